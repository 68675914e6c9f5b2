"""What is asked of a server before any load: its models and their window, how it counts tokens; and it warms up.

How many words make how many tokens for the server's own tokenizer and chat template is asked, not guessed: two prompts
of different lengths are sent, and the server's count of their tokens makes a straight line.
"""

import argparse
import asyncio
from pathlib import Path
from typing import Any

from server.config import client_api_key
from server.load_test.answer import Answer
from server.load_test.client import Client
from server.load_test.exchange_errors import ExchangeFailed
from server.load_test.plan import Prompt
from server.load_test.prompt_maker import Calibration, PromptMaker
from server.load_test.request_form import RequestForm
from server.load_test.words import make_words
from server.settings_error import SettingsError

_WITHOUT_LIST = ("http 404", "http 405", "http 501", "bad answer")  # what servers answer that list no models
_PROBE_WORDS = (16, 144)
_WARM_UP_TOKENS = (64, 16)  # of a prompt and its answer
# What may help where already the first requests fail, by the kind of failure.
_HINTS = {
    "http 400": "--no-usage, --max-tokens-field or another --endpoint may help",
    "http 401": "give --api-key, --api-key-file or OPENAI_API_KEY",
    "http 403": "the key must open the API",
    "http 404": "another --endpoint or --model may help",
}


async def meet(client: Client, options: argparse.Namespace) -> tuple[str, int | None]:
    """The model to ask for, and the most tokens that it takes where the server says so.

    Raises:
        SettingsError: no model was given, and the server names none.
        ExchangeFailed: nobody listens, or the server refuses to say.
    """
    if options.model is not None and options.max_model_len is not None:
        return options.model, options.max_model_len
    reason = "its list has another form"
    models: dict[str, Any] | None = None
    try:
        listed = (await client.get_json("/v1/models"))["data"]
        models = {str(row["id"]): row.get("max_model_len") for row in listed}
    except (KeyError, TypeError, AttributeError):
        pass
    except ExchangeFailed as failure:
        if failure.kind == "connect" or (options.model is None and failure.kind not in _WITHOUT_LIST):
            raise _with_hint(failure) from None
        reason = failure.message
    if options.model is None and models is None:
        raise SettingsError(f"The server does not list its models ({reason}): give --model.")
    if options.model is None and not models:
        raise SettingsError("The server lists no model: give --model.")
    models = models or {}
    model = options.model or next(iter(models))
    length = models.get(model)
    return model, options.max_model_len or (length if isinstance(length, int) else None)


def headers_of(options: argparse.Namespace) -> dict[str, str]:
    """Headers of each request: the key, and what else was given.

    Raises:
        SettingsError: there is no key where one was named, or none that can be sent.
    """
    key = options.api_key or client_api_key()
    if options.api_key_file is not None:
        key = _first_line(options.api_key_file)
    headers = dict(options.header)
    if key:
        if not (key.isascii() and key.isprintable()):
            raise SettingsError("The key has characters that cannot stand in a header.")
        headers = {"Authorization": f"Bearer {key}", **headers}
    return headers


def _first_line(path: Path) -> str:
    try:
        line = path.read_text(encoding="utf-8").split("\n")[0].strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"The key file {path} cannot be read: {error}.") from None
    if not line:
        raise SettingsError(f"The first line of {path} has no key.")
    return line


async def prepare(client: Client, form: RequestForm, options: argparse.Namespace, seed: str) -> PromptMaker:
    """Ask the server how it counts, and let it warm up.

    Raises:
        ExchangeFailed: it does not answer, so that no load makes sense; says what may be done.
    """
    maker = PromptMaker(seed, Calibration(), form.endpoint == "chat", options.prompt_ids)
    num_prompt_tokens, max_tokens = _WARM_UP_TOKENS
    try:
        if counts_words(options):
            maker = PromptMaker(seed, await calibrate(client, form, seed), maker.is_chat)
        await asyncio.gather(
            *(
                ask(client, form, maker.whole(num_prompt_tokens, f"warm-up {number}"), max_tokens)
                for number in range(options.warm_up)
            )
        )
    except ExchangeFailed as failure:
        raise _with_hint(failure) from None
    return maker


def counts_words(options: argparse.Namespace) -> bool:
    """Whether prompts are made of words, whose tokens the server is asked to count."""
    return options.prompts is None and options.prompt_ids is None and not options.no_calibrate


def _with_hint(failure: ExchangeFailed) -> ExchangeFailed:
    hint = _HINTS.get(failure.kind, "")
    return ExchangeFailed(failure.kind, f"{failure.message}{hint and f' ({hint})'}")


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
