"""A deterministic stand-in for the model runner that knows what every slot of the cache must hold.

A slot keeps a digest of the whole prefix up to its token, so that a wrong block table, a missed copy or swap, a block
that was shared too early or handed out twice shows as a wrong prefix. The next token is a function of the prefix, the
seed, the index and, where there is a grammar, of what that allows; candidates for beams are one of the prefix alone.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import cache
from math import exp, log

from scheduler.grammar import GrammarCompiler, GrammarState, Vocabulary
from scheduler.output import BlockCopy, KnownRow, NewRow, RowResult, SchedulerOutput, StepResult, TokenLogprobs
from scheduler.sampling_params import SamplingParams, StructuredOutput

VOCAB_SIZE = 50
SPECIAL_TOKEN_IDS = (3, 17, 31)
_WORDS = (
    *'{}[]":,-.0123456789abcdefxyz \n',
    *("true", "null", '{"a":', '"b":', ', "c"', "]}", "ab", "abc", "aa"),
)


def fake_vocabulary() -> Vocabulary:
    """50 tokens, with pieces of JSON among them; the special ones are spelled as others are."""
    words = [word.encode() for word in _WORDS]
    tokens = []
    for token_id in range(VOCAB_SIZE):
        tokens.append(b"ab" if token_id in SPECIAL_TOKEN_IDS else words.pop(0) if words else b"")
    assert not words
    ids = {token: i for i, token in enumerate(tokens) if len(token) == 1}
    return Vocabulary(
        tokens, SPECIAL_TOKEN_IDS, lambda text: [ids[char.encode()] for char in text if char.encode() in ids]
    )


@cache
def compiler() -> GrammarCompiler:
    """Of the fake vocabulary."""
    return GrammarCompiler(fake_vocabulary(), VOCAB_SIZE)


@cache
def compiled(wanted: StructuredOutput) -> GrammarState:
    """The beginning of a grammar; to be forked."""
    return compiler().compile(wanted)


class Prefixes:
    """Tokens of one sequence, with a digest per position, of its realm and all tokens up to and including it."""

    def __init__(self, token_ids: Iterable[int], realm: int = 0) -> None:
        self._realm = realm
        self.token_ids: list[int] = []
        self.digests: list[int] = []
        for token_id in token_ids:
            self.append(token_id)

    def append(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        self.digests.append(hash((self.digests[-1] if self.digests else self._realm, token_id)))


def allowed_tokens(bitmask: bytes) -> list[int]:
    """The token ids whose bits are set."""
    return [8 * place + bit for place, byte in enumerate(bitmask) for bit in range(8) if byte >> bit & 1]


def next_token(digest: int, params: SamplingParams, index: int, allowed: list[int] | None = None) -> int:
    """What the fake model says after the prefix with that digest, of all tokens or of those that are allowed."""
    choice = hash((digest, params.seed, index))
    return choice % VOCAB_SIZE if allowed is None else allowed[choice % len(allowed)]


def next_candidates(digest: int, num_candidates: int, forbidden: Collection[int] = ()) -> list[tuple[int, float]]:
    """The likeliest tokens after the prefix with that digest, and their log-probabilities, best first."""
    allowed = [token_id for token_id in range(VOCAB_SIZE) if token_id not in forbidden]
    logits = [8.0 * (hash((digest, token_id)) % 2**48) / 2**48 for token_id in allowed]
    normaliser = log(sum(exp(logit) for logit in logits))
    scored = [(token_id, logit - normaliser) for token_id, logit in zip(allowed, logits, strict=True)]
    return sorted(scored, key=lambda candidate: -candidate[1])[:num_candidates]


def expected_tokens(
    prompt: Iterable[int], params: SamplingParams, index: int, eos: frozenset[int], realm: int = 0
) -> list[int]:
    """The tokens of one sequence, made without any scheduler."""
    known = Prefixes(prompt, realm)
    num_prompt_tokens = len(known.token_ids)
    token_ids = known.token_ids
    stops = end_tokens(params, eos)
    grammar = None if params.structured_output is None else compiled(params.structured_output).fork()
    for num_generated in range(params.max_tokens):
        allowed = None if grammar is None else _allowed(grammar, stops, eos)
        if allowed == []:
            break
        known.append(next_token(known.digests[-1], params, index, allowed))
        if token_ids[-1] in stops and num_generated >= params.min_tokens:
            break
        if grammar is not None and (token_ids[-1] in eos or not grammar.accept(token_ids[-1]) or grammar.is_complete):
            break
    return token_ids[num_prompt_tokens:]


def end_tokens(params: SamplingParams, eos: frozenset[int]) -> frozenset[int]:
    """Tokens that end an answer."""
    return frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos)


def num_candidates(params: SamplingParams, ends: Collection[int]) -> int:
    """How many candidates a row of a beam search brings: enough to go on with, whichever of them end the answer."""
    assert params.beam_search is not None
    width = params.beam_search.width
    return max(2 * width, width + len(ends), params.logprobs or 0)


def _allowed(grammar: GrammarState, stops: frozenset[int], eos: frozenset[int]) -> list[int]:
    following = allowed_tokens(grammar.bitmask())
    if not grammar.may_end:
        return following
    return sorted({*following, *stops}) or sorted(eos)


@dataclass
class _State:
    known: Prefixes
    num_prompt_tokens: int
    block_ids: list[int]
    params: SamplingParams
    index: int
    num_told: int  # leading tokens whose ids the scheduler has sent
    num_computed: int  # where its next row begins


@dataclass
class PendingStep:
    """A launched step, which asks nothing of the runner any more."""

    rows: tuple[RowResult, ...]

    def result(self) -> StepResult:
        return StepResult(self.rows)


@dataclass
class FakeRunner:
    """Executes scheduler outputs over a dictionary of slots.

    A realm stands for those who may share cached blocks: it is part of every digest, so that a block that passes from
    one realm to another shows as a wrong prefix. Steps run as they are launched, each one's copies and writes before
    the next one's: so does a device, whenever the results are asked for. A sampled token counts as known to the next
    launch.
    """

    block_size: int
    max_num_seqs: int
    eos_token_ids: frozenset[int] = frozenset()
    slots: dict[tuple[int, int], int] = field(default_factory=dict)  # (block id, offset) -> prefix digest
    host_slots: dict[tuple[int, int], int] = field(default_factory=dict)
    states: dict[int, _State] = field(default_factory=dict)
    realms: dict[int, int] = field(default_factory=dict)  # seq_id -> realm; 0 for all others

    def launch(self, output: SchedulerOutput) -> PendingStep:
        for seq_id in output.finished_seq_ids:
            del self.states[seq_id]
        self._check_copies(output)
        _copy(output.swapped_out, self.slots, self.host_slots, self.block_size)
        _copy(output.block_copies, self.slots, self.slots, self.block_size)
        _copy(output.swapped_in, self.host_slots, self.slots, self.block_size)
        for row in output.rows:
            self._take_row(row)
        assert len(self.states) <= self.max_num_seqs, "more sequences than the runner has rows"
        self._check_destinations(output)
        # All rows write before any reads, as one forward pass does in each layer.
        for row in output.rows:
            self._write(row)
        num_new = [row.num_new_tokens for row in output.rows]
        assert num_new == sorted(num_new, key=lambda n: n > 1), "decodes do not come first"
        allowed = {mask.place: allowed_tokens(mask.bitmask) for mask in output.grammar_masks}
        assert len(allowed) == len(output.grammar_masks)
        return PendingStep(
            tuple(self._read_and_sample(row, allowed.get(place)) for place, row in enumerate(output.rows))
        )

    def _check_copies(self, output: SchedulerOutput) -> None:
        """Copies read before any of them writes, and swaps in come after them: what is written once may be read."""
        destinations = [copy.dst for copy in (*output.block_copies, *output.swapped_in)]
        assert len(set(destinations)) == len(destinations), "two copies into one block"
        host_destinations = [copy.dst for copy in output.swapped_out]
        assert len(set(host_destinations)) == len(host_destinations), "two copies into one host block"

    def _check_destinations(self, output: SchedulerOutput) -> None:
        """A copy belongs to rows of this step: one made for a preempted row would overwrite somebody else's block."""
        held = Counter(block_id for row in output.rows for block_id in self.states[row.seq_id].block_ids)
        assert all(held[copy.dst] == 1 for copy in output.block_copies), "a copy into a block of nobody, or of two"

    def _take_row(self, row: NewRow | KnownRow) -> None:
        if isinstance(row, NewRow):
            assert row.seq_id not in self.states, "a known sequence arrived as new"
            assert row.num_computed_tokens == 0 or row.params.pooling != "mean", "a mean of some of the hidden states"
            self.states[row.seq_id] = _State(
                Prefixes(row.token_ids, self.realms.get(row.seq_id, 0)),
                row.num_prompt_tokens,
                list(row.block_ids),
                row.params,
                row.index,
                num_told=len(row.token_ids),
                num_computed=row.num_computed_tokens,
            )
            return
        state = self.states[row.seq_id]
        if state.params.looks_back:
            self._take_tokens(state, row.sampled_token_ids)
        else:
            assert row.sampled_token_ids == ()
        if row.replaced_block is not None:
            position, block_id = row.replaced_block
            state.block_ids[position] = block_id
        state.block_ids.extend(row.new_block_ids)

    def _take_tokens(self, state: _State, token_ids: tuple[int, ...]) -> None:
        """Learn what a sequence that looks back goes on with: a beam's choice is news, a sampled token is not."""
        if state.params.beam_search is None:
            untold = tuple(state.known.token_ids[state.num_told :])
            assert token_ids == untold, "the runner is not told what it must look back at"
        else:
            for token_id in token_ids:
                state.known.append(token_id)
        state.num_told = len(state.known.token_ids)

    def _write(self, row: NewRow | KnownRow) -> None:
        state = self.states[row.seq_id]
        assert row.num_new_tokens > 0, "a row without tokens"
        assert row.num_computed_tokens == state.num_computed, "a row does not begin where the last one ended"
        state.num_computed = row.end
        assert row.end <= state.num_prompt_tokens + max(0, state.params.max_tokens - 1), "more tokens than it may have"
        assert row.end <= len(state.known.token_ids), "a row computes tokens that nobody knows"
        for position in range(row.num_computed_tokens, row.end):
            self.slots[self._slot(state, position)] = state.known.digests[position]

    def _read_and_sample(self, row: NewRow | KnownRow, allowed: list[int] | None) -> RowResult:
        state = self.states[row.seq_id]
        known, params = state.known, state.params
        for position in range(row.end):
            assert self.slots.get(self._slot(state, position)) == known.digests[position], (
                f"sequence {row.seq_id} reads another prefix at position {position}"
            )
        scored = self._prompt_scores(row, state)
        if row.end < len(known.token_ids):
            assert allowed is None, "a mask for a row that samples nothing"
            return RowResult(prompt_logprobs=scored)
        if params.pooling is not None:
            return RowResult(embedding=str(known.digests[-1]).encode())
        assert (allowed is None) == (params.structured_output is None), "a grammar without a mask"
        if params.beam_search is not None:
            return RowResult(prompt_logprobs=scored, candidates=self._candidates(state))
        if allowed == []:
            return RowResult(prompt_logprobs=scored, is_dead_end=True)
        token_id = next_token(known.digests[-1], params, state.index, allowed)
        known.append(token_id)
        return RowResult((token_id,), prompt_logprobs=scored)

    def _prompt_scores(self, row: NewRow | KnownRow, state: _State) -> tuple[TokenLogprobs, ...]:
        if state.params.prompt_logprobs is None or state.index != 0:
            return ()
        last_scored = min(row.end, state.num_prompt_tokens - 1)
        return tuple(
            TokenLogprobs(state.known.token_ids[position], -float(position))
            for position in range(row.num_computed_tokens + 1, last_scored + 1)
        )

    def _candidates(self, state: _State) -> tuple[tuple[int, float], ...]:
        params = state.params
        ends = end_tokens(params, self.eos_token_ids)
        num_generated = len(state.known.token_ids) - state.num_prompt_tokens
        forbidden = ends if num_generated < params.min_tokens else ()
        return tuple(next_candidates(state.known.digests[-1], num_candidates(params, ends), forbidden))

    def _slot(self, state: _State, position: int) -> tuple[int, int]:
        return state.block_ids[position // self.block_size], position % self.block_size


def _copy(
    copies: tuple[BlockCopy, ...],
    source: dict[tuple[int, int], int],
    destination: dict[tuple[int, int], int],
    block_size: int,
) -> None:
    """Copy whole blocks, all of them read before any is written."""
    read = [(copy.dst, [source.get((copy.src, offset)) for offset in range(block_size)]) for copy in copies]
    for block_id, digests in read:
        for offset, digest in enumerate(digests):
            destination[block_id, offset] = digest
