"""The Triton operations under the interpreter: against float64, and rows that do not depend on their batch."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch.nn import functional

from kernels.model_ops import triton_ops
from kernels.model_ops.ops import Activation
from kernels.model_ops.torch_ops import TorchOps
from kernels.model_ops.triton_ops import TritonOps
from tests.kernels.paged_batches import TOLERANCES, relative_error

OPS = TritonOps(batch_invariant=True)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
BATCH_SIZES = [1, 2, 7, 64, 65]


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def beside_nan(x: torch.Tensor) -> torch.Tensor:
    """The same rows as a slice of wider ones, NaN beside them."""
    wide = torch.full((x.shape[0], x.shape[1] + 5), torch.nan, dtype=x.dtype)
    wide[:, : x.shape[1]] = x
    return wide[:, : x.shape[1]]


def exact_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(x.double(), weight.shape, weight.double(), 1e-5)


@pytest.mark.parametrize("hidden_size", [64, 576, 3000], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm(dtype: torch.dtype, hidden_size: int) -> None:
    inputs, weight = beside_nan(randn(3, hidden_size, dtype=dtype) * 5), randn(hidden_size, seed=1)
    normed = OPS.rms_norm(inputs, weight, 1e-5)
    assert normed.dtype == dtype
    assert relative_error(normed, exact_norm(inputs, weight)) < TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_add_rms_norm(dtype: torch.dtype) -> None:
    inputs, residual = beside_nan(randn(3, 576, dtype=dtype)), beside_nan(randn(3, 576, dtype=dtype, seed=1) * 9)
    weight = randn(576, seed=2)
    before = residual.clone()
    normed, total = OPS.add_rms_norm(inputs, residual, weight, 1e-5)
    assert torch.equal(total, inputs + residual) and total.dtype == normed.dtype == dtype
    assert torch.equal(residual, before)
    assert torch.equal(normed, OPS.rms_norm(total, weight, 1e-5))  # of the sum as it is stored
    assert relative_error(normed, exact_norm(total, weight)) < TOLERANCES[dtype]


def test_the_norm_of_zeros_is_zero() -> None:
    assert not OPS.rms_norm(torch.zeros(2, 64), torch.ones(64), 1e-6).any()


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gate(dtype: torch.dtype, activation: Activation) -> None:
    size = 1100  # more than one program, the last one not full
    gate_up = beside_nan(torch.cat((randn(2, size) * 4, randn(2, size, seed=1)), dim=1).to(dtype))
    gate_up[0, :4] = torch.tensor([-200.0, 200.0, 0.0, -1e-3])
    gated = OPS.gate(gate_up, activation)
    assert gated.dtype == dtype
    assert relative_error(gated, TorchOps().gate(gate_up.double(), activation)) < TOLERANCES[dtype]


def test_soft_cap() -> None:
    scores = randn(2, 1100) * 50
    scores[0, :5] = torch.tensor([1e30, -1e30, 0.0, torch.inf, 1e-3])
    capped = OPS.soft_cap(scores, 30.0)
    torch.testing.assert_close(capped.double(), 30.0 * torch.tanh(scores.double() / 30.0), rtol=1e-6, atol=0)
    assert torch.equal(OPS.soft_cap(scores[0], 30.0), capped[0])


@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(("num_tokens", "out_features", "in_features"), [(1, 70, 100), (130, 64, 192)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_invariant_linear(
    dtype: torch.dtype, num_tokens: int, out_features: int, in_features: int, has_bias: bool
) -> None:
    inputs, weight = beside_nan(randn(num_tokens, in_features, dtype=dtype)), randn(out_features, in_features, seed=1)
    weight = beside_nan(weight.to(dtype))
    bias = randn(out_features, dtype=dtype, seed=2) * 9 if has_bias else None
    product = OPS.linear(inputs, weight, bias)
    expected = functional.linear(inputs.double(), weight.double(), None if bias is None else bias.double())
    assert product.dtype == dtype
    assert relative_error(product, expected) < TOLERANCES[dtype]


@pytest.mark.full
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_invariant_linear_of_many_tiles(dtype: torch.dtype) -> None:
    """More bands of row tiles than one, the last of them narrower; columns of the wide tile."""
    inputs, weight = randn(1200, 64, dtype=dtype), randn(16400, 64, dtype=dtype, seed=1)
    for rows, columns in ((slice(None), slice(0, 300)), (slice(0, 2), slice(None))):
        product = OPS.linear(inputs[rows], weight[columns], None)
        expected = inputs[rows].double() @ weight[columns].double().T
        assert relative_error(product, expected) < TOLERANCES[dtype]


def test_linear_without_invariance_is_torchs() -> None:
    inputs, weight, bias = randn(3, 64), randn(32, 64, seed=1), randn(32, seed=2)
    assert torch.equal(TritonOps(batch_invariant=False).linear(inputs, weight, bias), inputs @ weight.T + bias)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_its_batch(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bitwise: the first, a middle and the last row of every batch size, against the row alone."""
    # The interpreter multiplies tiles with numpy's BLAS, in which equal rows of one product can differ.
    monkeypatch.setattr(np, "matmul", lambda a, b, dtype: np.einsum("ik,kj->ij", a, b, dtype=dtype))
    inputs = randn(max(BATCH_SIZES), 160, dtype=dtype)
    residual, weight = randn(*inputs.shape, dtype=dtype, seed=1), randn(160, seed=2)
    matrix, bias = randn(48, 160, dtype=dtype, seed=3), randn(48, dtype=dtype, seed=4)

    def outputs(rows: slice) -> tuple[torch.Tensor, ...]:
        normed, total = OPS.add_rms_norm(inputs[rows], residual[rows], weight, 1e-5)
        product = OPS.linear(inputs[rows], matrix, bias)
        return OPS.rms_norm(inputs[rows], weight, 1e-5), normed, total, product, OPS.gate(inputs[rows], "silu")

    alone = {i: outputs(slice(i, i + 1)) for i in (0, 1, 6, 63, 64)}
    for num_rows in BATCH_SIZES:
        together = outputs(slice(0, num_rows))
        for row, expected in alone.items():
            if row < num_rows:
                for tensor, one in zip(together, expected, strict=True):
                    assert torch.equal(tensor[row], one[0])


