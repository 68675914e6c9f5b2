"""A trace: who asks for how many tokens when, and which prompts begin alike. Shrunk and scaled without losing that.

Knows no files, no scheduler and no clock: times are seconds from the trace's start.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace


class UnreadableTrace(ValueError):
    """What was named holds no trace of a known form; the message is for the person who named it."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request. Its prompt begins with runs of tokens that other prompts may begin with too."""

    num_prompt_tokens: int
    num_output_tokens: int
    run_ids: Sequence[int] = ()  # each stands for `Trace.tokens_per_run` tokens; the last may be cut off by the prompt
    think_time: float = 0.0  # seconds between the answer to the turn before and this one


@dataclass(frozen=True, slots=True)
class Session:
    """Turns that follow one another: each is sent when the one before was answered and thought about."""

    start: float
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """Sessions in the order of their starts. An id of a run stands for the same tokens wherever it occurs."""

    name: str
    sessions: tuple[Session, ...]
    tokens_per_run: int = 1
    notes: tuple[str, ...] = ()  # what was left out or made up on the way, for the reader of a report

    @property
    def num_requests(self) -> int:
        """Turns of all sessions."""
        return sum(len(session.turns) for session in self.sessions)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(turn.num_prompt_tokens for turn in self.turns())

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(turn.num_output_tokens for turn in self.turns())

    def turns(self) -> Iterable[Turn]:
        """All requests, session by session."""
        return (turn for session in self.sessions for turn in session.turns)

    def faster(self, rate: float) -> "Trace":
        """The same sessions, started `rate` times as fast; people think as long as before."""
        sessions = tuple(replace(session, start=session.start / rate) for session in self.sessions)
        return replace(self, sessions=sessions)

    def until(self, seconds: float) -> "Trace":
        """The sessions that start in the first `seconds`."""
        return replace(self, sessions=tuple(session for session in self.sessions if session.start < seconds))

    def first(self, num_sessions: int) -> "Trace":
        """The first sessions."""
        return replace(self, sessions=self.sessions[:num_sessions])

    def sampled(self, share: float, seed: int = 0) -> "Trace":
        """About this share of the sessions, chosen by whole roots: sessions that share a prefix stay or go together.

        Sampling requests one by one would tear prefixes apart: of Mooncake's conversations, 1 in 10 at random
        leaves a hit rate of 0.14 out of 0.37. A root is the first run after those with which all prompts begin.
        """
        num_common = self._num_common_runs()
        kept = []
        for number, session in enumerate(self.sessions):
            runs = session.turns[0].run_ids
            root = f"run {runs[num_common]}" if len(runs) > num_common else f"session {number}"
            digest = hashlib.blake2b(f"{seed} {root}".encode(), digest_size=8).digest()
            if int.from_bytes(digest, "little") < share * 2**64:
                kept.append(session)
        return replace(self, sessions=tuple(kept))

    def scaled(self, tokens_per_run: int | None = None, output_scale: float = 1.0) -> "Trace":
        """Shorter or longer prompts that share as before: each run stands for `tokens_per_run` tokens.

        A trace without runs can be scaled too; its prompts get shorter in the same proportion.
        """
        new = tokens_per_run or self.tokens_per_run

        def scaled_turn(turn: Turn) -> Turn:
            num_prompt_tokens = -(-turn.num_prompt_tokens * new // self.tokens_per_run)
            return replace(
                turn,
                num_prompt_tokens=num_prompt_tokens,
                num_output_tokens=max(1, round(turn.num_output_tokens * output_scale)),
            )

        sessions = tuple(replace(s, turns=tuple(scaled_turn(turn) for turn in s.turns)) for s in self.sessions)
        return replace(self, sessions=sessions, tokens_per_run=new)

    def within(self, max_model_len: int, max_tokens: int) -> "Trace":
        """Sessions up to the first turn that takes more than `max_model_len` or `max_tokens` tokens, with a note."""
        limit = min(max_model_len, max_tokens)
        sessions = []
        for session in self.sessions:
            turns = session.turns
            sizes = [turn.num_prompt_tokens + turn.num_output_tokens for turn in turns]
            num_fitting = next((number for number, size in enumerate(sizes) if size > limit), len(turns))
            if num_fitting:
                sessions.append(replace(session, turns=turns[:num_fitting]))
        fitting = replace(self, sessions=tuple(sessions))
        num_left_out = self.num_requests - fitting.num_requests
        if num_left_out:
            note = (
                f"{num_left_out} of {self.num_requests} requests left out: one of their session exceeds {limit} tokens"
            )
            fitting = replace(fitting, notes=(*self.notes, note))
        return fitting

    def hit_rate_limit(self, block_size: int = 1) -> float:
        """Share of prompt tokens that an unlimited cache finds if every request follows the answers to those before it.

        Computed from the ids alone, in the order of the sessions' starts: an oracle for the cache, which it can beat
        only with generated tokens, of which a trace's ids know nothing. A hit consists of whole blocks, at least one
        token before the prompt's end.
        """
        seen: set[int] = set()
        num_hits = 0
        for turn in self.turns():
            num_seen = next((n for n, run in enumerate(turn.run_ids) if run not in seen), len(turn.run_ids))
            seen.update(turn.run_ids)
            num_hit = min(num_seen * self.tokens_per_run, turn.num_prompt_tokens - 1)
            num_hits += num_hit // block_size * block_size
        return num_hits / max(1, self.num_prompt_tokens)

    def num_blocks_for_all(self, block_size: int) -> int:
        """Blocks that are never all used: with as many a cache is unlimited for this trace."""
        num_runs = len({run for turn in self.turns() for run in turn.run_ids})
        num_blocks = -(-num_runs * self.tokens_per_run // block_size)
        for turn in self.turns():
            num_shared = min(len(turn.run_ids) * self.tokens_per_run, turn.num_prompt_tokens)
            num_own = turn.num_prompt_tokens - num_shared + turn.num_output_tokens
            num_blocks += num_own // block_size + 3  # both ends are partial blocks
        return num_blocks

    def _num_common_runs(self) -> int:
        """Leading runs with which all prompts begin."""
        prompts = [session.turns[0].run_ids for session in self.sessions]
        num_common = 0
        while len(prompts) > 1 and all(len(runs) > num_common for runs in prompts):
            if any(runs[num_common] != prompts[0][num_common] for runs in prompts):
                break
            num_common += 1
        return num_common
