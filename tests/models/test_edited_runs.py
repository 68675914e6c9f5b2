"""Runs with every edit of the logits: each token is the one that the reference chooses, however the work was cut."""

import dataclasses

import numpy as np
import pytest
import torch

from models.sampler import uniform_numbers
from scheduler.request import Request
from scheduler.sampling_params import SamplingParams
from tests.models.logit_oracle import edited_logits, kept_distribution
from tests.models.paged import run_paged
from tests.models.served import Served, toy_decoder

EDITS = [
    {"presence_penalty": 1.5, "frequency_penalty": 0.5},
    {},
    {"repetition_penalty": 1.8, "min_tokens": 6, "stop_token_ids": (11, 12)},
    {"logit_bias": ((7, 9.0), (3, 4.0)), "min_tokens": 5},
    {"allowed_token_ids": (1, 7, 30, 31, 32, 33), "frequency_penalty": 2.0},
    {"bad_words": (*((token_id,) for token_id in range(60)), (70, 71), (80, 80))},
    {"repetition_penalty": 0.7, "bad_words": ((90, 90), (91, 92, 93), (40,)), "presence_penalty": -1.0},
    {"logit_bias": ((7, -100.0),), "repetition_penalty": 1.3, "allowed_token_ids": tuple(range(5, 95))},
]


def workload() -> dict[str, tuple[list[int], SamplingParams]]:
    """Each mix of edits twice: greedy, and drawn with cuts."""
    generator = torch.Generator().manual_seed(8)
    requests = {}
    for i, edits in enumerate([*EDITS, *EDITS]):
        length = int(torch.randint(1, 40, (1,), generator=generator))
        prompt = torch.randint(0, 101, (length,), generator=generator).tolist()
        cuts = {"temperature": 0.9, "top_k": 30, "top_p": 0.95} if i < len(EDITS) else {"temperature": 0.0}
        params = SamplingParams(max_tokens=18, n=1 + i % 2, seed=i, logprobs=3 if i % 3 else None, **cuts, **edits)
        requests[f"r{i}"] = (prompt, params)
    return requests


@pytest.fixture(scope="module")
def model():
    return toy_decoder()


@pytest.fixture(scope="module")
def together(model):
    return Served(model).run(workload())


def test_every_token_is_the_one_that_the_reference_chooses(model, together):
    """All prefixes of each answer at once; the log-probabilities are those of the unedited logits."""
    tokens, logprobs, _ = together
    requests = workload()
    sequences = {key: requests[key[0]][0] + tokens[key] for key in tokens}
    all_logits = run_paged(model, list(sequences.values()), [1000])
    for (request_id, index), logits in zip(sequences, all_logits, strict=True):
        prompt, params = requests[request_id]
        generated = tokens[request_id, index]
        raw = logits[len(prompt) - 1 : -1].double().numpy()
        for position, token_id in enumerate(generated):
            own = (prompt, generated[:position])
            edited = edited_logits(raw[position], params, *own, model.config.eos_token_ids)
            uniform = uniform_numbers(*(np.array([x]) for x in (params.seed, index, len(prompt) + position)))
            assert_chosen(edited, params, token_id, float(uniform[0]))
        expected = torch.from_numpy(raw).log_softmax(-1)[range(len(generated)), generated].tolist()
        got = logprobs.get((request_id, index), [])
        assert [score.token_id for score in got] == ([] if params.logprobs is None else generated)
        assert [score.logprob for score in got] == pytest.approx(expected[: len(got)], abs=1e-4)


def assert_chosen(edited: np.ndarray, params: SamplingParams, token_id: int, uniform: float) -> None:
    """The token is the best one, or lies where the number falls in the cumulative distribution."""
    if params.temperature == 0.0:
        assert edited[token_id] >= edited.max() - 1e-4
        return
    # Rounding at the edge of a cut moves the whole distribution: loosened and tightened, one of them holds the token.
    intervals = []
    for slack in (0.0, 1e-5, -1e-5):
        probs = kept_distribution(edited, dataclasses.replace(params, top_p=params.top_p + slack))
        end = float(probs[: token_id + 1].sum())
        intervals.append(probs[token_id] > 0 and end - probs[token_id] - 1e-4 <= uniform <= end + 1e-4)
    assert any(intervals)


def test_the_edits_make_a_difference(model, together):
    """Else the test above says nothing: every mix changes what is sampled, and min_tokens holds ends back."""
    plain = {
        request_id: (prompt, dataclasses.replace(params, **{name: PLAIN[name] for name in EDITED_FIELDS}))
        for request_id, (prompt, params) in workload().items()
    }
    unedited, _, _ = Served(model).run(plain)
    for i, edits in enumerate(EDITS):
        names = (f"r{i}", f"r{i + len(EDITS)}")
        differs = any(unedited[name, 0] != together[0][name, 0] for name in names)
        assert differs == bool(edits)
    for request_id, (_, params) in workload().items():
        assert len(together[0][request_id, 0]) > params.min_tokens


EDITED_FIELDS = sorted({name for edits in EDITS for name in edits})
PLAIN = dataclasses.asdict(SamplingParams(max_tokens=1))


@pytest.mark.parametrize("backend", ["torch", "auto"])
@pytest.mark.parametrize(
    ("limits", "num_steps_ahead"),
    [
        ({"max_num_seqs": 1}, 0),
        ({"max_num_batched_tokens": 7}, 0),
        ({"num_blocks": 24, "max_num_batched_tokens": 5, "max_num_seqs": 5}, 0),
        ({}, 1),
        ({"num_blocks": 24, "max_num_batched_tokens": 9, "max_num_seqs": 6}, 1),
    ],
    ids=["alone", "chunked", "chunked and preempted", "overlapped", "overlapped, chunked and preempted"],
)
def test_the_same_tokens_in_any_batch(model, together, backend, limits, num_steps_ahead):
    served = Served(model, backend, **limits)
    tokens, _, _ = served.run(workload(), num_steps_ahead)
    assert tokens == together[0]
    assert (served.scheduler.stats.num_preemptions > 0) == ("num_blocks" in limits)


def test_a_sequence_that_nothing_may_follow_fails_alone(model):
    """Greedy or drawn; neither a token that is forbidden comes of it, nor harm to the others."""
    served = Served(model)
    stuck = {"allowed_token_ids": (5, 6), "bad_words": ((5,), (6, 6)), "ignore_eos": True}
    for i, temperature in enumerate((0.0, 1.0)):
        params = SamplingParams(max_tokens=9, temperature=temperature, logprobs=1, **stuck)
        served.scheduler.add(Request(f"stuck{i}", (1, 2), params, 0.0))
    served.scheduler.add(Request("free", (1, 2), SamplingParams(max_tokens=9, ignore_eos=True), 0.0))
    ends, tokens = {}, {}
    while served.scheduler.has_unfinished:
        output = served.scheduler.schedule()
        for update in served.scheduler.update(output, served.runner.execute(output)):
            tokens.setdefault(update.request_id, []).extend(update.token_ids)
            ends[update.request_id] = update.finish_reason
        served.scheduler.check_integrity()
    assert tokens["stuck0"] == tokens["stuck1"] == [6]
    assert ends == {"stuck0": "error", "stuck1": "error", "free": "length"}
    assert len(tokens["free"]) == 9
