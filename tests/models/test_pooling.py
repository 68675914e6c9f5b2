"""Embeddings are the pooled hidden states of the whole prompt, however its tokens were computed, and in any batch."""

import numpy as np
import pytest
import torch

from scheduler.output import KnownRow, NewRow, SchedulerOutput
from scheduler.sampling_params import SamplingParams
from tests.models.paged import run_paged
from tests.models.served import Served, toy_decoder

PROMPTS = [[5, 6, 7], [9], list(range(20, 63)), list(range(90, 60, -1))]
BLOCK_SIZE = 4
CHUNKS = {"whole": 1000, "chunked": 7, "single tokens": 1}


@pytest.fixture(scope="module")
def model():
    return toy_decoder()


@pytest.fixture(scope="module")
def hidden(model):
    """Of each prompt, [num_tokens, hidden_size]: what the head gets."""
    kept, logits = [], model.logits
    model.logits = lambda states: (kept.append(states), logits(states))[1]
    try:
        for prompt in PROMPTS:
            run_paged(model, [prompt], [1000])
    finally:
        del model.logits
    return [states.double().numpy() for states in kept]


def expected_vector(states: np.ndarray, pooling: str) -> np.ndarray:
    return states.mean(axis=0) if pooling == "mean" else states[-1]


def block_ids(place: int, start: int, end: int) -> tuple[int, ...]:
    """Of a prompt that has its own stretch of the pool, those that tokens from `start` to `end` open."""
    opened = range(-(-start // BLOCK_SIZE), -(-end // BLOCK_SIZE))
    return tuple(place * 20 + block for block in opened)


class Rows:
    """Prompts on their way through a runner, chunk by chunk."""

    def __init__(self, served: Served) -> None:
        self.runner = served.runner
        self.num_computed: dict[int, int] = {}

    def row(self, seq_id: int, chunk: int, params: SamplingParams) -> NewRow | KnownRow:
        prompt = PROMPTS[seq_id]
        start = self.num_computed.get(seq_id, 0)
        end = self.num_computed[seq_id] = min(start + chunk, len(prompt))
        opened = block_ids(seq_id, start, end)
        if start:
            return KnownRow(seq_id, opened, None, start, end - start)
        return NewRow(seq_id, 0, tuple(prompt), len(prompt), params, opened, 0, end)

    def embeddings(self, chunk: int, params: list[SamplingParams]) -> dict[int, np.ndarray]:
        """All prompts side by side."""
        found = {}
        while unfinished := [i for i in range(len(PROMPTS)) if self.num_computed.get(i, 0) < len(PROMPTS[i])]:
            rows = sorted((self.row(i, chunk, params[i]) for i in unfinished), key=lambda row: row.num_new_tokens > 1)
            result = self.runner.execute(SchedulerOutput(tuple(rows)))
            for row, row_result in zip(rows, result.rows, strict=True):
                if row_result.embedding:
                    assert row.end == len(PROMPTS[row.seq_id]) and row.seq_id not in found
                    found[row.seq_id] = np.frombuffer(row_result.embedding, "<f4")
                if params[row.seq_id].pooling:
                    assert row_result.token_ids == ()
                else:
                    assert bool(row_result.token_ids) == (row.end == len(PROMPTS[row.seq_id]))
        return found


@pytest.mark.parametrize("backend", ["reference", "torch", "auto"])
@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.parametrize("chunk", CHUNKS.values(), ids=CHUNKS.keys())
def test_embeddings_are_pooled_hidden_states(model, hidden, backend, pooling, chunk):
    params = SamplingParams(max_tokens=0, pooling=pooling)
    found = Rows(Served(model, backend)).embeddings(chunk, [params] * len(PROMPTS))
    for i, states in enumerate(hidden):
        np.testing.assert_allclose(found[i], expected_vector(states, pooling), rtol=1e-4, atol=1e-5)


def test_pooled_rows_share_a_batch_with_rows_that_sample(model, hidden):
    params = [
        SamplingParams(max_tokens=0, pooling="mean"),
        SamplingParams(max_tokens=5, presence_penalty=1.0, logprobs=1),
        SamplingParams(max_tokens=0, pooling="last"),
        SamplingParams(max_tokens=5, temperature=0.0),
    ]
    found = Rows(Served(model)).embeddings(9, params)
    assert sorted(found) == [0, 2]
    np.testing.assert_allclose(found[0], expected_vector(hidden[0], "mean"), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found[2], expected_vector(hidden[2], "last"), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_a_preempted_prompt_begins_again(model, hidden, pooling):
    """Half a prompt, taken away, its row used by another prompt, and computed from its beginning."""
    params = SamplingParams(max_tokens=0, pooling=pooling)
    rows = Rows(Served(model, max_num_seqs=1))
    rows.runner.execute(SchedulerOutput((rows.row(2, 15, params),)))
    [other] = rows.runner.execute(SchedulerOutput((rows.row(3, 1000, params),), finished_seq_ids=(2,))).rows
    rows.num_computed[2] = 0
    rows.runner.execute(SchedulerOutput((rows.row(2, 20, params),), finished_seq_ids=(3,)))
    [result] = rows.runner.execute(SchedulerOutput((rows.row(2, 1000, params),))).rows
    for prompt, embedding in ((2, result.embedding), (3, other.embedding)):
        expected = expected_vector(hidden[prompt], pooling)
        np.testing.assert_allclose(np.frombuffer(embedding, "<f4"), expected, rtol=1e-4, atol=1e-5)


def test_half_precision_is_summed_in_float32(model):
    """Thousands of terms in bfloat16 would stop growing at 256 times the first."""
    served = Served(model)
    states = torch.full((90, 32), 1.0039, dtype=torch.bfloat16)
    served.runner._forward = lambda batch, wanted: (states[: len(batch.input_ids)], torch.zeros(0, 101))
    params = SamplingParams(max_tokens=0, pooling="mean")
    new = NewRow(0, 0, (1,) * 90, 90, params, tuple(range(23)), 0, 90)
    [result] = served.runner.execute(SchedulerOutput((new,))).rows
    np.testing.assert_allclose(np.frombuffer(result.embedding, "<f4"), states[0].float().numpy(), rtol=1e-6)


@pytest.mark.parametrize("num_steps_ahead", [0, 1])
@pytest.mark.parametrize("limits", [{}, {"max_num_batched_tokens": 16, "num_blocks": 24}], ids=["together", "tight"])
def test_the_scheduler_serves_embeddings_beside_answers(model, hidden, limits, num_steps_ahead):
    """Each ends as soon as its prompt is computed; where blocks are few, answers take them from half-computed ones."""
    served = Served(model, **limits)
    requests = {}
    for i, prompt in enumerate([*PROMPTS, *PROMPTS]):
        pooling = ("mean", "last")[i // len(PROMPTS)]
        requests[f"e{i}"] = (prompt, SamplingParams(max_tokens=0, pooling=pooling))
        requests[f"a{i}"] = ([i, 50, 3], SamplingParams(max_tokens=30, ignore_eos=True))
    tokens, _, _ = served.run(requests, num_steps_ahead)
    assert (served.scheduler.stats.num_preemptions > 0) == bool(limits)
    for i in range(2 * len(PROMPTS)):
        assert tokens[f"e{i}", 0] == [] and len(tokens[f"a{i}", 0]) == 30
        expected = expected_vector(hidden[i % len(PROMPTS)], ("mean", "last")[i // len(PROMPTS)])
        [embedding] = served.embeddings[f"e{i}"]
        np.testing.assert_allclose(np.frombuffer(embedding, "<f4"), expected, rtol=1e-4, atol=1e-5)
