"""Tokenizers against transformers on the same files, and against a direct statement of what the file formats mean."""

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, models, pre_tokenizers
from tokenizers import Tokenizer as BackendTokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from server.gguf_tokenizer import build_gguf_tokenizer
from server.pretokenizers import PRE_TOKENIZERS
from server.tokenizer import Tokenizer, TokenizerError, load_tokenizer
from tests.model_files import gemma3_path, smollm2_path
from tests.server.real_tokenizers import BYTE_TOKENS, gemma3, smollm2, texts

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def reference_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def test_smollm2_gives_the_ids_of_its_own_tokenizer() -> None:
    reference = reference_tokenizer(smollm2_path())
    as_converted = [reference(text).input_ids for text in texts()]
    # The model's tokenizer.json cuts out each digit before the words; transformers' conversion of GGUF leaves that out.
    reference.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    ours = [smollm2().encode(text) for text in texts()]
    assert ours == [reference(text).input_ids for text in texts()]
    different = [text for text, ids, theirs in zip(texts(), ours, as_converted, strict=True) if ids != theirs]
    assert 0 < len(different) < 20
    assert smollm2().encode("a    0") == smollm2().encode("a    ") + smollm2().encode("0")


def test_gemma3_gives_the_ids_of_its_own_tokenizer() -> None:
    reference = reference_tokenizer(gemma3_path())
    extra = ["<bos>a<eos>", "<table> <b>x</b>", "<0x0A>", " x", "\n x", "[multimodal]<unused3>", "a" + "\n" * 40]
    for text in (*texts(), *extra, *("a" + " " * count + "b" for count in range(1, 32))):
        assert gemma3().encode(text) == reference(text).input_ids, text


def test_gemma3_takes_the_longest_run_of_spaces() -> None:
    spaces = {count: gemma3().encode(" " * count, add_special_tokens=False)[0] for count in range(2, 32)}
    assert gemma3().encode("a" + " " * 50 + "b", False)[1:-1] == [spaces[31], spaces[19]]


@pytest.mark.parametrize("load", [smollm2, gemma3])
def test_token_bytes_join_to_the_text(load: Any) -> None:
    tokenizer = load()
    # SmolLM2's vocabulary lacks some control characters; its own tokenizer drops them too.
    lost = [byte for byte in range(256) if tokenizer is smollm2() and not tokenizer.encode(chr(byte))]
    assert len(lost) < 20
    for text in texts():
        if not any(chr(byte) in text for byte in lost):
            ids = tokenizer.encode(text, add_special_tokens=False)
            assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
            assert tokenizer.decode(ids) == text


def test_special_tokens_of_the_real_models() -> None:
    assert (smollm2().vocab_size, smollm2().bos_token_id, smollm2().eos_token_ids) == (49152, 1, (2,))
    assert smollm2().special_token_ids == frozenset(range(17))
    assert smollm2().encode("<|im_start|>user\nhi<|im_end|>") == [1, 4093, 198, 6004, 2]
    assert smollm2().decode([1, 4093, 198, 6004, 2]) == "<|im_start|>user\nhi<|im_end|>"
    assert smollm2().decode([1, 4093, 198, 6004, 2], skip_special_tokens=True) == "user\nhi"
    assert smollm2().chat_template is not None

    assert (gemma3().vocab_size, gemma3().bos_token_id, gemma3().eos_token_ids) == (262144, 2, (1, 106))
    assert gemma3().encode("") == [2]
    assert gemma3().encode("", add_special_tokens=False) == []
    assert gemma3().chat_template is None
    newlines = gemma3().encode("\n\n\n", add_special_tokens=False)
    assert len(newlines) == 1  # user-defined: one token, and text
    assert gemma3().decode(newlines, skip_special_tokens=True) == "\n\n\n"


@pytest.mark.parametrize("token_id", [-1, 49152, 49153, 2**31, 2**70])
def test_ids_beyond_the_tokenizer_are_empty(token_id: int) -> None:
    assert smollm2().token_bytes(token_id) == b""
    assert smollm2().token_text(token_id) == ""
    assert smollm2().decode([token_id, 6004]) == "hi"


