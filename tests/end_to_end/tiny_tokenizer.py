"""A byte-level tokenizer for the tiny random models: one token for each of the first bytes, no merges."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL_TOKENS = ("<pad>", "<s>", "</s>")


def save_tokenizer(directory: Path, vocab_size: int) -> None:
    """Write tokenizer.json and tokenizer_config.json for a model of `vocab_size` tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[: vocab_size - len(SPECIAL_TOKENS)]
    vocab = {token: i for i, token in enumerate((*SPECIAL_TOKENS, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
