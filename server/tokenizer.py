"""Text to token ids and back, for one model.

Wraps `tokenizers`; nothing that shows changes after construction, so that threads share one (`tokenizers` lets go of
the GIL while it encodes). Knows no file formats (see hf_tokenizer and gguf_tokenizer), no requests, and not how text is
streamed.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from server.chat_template import ChatTemplate
from server.gguf_tokenizer import read_gguf_tokenizer
from server.hf_tokenizer import read_hf_tokenizer
from server.tokenizer_parts import TokenizerError, TokenizerParts

__all__ = ["Tokenizer", "TokenizerError", "load_tokenizer"]

_SPACE_MARK = "\u2581"  # SentencePiece's visible space
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable ones stand for themselves, the rest for code points from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_LEVEL = _byte_level_alphabet()


class Tokenizer:
    """The tokenizer of one model, with its chat template where it has one."""

    def __init__(self, parts: TokenizerParts) -> None:
        """Take over what a reader built."""
        self._parts = parts
        self._backend = parts.backend
        vocabulary = parts.backend.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(vocabulary.values(), default=-1) + 1  # ids are below it; a model may pad its own
        self.bos_token_id: int | None = parts.bos_token_id
        self.eos_token_ids: tuple[int, ...] = parts.eos_token_ids
        self.special_token_ids: frozenset[int] = parts.special_token_ids
        self.special_tokens: Mapping[str, str] = parts.special_tokens  # "bos_token" -> "<s>", those that have a name
        self._known_bytes: dict[int, bytes] = {}  # of the tokens that were asked for
        self.chat_template: ChatTemplate | None = None
        if "default" in parts.chat_templates:
            self.chat_template = ChatTemplate(
                parts.chat_templates["default"], parts.special_tokens, parts.chat_templates.get("tool_use")
            )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, as the model's own tokenizer gives them.

        `add_special_tokens` puts the model's beginning and end tokens around it where the model wants them: true for a
        plain prompt, false for the output of a chat template, which writes them itself. Special tokens spelled out in
        the text become those tokens. Raises TokenizerError for a string that is not Unicode text.
        """
        try:
            # Only the batch form lets go of the GIL. The fast one leaves out the offsets, which nobody reads.
            [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            ids: list[int] = encoding.ids
        except (TypeError, UnicodeEncodeError) as error:  # half a surrogate pair, which JSON can spell
            raise TokenizerError(
                "The text holds half of a surrogate pair (U+D800 to U+DFFF), which is not a character."
            ) from error
        return ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """The text of a whole sequence: UTF-8 over the tokens' bytes, U+FFFD for what is not UTF-8.

        A space at the very beginning is kept: a completion continues its prompt.
        """
        hidden = self.special_token_ids if skip_special_tokens else frozenset()
        return b"".join(self.token_bytes(i) for i in ids if i not in hidden).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes that a token adds to the text; none for an id that the tokenizer does not have."""
        known = self._known_bytes.get(token_id)
        if known is None:
            known = self._known_bytes[token_id] = self.spelled_bytes(token_id)
        return known

    def spelled_bytes(self, token_id: int) -> bytes:
        """The same, worked out anew: for whoever looks at the whole vocabulary once."""
        piece = self.spelling(token_id)
        if token_id in self._parts.literal_ids:
            return piece.encode("utf-8")
        if self._parts.spelling == "byte_level":
            try:
                return bytes([_BYTE_LEVEL[char] for char in piece])
            except KeyError:  # not spelled so
                return piece.encode("utf-8")
        if self._parts.byte_fallback and (byte := _BYTE_TOKEN.fullmatch(piece)):
            return bytes([int(byte[1], 16)])
        return piece.replace(_SPACE_MARK, " ").encode("utf-8")

    def token_text(self, token_id: int) -> str:
        r"""One token for a reader: its text, or `bytes:\xe2\x80` where its bytes alone are no text.

        The second form is the OpenAI API's; it keeps tokens apart that would all read U+FFFD.
        """
        raw = self.token_bytes(token_id)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def token_id(self, text: str) -> int | None:
        """The id of a token that the vocabulary spells so, such as a special one."""
        token_id: int | None = self._backend.token_to_id(text)
        return token_id

    def spelling(self, token_id: int) -> str:
        """The token as the vocabulary spells it; nothing for an id that the tokenizer does not have."""
        if not 0 <= token_id < self.vocab_size:
            return ""
        return self._backend.id_to_token(token_id) or ""


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face directory or of a .gguf file. Raises TokenizerError."""
    return Tokenizer(read_hf_tokenizer(path) if path.is_dir() else read_gguf_tokenizer(path))
