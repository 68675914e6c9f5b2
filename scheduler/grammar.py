"""Grammars that answers must follow: compiled from what a request asks for, and how far along one each sequence is.

The only file that knows the grammar library, llguidance. It matches bytes, so the vocabulary comes as bytes; it has no
end tokens of its own here, since when a sequence may end is a question of the request too. No threads, no torch.
"""

import ctypes
import json
import os
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import cast

import llguidance

from scheduler.json_schema import JSON_ESCAPES, SchemaError, grammar_schema, holds_endless_range
from scheduler.sampling_params import StructuredOutput

# What separates the tokens of JSON unless a request says otherwise: as llama.cpp has it, enough for any layout. Without
# a bound, a model may write blanks until its tokens are used up.
JSON_WHITESPACE = r"( |\n{1,2}[ \t]{0,20})"
_MAX_MESSAGE = 300  # characters of the library's own words
# Of a text that a grammar leaves no choice about, characters that are looked at for its first token. All of a long one
# would take 25 ms for each of its tokens.
_MAX_FORCED = 256
# From these sizes on, threads cost less than they save.
_MIN_PARALLEL_MASKS = 16
_MIN_PARALLEL_CORES = 8
_UNIMPLEMENTED = re.compile(r"Unimplemented keys: \[(.*)\]")
_NO_EXTENSION = "NoExtensionBias"  # no token may follow, and the answer may not end either
# One of the bounds of `_limits`, reached on the way.
_TOO_COSTLY = re.compile("(?:lexer|parser) error: |Parser Error: Current row has ")
_UNKNOWN_FORMAT = re.compile(r"Unknown format: (\S+)")


class GrammarError(ValueError):
    """A grammar that cannot be compiled; the message says what of it is not supported, without a full stop."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a model, as the bytes that they add to an answer."""

    tokens: Sequence[bytes]  # by token id; an empty one is never allowed
    special_token_ids: Collection[int]  # not part of any text, so that only a grammar that names one allows it
    encode: Callable[[str], list[int]]  # text to token ids as the model has learned it, with nothing around it


class GrammarState:
    """How far one sequence is along its grammar."""

    __slots__ = ("_matcher", "_num_bytes", "lease")

    def __init__(self, matcher: llguidance.LLMatcher, num_bytes: int, lease: object = None) -> None:
        """Take a matcher; a bitmask of the vocabulary has `num_bytes`. `lease` lives as long as any fork does."""
        self._matcher = matcher
        self.lease = lease
        self._num_bytes = num_bytes

    def fork(self) -> "GrammarState":
        """A state that goes its own way from here on. Takes some 5 µs: what was computed of the grammar is shared."""
        return GrammarState(self._matcher.deep_copy(), self._num_bytes, self.lease)

    def accept(self, token_id: int) -> bool:
        """Take the next token; False where the grammar does not allow it, or became too costly to follow."""
        return self._matcher.consume_token(token_id)

    @property
    def may_end(self) -> bool:
        """The answer is whole as it stands."""
        return self._matcher.is_accepting()

    @property
    def is_complete(self) -> bool:
        """The answer is whole, and nothing may follow it."""
        return self._matcher.is_stopped() and self.may_end

    @property
    def error(self) -> str | None:
        """Why it can be followed no further, without a full stop; None as well where it just allows no token."""
        message = self._matcher.get_error()
        return _explanation(message) if message and not message.startswith(_NO_EXTENSION) else None

    @property
    def is_too_costly(self) -> bool:
        """It can be followed no further because of what it asks for; any other `error` is a fault of the program's."""
        return _TOO_COSTLY.match(self._matcher.get_error()) is not None

    def bitmask(self) -> bytes:
        """Which tokens may follow, as GrammarMask has it; no end tokens. None at all where it is too costly to say."""
        mask = self._matcher.compute_bitmask()[: self._num_bytes]
        return bytes(self._num_bytes) if self._matcher.is_error() else mask


