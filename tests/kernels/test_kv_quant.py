"""Quantised keys and values: the properties of the helpers, and the torch backends on a quantised cache."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.attention.metadata import AttentionParams, KVLayer
from kernels.attention.reference import ReferenceBackend
from kernels.attention.torch_gather import TorchBackend
from kernels.kv_quant import QUANTISED_MAX, dequantise, quantise
from tests.kernels.paged_batches import Shape, make_batch, relative_error

# Of the largest number of a vector: half a step of int8; three bits of mantissa round by one sixteenth at most.
STEPS = {torch.int8: 0.5 / 127, torch.float8_e4m3fn: 1 / 16}


@given(
    seed=st.integers(0, 2**32 - 1),
    exponent=st.integers(-60, 60),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    quantised_dtype=st.sampled_from(list(QUANTISED_MAX)),
)
@settings(deadline=None, max_examples=100)
def test_what_comes_back_is_near_what_went_in(seed, exponent, dtype, quantised_dtype):
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(3, 2, 64, generator=generator) * 2.0**exponent).clamp(-6e4, 6e4).to(dtype)
    values, scales = quantise(x, quantised_dtype)
    assert values.dtype == quantised_dtype and scales.shape == (3, 2) and scales.dtype == torch.float32
    absmax = x.double().abs().amax(-1)
    largest = QUANTISED_MAX[quantised_dtype]
    if absmax.min() > 2.0**-90:
        torch.testing.assert_close(scales.double(), absmax / largest, rtol=1e-6, atol=0)
        assert (values.float().abs().amax(-1) == largest).all()  # the whole range is used
    error = (dequantise(values, scales).double() - x.double()).abs()
    assert (error <= (STEPS[quantised_dtype] * 1.00001) * absmax[..., None]).all()


def test_ties_round_to_even_and_nothing_wraps():
    x = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, -126.5, 126.5, 127.0, -127.0])
    values, scale = quantise(x, torch.int8)
    assert scale == 1.0
    assert values.tolist() == [0, 2, 2, 0, -2, -126, 126, 127, -127]


@pytest.mark.parametrize("dtype", QUANTISED_MAX, ids=str)
def test_zeros_stay_zeros_and_tiny_numbers_give_no_nan(dtype):
    x = torch.stack((torch.zeros(64), torch.full((64,), 1e-38), torch.full((64,), 3e38)))
    values, scales = quantise(x, dtype)
    back = dequantise(values, scales)
    assert (scales > 0).all() and back.isfinite().all()
    assert not back[0].any()
    torch.testing.assert_close(back[2], x[2])


@pytest.mark.parametrize("dtype", QUANTISED_MAX, ids=str)
def test_a_vector_does_not_depend_on_its_neighbours(dtype):
    x = torch.randn(5, 3, 80, generator=torch.Generator().manual_seed(0))
    values, scales = quantise(x, dtype)
    for i in range(5):
        alone_values, alone_scales = quantise(x[i, 1], dtype)
        assert torch.equal(values[i, 1].float(), alone_values.float()) and scales[i, 1] == alone_scales


BACKENDS = [TorchBackend(), ReferenceBackend()]


def quantised_layer(like: KVLayer, dtype: torch.dtype) -> KVLayer:
    """An empty quantised layer of the same shape; scales that nothing writes are NaN."""
    num_blocks, *size = like.key.shape
    data = torch.zeros(num_blocks, 2, *size).to(dtype)
    scales = torch.full((num_blocks, 2, *size[:2]), torch.nan)
    return KVLayer(data[:, 0], data[:, 1], scales[:, 0], scales[:, 1])


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("dtype", QUANTISED_MAX, ids=str)
def test_attention_over_a_quantised_cache(backend, dtype):
    """Exactly that over the numbers which the quantised cache stands for, and near that over the original."""
    shape = Shape(4, 2, 64, 16)
    params = AttentionParams(scale=0.125, sliding_window=20)
    batch = make_batch(shape, [7, 33], [7, 33])  # prompts: every key is written by this step
    key, value = torch.randn(2, 40, 2, 64, generator=torch.Generator().manual_seed(1))
    exact = dataclasses.replace(batch.kv_layer, key=batch.kv_layer.key.double(), value=batch.kv_layer.value.double())
    quantised = quantised_layer(batch.kv_layer, dtype)
    ReferenceBackend().write_kv(key, value, exact, batch.metadata)
    backend.write_kv(key, value, quantised, batch.metadata)
    assert quantised.key_scale is not None and quantised.value_scale is not None
    stands_for = KVLayer(
        quantised.key.double() * quantised.key_scale.double()[..., None],
        quantised.value.double() * quantised.value_scale.double()[..., None],
    )
    out = backend.attend(batch.query, quantised, batch.metadata, params)
    reference = ReferenceBackend()
    query = batch.query.double()
    assert relative_error(out, reference.attend(query, stands_for, batch.metadata, params)) < 2e-6
    error = relative_error(out, reference.attend(query, exact, batch.metadata, params))
    assert error < {torch.int8: 0.02, torch.float8_e4m3fn: 0.06}[dtype]
