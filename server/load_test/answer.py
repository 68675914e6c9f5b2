"""Reads the stream of one answer, of completions and chats alike: when its text came, how many tokens, and any error.

Knows OpenAI's events, and no HTTP.
"""

from array import array
from typing import Any

import msgspec

from server.load_test.exchange_errors import ExchangeFailed, error_text

_MOST_ERROR_BYTES = 4096
_GIVEN_UP = ("abort", "error")  # reasons for an end that are the server's, not the model's
_NO_STREAMS = ("application/json", "text/html")  # other types, and none, are streams that somebody named carelessly


class _Delta(msgspec.Struct):
    content: str | list[Any] | None = None  # some servers send a list of typed parts
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _CachedTokens(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _CachedTokens | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None
    object: str | None = None


_DECODER = msgspec.json.Decoder(_Event)


class Answer:
    """One answer as it comes in. Times are those of `time.perf_counter()`."""

    def __init__(self, *, keeps_text: bool) -> None:
        """`keeps_text`: what is said will be needed for the next turn."""
        self.piece_times = array("d")  # of each event that brought text
        self.num_prompt_tokens: int | None = None  # None: the server does not say
        self.num_output_tokens: int | None = None
        self.num_cached_tokens: int | None = None
        self.finish_reason: str | None = None
        self._keeps_text = keeps_text
        self._pieces: list[str] = []
        self._rest = b""  # of a line whose end has not come
        self._is_done = False
        self._failure: ExchangeFailed | None = None
        self._error_body = b""
        self._content_type = ""

    @property
    def text(self) -> str:
        """All that was said, if it was to be kept."""
        return "".join(self._pieces)

    def take(self, status: int, content_type: str, now: float, data: bytes) -> None:
        """A piece of the body, as connection.py hands it over."""
        self._content_type = content_type
        if status != 200 or content_type in _NO_STREAMS:
            if len(self._error_body) < _MOST_ERROR_BYTES:
                self._error_body += data
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):  # other lines are comments, names of events, and the blanks between them
                self._take_event(now, line[5:].strip())

    def end(self, status: int) -> None:
        """The body is over.

        Raises:
            ExchangeFailed: it was no whole answer.
        """
        if status != 200:
            raise ExchangeFailed(f"http {status}", error_text(self._error_body) or f"status {status} without a body")
        if self._content_type in _NO_STREAMS:
            raise ExchangeFailed("bad answer", f"no event stream came but {self._content_type}")
        if self._failure is not None:
            raise self._failure
        if not self._is_done and self.finish_reason is None:
            raise ExchangeFailed("broken off", "the stream ended without [DONE] and without a finish_reason")
        if self.finish_reason in _GIVEN_UP:
            raise ExchangeFailed("broken off", f"the server ended the answer with the reason {self.finish_reason!r}")
        if not self.piece_times and not self.num_output_tokens:
            raise ExchangeFailed("no tokens", "the answer is whole and has no text")

    def _take_event(self, now: float, data: bytes) -> None:
        if data == b"[DONE]":
            self._is_done = True
            return
        try:
            event = _DECODER.decode(data)
        except msgspec.MsgspecError as error:
            self._fail("bad answer", f"an event is not as OpenAI's API has it: {error}")
            return
        if event.error is not None or event.object == "error":
            self._fail("error event", error_text(data))
            return
        has_text = False
        for choice in event.choices:
            has_text |= _has_text(choice)
            if self._keeps_text:
                self._pieces.append(_text_of(choice))
            self.finish_reason = choice.finish_reason or self.finish_reason
        if has_text:
            self.piece_times.append(now)
        if event.usage is not None:
            self.num_prompt_tokens = event.usage.prompt_tokens
            self.num_output_tokens = event.usage.completion_tokens
            details = event.usage.prompt_tokens_details
            self.num_cached_tokens = None if details is None else details.cached_tokens

    def _fail(self, kind: str, message: str) -> None:
        self._failure = self._failure or ExchangeFailed(kind, message)


def _text_of(choice: _Choice) -> str:
    """What a next turn has to repeat: without thoughts."""
    content = choice.text if choice.delta is None else choice.delta.content
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content or ""


def _has_text(choice: _Choice) -> bool:
    """Whether the model said something, thought included, that is no empty frame."""
    delta = choice.delta
    if delta is None:
        return bool(choice.text)
    return bool(delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls)
