"""The native operations: right against float64 at every size and on every instruction set, and batch-invariant."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from kernels.attention.cpu import CpuBackend
from kernels.attention.metadata import KVLayer, Rotation
from kernels.attention.rotation import rotate_heads
from kernels.cpu.native_library import INSTRUCTION_SETS, load_library, supported_instruction_sets
from kernels.model_ops.native_ops import NativeOps
from kernels.model_ops.ops import Activation, select_ops
from kernels.model_ops.torch_ops import TorchOps
from tests.kernels.conftest import make_backend
from tests.kernels.paged_batches import TOLERANCES, make_metadata

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Around whole vectors of 4, 8 and 16 lanes, whole tiles of 64 outputs, and whole blocks of 1024 along the sum.
SIZES = [1, 3, 15, 16, 17, 64, 65, 575, 1024, 1025, 2100]

dtypes = st.sampled_from(DTYPES)
instruction_sets = st.sampled_from(list(INSTRUCTION_SETS))
seeds = st.integers(0, 2**32)
activations = st.sampled_from(["silu", "gelu_tanh"])


pytestmark = pytest.mark.usefixtures("native_library", "restored_threads")


def available(instruction_set: str) -> str:
    return instruction_set if instruction_set in supported_instruction_sets(load_library()) else "generic"


def randn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def assert_near(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, size: torch.Tensor) -> None:
    """`size` is what the result would be were no term to cancel another: what rounding errors are relative to."""
    assert actual.dtype == dtype
    error = torch.linalg.vector_norm(actual.double() - expected)
    assert error <= TOLERANCES[dtype] * torch.linalg.vector_norm(size)


def assert_rows_alone(compute: Callable[[slice], tuple[torch.Tensor, ...]], num_rows: int, seed: int) -> None:
    """All rows at once on several threads, then parts of them on one thread: bitwise the same."""
    torch.set_num_threads(3)
    together = compute(slice(0, num_rows))
    torch.set_num_threads(1)
    cuts = torch.randint(0, num_rows + 1, (2,), generator=torch.Generator().manual_seed(seed)).sort().values.tolist()
    for rows in (slice(0, 1), slice(num_rows - 1, num_rows), slice(*cuts), slice(0, num_rows)):
        for part, whole in zip(compute(rows), together, strict=True):
            assert torch.equal(part, whole[rows])


@settings(deadline=None, max_examples=60)
@given(
    num_rows=st.integers(1, 70),
    num_outputs=st.sampled_from(SIZES[:-3]),
    in_features=st.sampled_from(SIZES),
    has_bias=st.booleans(),
    dtype=dtypes,
    instruction_set=instruction_sets,
    seed=seeds,
)
def test_linear(
    num_rows: int,
    num_outputs: int,
    in_features: int,
    has_bias: bool,
    dtype: torch.dtype,
    instruction_set: str,
    seed: int,
) -> None:
    inputs = randn(seed, num_rows, in_features).to(dtype)
    weight = randn(seed + 1, num_outputs, in_features).to(dtype)
    bias = randn(seed + 2, num_outputs).to(dtype) if has_bias else None
    out = NativeOps(available(instruction_set)).linear(inputs, weight, bias)
    exact = functional.linear(inputs.double(), weight.double(), None if bias is None else bias.double())
    size = functional.linear(inputs.double().abs(), weight.double().abs())
    assert_near(out, exact, dtype, size if dtype == torch.float32 else exact.abs() + 0.01 * size)


@settings(deadline=None, max_examples=60)
@given(
    num_rows=st.integers(1, 140),
    num_outputs=st.sampled_from([1, 15, 16, 65, 130]),
    in_features=st.sampled_from([1, 17, 64, 575, 1030]),
    dtype=dtypes,
    instruction_set=instruction_sets,
    seed=seeds,
)
def test_linear_rows_do_not_depend_on_company(
    num_rows: int, num_outputs: int, in_features: int, dtype: torch.dtype, instruction_set: str, seed: int
) -> None:
    ops = NativeOps(available(instruction_set))
    inputs = randn(seed, num_rows, in_features).to(dtype)
    weight = randn(seed + 1, num_outputs, in_features).to(dtype)
    bias = randn(seed + 2, num_outputs).to(dtype)
    assert_rows_alone(lambda rows: (ops.linear(inputs[rows], weight, bias),), num_rows, seed)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_linear_of_rows_that_do_not_follow_one_another(instruction_set: str) -> None:
    """A slice of a wider tensor is read in place; another layout is copied."""
    ops = NativeOps(available(instruction_set))
    wide, weight = randn(0, 9, 100), randn(1, 33, 70)
    expected = ops.linear(wide[:, 5:75].contiguous(), weight, None)
    assert torch.equal(ops.linear(wide[:, 5:75], weight, None), expected)
    assert torch.equal(ops.linear(wide[:, 5:75].contiguous().t().contiguous().t(), weight, None), expected)


def test_linear_of_no_rows() -> None:
    assert NativeOps().linear(torch.empty(0, 8), randn(0, 3, 8), None).shape == (0, 3)


@settings(deadline=None, max_examples=60)
@given(
    num_rows=st.integers(1, 40),
    size=st.sampled_from(SIZES),
    dtype=dtypes,
    instruction_set=instruction_sets,
    seed=seeds,
)
def test_norms(num_rows: int, size: int, dtype: torch.dtype, instruction_set: str, seed: int) -> None:
    ops = NativeOps(available(instruction_set))
    inputs, residual = randn(seed, num_rows, size).to(dtype), randn(seed + 1, num_rows, size).to(dtype)
    weight = randn(seed + 2, size)
    out, total = ops.add_rms_norm(inputs, residual, weight, 1e-5)
    assert torch.equal(total, inputs + residual)
    exact = functional.rms_norm(total.double(), (size,), weight.double(), 1e-5)
    assert_near(out, exact, dtype, exact)
    assert torch.equal(ops.rms_norm(total, weight, 1e-5), out)
    assert_rows_alone(lambda rows: ops.add_rms_norm(inputs[rows], residual[rows], weight, 1e-5), num_rows, seed)


@settings(deadline=None, max_examples=60)
@given(
    num_rows=st.integers(1, 40),
    size=st.sampled_from(SIZES),
    activation=activations,
    dtype=dtypes,
    instruction_set=instruction_sets,
    seed=seeds,
)
def test_gate(
    num_rows: int, size: int, activation: Activation, dtype: torch.dtype, instruction_set: str, seed: int
) -> None:
    ops = NativeOps(available(instruction_set))
    gate_up = (randn(seed, num_rows, 2 * size) * 3).to(dtype)
    out = ops.gate(gate_up, activation)
    exact = TorchOps().gate(gate_up.double(), activation)
    assert_near(out, exact, dtype, exact)
    assert_rows_alone(lambda rows: (ops.gate(gate_up[rows], activation),), num_rows, seed)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_gate_far_from_zero(instruction_set: str, activation: Activation) -> None:
    gate = torch.tensor([-3e38, -1e30, -200.0, -88.0, -20.0, -1e-30, 0.0, 1e-30, 20.0, 88.0, 200.0, 1e30])
    out = NativeOps(available(instruction_set)).gate(torch.cat((gate, torch.ones_like(gate)))[None], activation)[0]
    expected = torch.where(
        gate > 10, gate, TorchOps().gate(torch.stack((gate, torch.ones_like(gate)), 1).double(), activation)[:, 0]
    )
    torch.testing.assert_close(out, expected.float(), rtol=1e-6, atol=1e-7)
    assert not out[gate <= -200].any()


@settings(deadline=None, max_examples=30)
@given(num_tokens=st.integers(1, 40), size=st.integers(1, 70), instruction_set=instruction_sets, seed=seeds)
def test_rotary_angles(num_tokens: int, size: int, instruction_set: str, seed: int) -> None:
    ops = NativeOps(available(instruction_set))
    positions = torch.randint(0, 100_000, (num_tokens,), generator=torch.Generator().manual_seed(seed))
    frequencies = 1.0 / 10_000 ** (torch.arange(size) / size)
    angles = (positions.float()[:, None] * frequencies).double()  # rounded as models are trained with
    cos, sin = ops.rotary_angles(positions, frequencies, 1.25)
    torch.testing.assert_close(cos.double(), 1.25 * angles.cos(), rtol=0, atol=2e-7)
    torch.testing.assert_close(sin.double(), 1.25 * angles.sin(), rtol=0, atol=2e-7)
    assert_rows_alone(lambda rows: ops.rotary_angles(positions[rows], frequencies, 1.25), num_tokens, seed)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("size", [1, 15, 17, 211])
def test_soft_cap(instruction_set: str, size: int) -> None:
    ops = NativeOps(available(instruction_set))
    scores = randn(size, 33, size) * 40
    exact = 30 * torch.tanh(scores.double() / 30)
    torch.testing.assert_close(ops.soft_cap(scores, 30.0).double(), exact, rtol=1e-6, atol=0)
    assert_rows_alone(lambda rows: (ops.soft_cap(scores[rows], 30.0),), 33, size)


# --- rotation and cache write ---


def rotate_and_write(
    backend: CpuBackend, heads: torch.Tensor, rotation: Rotation, num_kv_heads: int, cache_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values of each token, through a cache with one block of one slot for each."""
    num_tokens, _, head_dim = heads.shape
    data = torch.full((num_tokens, 2, num_kv_heads, 1, head_dim), torch.nan, dtype=cache_dtype)
    blocks = torch.randperm(num_tokens, generator=torch.Generator().manual_seed(0)).tolist()
    metadata = make_metadata([1] * num_tokens, [1] * num_tokens, [[block] for block in blocks], 1)
    query = backend.rotate_and_write(heads, rotation, KVLayer(key=data[:, 0], value=data[:, 1]), metadata)
    return query, data[blocks, 0, :, 0], data[blocks, 1, :, 0]


