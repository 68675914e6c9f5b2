"""Makes prompts of a wanted number of tokens, in the form that the server is asked in: text, messages or token ids.

Parts of the same name are the same in all prompts of one load, so that they are shared; all else differs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from server.load_test.plan import Prompt
from server.load_test.words import make_token_ids, make_words

_shared_words = lru_cache(maxsize=4096)(make_words)
_shared_ids = lru_cache(maxsize=4096)(make_token_ids)


@dataclass(frozen=True, slots=True)
class Calibration:
    """Tokens of a prompt = fixed + per_word * words."""

    fixed: float = 0.0  # of a template, or of a token that begins every text
    per_word: float = 1.0
    is_measured: bool = False

    def num_words(self, num_tokens: int) -> int:
        """Words of a whole prompt of so many tokens, one at least."""
        return max(1, round((num_tokens - self.fixed) / self.per_word))

    def num_added_words(self, num_tokens: int) -> int:
        """Words that make a prompt longer by so many tokens, one at least."""
        return max(1, round(num_tokens / self.per_word))


@dataclass(frozen=True, slots=True)
class PromptMaker:
    """Makes the prompts of one load."""

    seed: str  # of another load: all prompts differ
    calibration: Calibration
    is_chat: bool = False
    id_range: tuple[int, int] | None = None  # prompts as token ids of this range, its end excluded; None: as text

    def seeded(self, seed: str) -> "PromptMaker":
        """The same for another load."""
        return replace(self, seed=seed)

    def whole(self, num_tokens: int, name: str) -> Prompt:
        """A prompt that shares nothing."""
        if self.id_range:
            return make_token_ids(num_tokens, self._seed_of(name), *self.id_range)
        return make_words(self.calibration.num_words(num_tokens), self._seed_of(name))

    def added(self, num_tokens: int, name: str) -> Prompt:
        """What a conversation's next turn adds."""
        return make_words(self.calibration.num_added_words(num_tokens), self._seed_of(name))

    def after_prefix(self, prefix_name: str, num_prefix_tokens: int, num_tokens: int, name: str) -> Prompt:
        """`num_tokens` after a prefix that prompts share: in chats the system's message."""
        prefix_seed = self._seed_of(prefix_name)
        if self.id_range:
            return [*_shared_ids(num_prefix_tokens, prefix_seed, *self.id_range), *self._whole_ids(num_tokens, name)]
        prefix = _shared_words(self.calibration.num_added_words(num_prefix_tokens), prefix_seed)
        text = make_words(self.calibration.num_words(num_tokens), self._seed_of(name))
        if self.is_chat:
            return [{"role": "system", "content": prefix.strip()}, {"role": "user", "content": text.strip()}]
        return prefix + text

    def of_runs(self, run_ids: Sequence[int], tokens_per_run: int, num_tokens: int, name: str) -> Prompt:
        """A prompt of `num_tokens` that begins with these runs; what they leave of it is its own."""
        if self.id_range:
            size, total = tokens_per_run, num_tokens
        else:
            size, total = self.calibration.num_added_words(tokens_per_run), self.calibration.num_words(num_tokens)
        num_begun = min(len(run_ids), -(-total // size))
        parts = [(min(size, total - size * place), f"run {run_ids[place]}") for place in range(num_begun)]
        num_own = total - sum(length for length, _ in parts)
        own_seed = self._seed_of(name)
        if self.id_range:
            runs = [_shared_ids(length, self._seed_of(part), *self.id_range) for length, part in parts]
            return [*(token for run in runs for token in run), *make_token_ids(num_own, own_seed, *self.id_range)]
        texts = [_shared_words(length, self._seed_of(part)) for length, part in parts]
        return "".join([*texts, make_words(num_own, own_seed)])

    def _whole_ids(self, num_tokens: int, name: str) -> list[int]:
        assert self.id_range is not None
        return make_token_ids(num_tokens, self._seed_of(name), *self.id_range)

    def _seed_of(self, name: str) -> str:
        return f"{self.seed} {name}"
