"""Whole models on the native CPU kernels: logits are those of transformers, and bitwise the same in any company."""

import random
from pathlib import Path

import pytest
import torch

from kernels.attention.cpu import CpuBackend
from kernels.cpu.native_library import INSTRUCTION_SETS, load_library, supported_instruction_sets
from kernels.model_ops.native_ops import NativeOps
from models.decoder import Decoder
from models.loader import load_model
from tests.models.paged import run_paged
from tests.models.tiny_models import build, oracle_logits, save

_RNG = random.Random(5)
PROMPTS = [[_RNG.randrange(3, 211) for _ in range(length)] for length in (83, 1, 17, 41, 2)]
CHUNK_SIZES = ([10_000], [7, 3, 1, 16], [1], [33, 10_000])

# Biases; a norm of each head and scaled rotary embeddings; windows, four norms, GELU and two rotary embeddings; a cap.
FAMILIES = ["llama_biases", "llama_yarn_rope", "qwen3", "mistral_window", "gemma3", "gemma3_softcap"]

pytestmark = pytest.mark.usefixtures("native_library")


def load(path: Path, instruction_set: str, dtype: torch.dtype) -> Decoder:
    if instruction_set not in supported_instruction_sets(load_library()):
        pytest.skip(f"this processor lacks {instruction_set}")
    return load_model(path, dtype, torch.device("cpu"), NativeOps(instruction_set), lambda done, total: None)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers_and_themselves(family: str, tmp_path: Path) -> None:
    model = build(family)
    save(model, tmp_path)
    for instruction_set in supported_instruction_sets(load_library()):
        decoder = load(tmp_path, instruction_set, torch.float32)
        check_company(decoder, instruction_set)
        (got,) = run_paged(decoder, PROMPTS[:1], [10_000], backend=CpuBackend(instruction_set))
        assert (got - oracle_logits(model, PROMPTS[0])).abs().max() < 1e-4


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype: torch.dtype, instruction_set: str, tmp_path: Path) -> None:
    check_company(load(save(build("qwen3"), tmp_path), instruction_set, dtype), instruction_set)


def check_company(decoder: Decoder, instruction_set: str) -> None:
    """Every prompt alone and whole, against all of them together in chunks of every kind."""
    backend = CpuBackend(instruction_set)
    alone = [run_paged(decoder, [prompt], [10_000], backend=backend)[0] for prompt in PROMPTS]
    assert all(logits.isfinite().all() for logits in alone)
    for chunk_sizes in CHUNK_SIZES:
        together = run_paged(decoder, PROMPTS, chunk_sizes, backend=backend)
        for got, expected in zip(together, alone, strict=True):
            assert torch.equal(got, expected)
