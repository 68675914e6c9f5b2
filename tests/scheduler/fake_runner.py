"""A deterministic stand-in for the model runner that knows what every slot of the cache must hold.

A slot keeps a digest of the whole prefix up to its token, so that a wrong block table, a missed copy or a block
handed out twice shows as a wrong prefix. The next token is a function of the prefix, the seed, the index and, where
there is a grammar, of what that allows.
"""

from dataclasses import dataclass, field
from functools import cache

from scheduler.grammar import GrammarCompiler, GrammarState, Vocabulary
from scheduler.output import KnownRow, NewRow, RowResult, SchedulerOutput, StepResult, TokenLogprobs
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


def prefix_digests(token_ids: list[int]) -> list[int]:
    """One digest per position, of all tokens up to and including it."""
    digests, digest = [], 0
    for token_id in token_ids:
        digest = hash((digest, token_id))
        digests.append(digest)
    return digests


def allowed_tokens(bitmask: bytes) -> list[int]:
    """The token ids whose bits are set."""
    return [8 * place + bit for place, byte in enumerate(bitmask) for bit in range(8) if byte >> bit & 1]


def next_token(token_ids: list[int], params: SamplingParams, index: int, allowed: list[int] | None = None) -> int:
    """What the fake model says after `token_ids`, of all tokens or of those that are allowed."""
    choice = hash((prefix_digests(token_ids)[-1], params.seed, index))
    return choice % VOCAB_SIZE if allowed is None else allowed[choice % len(allowed)]


def expected_tokens(prompt: list[int], params: SamplingParams, index: int, eos: frozenset[int]) -> list[int]:
    """The tokens of one sequence, made without any scheduler."""
    token_ids = list(prompt)
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else eos)
    grammar = None if params.structured_output is None else compiled(params.structured_output).fork()
    for num_generated in range(params.max_tokens):
        allowed = None if grammar is None else _allowed(grammar, stops, eos)
        if allowed == []:
            break
        token_ids.append(next_token(token_ids, params, index, allowed))
        if token_ids[-1] in stops and num_generated >= params.min_tokens:
            break
        if grammar is not None and (token_ids[-1] in eos or not grammar.accept(token_ids[-1]) or grammar.is_complete):
            break
    return token_ids[len(prompt) :]


def _allowed(grammar: GrammarState, stops: set[int], eos: frozenset[int]) -> list[int]:
    following = allowed_tokens(grammar.bitmask())
    if not grammar.may_end:
        return following
    return sorted({*following, *stops}) or sorted(eos)


@dataclass
class _State:
    token_ids: list[int]
    num_prompt_tokens: int
    block_ids: list[int]
    params: SamplingParams
    index: int
    num_told: int  # leading tokens whose ids the scheduler has sent


@dataclass
class PendingStep:
    """A launched step, which asks nothing of the runner any more."""

    rows: tuple[RowResult, ...]

    def result(self) -> StepResult:
        return StepResult(self.rows)


@dataclass
class FakeRunner:
    """Executes scheduler outputs over a dictionary of slots.

    Steps run as they are launched, each one's copies and writes before the next one's: so does a device, whenever
    the results are asked for. A sampled token counts as known to the next launch.
    """

    block_size: int
    max_num_seqs: int
    slots: dict[tuple[int, int], int] = field(default_factory=dict)  # (block id, offset) -> prefix digest
    states: dict[int, _State] = field(default_factory=dict)

    def launch(self, output: SchedulerOutput) -> PendingStep:
        for seq_id in output.finished_seq_ids:
            del self.states[seq_id]
        self._copy_blocks(output)
        for row in output.rows:
            self._take_row(row)
        assert len(self.states) <= self.max_num_seqs, "more sequences than the runner has rows"
        self._check_copies(output)
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

    def _copy_blocks(self, output: SchedulerOutput) -> None:
        sources = {copy.src for copy in output.block_copies}
        read = {src: [self.slots.get((src, offset)) for offset in range(self.block_size)] for src in sources}
        for copy in output.block_copies:
            for offset, digest in enumerate(read[copy.src]):
                self.slots[copy.dst, offset] = digest

    def _check_copies(self, output: SchedulerOutput) -> None:
        """A copy belongs to a row of this step: one made for a preempted row would overwrite somebody else's block."""
        written = [block_id for row in output.rows for block_id in self.states[row.seq_id].block_ids]
        destinations = [copy.dst for copy in output.block_copies]
        assert all(written.count(block_id) == 1 for block_id in destinations), (
            "a copy into a block of nobody, or of two"
        )
        assert len(set(destinations)) == len(destinations), "two copies into one block"

    def _take_row(self, row: NewRow | KnownRow) -> None:
        if isinstance(row, NewRow):
            assert row.seq_id not in self.states, "a known sequence arrived as new"
            self.states[row.seq_id] = _State(
                list(row.token_ids),
                row.num_prompt_tokens,
                list(row.block_ids),
                row.params,
                row.index,
                num_told=len(row.token_ids),
            )
            return
        state = self.states[row.seq_id]
        if state.params.looks_back:
            untold = tuple(state.token_ids[state.num_told :])
            assert row.sampled_token_ids == untold, "the runner is not told what it must look back at"
            state.num_told = len(state.token_ids)
        else:
            assert row.sampled_token_ids == ()
        if row.replaced_block is not None:
            position, block_id = row.replaced_block
            state.block_ids[position] = block_id
        state.block_ids.extend(row.new_block_ids)

    def _write(self, row: NewRow | KnownRow) -> None:
        state = self.states[row.seq_id]
        assert row.end <= state.num_prompt_tokens + max(0, state.params.max_tokens - 1), "more tokens than it may have"
        digests = prefix_digests(state.token_ids)
        for position in range(row.num_computed_tokens, row.num_computed_tokens + row.num_new_tokens):
            self.slots[self._slot(state, position)] = digests[position]

    def _read_and_sample(self, row: NewRow | KnownRow, allowed: list[int] | None) -> RowResult:
        state = self.states[row.seq_id]
        end = row.num_computed_tokens + row.num_new_tokens
        for position, digest in enumerate(prefix_digests(state.token_ids)[:end]):
            assert self.slots[self._slot(state, position)] == digest, (
                f"sequence {row.seq_id} reads another prefix at position {position}"
            )
        last_scored = min(end, state.num_prompt_tokens - 1)
        scored = ()
        if state.params.prompt_logprobs is not None and state.index == 0:
            scored = tuple(
                TokenLogprobs(state.token_ids[position], -float(position))
                for position in range(row.num_computed_tokens + 1, last_scored + 1)
            )
        if end < len(state.token_ids):
            assert allowed is None, "a mask for a row that samples nothing"
            return RowResult(prompt_logprobs=scored)
        if state.params.pooling is not None:
            return RowResult(embedding=str(prefix_digests(state.token_ids)[-1]).encode())
        assert (allowed is None) == (state.params.structured_output is None), "a grammar without a mask"
        if allowed == []:
            return RowResult(prompt_logprobs=scored, is_dead_end=True)
        token_id = next_token(state.token_ids, state.params, state.index, allowed)
        state.token_ids.append(token_id)
        return RowResult((token_id,), prompt_logprobs=scored)

    def _slot(self, state: _State, position: int) -> tuple[int, int]:
        return state.block_ids[position // self.block_size], position % self.block_size
