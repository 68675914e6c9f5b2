"""The model that requests are checked against: its names, its vocabulary, its window. Knows no HTTP and no engine."""

from dataclasses import dataclass

from server.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound
from server.tokenizer import Tokenizer, TokenizerError
from server.tool_parsers.formats import ToolParserName

_MAX_SHOWN_TOKEN = 64  # characters


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What requests are checked against. The checks raise for the caller's mistake, naming the field `param`."""

    names: tuple[str, ...]
    tokenizer: Tokenizer
    longest_token: int  # bytes
    vocab_size: int  # ids that have an embedding and a text
    max_model_len: int
    hidden_size: int = 0  # numbers of an embedding
    tool_call_parser: ToolParserName | None = None  # None: the form of calls that the chat template writes

    def check_name(self, name: str | None) -> None:
        """Refuse a model that is not served. Raises ModelNotFound."""
        if name is not None and name not in self.names:
            raise ModelNotFound(f"The model {name[:256]!r} is not served here; {self.names[0]!r} is.", "model")

    def check_token_ids(self, token_ids: tuple[int, ...], param: str) -> None:
        """Refuse ids that are not of the vocabulary. Raises InvalidRequest."""
        unknown = self._id_without_embedding(token_ids)
        if unknown is not None:
            shown = str(unknown)[:20]
            raise InvalidRequest(f"{param} has the token id {shown}; ids go from 0 to {self.vocab_size - 1}.", param)

    def check_window(self, num_tokens: int, param: str, qualifier: str = "") -> None:
        """Refuse a prompt that is longer than the window. Raises ContextLengthExceeded."""
        if num_tokens > self.max_model_len:
            raise ContextLengthExceeded(
                f"{param} has {qualifier}{num_tokens} tokens; the model's window is {self.max_model_len}.", param
            )

    def encode(self, text: str, param: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """Token ids of a prompt, at least one and at most a window of them. Raises InvalidRequest."""
        # Before the tokenizer spends seconds on megabytes that cannot fit.
        self.check_window(len(text) // self.longest_token, param, "at least ")
        token_ids = self.tokenise(text, param, add_special_tokens=add_special_tokens)
        if not token_ids:
            raise InvalidRequest(f"{param} has no tokens.", param)
        self.check_window(len(token_ids), param)
        # Special tokens for what a model was not trained to read, such as images, may lie past its embeddings.
        unknown = self._id_without_embedding(token_ids)
        if unknown is not None:
            shown = self.tokenizer.token_text(unknown)[:_MAX_SHOWN_TOKEN]
            raise InvalidRequest(f"{param} contains a token, {shown!r}, that the model has no embedding for.", param)
        return token_ids

    def tokenise(self, text: str, param: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """Token ids of a text, be they none, too many for a prompt, or without an embedding. Raises InvalidRequest."""
        try:
            return tuple(self.tokenizer.encode(text, add_special_tokens=add_special_tokens))
        except TokenizerError as error:
            raise InvalidRequest(f"{param} cannot be tokenised: {error}", param) from None

    def prompt_tokens(
        self, prompt: str | tuple[int, ...], param: str, *, add_special_tokens: bool = True
    ) -> tuple[int, ...]:
        """Token ids of a prompt that is a text or token ids: at least one, at most a window. Raises InvalidRequest."""
        if isinstance(prompt, str):
            return self.encode(prompt, param, add_special_tokens=add_special_tokens)
        self.check_window(len(prompt), param)
        self.check_token_ids(prompt, param)
        return prompt

    def _id_without_embedding(self, token_ids: tuple[int, ...]) -> int | None:
        extremes = (min(token_ids), max(token_ids)) if token_ids else ()
        return next((extreme for extreme in extremes if not 0 <= extreme < self.vocab_size), None)


def longest_token(tokenizer: Tokenizer) -> int:
    """Bytes of the longest token of a vocabulary: no prompt has fewer tokens than its length over this."""
    return max(len(tokenizer.spelled_bytes(token_id)) for token_id in range(tokenizer.vocab_size))
