"""What surrounds attention, against the card's limits: rotation and cache write, norm, gate, products, sampling.

Each is held against the bytes it must move, and against the same in plain torch. Part "operations" of
benchmarks/gpu_check.sh.
"""

import dataclasses
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

if not __package__:  # run as a script: Python has put this folder on the path, not the one above it
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.gpu_batches import BLOCK_SIZE, Heads, bytes_per_key, random_layer
from benchmarks.gpu_part import Part, run_part
from kernels.attention.metadata import Rotation
from kernels.attention.rotation import rotate_heads
from kernels.attention.triton_write import launch_rotate_and_write, launch_write_kv
from kernels.model_ops.torch_ops import TorchOps
from kernels.model_ops.triton_ops import TritonOps
from kernels.sampling.sampling_batch import SamplingBatch


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of Llama 3.1 8B, or tiny; the names of the measurements stand for the full ones."""

    heads: Heads
    hidden: int
    intermediate: int
    vocab: int
    tokens: Mapping[str, int]  # of a step
    sampling_rows: int


FULL = Sizes(Heads(), 4096, 14336, 128_256, {"1 token": 1, "64 tokens": 64, "8192 tokens": 8192}, 64)
SMALL = Sizes(Heads(4, 2, 16), 32, 48, 100, {"1 token": 1, "64 tokens": 2, "8192 tokens": 3}, 3)


def measure(part: Part) -> None:
    """Every operation at every number of tokens."""
    sizes = SMALL if part.is_small else FULL
    for name, num_tokens in sizes.tokens.items():
        for dtype in ("bfloat16", "float8_e4m3fn"):
            part.measure(
                f"rotate and write, {dtype} cache, {name}",
                lambda n=num_tokens, d=dtype: _rotate_and_write(part, sizes, n, d),
            )
    for name, num_tokens in sizes.tokens.items():
        part.measure(f"add and norm, {name}", lambda n=num_tokens: _norm(part, sizes, n))
        part.measure(f"gate, {name}", lambda n=num_tokens: _gate(part, sizes, n))
        part.measure(f"batch-invariant product, {name}", lambda n=num_tokens: _product(part, sizes, n))
    part.measure("sampling 64 rows", lambda: _sampling(part, sizes))


def _rotate_and_write(part: Part, sizes: Sizes, num_tokens: int, dtype: str) -> Mapping[str, object]:
    """One kernel against norm-less rotation in torch and the plain write; the bytes are those of the packed product."""
    heads, device = sizes.heads, part.device
    num_heads = heads.num_q_heads + 2 * heads.num_kv_heads
    packed = torch.randn(num_tokens, num_heads, heads.head_dim, device=device, dtype=torch.bfloat16)
    angles = torch.rand(num_tokens, heads.head_dim // 2, device=device) * 6.28
    rotation = Rotation(angles.cos(), angles.sin())
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    layer = random_layer(heads, num_blocks, BLOCK_SIZE, device, dtype)
    slots = torch.randperm(num_blocks * BLOCK_SIZE, device=device)[:num_tokens]

    def in_two() -> None:
        _, key, value = rotate_heads(packed, rotation, heads.num_kv_heads)
        launch_write_kv(key, value, layer, slots)

    written = num_tokens * heads.num_kv_heads * bytes_per_key(heads, layer)
    query = num_tokens * heads.num_q_heads * heads.head_dim * packed.element_size()
    num_bytes = packed.numel() * packed.element_size() + query + written + 2 * angles.numel() * 4
    return _against(part, lambda: launch_rotate_and_write(packed, rotation, layer, slots), in_two, num_bytes)


def _norm(part: Part, sizes: Sizes, num_tokens: int) -> Mapping[str, object]:
    x, residual = torch.randn(2, num_tokens, sizes.hidden, device=part.device, dtype=torch.bfloat16)
    weight = torch.rand(sizes.hidden, device=part.device)
    ours, torchs = TritonOps(batch_invariant=False), TorchOps()
    num_bytes = 4 * x.numel() * x.element_size()
    return _against(
        part,
        lambda: ours.add_rms_norm(x, residual, weight, 1e-5),
        lambda: torchs.add_rms_norm(x, residual, weight, 1e-5),
        num_bytes,
    )


def _gate(part: Part, sizes: Sizes, num_tokens: int) -> Mapping[str, object]:
    x = torch.randn(num_tokens, 2 * sizes.intermediate, device=part.device, dtype=torch.bfloat16)
    ours, torchs = TritonOps(batch_invariant=False), TorchOps()
    num_bytes = x.numel() * x.element_size() * 3 // 2
    return _against(part, lambda: ours.gate(x, "silu"), lambda: torchs.gate(x, "silu"), num_bytes)


def _product(part: Part, sizes: Sizes, num_tokens: int) -> Mapping[str, object]:
    """The up and gate projection; torch's product is the vendor's library."""
    x = torch.randn(num_tokens, sizes.hidden, device=part.device, dtype=torch.bfloat16)
    weight = torch.randn(2 * sizes.intermediate, sizes.hidden, device=part.device, dtype=torch.bfloat16)
    invariant, default = TritonOps(batch_invariant=True), TorchOps()
    num_bytes = (x.numel() + weight.numel() + num_tokens * weight.shape[0]) * x.element_size()
    values = _against(
        part, lambda: invariant.linear(x, weight, None), lambda: default.linear(x, weight, None), num_bytes
    )
    return {**values, "tflops": 2 * num_tokens * weight.numel() / (float(values["us"]) * 1e6)}


def _sampling(part: Part, sizes: Sizes) -> Mapping[str, object]:
    rows, device = sizes.sampling_rows, part.device
    logits = 3 * torch.randn(rows, sizes.vocab, device=device)
    batch = SamplingBatch(
        temperature=torch.full((rows,), 0.8, device=device),
        top_k=torch.full((rows,), 50, dtype=torch.int64, device=device),
        top_p=torch.full((rows,), 0.95, device=device),
        min_p=torch.zeros(rows, device=device),
        uniform=torch.rand(rows, dtype=torch.float64, device=device),
        all_greedy=False,
    )
    greedy = dataclasses.replace(batch, all_greedy=True)
    ours, torchs = TritonOps(batch_invariant=False), TorchOps()
    num_bytes = logits.numel() * logits.element_size()
    values = _against(part, lambda: ours.sample(logits, batch), lambda: torchs.sample(logits, batch), num_bytes)
    return {**values, "greedy_us": part.timer.time(lambda: ours.sample(logits, greedy)).median * 1e6}


def _against(
    part: Part, ours: Callable[[], object], torchs: Callable[[], object], num_bytes: int
) -> Mapping[str, object]:
    """Microseconds of both, and the rate at which ours moves the bytes that have to move."""
    timing, other = part.timer.time(ours), part.timer.time(torchs)
    return {
        "us": timing.median * 1e6,
        "torch_us": other.median * 1e6,
        "over_torch": timing.median / other.median,
        "gb_per_s": num_bytes / timing.median / 1e9,
        "first_s": timing.first,
    }


def main(argv: list[str] | None = None) -> int:
    """Run the part."""
    return run_part("operations", "What surrounds attention, against the card's limits.", measure, argv)


if __name__ == "__main__":
    sys.exit(main())
