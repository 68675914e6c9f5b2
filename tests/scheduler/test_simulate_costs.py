"""What a step does, counted, and the models that turn it into seconds."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.output import BlockCopy, KnownRow, SchedulerOutput
from scheduler.simulate.hardware import CARDS, MODELS, RooflineCost
from scheduler.simulate.step_cost import FittedCost, NoCost, StepWork, load_fitted_cost

rows = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), max_size=6)
works = st.builds(
    StepWork,
    num_rows=st.integers(1, 64),
    num_tokens=st.integers(1, 4096),
    num_context_tokens=st.integers(1, 100_000),
    num_attention_pairs=st.floats(0, 1e8),
    num_copied_blocks=st.integers(0, 9),
    num_swapped_blocks=st.integers(0, 9),
)
FITTED = FittedCost("a test", ((1, 1.0), (4, 1.5), (8, 4.5)), 0.5, 0.001, 0.0001, 0.25, 2.0)


@given(rows)
def test_work_counts_what_each_token_sees(drawn):
    output = SchedulerOutput(
        tuple(KnownRow(n, (), None, computed, new) for n, (computed, new) in enumerate(drawn)),
        block_copies=(BlockCopy(0, 1),),
        swapped_out=(BlockCopy(1, 0), BlockCopy(2, 1)),
        swapped_in=(BlockCopy(0, 3),),
    )
    work = StepWork.of(output)
    assert work.num_tokens == output.num_tokens
    assert work.num_context_tokens == sum(row.end for row in output.rows)
    seen = sum(position + 1 for computed, new in drawn if new > 1 for position in range(computed, computed + new))
    assert work.num_attention_pairs == seen
    assert (work.num_rows, work.num_copied_blocks, work.num_swapped_blocks) == (len(drawn), 1, 3)


@pytest.mark.parametrize(
    ("num_tokens", "seconds"), [(1, 1.0), (2, 1.0 + 0.5 / 3), (4, 1.5), (6, 3.0), (8, 4.5), (12, 7.5)]
)
def test_a_fitted_line_is_straight_between_its_points_and_beyond(num_tokens, seconds):
    assert FITTED.seconds(StepWork(num_tokens=num_tokens)) == pytest.approx(seconds)


def test_a_fitted_model_adds_its_terms():
    work = StepWork(2, 4, 100, 50.0, 3, 1)
    assert FITTED.seconds(work) == pytest.approx(1.5 + 2 * 0.5 + 100 * 0.001 + 50 * 0.0001 + 3 * 0.25 + 2.0)


def test_a_fitted_model_goes_through_a_file(tmp_path):
    path = tmp_path / "model.json"
    path.write_text(json.dumps({"model": FITTED.to_json()}))
    assert load_fitted_cost(path) == FITTED


@pytest.mark.parametrize(
    "change",
    [
        {"per_row": None},
        {"seconds_by_tokens": [[1, 1.0]]},
        {"seconds_by_tokens": [[4, 1.0], [2, 1.0]]},
        {"seconds_by_tokens": 3},
        {"seconds_by_tokens": [["x", 1.0], [2, 1.0]]},
    ],
)
def test_a_file_with_a_broken_model_is_named(tmp_path, change):
    path = tmp_path / "model.json"
    path.write_text(json.dumps({"model": {**FITTED.to_json(), **change}}))
    with pytest.raises(ValueError, match=r"model\.json holds no cost model"):
        load_fitted_cost(path)
    with pytest.raises(ValueError, match=r"none\.json holds no cost model"):
        load_fitted_cost(tmp_path / "none.json")


@pytest.mark.parametrize(
    "cost", [FITTED, RooflineCost(CARDS["h100"], MODELS["llama-3.1-8b"], 16), NoCost()], ids=lambda c: type(c).__name__
)
@given(works)
def test_more_work_never_takes_less_time(cost, work):
    seconds = cost.seconds(work)
    for name in StepWork.__slots__:
        assert cost.seconds(replace(work, **{name: getattr(work, name) + 1})) >= seconds


def test_a_lone_decode_reads_the_weights_and_a_long_prefill_computes():
    cost = RooflineCost(CARDS["h100"], MODELS["llama-3.1-8b"], 16, host_seconds=0.0, host_seconds_per_row=0.0)
    # 16.06 GB of weights at 80 % of 3.35 TB/s.
    assert cost.seconds(StepWork(1, 1, 1)) == pytest.approx(16.06e9 / (0.8 * 3.35e12), rel=0.01)
    # 2 x 8.03e9 x 8192 FLOP at half of 989 TFLOP/s.
    assert cost.seconds(StepWork(1, 8192, 1)) == pytest.approx(2 * 8.03e9 * 8192 / (0.5 * 989e12), rel=0.01)
    assert cost.seconds_per_prefill_token == pytest.approx(cost.seconds(StepWork(1, 8192, 1)) / 8192, rel=0.01)
    two = replace(cost, num_cards=2)
    assert two.seconds(StepWork(1, 1, 1)) == pytest.approx(cost.seconds(StepWork(1, 1, 1)) / 2)


def test_the_cache_gets_what_the_weights_leave():
    cost = RooflineCost(CARDS["h100"], MODELS["llama-3.1-8b"], 16)
    # 128 KiB of keys and values for each token.
    assert cost.num_blocks() == (72e9 - 16.06e9) // (16 * 131072)
    assert RooflineCost(CARDS["h100"], MODELS["llama-3.1-70b"], 16).num_blocks() < 1
    assert RooflineCost(CARDS["h100"], MODELS["llama-3.1-70b"], 16, num_cards=4).num_blocks() > 10_000