def test_token_text_keeps_tokens_apart() -> None:
    tokenizer = gemma3()
    assert tokenizer.token_text(238 + 0xE2) == "bytes:\\xe2"
    assert tokenizer.token_bytes(238 + 0xE2) == b"\xe2"
    readable = [tokenizer.token_text(token_id) for token_id in range(238, 238 + 256)]
    assert len(set(readable)) == 256


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(TokenizerError, match="half of a surrogate pair"):
        smollm2().encode("a\ud800b")


def test_threads_share_one_tokenizer() -> None:
    expected = [smollm2().encode(text) for text in texts()]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(smollm2().encode, texts())) == expected
        assert list(pool.map(smollm2().decode, expected)) == [smollm2().decode(ids) for ids in expected]


# Pre-tokenizers


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS.keys() & GGUF_PRE_TOKENIZER_SPLITS.keys()))
def test_words_are_cut_as_the_models_own_pattern_does(name: str) -> None:
    pattern = GGUF_PRE_TOKENIZER_SPLITS[name]
    reference = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    ours = PRE_TOKENIZERS[name].build()
    for text in (*texts()[::3], "DON'T don't I'LL x'S", "HTTPServer camelCase ÀÉî", "1234567 ½ ², a/b//\n\n"):
        assert ours.pre_tokenize_str(text) == reference.pre_tokenize_str(text), text


def test_gpt2_words() -> None:
    reference = pre_tokenizers.ByteLevel(add_prefix_space=False)
    ours = PRE_TOKENIZERS["gpt-2"].build()
    for text in texts()[::3]:
        assert ours.pre_tokenize_str(text) == reference.pre_tokenize_str(text), text


# GGUF metadata, made up


def gguf_metadata(tokens: list[str], types: list[int], **more: Any) -> dict[str, Any]:
    values = {"model": "llama", "tokens": tokens, "token_type": np.array(types, dtype=np.int32)} | more
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}


def build(metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer(build_gguf_tokenizer(Path("made-up.gguf"), metadata))


LETTERS = "▁abc"


def sentencepiece_metadata(pieces: list[str], **more: Any) -> dict[str, Any]:
    """A vocabulary of specials, bytes, then `pieces`, best first, then single letters."""
    tokens = ["<unk>", "<s>", "</s>", *BYTE_TOKENS, *pieces, *LETTERS]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * (len(pieces) + len(LETTERS))]
    scores = np.array([0.0] * 259 + [-float(rank) for rank in range(len(tokens) - 259)], dtype=np.float32)
    more = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0} | more
    return gguf_metadata(tokens, types, scores=scores, **more)


def sentencepiece_reference(text: str, scores: dict[str, float]) -> list[str]:
    """Merge the neighbours whose concatenation has the best score, the leftmost of equals, until none is a token."""
    symbols = list(text)
    while True:
        pairs = [(scores.get(a + b), -i) for i, (a, b) in enumerate(pairwise(symbols))]
        known = [(score, place) for score, place in pairs if score is not None]
        if not known:
            return symbols
        i = -max(known)[1]
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]


@settings(max_examples=60, deadline=None)
@given(
    pieces=st.lists(st.text("▁abc", min_size=2, max_size=5), unique=True, max_size=25),
    text=st.text(" abc", max_size=30),
)
def test_sentencepiece_merges_by_score(pieces: list[str], text: str) -> None:
    # Made of letters that repeat, a token can overlap itself ("aa" in "aaa", cut two ways), where the order of merges
    # in a list cannot say "leftmost"; tokens in a model's vocabulary are hardly ever cut so. Keep to one cut each.
    scores = {piece: -float(rank) for rank, piece in enumerate([*pieces, *LETTERS])}
    unambiguous = [p for p in pieces if sum(p[:i] in scores and p[i:] in scores for i in range(1, len(p))) <= 1]
    scores = {piece: -float(rank) for rank, piece in enumerate([*unambiguous, *LETTERS])}
    tokenizer = build(sentencepiece_metadata(unambiguous, add_space_prefix=False))
    ids = tokenizer.encode(text, add_special_tokens=False)
    expected = sentencepiece_reference(text.replace(" ", "▁"), scores)
    assert [tokenizer.token_text(i) for i in ids] == [piece.replace("▁", " ") for piece in expected]


