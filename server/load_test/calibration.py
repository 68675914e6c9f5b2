"""How many words make how many tokens for the server's own tokenizer and chat template: asked, not guessed.

Two prompts of different lengths are sent, and the server's count of their tokens makes a straight line.
"""

from dataclasses import dataclass

from server.load_test.answer import Answer
from server.load_test.client import Client
from server.load_test.plan import Prompt
from server.load_test.request_form import RequestForm
from server.load_test.words import make_words

_PROBE_WORDS = (16, 144)


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


async def ask(client: Client, form: RequestForm, prompt: Prompt, max_tokens: int) -> Answer:
    """One answer, outside of any load.

    Raises:
        ExchangeFailed: none came.
    """
    answer = Answer(keeps_text=False)
    answer.end(await client.post(form.path, form.body(prompt, max_tokens), answer.take))
    return answer


async def calibrate(client: Client, form: RequestForm, seed: str) -> Calibration:
    """Ask the server to count.

    A server that says nothing of tokens leaves a word for a token.

    Raises:
        ExchangeFailed: the server does not answer as it must for any load.
    """
    counts = []
    for num_words in _PROBE_WORDS:
        # Two tokens: with one, some servers answer no text at all where the model wants to end at once.
        answer = await ask(client, form, make_words(num_words, f"{seed} probe {num_words}"), max_tokens=2)
        counts.append(answer.num_prompt_tokens)
    (fewer_words, more_words), (fewer, more) = _PROBE_WORDS, counts
    if not fewer or not more or more <= fewer:
        return Calibration()
    per_word = (more - fewer) / (more_words - fewer_words)
    return Calibration(fewer - per_word * fewer_words, per_word, is_measured=True)
