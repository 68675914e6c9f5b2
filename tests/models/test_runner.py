"""The model runner under the real scheduler: what a step computes does not depend on how the work was cut."""

import numpy as np
import pytest
import torch

from models.step_inputs import pack, unpack
from scheduler.request import Request
from scheduler.sampling_params import SamplingParams
from tests.models.served import MAX_MODEL_LEN, Served, toy_decoder


@pytest.fixture(scope="module")
def model():
    return toy_decoder()


def workload():
    generator = torch.Generator().manual_seed(5)
    requests = {}
    for i in range(7):
        length = int(torch.randint(1, 50, (1,), generator=generator))
        prompt = torch.randint(0, 101, (length,), generator=generator).tolist()
        params = SamplingParams(
            max_tokens=20,
            n=1 + i % 3,
            temperature=(0.0, 0.8)[i % 2],
            top_k=(0, 20)[i // 2 % 2],
            top_p=(1.0, 0.9)[i // 3 % 2],
            seed=i * 1000,
            logprobs=2,
            prompt_logprobs=1,
        )
        requests[f"r{i}"] = (prompt, params)
    return requests


@pytest.fixture(scope="module")
def alone(model):
    """Each request by itself, whole prompts, plenty of blocks."""
    results = ({}, {}, {})
    for request_id, request in workload().items():
        for merged, part in zip(results, Served(model, "reference").run({request_id: request}), strict=True):
            merged.update(part)
    return results


def assert_same_scores(got, expected):
    assert [score.token_id for score in got] == [score.token_id for score in expected]
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert [value for _, value in ours.top] == pytest.approx([value for _, value in theirs.top], abs=1e-4)


@pytest.mark.parametrize("backend", ["reference", "torch", "auto"])
@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"max_num_batched_tokens": 7},
        {"num_blocks": 24},
        {"num_blocks": 24, "max_num_batched_tokens": 5, "max_num_seqs": 5, "block_size": 4},
        {"block_size": 16, "num_blocks": 20, "long_prefill_token_threshold": 3},
    ],
    ids=["together", "chunked", "preempted", "chunked and preempted", "large blocks"],
)
def test_tokens_and_logprobs_do_not_depend_on_how_the_work_was_cut(model, alone, backend, limits):
    served = Served(model, backend, **limits)
    tokens, logprobs, scores = served.run(workload())
    assert tokens == alone[0]
    assert (served.scheduler.stats.num_preemptions > 0) == ("num_blocks" in limits)
    for key in tokens:
        assert_same_scores(logprobs[key], alone[1][key])
    for request_id in scores:
        assert_same_scores(scores[request_id], alone[2][request_id])


@pytest.mark.parametrize(
    "limits",
    [{}, {"num_blocks": 24, "max_num_batched_tokens": 5, "max_num_seqs": 5}],
    ids=["together", "chunked and preempted"],
)
def test_a_step_launched_before_the_last_result_is_read_changes_nothing(model, alone, limits):
    served = Served(model, "torch", **limits)
    tokens, logprobs, scores = served.run(workload(), num_steps_ahead=1)
    assert tokens == alone[0]
    assert (served.scheduler.stats.num_preemptions > 0) == ("num_blocks" in limits)
    for key in tokens:
        assert_same_scores(logprobs[key], alone[1][key])
    for request_id in scores:
        assert_same_scores(scores[request_id], alone[2][request_id])


def test_a_result_may_be_read_late_and_twice(model):
    served = Served(model)
    served.scheduler.add(Request("a", (5, 6, 7), SamplingParams(max_tokens=9, temperature=0.0, logprobs=1), 0.0))
    outputs = [served.scheduler.schedule(), served.scheduler.schedule()]
    steps = [served.runner.launch(output) for output in outputs]
    late = [step.result() for step in reversed(steps)][::-1]
    assert late == [step.result() for step in steps]
    fresh = Served(model)
    assert late == [fresh.runner.execute(output) for output in outputs]


def test_arrays_packed_for_one_copy_come_out_as_they_were():
    generator = np.random.default_rng(3)
    arrays = {
        "ids": generator.integers(0, 2**60, 5),
        "table": generator.integers(0, 2**30, (7, 9)).astype(np.int32)[:, 2:5],
        "none": np.empty(0, np.int64),
        "pairs": np.empty((0, 2), np.int64),
        "floats": generator.random(3).astype(np.float32),
        "doubles": generator.random(4),
    }
    packed, places = pack(arrays, pin_memory=False)
    tensors = unpack(packed, arrays, places)
    for name, array in arrays.items():
        assert tensors[name].data_ptr() % 16 == packed.data_ptr() % 16
        np.testing.assert_array_equal(tensors[name].numpy(), array, strict=True)


def test_prompt_scores_are_the_logits_of_the_previous_position(model, alone):
    """Scoring prompt + answer as a prompt gives the log-probabilities that sampling reported."""
    prompt, _ = workload()["r0"]
    answer = alone[0]["r0", 0]
    scored = SamplingParams(max_tokens=0, prompt_logprobs=2)
    _, _, scores = Served(model, max_num_batched_tokens=6).run({"again": (prompt + answer, scored)})
    assert len(scores["again"]) == len(prompt) + len(answer) - 1
    assert_same_scores(scores["again"][len(prompt) - 1 :], alone[1]["r0", 0])


def test_a_sequence_may_fill_the_whole_window(model):
    params = SamplingParams(max_tokens=MAX_MODEL_LEN - 3, temperature=0.0, ignore_eos=True)
    tokens, _, _ = Served(model).run({"a": ([1, 2, 3], params)})
    assert len(tokens["a", 0]) == MAX_MODEL_LEN - 3