@settings(deadline=None, max_examples=60)
@given(
    num_tokens=st.integers(1, 40),
    num_heads=st.sampled_from([(1, 1), (9, 3), (7, 1), (4, 4)]),
    half=st.sampled_from([1, 3, 8, 15, 16, 17, 32, 40, 128]),
    is_normed=st.booleans(),
    dtype=dtypes,
    cache_dtype=dtypes,
    instruction_set=instruction_sets,
    seed=seeds,
)
def test_rotate_and_write(
    num_tokens: int,
    num_heads: tuple[int, int],
    half: int,
    is_normed: bool,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    instruction_set: str,
    seed: int,
) -> None:
    num_q_heads, num_kv_heads = num_heads
    packed = randn(seed, num_tokens, (num_q_heads + 2 * num_kv_heads) * 2 * half + 5).to(dtype)
    heads = packed[:, 5:].unflatten(1, (-1, 2 * half))
    angles = randn(seed + 1, num_tokens, half) * 3
    weight = randn(seed + 2, num_q_heads + num_kv_heads, 2 * half) if is_normed else None
    rotation = Rotation(angles.cos(), angles.sin(), weight, 1e-6)
    backend = CpuBackend(available(instruction_set))
    got = rotate_and_write(backend, heads, rotation, num_kv_heads, cache_dtype)
    wide = Rotation(angles.cos().double(), angles.sin().double(), None if weight is None else weight.double(), 1e-6)
    query, key, value = rotate_heads(heads.double(), wide, num_kv_heads)
    assert_near(got[0], query, dtype, query)
    assert_near(got[1], key, cache_dtype, key)
    assert torch.equal(got[2], value.to(cache_dtype))

    def part(rows: slice) -> tuple[torch.Tensor, ...]:
        rows_rotation = Rotation(rotation.cos[rows], rotation.sin[rows], weight, 1e-6)
        return rotate_and_write(backend, heads[rows], rows_rotation, num_kv_heads, cache_dtype)

    assert_rows_alone(part, num_tokens, seed)


