"""Beam searches over a model are those of transformers: the same answers in the same order, with the same scores."""

import pytest
import torch
import transformers

from kernels.attention.backend import select_backend
from kernels.model_ops.torch_ops import TorchOps
from models.loader import load_model
from models.runner import ModelRunner
from paged_cache.kv_cache import KVCache
from paged_cache.manager import BlockManager
from paged_cache.spec import KVCacheSpec
from scheduler.config import SchedulerConfig
from scheduler.output import NewRow, SchedulerOutput
from scheduler.request import Request
from scheduler.sampling_params import BeamSearch, SamplingParams
from scheduler.scheduler import Scheduler
from tests.models.test_launch import LookedUpModel, ReadsNothingBack
from tests.models.tiny_models import build, save

CPU = torch.device("cpu")
EOS = 2
PROMPTS = [(5, 9, 60, 9, 31, 5, 140), (8,), tuple(range(30, 70, 2))]
NUM_TOKENS = 20
END_BIAS = 2.0  # ends some answers early and lets others reach their length


@pytest.fixture(scope="module")
def oracle():
    return build("llama")


@pytest.fixture(scope="module")
def model(oracle, tmp_path_factory):
    path = save(oracle, tmp_path_factory.mktemp("model"))
    return load_model(path, torch.float32, CPU, TorchOps(), lambda done, total: None)


def searched(model, params: SamplingParams, *, num_blocks=64, backend="torch", **limits) -> list[list]:
    """The updates of each prompt's answers, best first, all prompts at once."""
    config = SchedulerConfig(
        **{"max_num_seqs": 18, "max_num_batched_tokens": 64, "max_model_len": 64, **limits},
        eos_token_ids=frozenset({EOS}),
    )
    scheduler = Scheduler(config, BlockManager(num_blocks, 4))
    cache = KVCache(KVCacheSpec(3, 2, 16, 4, "float32"), num_blocks, CPU)
    backend = select_backend(backend, CPU)
    runner = ModelRunner(model, backend, cache, max_num_seqs=config.max_num_seqs, max_model_len=64)
    for i, prompt in enumerate(PROMPTS):
        scheduler.add(Request(str(i), prompt, params, arrival_time=float(i)))
    updates = {}
    while scheduler.has_unfinished:
        output = scheduler.schedule()
        for update in scheduler.update(output, runner.execute(output)):
            updates.setdefault(update.request_id, []).append(update)
    assert (scheduler.stats.num_preemptions > 0) == (num_blocks < 64)
    return [updates[str(i)] for i in range(len(PROMPTS))]


@torch.inference_mode()
def expected(oracle, prompt, search: BeamSearch, n: int, **edits) -> list[tuple[list[int], float]]:
    """The answers of transformers, best first, each with its score."""
    config = transformers.GenerationConfig(
        num_beams=search.width,
        num_return_sequences=n,
        length_penalty=search.length_penalty,
        early_stopping=search.early_stopping,
        do_sample=False,
        max_new_tokens=NUM_TOKENS,
        eos_token_id=EOS,
        pad_token_id=0,
        renormalize_logits=True,
        return_dict_in_generate=True,
        output_scores=True,
        **edits,
    )
    found = oracle.generate(torch.tensor([prompt]), config)
    answers = []
    for ids, score in zip(found.sequences[:, len(prompt) :].tolist(), found.sequences_scores.tolist(), strict=True):
        end = ids.index(EOS) + 1 if EOS in ids else len(ids)
        answers.append((ids[:end], score))
    return answers


def assert_same(updates, answers, length_penalty: float) -> None:
    assert [list(update.token_ids) for update in updates] == [tokens for tokens, _ in answers]
    for update, (tokens, score) in zip(updates, answers, strict=True):
        # Transformers adds up in float32.
        total = sum(scored.logprob for scored in update.logprobs)
        assert total / len(tokens) ** length_penalty == pytest.approx(score, abs=1e-4, rel=1e-6)
        assert update.finish_reason == ("stop" if tokens[-1] == EOS else "length")


ENDING = ({"logit_bias": ((EOS, END_BIAS),)}, {"sequence_bias": [[[EOS], END_BIAS]]})


