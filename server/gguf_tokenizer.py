"""Builds a tokenizer from the metadata of a GGUF file, which holds the vocabulary but no tokenizer.json.

Follows what the keys mean to llama.cpp, which defines them. Two kinds: `gpt2` (byte-level BPE with merges) and `llama`
(SentencePiece BPE: a score for each token). Knows the metadata only, not the tensors.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

from models.config_reader import open_gguf
from models.errors import ModelError
from models.gguf_config import TURN_ENDS
from server.pretokenizers import PRE_TOKENIZERS
from server.tokenizer_parts import TokenizerError, TokenizerParts, add_boundary_tokens

# tokenizer.ggml.token_type
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5
_PLAIN = (_NORMAL, _UNUSED)
_HIDDEN = (_CONTROL, _UNKNOWN)
_LITERAL = (_CONTROL, _UNKNOWN, _USER_DEFINED)

# What chat templates call them -> the middle of their keys
_NAMED_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


class _Metadata:
    """Typed access to the tokenizer's keys. Every complaint names the file and the key."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path = path
        self._values = values
        self.tokens: list[str] = self._list("tokenizer.ggml.tokens", str)
        self.vocab = {token: index for index, token in enumerate(self.tokens)}
        if len(self.vocab) != len(self.tokens):
            twice = next(token for index, token in enumerate(self.tokens) if self.vocab[token] != index)
            raise self.error("tokenizer.ggml.tokens", f"lists {twice!r} twice")
        self.types: list[int] = self._per_token("tokenizer.ggml.token_type", _NORMAL)

    def error(self, key: str, problem: str) -> TokenizerError:
        return TokenizerError(f"{self.path}: {key} {problem}.")

    def text(self, key: str, default: str | None = None) -> str:
        value = self._values.get(key, default)
        if not isinstance(value, str):
            raise self.error(key, "is missing" if value is None else f"is {value!r}, not a string")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._values.get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"is {value!r}, not a truth value")
        return value

    def token_id(self, name: str) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        value = self._values.get(key)
        if value is not None and (type(value) is not int or not 0 <= value < len(self.tokens)):
            raise self.error(key, f"is {value!r}; the vocabulary has {len(self.tokens)} tokens")
        return value

    def merges(self) -> list[tuple[str, str]]:
        pairs = []
        for merge in self._list("tokenizer.ggml.merges", str):
            middle = merge.find(" ", 1)
            pairs.append((merge[:middle], merge[middle + 1 :]))
        return pairs

    def scores(self) -> list[float]:
        return self._per_token("tokenizer.ggml.scores", 0.0)

    def chat_templates(self) -> dict[str, str]:
        prefix = "tokenizer.chat_template"
        names = [key for key, value in self._values.items() if key.startswith(prefix) and isinstance(value, str)]
        return {key.removeprefix(prefix).removeprefix(".") or "default": self.text(key) for key in names}

    def _list(self, key: str, kind: type) -> list[Any]:
        value = self._values.get(key)
        if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
            raise self.error(key, "is missing" if value is None else "is not a list of strings")
        return value

    def _per_token(self, key: str, default: float) -> list[Any]:
        value = self._values.get(key)
        if value is None:
            return [default] * len(self.tokens)
        if not hasattr(value, "tolist") or len(value) != len(self.tokens):
            raise self.error(key, f"does not hold one number for each of the {len(self.tokens)} tokens")
        numbers: list[Any] = value.tolist()
        return numbers


def read_gguf_tokenizer(path: Path) -> TokenizerParts:
    """Build the tokenizer of a .gguf file. Raises TokenizerError."""
    try:
        values = open_gguf(path).metadata
    except ModelError as error:
        raise TokenizerError(str(error)) from error
    return build_gguf_tokenizer(path, values)


