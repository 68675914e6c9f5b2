"""Tokenizers of Hugging Face directories against transformers on the same files."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, processors
from tokenizers import Tokenizer as BackendTokenizer
from transformers import AutoTokenizer

from server.tokenizer import TokenizerError, load_tokenizer
from tests.server.real_tokenizers import BYTE_TOKENS, smollm2, texts


def save_byte_level(directory: Path, **config: Any) -> None:
    """SmolLM2's vocabulary with a post-processor that adds `<|im_start|>`, as Llama 3's does."""
    backend = BackendTokenizer.from_str(smollm2()._backend.to_str())
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single=["<|im_start|>:0", "$A:0"], special_tokens=[("<|im_start|>", 1)]),
        ]
    )
    backend.enable_truncation(3)  # a saved setting that must not cut prompts
    backend.save(str(directory / "tokenizer.json"))
    write_config(directory, bos_token="<|im_start|>", eos_token="<|im_end|>", **config)


def save_sentencepiece(directory: Path, **config: Any) -> None:
    """A Llama-2-like tokenizer over Gemma's script-rich letters, saved as transformers saves one."""
    pieces = ["▁the", "the", "▁t", "he", "▁a", "th", "▁th", "in", "an"]
    vocab = {token: index for index, token in enumerate(["<unk>", "<s>", "</s>", *BYTE_TOKENS, *pieces])}
    for letter in "▁abcdefghijklmnopqrstuvwxyz日本語":
        vocab[letter] = len(vocab)
    merges = [("t", "h"), ("th", "e"), ("h", "e"), ("▁", "t"), ("▁t", "he"), ("▁t", "h"), ("▁", "a"), ("i", "n")]
    backend = BackendTokenizer(
        models.BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in ("<unk>", "<s>", "</s>")])
    backend.add_tokens([AddedToken("▁▁", normalized=False)])
    backend.save(str(directory / "tokenizer.json"))
    write_config(directory, bos_token="<s>", eos_token="</s>", unk_token="<unk>", **config)


def write_config(directory: Path, **config: Any) -> None:
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | config
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


EXTRA_TOKEN = {"content": "<|tool|>", "special": True, "normalized": False, "lstrip": True, "rstrip": True}


@pytest.mark.parametrize("save", [save_byte_level, save_sentencepiece])
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"add_bos_token": True},
        {"add_bos_token": False, "add_eos_token": True},
        {"add_bos_token": True, "add_eos_token": True},
        {"added_tokens_decoder": {"49152": EXTRA_TOKEN}},
        {"pad_token": "<|new_pad|>"},
        {"pad_token": {"__type": "AddedToken", "content": "</s>", "lstrip": False}},
    ],
    ids=["plain", "bos", "eos", "both", "extra", "new-pad", "object"],
)
def test_directories_give_the_ids_that_transformers_gives(save: Any, config: dict[str, Any], tmp_path: Path) -> None:
    save(tmp_path, **config)
    tokenizer, reference = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    special = ["a <|tool|> b", "x<|new_pad|>y</s> the<s>the", "<|im_start|>user\n", "", " the  the", "the 日本 ▁▁é"]
    for text in (*texts()[::40], *special):
        assert tokenizer.encode(text) == reference(text, truncation=False).input_ids, text
        without = reference(text, add_special_tokens=False, truncation=False).input_ids
        assert tokenizer.encode(text, add_special_tokens=False) == without, text
    assert tokenizer.bos_token_id == reference.bos_token_id
    hidden = {reference.convert_tokens_to_ids(token) for token in reference.all_special_tokens}
    assert hidden <= tokenizer.special_token_ids


def test_sentencepiece_directory_keeps_bytes_exact(tmp_path: Path) -> None:
    save_sentencepiece(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode("the é 日", add_special_tokens=False)
    assert tokenizer.decode(ids) == " the é 日"  # the first space is kept: a completion continues its prompt
    assert tokenizer.token_bytes(tokenizer._backend.token_to_id("▁▁")) == b"  "
    assert tokenizer.token_bytes(3 + 0xC3) == b"\xc3"
    assert tokenizer.token_bytes(1) == b"<s>"


def test_added_tokens_of_a_byte_level_directory_stand_for_themselves(tmp_path: Path) -> None:
    token = {"content": "<é>", "special": False, "normalized": False}
    save_byte_level(tmp_path, added_tokens_decoder={"49152": token})
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode("é<é>é", add_special_tokens=False)
    assert tokenizer.vocab_size == 49153
    assert ids.count(49152) == 1
    assert tokenizer.decode(ids, skip_special_tokens=True) == "é<é>é"


def test_end_tokens_of_a_directory(tmp_path: Path) -> None:
    save_byte_level(tmp_path)
    assert load_tokenizer(tmp_path).eos_token_ids == (2,)
    (tmp_path / "config.json").write_text('{"eos_token_id": 5}')
    assert load_tokenizer(tmp_path).eos_token_ids == (5, 2)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 2]}')
    assert load_tokenizer(tmp_path).eos_token_ids == (7, 2)


def test_chat_templates_of_a_directory(tmp_path: Path) -> None:
    def rendered(tools: list[dict[str, Any]] | None = None) -> str | None:
        template = load_tokenizer(tmp_path).chat_template
        return template and template.render([], tools=tools)

    save_byte_level(tmp_path)
    assert rendered() is None
    save_byte_level(tmp_path, chat_template="one {{ bos_token }}")
    assert rendered() == "one <|im_start|>"
    named = [{"name": "default", "template": "two"}, {"name": "tool_use", "template": "tools"}]
    save_byte_level(tmp_path, chat_template=named)
    assert (rendered(), rendered([{}])) == ("two", "tools")
    (tmp_path / "chat_template.jinja").write_text("three")
    assert rendered() == "three"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("[]", "does not hold a JSON object"),
        ("{", "cannot be read"),
        ('{"bos_token": 7}', "bos_token is 7, which is neither a string nor a token object"),
        ('{"added_tokens_decoder": {"x": "a"}}', "does not map token ids to tokens"),
        ('{"chat_template": [{"name": "default"}]}', "an entry without name and template"),
    ],
)
def test_a_wrong_configuration_is_explained(config: str, message: str, tmp_path: Path) -> None:
    save_sentencepiece(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(tmp_path)


def test_a_chat_template_that_is_not_utf8_is_explained(tmp_path: Path) -> None:
    save_byte_level(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(TokenizerError, match=r"chat_template\.jinja cannot be read"):
        load_tokenizer(tmp_path)
