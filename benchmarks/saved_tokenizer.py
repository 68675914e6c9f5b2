"""Writes a tokenizer into a model's directory in Hugging Face layout."""

import json
from pathlib import Path

from server.tokenizer import Tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, the chat template in it where there is one."""
    parts = tokenizer._parts
    parts.backend.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **parts.special_tokens}
    if "default" in parts.chat_templates:
        settings["chat_template"] = parts.chat_templates["default"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
