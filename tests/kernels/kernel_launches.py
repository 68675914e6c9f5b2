"""Launches every instance of our kernels that a server may need, through the code that serves.

Owns which layers and dtypes stand for all; the table of tiles adds its own. Run as a module it compiles them for one
target and prints what each instance takes, one JSON object a line: python -m tests.kernels.kernel_launches sm_90
"""

import argparse
import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from unittest import mock

import torch

from kernels.attention import triton_backend
from kernels.attention.metadata import AttentionParams, KVLayer, Rotation
from kernels.attention.triton_backend import TritonBackend
from kernels.attention.triton_write import launch_rotate_and_write, launch_write_kv
from kernels.attention.tuning import TileTable
from kernels.model_ops.ops import Activation
from kernels.model_ops.triton_ops import TritonOps
from kernels.sampling.sampling_batch import SamplingBatch
from tests.kernels.compile_for import TARGETS, Resources, compiling_for, constants, resources
from tests.kernels.paged_batches import Shape, make_batch, make_kv_layer

FILLING_PROGRAMS = 264  # two for each of 132 multiprocessors: the lone sequence below is split
LONG = 2000  # keys
# What the batches of each kind of tile look like: query lengths, sequence lengths.
BATCHES = {"decode": ([1], [LONG]), "prefill": ([200], [LONG]), "invariant": ([1], [LONG])}
WITHOUT_FLOAT8 = {"sm_80", "gfx942"}  # no e4m3fn in hardware: those caches take int8


@dataclass(frozen=True, slots=True)
class Layer:
    """What a layer fixes about its attention."""

    shape: Shape
    sliding_window: int | None = None
    logit_softcap: float | None = None


LAYERS = {
    "32/8 heads of 128": Layer(Shape(32, 8, 128, 16)),
    "32/8 heads of 128, blocks of 64": Layer(Shape(32, 8, 128, 64)),
    "9/3 heads of 64": Layer(Shape(9, 3, 64, 16)),
    "14/2 heads of 64": Layer(Shape(14, 2, 64, 16)),
    "32/32 heads of 80": Layer(Shape(32, 32, 80, 16)),
    "32/32 heads of 96": Layer(Shape(32, 32, 96, 16)),
    "4/1 heads of 256, window": Layer(Shape(4, 1, 256, 16), sliding_window=512),
    "8/4 heads of 256, window, soft cap": Layer(Shape(8, 4, 256, 16), sliding_window=4096, logit_softcap=50.0),
}
QUANTISED_LAYERS = ("32/8 heads of 128", "9/3 heads of 64", "4/1 heads of 256, window")
# Hidden size, intermediate size, vocabulary, activation.
MODEL_SIZES: dict[str, tuple[int, int, int, Activation]] = {
    "Llama 3.1 8B": (4096, 14336, 128256, "silu"),
    "SmolLM2 135M": (576, 1536, 49152, "silu"),
    "Gemma 3 270M": (640, 2048, 262144, "gelu_tanh"),
}
OPS = TritonOps(batch_invariant=True)

Launch = Callable[[], object]


def launches(target: str) -> Iterator[tuple[str, Launch]]:
    """Name and launch of everything that is to be compiled for a target."""
    yield from attention_launches(target)
    yield from write_launches(target)
    yield from operation_launches()


def attention_launches(target: str) -> Iterator[tuple[str, Launch]]:
    """Every layer with each kind of tile and each dtype of cache, then the rows of the table that these leave out."""
    covered = set()
    for layer_name, layer in LAYERS.items():
        for kind in BATCHES:
            for dtype in kv_dtypes(layer_name, target):
                covered.add((layer.shape.head_dim, None, kind, name_of(dtype)))
                yield f"{kind} {layer_name} {name_of(dtype)}", partial(attend, target, kind, layer, dtype)
    for row in TileTable.load().rows:
        kv_dtype = {"float16": "bfloat16"}.get(row.kv_dtype, row.kv_dtype)  # rows of float16 stand for both
        dtype = getattr(torch, kv_dtype)
        is_covered = (row.head_dim, row.group_size, row.kind, kv_dtype) in covered
        if row.arch == target and not is_covered and (dtype.itemsize > 1 or dtype in quantised_dtypes(target)):
            group_size = row.group_size or 4
            layer = Layer(Shape(2 * group_size, 2, row.head_dim, 16))
            name = f"{row.kind} groups of {group_size} heads of {row.head_dim} {kv_dtype}"
            yield name, partial(attend, target, row.kind, layer, dtype)