# --- errors and choice ---


def test_other_dtypes_are_refused() -> None:
    ops = NativeOps()
    with pytest.raises(ValueError, match=r"take float32, bfloat16 and float16, not torch\.float64"):
        ops.linear(torch.ones(1, 4, dtype=torch.float64), torch.ones(2, 4, dtype=torch.float64), None)
    with pytest.raises(ValueError, match=r"not torch\.float64"):
        ops.gate(torch.ones(1, 4, dtype=torch.float64), "silu")


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_a_broken_row_is_not_hidden(instruction_set: str) -> None:
    ops = NativeOps(available(instruction_set))
    nan = torch.full((1, 20), torch.nan)
    assert ops.soft_cap(nan, 30.0).isnan().all()
    assert ops.gate(nan, "silu").isnan().all()
    assert ops.gate(nan, "gelu_tanh").isnan().all()
    assert ops.rms_norm(nan, torch.ones(20), 1e-6).isnan().all()
    assert ops.linear(nan, torch.ones(3, 20), None).isnan().all()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are listed in /proc")
def test_threads_outlive_small_calls() -> None:
    """A new thread for each call would cost more than most calls, and lose its scratch memory."""
    make_backend("cpu")
    script = """
import os, torch
from kernels.model_ops.native_ops import NativeOps
torch.set_num_threads(8)
ops = NativeOps()
x, weight = torch.randn(64, 576), torch.randn(1536, 576)
ops.linear(x, weight, None)
threads = set(os.listdir("/proc/self/task"))
for _ in range(10):
    ops.linear(x, weight, None)
    ops.rms_norm(x, weight[0], 1e-5)
    ops.linear(x[:1], weight[:40], None)
    assert set(os.listdir("/proc/self/task")) == threads
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parents[2])


def test_unknown_instruction_set() -> None:
    with pytest.raises(ValueError, match="'sse9' is not one of"):
        NativeOps("sse9")


def test_native_operations_serve_the_native_backend() -> None:
    cpu = torch.device("cpu")
    for batch_invariant in (False, True):
        assert isinstance(select_ops("cpu", cpu, batch_invariant=batch_invariant), NativeOps)
    assert isinstance(select_ops("torch", cpu, batch_invariant=False), TorchOps)
