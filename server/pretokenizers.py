"""How text is cut into words before byte-level BPE, by the name that a GGUF file gives it (`tokenizer.ggml.pre`).

A table of facts about published tokenizers: the patterns are those of the models' own tokenizer.json, and the names
llama.cpp's. Knows no vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import MappingProxyType

from tokenizers import Regex, normalizers, pre_tokenizers

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_CL100K = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|{digits}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CL100K.replace("{digits}", r"\p{N}{1,3}")
_QWEN2 = _CL100K.replace("{digits}", _DIGIT)
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_WORD = r"[^\r\n\p{L}\p{N}]?" + _UPPER + "*" + _LOWER + "+"
_UPPER_WORD = r"[^\r\n\p{L}\p{N}]?" + _UPPER + "+" + _LOWER + "*"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = f"{_CASED_WORD}|{_UPPER_WORD}|{_DIGIT}{_TAIL}"
_GPT4O = f"{_CASED_WORD}{_CONTRACTIONS}?|{_UPPER_WORD}{_CONTRACTIONS}?" + r"|\p{N}{1,3}" + _TAIL
_FALCON_LIKE = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """One way of cutting text, and what goes with it."""

    patterns: tuple[str, ...]  # applied one after the other; each match, and what lies between, is a word
    whole_words_first: bool = False  # a word that is a token is taken whole, whatever the merges say
    adds_bos: bool = False  # unless the file says otherwise
    nfc: bool = False  # the model's own tokenizer composes characters first

    def build(self) -> pre_tokenizers.PreTokenizer:
        """As `tokenizers` runs it, spelling bytes in the byte-level alphabet."""
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    def build_normalizer(self) -> normalizers.Normalizer | None:
        """What happens to the text before, if anything."""
        return normalizers.NFC() if self.nfc else None


@dataclass(frozen=True, slots=True)
class _Family:
    names: tuple[str, ...]
    pre_tokenizer: PreTokenizer = field(compare=False)

    def items(self) -> Iterator[tuple[str, PreTokenizer]]:
        return ((name, self.pre_tokenizer) for name in self.names)


_FAMILIES = (
    _Family(("gpt-2", "phi-2", "mpt", "olmo", "jais", "gigachat"), PreTokenizer((_GPT2,))),
    # Each digit is a word, as in the models' tokenizer.json: "    0" is four spaces and 0. (transformers reads `smollm`
    # files as plain GPT-2, which gives the last space to the digit.)
    _Family(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
        PreTokenizer((_DIGIT, _GPT2)),
    ),
    _Family(
        ("llama-bpe", "llama3", "llama-v3", "falcon3"), PreTokenizer((_LLAMA3,), whole_words_first=True, adds_bos=True)
    ),
    _Family(("dbrx", "smaug-bpe"), PreTokenizer((_LLAMA3,))),
    _Family(("qwen2", "deepseek-r1-qwen", "megrez"), PreTokenizer((_QWEN2,), nfc=True)),
    _Family(("stablelm2",), PreTokenizer((_QWEN2,))),
    _Family(("tekken",), PreTokenizer((_TEKKEN,), whole_words_first=True, adds_bos=True)),
    _Family(("gpt-4o", "llama4"), PreTokenizer((_GPT4O,))),
    _Family(("default",), PreTokenizer(_FALCON_LIKE)),
)

PRE_TOKENIZERS = MappingProxyType({name: value for family in _FAMILIES for name, value in family.items()})