def write_launches(target: str) -> Iterator[tuple[str, Launch]]:
    """The fused write of every layer, with head norms where a cache is quantised, and the plain write."""
    for layer_name, layer in LAYERS.items():
        for dtype in kv_dtypes(layer_name, target):
            name = f"rotated {layer_name} {name_of(dtype)}"
            yield name, partial(rotate_and_write, layer, dtype, has_norm=False)
    for dtype in (torch.bfloat16, *quantised_dtypes(target)):
        layer = LAYERS["32/8 heads of 128"]
        name = f"32/8 heads of 128 {name_of(dtype)}"
        yield f"normed and rotated {name}", partial(rotate_and_write, layer, dtype, has_norm=True)
        yield f"plain {name}", partial(write_kv, layer, dtype)


def operation_launches() -> Iterator[tuple[str, Launch]]:
    """Norms, gates, products and the sampler at the sizes of models small and large."""
    for model, (hidden_size, intermediate_size, vocab_size, activation) in MODEL_SIZES.items():
        hidden = torch.zeros(3, hidden_size, dtype=torch.bfloat16)
        gate_up = torch.zeros(3, 2 * intermediate_size, dtype=torch.bfloat16)
        weight = torch.zeros(hidden_size)
        yield f"norm {model}", partial(OPS.rms_norm, hidden, weight, 1e-5)
        yield f"added norm {model}", partial(OPS.add_rms_norm, hidden, hidden, weight, 1e-5)
        yield f"{activation} {model}", partial(OPS.gate, gate_up, activation)
        for name, projection in (
            ("down", (hidden_size, intermediate_size)),
            ("gate and up", (*gate_up.shape[1:], hidden_size)),
        ):
            weights = torch.empty(projection, dtype=torch.bfloat16)
            inputs = torch.zeros(3, projection[1], dtype=torch.bfloat16)
            yield f"{name} product {model}", partial(OPS.linear, inputs, weights, None)
        yield f"sampler {model}", partial(OPS.sample, torch.zeros(3, vocab_size), sampling_batch(3))
    yield (
        "product with bias",
        partial(OPS.linear, hidden, torch.empty(64, len(weight), dtype=torch.bfloat16), weight[:64]),
    )
    yield "soft cap", partial(OPS.soft_cap, torch.zeros(3, 262144), 30.0)


def kv_dtypes(layer_name: str, target: str) -> list[torch.dtype]:
    """Dtypes of the cache to compile a layer for; float32 has products of its own."""
    if layer_name not in QUANTISED_LAYERS:
        return [torch.bfloat16]
    return [torch.bfloat16, torch.float32, *quantised_dtypes(target)]


def quantised_dtypes(target: str) -> list[torch.dtype]:
    return [torch.int8] if target in WITHOUT_FLOAT8 else [torch.int8, torch.float8_e4m3fn]


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def attend(target: str, kind: str, layer: Layer, kv_dtype: torch.dtype) -> None:
    """Attention of one batch that takes this kind of tile, and the merge if it is split."""
    shape = dataclasses.replace(layer.shape, dtype=torch.float32 if kv_dtype == torch.float32 else torch.bfloat16)
    batch = make_batch(shape, *BATCHES[kind])
    params = AttentionParams(shape.head_dim**-0.5, layer.sliding_window, layer.logit_softcap)
    with mock.patch.object(triton_backend, "arch_of", lambda device: target):
        backend = TritonBackend(FILLING_PROGRAMS, batch_invariant=kind == "invariant")
        backend.attend(batch.query, with_dtype(batch.kv_layer, kv_dtype), batch.metadata, params)


