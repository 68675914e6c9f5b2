"""The workload of the engine's part under transformers' own continuous batching, on the same card in the same run.

A process of its own, since both models do not fit beside their caches. Part "transformers" of benchmarks/gpu_check.sh.
"""

import importlib.util
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if not __package__:  # run as a script: Python has put this folder on the path, not the one above it
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.gpu_part import Part, run_part
from benchmarks.gpu_results import NOTE, SKIPPED
from benchmarks.gpu_workload import FULL, ROPE, SMALL, Workload, prompts

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.generation.continuous_batching.requests import GenerationOutput

BLOCK_SIZE = 256  # its own default; flash attention takes no smaller one
ENGINE_WAY = "graphs, overlapped"  # what of ours it is compared with


def attention_implementation() -> str:
    """Flash attention where it is installed. Without it, what transformers can do with torch alone."""
    if importlib.util.find_spec("flash_attn_interface") is not None:
        return "paged|flash_attention_3"
    return "paged|flash_attention_2" if importlib.util.find_spec("flash_attn") is not None else "paged|sdpa"


def build_model(workload: Workload, device: torch.device) -> "PreTrainedModel":
    """Llama of the workload's shape, with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    ours = workload.config
    scaling = ROPE.scaling
    config = LlamaConfig(
        vocab_size=ours.vocab_size,
        hidden_size=ours.hidden_size,
        intermediate_size=ours.intermediate_size,
        num_hidden_layers=ours.num_layers,
        num_attention_heads=ours.num_q_heads,
        num_key_value_heads=ours.num_kv_heads,
        head_dim=ours.head_dim,
        max_position_embeddings=ours.max_position_embeddings,
        rms_norm_eps=ours.rms_norm_eps,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": ROPE.theta,
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position_embeddings,
        },
        attn_implementation=attention_implementation(),
    )
    torch.set_default_dtype(getattr(torch, workload.dtype))
    with torch.device(device):
        return LlamaForCausalLM(config).eval()


def generate(model: "PreTrainedModel", workload: Workload, num_requests: int) -> Mapping[str, object]:
    """Output tokens per second; the cache is made and everything compiled by a run of two tokens before."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    num_blocks = num_requests * -(-workload.max_model_len // BLOCK_SIZE)
    settings = ContinuousBatchingConfig(
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks + 1,
        max_batch_tokens=workload.max_batched_tokens,
        max_requests_per_batch=num_requests,
        allow_block_sharing=False,
    )
    outputs: Mapping[str, GenerationOutput] = {}
    started = time.perf_counter()
    for seed, num_tokens in enumerate((2, workload.output_tokens)):
        started = time.perf_counter()
        outputs = model.generate_batch(
            prompts(workload, num_requests, seed),
            generation_config=GenerationConfig(max_new_tokens=num_tokens, do_sample=False, eos_token_id=-1),
            continuous_batching_config=settings,
            persistent_manager=True,
        )
    seconds = time.perf_counter() - started
    model.destroy_cached_continuous_batching_manager()
    num_tokens = sum(len(output.generated_tokens) for output in outputs.values())
    expected = num_requests * workload.output_tokens
    assert num_tokens == expected, f"{num_tokens} tokens came, not {expected}"
    return {"tokens_per_s": num_tokens / seconds, "seconds": seconds}


def measure(part: Part) -> None:
    """Every number of sequences, each against the engine's own number."""
    if importlib.util.find_spec("transformers") is None:
        part.record(SKIPPED, {NOTE: "transformers is not installed"})
        return
    workload = SMALL if part.is_small else FULL
    part.record("attention", {"implementation": attention_implementation()})
    models: list[PreTrainedModel] = []
    part.measure("model", lambda: _build(models, workload, part.device))
    if not models:
        return
    for name, num_requests in workload.num_requests.items():
        part.measure(name, lambda name=name, n=num_requests: _against_ours(part, models[0], workload, name, n))


def _build(models: list["PreTrainedModel"], workload: Workload, device: torch.device) -> Mapping[str, object]:
    started = time.perf_counter()
    models.append(build_model(workload, device))
    return {"first_s": time.perf_counter() - started}


def _against_ours(
    part: Part, model: "PreTrainedModel", workload: Workload, name: str, num_requests: int
) -> Mapping[str, object]:
    values = {**generate(model, workload, num_requests), "their_attention": attention_implementation()}
    ours = part.earlier("engine", f"{name}, {ENGINE_WAY}", "tokens_per_s")
    return values if ours is None else {**values, "ours_over_theirs": ours / values["tokens_per_s"]}


def main(argv: list[str] | None = None) -> int:
    """Run the part."""
    return run_part("transformers", "transformers' continuous batching on the same workload.", measure, argv)


if __name__ == "__main__":
    sys.exit(main())