class GrammarCompiler:
    """Compiles grammars for one vocabulary. `compile` lets go of the GIL, and threads may call it at once."""

    def __init__(self, vocabulary: Vocabulary, vocab_size: int) -> None:
        """Prepare the vocabulary, in a second or more.

        Args:
            vocabulary: of the tokenizer.
            vocab_size: tokens that the model has logits for: those beyond it are left out, missing ones never allowed.
        """
        self._num_bytes = 4 * -(-vocab_size // 32)
        self._tokenizer = _tokenizer(vocabulary, vocab_size)

    def compile(self, wanted: StructuredOutput) -> GrammarState:
        """The beginning of a grammar.

        Raises:
            GrammarError: if the library cannot follow it exactly, or it is too large.
        """
        matcher = llguidance.LLMatcher(self._tokenizer, _grammar_text(wanted), log_level=0, limits=_limits())
        if matcher.is_error():
            raise GrammarError(_explanation(matcher.get_error()))
        state = GrammarState(matcher, self._num_bytes)
        first = state.bitmask()  # also the most costly one, since nothing is known of the grammar yet
        if matcher.is_error():
            raise GrammarError(_explanation(matcher.get_error()))
        if not any(first):
            raise GrammarError("it allows no answer but the empty one" if state.may_end else "it allows no answer")
        return state


class MaskComputer:
    """Computes the bitmasks of a step, on several cores where they are many."""

    def __init__(self) -> None:
        """Start no thread yet."""
        self._is_parallel = (os.cpu_count() or 1) >= _MIN_PARALLEL_CORES
        self._executor: llguidance.LLExecutor | None = None

    def bitmasks(self, states: Sequence[GrammarState]) -> list[bytes]:
        """The bitmask of each state."""
        if not self._is_parallel or len(states) < _MIN_PARALLEL_MASKS:
            return [state.bitmask() for state in states]
        if self._executor is None:
            self._executor = llguidance.LLExecutor()
        num_bytes = states[0]._num_bytes
        stride = num_bytes + 4  # the library's own end token lies behind the vocabulary's last word
        buffer = bytearray(stride * len(states))
        pointer = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        matchers = [(state._matcher, place) for place, state in enumerate(states)]
        self._executor.unsafe_compute_mask_ptr(matchers, pointer, stride, len(states))
        return [
            bytes(num_bytes if state._matcher.is_error() else buffer[place * stride : place * stride + num_bytes])
            for place, state in enumerate(states)
        ]


def with_end_tokens(mask: bytes, end_token_ids: Collection[int], last_resort: Collection[int]) -> bytes:
    """The mask of an answer that may end here: end tokens are allowed too.

    Args:
        mask: of the tokens that may follow.
        end_token_ids: the tokens that end the sequence.
        last_resort: to be allowed if nothing else is.
    """
    bits = bytearray(mask)
    for token_id in end_token_ids:
        if token_id < 8 * len(bits):
            bits[token_id >> 3] |= 1 << (token_id & 7)
    if not any(bits):
        return with_end_tokens(mask, last_resort, ()) if last_resort else mask
    return bytes(bits)


def _limits() -> llguidance.LLParserLimits:
    """Bounds on what one grammar may cost; the comments say what they stand for by the library's description."""
    return llguidance.LLParserLimits(
        initial_lexer_fuel=1_000_000,  # 20 ms of compiling
        step_lexer_fuel=50_000,  # 3.5 ms of each mask
        step_max_items=12_000,  # 1 ms of each mask
        max_items_in_row=1_000,  # what a mask costs grows with its square: 8 ms; an object of 240 optional properties
        max_lexer_states=20_000,  # 40 MB
        verbose_errors=False,  # they would carry the grammar into answers and logs
    )


def _tokenizer(vocabulary: Vocabulary, vocab_size: int) -> llguidance.LLTokenizer:
    """The library's view of the vocabulary: whole words of bits, and behind them an end token that nobody samples."""
    padded_size = 32 * -(-vocab_size // 32)
    tokens = [*vocabulary.tokens[:vocab_size]]
    tokens += [b""] * (padded_size - len(tokens))
    special = sorted(i for i in vocabulary.special_token_ids if i < vocab_size)
    wrapped = cast("llguidance.TokenizerWrapper", _WrappedVocabulary(vocabulary, tokens, special))
    return llguidance.LLTokenizer(wrapped, n_vocab=padded_size + 1, eos_token=padded_size)


class _WrappedVocabulary:
    """What the library asks of a tokenizer, with the attributes of its own TokenizerWrapper.

    It calls it with a text that a grammar leaves no choice about, and then allows the first of the tokens alone: they
    must spell the text exactly, without a special token. The wrapper itself would try one out on a text of its own.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, tokens: list[bytes], special: list[int]) -> None:
        self.eos_token_id = len(tokens)
        self.tokens = [*tokens, b"<end>"]
        self.special_token_ids = [*special, len(tokens)]
        self._encode = vocabulary.encode
        self._special = frozenset(special)
        self._ids = {token: i for i, token in enumerate(tokens) if token and i not in self._special}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: str) -> list[int]:
        text = text[:_MAX_FORCED]
        token_ids = self._encode(text)
        is_plain = all(i < self.eos_token_id and i not in self._special for i in token_ids)
        if is_plain and b"".join(self.tokens[i] for i in token_ids) == text.encode():
            return token_ids
        return self._longest_matches(text.encode())

    def _longest_matches(self, text: bytes) -> list[int]:
        """Other tokens for a text whose own ones do not do: a tokenizer may put a space before it, for instance."""
        token_ids = []
        place = 0
        while place < len(text):
            lengths = range(min(self._longest, len(text) - place), 0, -1)
            length = next((n for n in lengths if text[place : place + n] in self._ids), None)
            if length is None:  # the vocabulary cannot spell it
                break
            token_ids.append(self._ids[text[place : place + length]])
            place += length
        return token_ids


def _grammar_text(wanted: StructuredOutput) -> str:
    """The grammar in the library's notation. Raises GrammarError."""
    match wanted.kind:
        case "json_object":
            return _schema_grammar('{"type": "object"}', wanted.whitespace)
        case "json_schema":
            return _schema_grammar(wanted.value, wanted.whitespace)
        case "regex":
            return llguidance.LLMatcher.grammar_from_regex(wanted.value)
        case "choice":
            options = "|".join("".join(map(_escaped, choice)) for choice in json.loads(wanted.value))
            return llguidance.LLMatcher.grammar_from_regex(f"(?:{options})")
        case "grammar":
            if holds_endless_range(wanted.value):
                raise GrammarError("it holds a number below -2**63, which is not supported")
            return llguidance.LLMatcher.grammar_from_lark(wanted.value)


def _schema_grammar(schema: str, whitespace: str | None) -> str:
    value = json.loads(schema)
    if value is False:
        raise GrammarError("it allows no answer")
    try:
        text = json.dumps({} if value is True else grammar_schema(value))
    except SchemaError as error:
        raise GrammarError(str(error)) from None
    if holds_endless_range(text):
        raise GrammarError("it holds a number below -2**63, which is not supported")
    try:
        return llguidance.LLMatcher.grammar_from_json_schema(
            text,
            # Each of them, since a schema may carry options of its own: none of those counts.
            overrides={
                "item_separator": ",",
                "key_separator": ":",
                "whitespace_flexible": whitespace != "",
                "whitespace_pattern": JSON_WHITESPACE if whitespace is None else whitespace or None,
                "coerce_one_of": False,
                "lenient": False,
                "json_allowed_escapes": JSON_ESCAPES,
            },
        )
    except ValueError as error:
        raise GrammarError(_explanation(str(error))) from None


def _escaped(char: str) -> str:
    return char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):X}}}"


def _explanation(message: str) -> str:
    """The library's words for a person who has only written a schema."""
    if message.startswith(_NO_EXTENSION):
        return "it allows no answer, as where a schema or a rule stands for nothing but itself"
    if message.startswith("panic: "):  # with a trace of the program's
        return "the grammar library fails on it"
    if unimplemented := _UNIMPLEMENTED.search(message):
        names = unimplemented[1].replace('"', "")
        return f"it uses what is not supported: {names}"
    if unknown := _UNKNOWN_FORMAT.search(message):
        return f"it uses the format {unknown[1]}, which is not supported"
    if message.startswith("oneOf constraints are not supported"):
        return "it uses oneOf with options that may hold at once, which is not supported; anyOf is"
    return " ".join(message.replace("<non-verbose/>", "").split())[:_MAX_MESSAGE].rstrip(".")
