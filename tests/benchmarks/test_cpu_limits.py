"""What the benchmark of the processor's limits makes of its measurements, and that it measures a model's own shapes."""

import pytest
import torch

from benchmarks.bare_limits import ProductShape, bare_ways, own_ways, product_seconds, product_shapes, read_bandwidth
from benchmarks.cpu_limits import HEAD, PREFILL, bytes_per_step, layers_seconds, shares_of
from benchmarks.served_model import ServedModel
from benchmarks.step_parts import StepParts, StepShape, layer_products, measure_parts, steps_of
from tests.models.tiny_models import build, save

SHAPES = [ProductShape("q, k, v", 10, 20, 3), ProductShape(HEAD, 10, 1000, 1)]
FLAGS = {"block_size": "4", "num_gpu_blocks_override": "60", "max_num_seqs": "3", "device": "cpu", "cpu_threads": "1"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = save(build("llama"), tmp_path_factory.mktemp("tiny"))
    return ServedModel(path, {**FLAGS, "max_num_batched_tokens": "16", "quantization": "none"})


def parts(step, **others):
    return StepParts(step, others)


def test_an_engine_as_fast_as_the_bare_product_and_the_memory_has_shares_of_one():
    steps = {"prefill, 512 tokens": parts(0.5), "decode, 1 sequence": parts(0.01)}
    shares = shares_of(steps, SHAPES, bare_seconds=0.5, bytes_per_step=1000, bandwidth=1e5)
    assert (shares.prefill_share, shares.decode_share) == pytest.approx((1, 1))
    assert shares.prefill_tokens_per_second == pytest.approx(2 * PREFILL)
    # The head is no part of it: of a prompt one row alone is sampled.
    assert shares.bare_operations_per_second == pytest.approx(2 * PREFILL * 10 * 20 * 3 / 0.5)


def test_the_layers_products_are_counted_and_the_head_is_not():
    found = {"q, k, v": {"a": {1: 0.25}}, HEAD: {"a": {1: 9.0}}}
    assert layers_seconds(found, SHAPES, "a", 1) == 0.75


def test_the_rest_is_what_the_parts_leave():
    assert parts(1.0, products=0.5, host=0.25).rest == 0.25


def test_shapes_are_those_of_the_model(model):
    expected = {(linear.weight.shape[1], sum(linear.out_features)) for linear in layer_products(model)}
    shapes = product_shapes(model.decoder.config)
    assert {(shape.in_features, shape.out_features) for shape in shapes[:-1]} == expected
    held = sum(linear.weight.numel() for linear in (*layer_products(model), model.decoder.head))
    assert sum(shape.num_weights for shape in shapes) == held
    assert bytes_per_step(model, 0) == 4 * held
    assert bytes_per_step(model, 10) - 4 * held == 10 * model.info.kv_cache_bytes // (60 * 4)


@pytest.mark.parametrize("shape", [StepShape(3, 20, 1), StepShape(1, 16, 16)])
def test_steps_have_the_shape_that_was_asked_for(model, shape):
    steps = steps_of(model, shape, range(40), rounds=2)
    assert len(steps) >= 2
    assert {(step.num_rows, step.num_tokens) for step in steps} == {(shape.num_sequences, shape.num_tokens)}


def test_steps_that_never_come_are_told(model):
    with pytest.raises(ValueError, match="no steps of 1 rows and 17 tokens"):
        steps_of(model, StepShape(1, 17, 17), range(40), rounds=1)


def test_every_part_of_a_step_is_measured(model):
    found = measure_parts(model, StepShape(2, 12, 1), range(40), rounds=1)
    assert {"head", "sampling", "host"} <= set(found.parts)
    assert min(found.step, *found.parts.values()) > 0
    assert found.rest == pytest.approx(found.step - sum(found.parts.values()))


def test_every_way_multiplies_by_the_same_weight():
    weight, rows = torch.randn(48, 64), torch.randn(5, 64)
    exact = rows @ weight.T
    for way in (*bare_ways(), *own_ways(lambda rows, weight, _: rows @ weight.dequantize().T)):
        product = way.multiply(rows, way.prepare(weight)())
        allowed = {32: 1e-5, 8: 0.03, 4: 0.2}[way.bits]
        assert (product - exact).norm() < allowed * exact.norm(), way.name


def test_all_ways_are_timed_at_all_numbers_of_rows():
    ways = bare_ways()[:1]
    found = product_seconds(ProductShape("down", 2048, 4096, 1), [1, 3], ways, rounds=1)
    assert set(found) == {"float32"} and set(found["float32"]) == {1, 3}
    assert all(seconds > 0 for seconds in found["float32"].values())


def test_reading_memory_leaves_the_threads_as_they_were():
    before = torch.get_num_threads()
    assert read_bandwidth(1, rounds=1) > 0
    assert torch.get_num_threads() == before
