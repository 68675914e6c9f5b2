"""Servers that tests of this folder share: one on the default model, one on a tiny model.

Both compute with the weights as they are: transformers is the oracle of their answers.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from server.tokenizer import Tokenizer, load_tokenizer
from tests.end_to_end.server_process import ServerProcess
from tests.end_to_end.tiny_tokenizer import save_tokenizer
from tests.models.tiny_models import SIZES, build, save

EXACT = ("--quantization", "none")


@pytest.fixture(scope="package")
def smollm2(smollm2_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(smollm2_path, *EXACT, "--served-model-name", "smollm2") as server:
        yield server


@dataclass(frozen=True)
class Cramped:
    """A server whose prompts take many steps, in a pool too small for some of them at once, and its oracle."""

    server: ServerProcess
    oracle: torch.nn.Module
    tokenizer: Tokenizer


@pytest.fixture(scope="package")
def cramped_gemma3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cramped]:
    """A tiny model, most of whose layers see the last seven tokens only."""
    path, oracle = tmp_path_factory.mktemp("gemma3"), build("gemma3")
    save(oracle, path)
    save_tokenizer(path, SIZES["vocab_size"])
    flags = (*EXACT, "--cpu-threads", "1", "--max-num-batched-tokens", "8", "--num-gpu-blocks-override", "17")
    with ServerProcess(path, *flags, "--served-model-name", "tested") as server:
        yield Cramped(server, oracle, load_tokenizer(path))
