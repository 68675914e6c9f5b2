"""Logit edits of whole steps against the float64 reference: any mix in one batch, however sequences come and go."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.sampling import logit_edits
from kernels.sampling.logit_edits import apply_edits
from models import step_edits
from models.row_table import RowTable
from models.step_edits import StepEditor
from scheduler.output import GrammarMask, KnownRow, NewRow
from scheduler.sampling_params import SamplingParams
from tests.models.logit_oracle import edit_params, edited_logits

CPU = torch.device("cpu")
VOCAB_SIZE = 45  # neither whole bytes nor whole words of a mask
EOS = (7, 20)
MAX_NUM_SEQS = 4
MAX_MODEL_LEN = 64


@dataclass
class Running:
    """A sequence as the scheduler has it."""

    seq_id: int
    params: SamplingParams
    prompt: list[int]
    generated: list[int] = field(default_factory=list)
    num_told: int = 0  # generated tokens that the runner was told of
    is_known: bool = False

    def message(self, num_new_tokens: int) -> NewRow | KnownRow:
        num_computed = len(self.prompt) + len(self.generated) - num_new_tokens
        news = tuple(self.generated[self.num_told :]) if self.params.looks_back else ()
        self.num_told = len(self.generated)
        if self.is_known:
            return KnownRow(self.seq_id, (), None, num_computed, num_new_tokens, news)
        self.is_known = True
        token_ids = (*self.prompt, *self.generated)
        return NewRow(self.seq_id, 0, token_ids, len(self.prompt), self.params, (), num_computed, num_new_tokens)


def bitmask(allowed: set[int]) -> bytes:
    return sum(1 << token_id for token_id in allowed).to_bytes(4 * -(-VOCAB_SIZE // 32), "little")


class Steps:
    """The host's and the device's side of the edits, and the sequences that they are for."""

    def __init__(self) -> None:
        self.table = RowTable(MAX_NUM_SEQS, MAX_MODEL_LEN, 16, EOS)
        self.editor = StepEditor(MAX_NUM_SEQS, VOCAB_SIZE, CPU)

    def edit(
        self, running: list[Running], samples: list[bool], logits: torch.Tensor, grammars: dict[int, set[int]]
    ) -> torch.Tensor:
        """The edited logits of the rows that sample; `grammars` go by place in the step."""
        rows = np.array([self.table.take(sequence.message(1)) for sequence in running], np.int64)
        masks = tuple(GrammarMask(place, bitmask(allowed)) for place, allowed in grammars.items())
        host = self.editor.host_arrays(self.table, rows, np.array(samples), masks)
        edits = self.editor.edits({name: torch.from_numpy(array) for name, array in host.items()}, host)
        edited = logits.clone()
        if edits is not None:
            apply_edits(edited, edits)
        self.table.num_tokens[rows[samples]] += 1
        return edited


@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=60)
def test_any_mix_of_edits_is_that_of_the_reference(data: st.DataObject, seed: int) -> None:
    generator = np.random.default_rng(seed)
    token_ids = st.integers(0, 9)  # few, so that they repeat and bad words are met
    steps, running, num_begun = Steps(), [], 0
    for _ in range(data.draw(st.integers(1, 7), "steps")):
        gone = [sequence for sequence in running if generator.random() < 0.15]
        steps.table.forget(sequence.seq_id for sequence in gone if sequence.is_known)
        for sequence in gone:
            if generator.random() < 0.5:  # preempted, not finished: it comes back whole
                sequence.is_known = False
            else:
                running.remove(sequence)
        while len(running) < MAX_NUM_SEQS and (not running or generator.random() < 0.6):
            params = data.draw(edit_params(VOCAB_SIZE), "params")
            prompt = data.draw(st.lists(token_ids, min_size=1, max_size=12), "prompt")
            running.append(Running(num_begun, params, prompt))
            num_begun += 1
        samples = [sequence.generated != [] or generator.random() < 0.8 for sequence in running]
        grammars = {
            place: set(np.flatnonzero(generator.random(VOCAB_SIZE) < 0.7).tolist())
            for place in range(len(running))
            if generator.random() < 0.2
        }
        logits = torch.from_numpy(generator.normal(size=(sum(samples), VOCAB_SIZE)) * 4).float()
        edited = steps.edit(running, samples, logits, grammars)
        sampling = [(place, sequence) for place, sequence in enumerate(running) if samples[place]]
        for i, (place, sequence) in enumerate(sampling):
            own = (sequence.params, sequence.prompt, sequence.generated, EOS, grammars.get(place))
            expected = edited_logits(logits[i].numpy(), *own)
            np.testing.assert_allclose(edited[i].numpy(), expected, rtol=1e-5, atol=1e-5)
            sequence.generated.append(int(generator.integers(0, 10)))


MIX = [
    SamplingParams(20, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2),
    SamplingParams(20),
    SamplingParams(20, logit_bias=((3, 1.5), (8, -2.0)), bad_words=((4,), (1, 2)), min_tokens=9),
    SamplingParams(20, allowed_token_ids=(1, 2, 3, 44), presence_penalty=0.5),
]


def edit_once(params: list[SamplingParams], logits: torch.Tensor) -> torch.Tensor:
    running = [Running(i, each, [1, 2, 3, 5, 8][: 5 - i], [2, 1]) for i, each in enumerate(params)]
    return Steps().edit(running, [True] * len(running), logits, {})


def test_a_row_does_not_depend_on_its_batch() -> None:
    logits = torch.randn(4, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    together = edit_once(MIX, logits)
    assert torch.equal(together[1], logits[1])
    for i, params in enumerate(MIX):
        # The first rows stay as companions of no interest, so that row i has its own prompt.
        plain = [SamplingParams(20)] * i
        assert torch.equal(edit_once([*plain, params], logits[: i + 1])[i], together[i])


def test_little_memory_at_once_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(4, VOCAB_SIZE, generator=torch.Generator().manual_seed(2))
    expected = edit_once([MIX[0], MIX[3], MIX[0], MIX[3]], logits)
    monkeypatch.setattr(logit_edits, "_ELEMENTS_AT_ONCE", 1)
    assert torch.equal(edit_once([MIX[0], MIX[3], MIX[0], MIX[3]], logits), expected)


def test_the_table_of_occurrences_keeps_what_it_has_when_it_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_edits, "_MIN_PLACES", 1)
    params = SamplingParams(40, repetition_penalty=1.7, frequency_penalty=0.3)
    steps, sequence = Steps(), Running(0, params, [30])
    for token_id in [*range(20), 4, 4]:
        logits = torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(token_id))
        expected = edited_logits(logits[0].numpy(), params, sequence.prompt, sequence.generated, EOS)
        np.testing.assert_allclose(steps.edit([sequence], [True], logits, {})[0].numpy(), expected, rtol=1e-5)
        sequence.generated.append(token_id)


def test_a_step_sends_what_changed_and_not_the_context() -> None:
    """What a step sends is as large after a hundred tokens as after one."""
    params = SamplingParams(99, repetition_penalty=1.2, presence_penalty=0.1, bad_words=((1, 2), (3,)), min_tokens=90)

    def num_bytes(num_prompt_tokens: int) -> int:
        table, editor = RowTable(1, 1000, 16, EOS), StepEditor(1, 50_000, CPU)
        sequence = Running(0, params, list(range(num_prompt_tokens)))
        for token_id in (9, 10):
            rows = np.array([table.take(sequence.message(1))])
            host = editor.host_arrays(table, rows, np.array([True]), ())
            editor.edits({name: torch.from_numpy(array) for name, array in host.items()}, host)
            table.num_tokens[rows] += 1
            sequence.generated.append(token_id)
        return sum(array.nbytes for array in host.values())

    assert num_bytes(900) == num_bytes(20)


@pytest.mark.parametrize("wanted", [lambda table: None, lambda table: table.take(Running(5, MIX[0], [1]).message(1))])
def test_a_step_without_edits_sends_nothing(wanted: Callable[[RowTable], object]) -> None:
    """Also when another row has some, which is not part of the step."""
    steps = Steps()
    wanted(steps.table)
    rows = np.array([steps.table.take(Running(0, SamplingParams(5), [1, 2]).message(1))])
    host = steps.editor.host_arrays(steps.table, rows, np.array([True]), ())
    assert host == {}
    assert steps.editor.edits({}, host) is None