@pytest.mark.parametrize(
    ("search", "n", "edits"),
    [
        (BeamSearch(4), 4, ENDING),
        (BeamSearch(4, early_stopping=True), 4, ENDING),
        (BeamSearch(5, length_penalty=0.0), 2, ENDING),
        (BeamSearch(3, length_penalty=2.0), 3, ENDING),
        (BeamSearch(3, length_penalty=-1.0), 3, ENDING),
        (BeamSearch(6, early_stopping=True, length_penalty=0.6), 1, ENDING),
        (BeamSearch(2), 2, ENDING),
        (BeamSearch(4), 3, ({}, {})),
        (
            BeamSearch(4),
            4,
            (
                {"logit_bias": ((EOS, 6.0), (50, 3.0)), "min_tokens": 7, "bad_words": ((60,), (50, 50))},
                {"sequence_bias": [[[EOS], 6.0], [[50], 3.0]], "min_new_tokens": 7, "bad_words_ids": [[60], [50, 50]]},
            ),
        ),
    ],
    ids=str,
)
def test_answers_and_scores_are_those_of_transformers(oracle, model, search, n, edits):
    ours, theirs = edits
    params = SamplingParams(max_tokens=NUM_TOKENS, n=n, logprobs=0, beam_search=search, **ours)
    for prompt, updates in zip(PROMPTS, searched(model, params), strict=True):
        assert_same(updates, expected(oracle, prompt, search, n, **theirs), search.length_penalty)


def test_the_cases_end_by_themselves_and_at_their_length(oracle):
    """Else the test above says little."""
    lengths = {
        len(tokens) for prompt in PROMPTS for tokens, _ in expected(oracle, prompt, BeamSearch(4), 4, **ENDING[1])
    }
    assert NUM_TOKENS in lengths
    assert min(lengths) < NUM_TOKENS // 2


@pytest.mark.parametrize("backend", ["torch", "auto"])
@pytest.mark.parametrize(
    "limits",
    [{"max_num_batched_tokens": 3}, {"num_blocks": 14}, {"num_blocks": 14, "max_num_seqs": 3}],
    ids=["chunked", "preempted", "few slots"],
)
def test_the_same_answers_whatever_the_room(model, backend, limits):
    search = BeamSearch(4, early_stopping=True)
    params = SamplingParams(max_tokens=NUM_TOKENS, n=4, logprobs=2, beam_search=search, **ENDING[0])
    alone = searched(model, params)
    for updates, expected_updates in zip(searched(model, params, backend=backend, **limits), alone, strict=True):
        assert [u.token_ids for u in updates] == [u.token_ids for u in expected_updates]
        assert {len(scored.top) for update in updates for scored in update.logprobs} == {2}


def test_rows_bring_as_many_candidates_as_their_own_requests_need():
    """Searches of several widths in one step, a sampled row among them; and the launch waits for nothing."""
    table = LookedUpModel()
    runner = ModelRunner(
        table, None, KVCache(KVCacheSpec(1, 1, 2, 4, "float32"), 8, CPU), max_num_seqs=8, max_model_len=8
    )
    params = [
        SamplingParams(max_tokens=4, beam_search=BeamSearch(5)),
        SamplingParams(max_tokens=4),
        SamplingParams(max_tokens=4, beam_search=BeamSearch(1), allowed_token_ids=(4, 8, 6), ignore_eos=True),
        SamplingParams(max_tokens=4, beam_search=BeamSearch(5), logprobs=20),
        SamplingParams(max_tokens=4, beam_search=BeamSearch(1), stop_token_ids=tuple(range(20, 30))),
        SamplingParams(max_tokens=4, beam_search=BeamSearch(5)),
    ]
    rows = [NewRow(i, 0, (i, 9), 2, p, (i,), 0, 2) for i, p in enumerate(params)]
    with ReadsNothingBack():
        pending = runner.launch(SchedulerOutput(tuple(rows)))
    results = pending.result().rows
    assert [len(result.candidates) for result in results] == [10, 0, 2, 20, 12, 10]
    assert [len(result.token_ids) for result in results] == [0, 1, 0, 0, 0, 0]
    logprobs = table.table[9].log_softmax(-1)
    for result in (results[i] for i in (0, 3, 4, 5)):
        best = logprobs.argsort(descending=True)[: len(result.candidates)].tolist()
        assert [token_id for token_id, _ in result.candidates] == best
        assert [p for _, p in result.candidates] == pytest.approx(logprobs[best].tolist(), abs=1e-6)
    allowed = table.table[9][[4, 8, 6]].log_softmax(-1).sort(descending=True).values[:2]
    assert [p for _, p in results[2].candidates] == pytest.approx(allowed.tolist(), abs=1e-6)