def test_the_launch_of_the_invariant_product_depends_on_the_weight_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles and warps choose the order of a GPU's sums, which the interpreter does not show."""
    launches = []

    class Recorder:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *args, **options: launches.append(options)

    monkeypatch.setattr(triton_ops, "linear_kernel", Recorder())
    for dtype, out_features in ((torch.bfloat16, 64), (torch.bfloat16, 40_000), (torch.float32, 64)):
        weight = torch.zeros(out_features, 64, dtype=dtype)
        launches.clear()
        for num_rows in (*BATCH_SIZES, 5000):
            OPS.linear(torch.zeros(num_rows, 64, dtype=dtype), weight, None)
        assert all(options == launches[0] for options in launches)


def test_no_rows() -> None:
    inputs, weight = torch.zeros(0, 64), torch.ones(64)
    assert OPS.rms_norm(inputs, weight, 1e-5).shape == (0, 64)
    assert [x.shape for x in OPS.add_rms_norm(inputs, inputs, weight, 1e-5)] == [(0, 64)] * 2
    assert OPS.gate(inputs, "silu").shape == (0, 32)
    assert OPS.linear(inputs, torch.ones(3, 64), None).shape == (0, 3)
    assert OPS.soft_cap(inputs, 30.0).shape == (0, 64)


def test_rotary_angles() -> None:
    positions, frequencies = torch.tensor([0, 1, 100_000]), 10_000 ** -torch.linspace(0, 1, 32)
    cos, sin = OPS.rotary_angles(positions, frequencies, 1.5)
    angles = positions.float()[:, None] * frequencies
    torch.testing.assert_close(cos, 1.5 * angles.cos())
    torch.testing.assert_close(sin, 1.5 * angles.sin())