def test_sentencepiece_defaults_and_flags() -> None:
    tokenizer = build(sentencepiece_metadata(["▁a"]))
    assert [tokenizer.token_text(i) for i in tokenizer.encode("ab a")] == ["<s>", " a", "b", " a"]
    # The space goes before each stretch of text, also after a special token.
    assert [tokenizer.token_text(i) for i in tokenizer.encode("a</s>a", False)] == [" a", "</s>", " a"]
    assert tokenizer.decode(tokenizer.encode("é", False)) == " é"  # two byte tokens after the space
    plain = build(sentencepiece_metadata(["▁a"], add_space_prefix=False, add_bos_token=False, add_eos_token=True))
    assert [plain.token_text(i) for i in plain.encode("a")] == ["a", "</s>"]


def byte_level_metadata(**more: Any) -> dict[str, Any]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, "ab", "Ġab", "abc", "<|end|>", "<think>", "é!"]
    types = [*[NORMAL] * (len(tokens) - 3), CONTROL, USER_DEFINED, USER_DEFINED]
    more = {"model": "gpt2", "pre": "gpt-2", "merges": ["a b", "Ġ ab", "ab c"]} | more
    return gguf_metadata(tokens, types, **more)


def test_byte_level_tokens() -> None:
    tokenizer = build(byte_level_metadata())
    ids = tokenizer.encode("ab abc<think>é!é<|end|>")
    assert [tokenizer.token_text(i) for i in ids] == [
        *("ab", " ab", "c", "<think>", "é!", "bytes:\\xc3", "bytes:\\xa9", "<|end|>")
    ]
    assert tokenizer.decode(ids) == "ab abc<think>é!é<|end|>"  # literal tokens stand for themselves, é included
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab abc<think>é!é"
    # Llama 3's cut takes a word that is a token whole, and begins with <bos> unless the file says no.
    llama3 = build(byte_level_metadata(pre="llama-bpe", merges=["a b"], bos_token_id=256 + 3))
    assert [llama3.token_text(i) for i in llama3.encode("abc")] == ["<|end|>", "abc"]
    silent = build(byte_level_metadata(pre="llama-bpe", bos_token_id=259, add_bos_token=False))
    assert [silent.token_text(i) for i in silent.encode("abc")] == ["abc"]


def test_end_tokens_and_templates_of_gguf() -> None:
    metadata = byte_level_metadata(eos_token_id=256, eot_token_id=257)
    metadata["tokenizer.ggml.tokens"][259] = "<|im_end|>"
    metadata["tokenizer.chat_template"] = "hello {{ eos_token }}"
    metadata["tokenizer.chat_template.tool_use"] = "tools"
    tokenizer = build(metadata)
    assert tokenizer.eos_token_ids == (256, 257, 259)
    assert tokenizer.chat_template is not None
    assert tokenizer.chat_template.render([]) == "hello ab"
    assert tokenizer.chat_template.render([], tools=[{}]) == "tools"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"pre": "no-such"},
            r"made-up\.gguf: tokenizer\.ggml\.pre is 'no-such', which is not one of .*qwen2, .*smollm",
        ),
        ({"model": "t5"}, "is 't5'; gpt2 and llama are supported"),
        ({"model": None}, "tokenizer.ggml.model is missing"),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokens": ["a", "b", "a"]}, "lists 'a' twice"),
        ({"token_type": np.zeros(3, dtype=np.int32)}, "does not hold one number for each of the 262 tokens"),
        ({"merges": ["x y", "no such"]}, "its tokenizer cannot be built"),
        ({"merges": None}, "tokenizer.ggml.merges is missing"),
        ({"bos_token_id": 999}, "bos_token_id is 999; the vocabulary has 262 tokens"),
        ({"bos_token_id": True}, "bos_token_id is True"),
        ({"add_bos_token": 1}, "is 1, not a truth value"),
    ],
)
def test_wrong_metadata_is_explained(change: dict[str, Any], message: str) -> None:
    metadata = byte_level_metadata() | {f"tokenizer.ggml.{key}": value for key, value in change.items()}
    with pytest.raises(TokenizerError, match=message):
        build(metadata)


def test_files_that_hold_no_tokenizer_are_explained(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"has no tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError, match="is not a tokenizer that this version can read"):
        load_tokenizer(tmp_path)
    (tmp_path / "x.gguf").write_bytes(b"GGUF\x03\x00")
    with pytest.raises(TokenizerError, match="truncated"):
        load_tokenizer(tmp_path / "x.gguf")
    BackendTokenizer(models.BPE()).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(TokenizerError, match="has a decoder of type None"):
        load_tokenizer(tmp_path)