def build_gguf_tokenizer(path: Path, values: Mapping[str, Any]) -> TokenizerParts:
    """Build the tokenizer that a GGUF file's metadata describes; `path` is for messages. Raises TokenizerError."""
    metadata = _Metadata(path, values)
    kind = metadata.text("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise metadata.error("tokenizer.ggml.model", f"is {kind!r}; gpt2 and llama are supported")
    try:
        backend, adds_bos = _byte_level(metadata) if kind == "gpt2" else _sentencepiece(metadata)
    except Exception as error:  # `tokenizers` raises the bare Exception, for instance for a merge of unknown tokens
        if isinstance(error, TokenizerError):
            raise
        raise TokenizerError(f"{path}: its tokenizer cannot be built ({error}).") from error
    _add_literal_tokens(backend, metadata)
    named = {name: metadata.token_id(key) for name, key in _NAMED_TOKENS.items()}
    special_tokens = {name: metadata.tokens[i] for name, i in named.items() if i is not None}
    adds_bos = metadata.flag("tokenizer.ggml.add_bos_token", adds_bos)
    adds_eos = metadata.flag("tokenizer.ggml.add_eos_token", False)
    add_boundary_tokens(
        backend,
        special_tokens.get("bos_token") if adds_bos else None,
        special_tokens.get("eos_token") if adds_eos else None,
    )
    return TokenizerParts(
        backend=backend,
        spelling="byte_level" if kind == "gpt2" else "sentencepiece",
        byte_fallback=kind == "llama",
        literal_ids=frozenset(i for i, kind in enumerate(metadata.types) if kind in _LITERAL),
        special_token_ids=frozenset(i for i, kind in enumerate(metadata.types) if kind in _HIDDEN),
        eos_token_ids=_eos_token_ids(metadata),
        bos_token_id=named["bos_token"],
        special_tokens=special_tokens,
        chat_templates=metadata.chat_templates(),
    )


def _byte_level(metadata: _Metadata) -> tuple[tokenizers.Tokenizer, bool]:
    name = metadata.text("tokenizer.ggml.pre", "default")
    if name not in PRE_TOKENIZERS:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise metadata.error("tokenizer.ggml.pre", f"is {name!r}, which is not one of {known}")
    pre_tokenizer = PRE_TOKENIZERS[name]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=metadata.vocab, merges=metadata.merges(), ignore_merges=pre_tokenizer.whole_words_first)
    )
    normalizer = pre_tokenizer.build_normalizer()
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizer.build()
    backend.decoder = decoders.ByteLevel()
    return backend, pre_tokenizer.adds_bos


def _sentencepiece(metadata: _Metadata) -> tuple[tokenizers.Tokenizer, bool]:
    unknown = metadata.token_id("unknown")
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=metadata.vocab,
            merges=_merges_from_scores(metadata),
            byte_fallback=True,
            fuse_unk=True,
            unk_token=metadata.tokens[unknown] if unknown is not None else None,
        )
    )
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", "\u2581")]
    if metadata.flag("tokenizer.ggml.add_space_prefix", True):
        # As a normalizer it acts on each stretch of text between special tokens, as llama.cpp does.
        steps.insert(0, normalizers.Prepend("\u2581"))
    backend.normalizer = normalizers.Sequence(steps)
    return backend, True


def _merges_from_scores(metadata: _Metadata) -> list[tuple[str, str]]:
    """Every way to make a token out of two others, the best token's first.

    SentencePiece merges the neighbours whose concatenation has the best score (Kudo and Richardson 2018, section 3);
    BPE merges the pair that comes first in its list, so the list in the order of the scores does the same. Control,
    user-defined and byte tokens are no merges: the first two are cut out of the text before, whole.
    """
    mergeable = {token for token, kind in zip(metadata.tokens, metadata.types, strict=True) if kind in _PLAIN}
    scores = metadata.scores()
    vocab = metadata.vocab
    merges: list[tuple[str, str]] = []
    for token in sorted(mergeable, key=lambda token: (-scores[vocab[token]], vocab[token])):
        for middle in range(len(token) - 1, 0, -1):
            left = token[:middle]
            if left in mergeable:
                right = token[middle:]
                if right in mergeable:
                    merges.append((left, right))
    return merges


def _add_literal_tokens(backend: tokenizers.Tokenizer, metadata: _Metadata) -> None:
    """Tokens that are found in the text as they stand, before anything else happens to it.

    llama.cpp does so with runs of spaces too, which Gemma's file lists as user-defined (the longest run is 31).
    transformers merges those by score instead: 33 spaces become 16 + 17 there, 31 + 2 here and in SentencePiece.
    """
    for kinds, special in ((_HIDDEN, True), ((_USER_DEFINED,), False)):
        backend.add_tokens(
            [
                AddedToken(token, special=special, normalized=False)
                for token, kind in zip(metadata.tokens, metadata.types, strict=True)
                if kind in kinds and token
            ]
        )


def _eos_token_ids(metadata: _Metadata) -> tuple[int, ...]:
    named: Sequence[int | None] = [metadata.token_id(name) for name in ("eos", "eot", "eom")]
    by_text = [
        i
        for i, (token, kind) in enumerate(zip(metadata.tokens, metadata.types, strict=True))
        if kind == _CONTROL and token in TURN_ENDS
    ]
    return tuple(dict.fromkeys(i for i in (*named, *by_text) if i is not None))