def rotate_and_write(layer: Layer, kv_dtype: torch.dtype, *, has_norm: bool) -> None:
    """The write that a decoder's layer does."""
    shape = layer.shape
    num_rotated = shape.num_q_heads + shape.num_kv_heads
    dtype = torch.float32 if kv_dtype == torch.float32 else torch.bfloat16
    heads = torch.zeros(3, num_rotated + shape.num_kv_heads, shape.head_dim, dtype=dtype)
    angles = torch.zeros(2, 3, shape.head_dim // 2)
    rotation = Rotation(*angles, torch.zeros(num_rotated, shape.head_dim) if has_norm else None, 1e-6)
    kv_layer = with_dtype(make_kv_layer(dataclasses.replace(shape, dtype=dtype), 4), kv_dtype)
    launch_rotate_and_write(heads, rotation, kv_layer, torch.arange(3))


def write_kv(layer: Layer, kv_dtype: torch.dtype) -> None:
    """The write without rotation."""
    shape = dataclasses.replace(layer.shape, dtype=torch.bfloat16)
    rows = torch.zeros(3, shape.num_kv_heads, shape.head_dim, dtype=shape.dtype)
    launch_write_kv(rows, rows, with_dtype(make_kv_layer(shape, 4), kv_dtype), torch.arange(3))


def sampling_batch(num_rows: int) -> SamplingBatch:
    ones = torch.ones(num_rows)
    return SamplingBatch(ones, torch.full((num_rows,), 20), 0.9 * ones, 0.1 * ones, ones.double() / 2, all_greedy=False)


def with_dtype(kv_layer: KVLayer, dtype: torch.dtype) -> KVLayer:
    """A layer of the same shape whose cache is of that dtype, with scales where it needs them."""
    if dtype.itemsize > 1:
        return kv_layer
    num_blocks, num_kv_heads, block_size, head_dim = kv_layer.key.shape
    data = torch.zeros(num_blocks, 2, num_kv_heads, block_size, head_dim, dtype=dtype)
    scales = torch.zeros(num_blocks, 2, num_kv_heads, block_size)
    return KVLayer(data[:, 0], data[:, 1], scales[:, 0], scales[:, 1])


@dataclass(frozen=True, slots=True)
class Instance:
    """One compiled kernel."""

    kernel: str
    name: str  # with the launch that first needed it
    num_warps: int
    num_stages: int
    constants: dict[str, int | float | bool | None]
    resources: Resources

    @classmethod
    def from_json(cls, line: str) -> "Instance":
        """From a line that `main` prints."""
        fields = json.loads(line)
        return cls(**{**fields, "resources": Resources(**fields["resources"])})


def compile_all(target: str, pattern: re.Pattern[str] | None = None) -> Iterator[Instance]:
    """Compile what a target needs, or only the launches whose name matches the pattern."""
    with compiling_for(target) as kernels:
        num_seen = 0
        for name, launch in launches(target):
            if pattern is not None and not pattern.search(name):
                continue
            launch()
            for kernel in kernels[num_seen:]:
                yield Instance(
                    kernel=kernel.name,
                    name=f"{kernel.name}: {name}",
                    num_warps=kernel.metadata.num_warps,
                    num_stages=kernel.metadata.num_stages,
                    constants=constants(kernel),
                    resources=resources(kernel),
                )
            num_seen = len(kernels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--only", type=re.compile, help="a pattern of launch names")
    arguments = parser.parse_args()
    for instance in compile_all(arguments.target, arguments.only):
        print(json.dumps(dataclasses.asdict(instance)), flush=True)


if __name__ == "__main__":
    main()
