"""Texts to tokens and back, for callers who count or look at tokens: no engine takes part.

Pure functions that may take a while: they run off the event loop, large ones in another process. Knows no HTTP.
"""

from dataclasses import replace

from server.chat_preparation import conversation_text, ignored_variables
from server.errors import InvalidRequest
from server.protocol.fields import bounded_names, parse_body
from server.protocol.responses import to_json
from server.protocol.tokenization import (
    Detokenization,
    DetokenizeRequest,
    Tokenization,
    TokenizeChatRequest,
    TokenizeRequest,
    TokenPiece,
)
from server.served_model import ServedModel
from server.tokenizer import Tokenizer

# A text may be longer than the window: callers ask in order to find out. One token takes up to 200 bytes while the
# tokenizer works on it, and a text of an unlucky script has more tokens than characters.
_MIN_TEXT_LIMIT = 1 << 20  # bytes of UTF-8
_TEXT_BYTES_PER_TOKEN = 8  # of the window


def tokenise_body(body: bytes, model: ServedModel) -> tuple[bytes, list[str]]:
    """Answer the body of `/tokenize`, as JSON; also the names of the fields that nobody knows. Raises ApiError."""
    request = parse_body(TokenizeRequest, body)
    if request.is_chat:
        return _tokenise_chat(parse_body(TokenizeChatRequest, body), model)
    model.check_name(request.model)
    text, param = (request.prompt, "prompt") if request.content is None else (request.content, "content")
    assert text is not None, "a request without a text was let in"
    token_ids = _tokenise(text, param, model, add_special_tokens=request.wants_special_tokens)
    return to_json(_tokenization(request, token_ids, model)), request.ignored_fields()


def detokenise_body(body: bytes, model: ServedModel) -> tuple[bytes, list[str]]:
    """Answer the body of `/detokenize`, as JSON; also the names of the fields that nobody knows. Raises ApiError."""
    request = parse_body(DetokenizeRequest, body)
    model.check_name(request.model)
    tokenizer = model.tokenizer
    # Some tokens have a text and no embedding.
    replace(model, vocab_size=tokenizer.vocab_size).check_token_ids(request.tokens, "tokens")
    text = tokenizer.decode(request.tokens, skip_special_tokens=bool(request.skip_special_tokens))
    return to_json(Detokenization(text, text)), request.ignored_fields()


def _tokenise_chat(request: TokenizeChatRequest, model: ServedModel) -> tuple[bytes, list[str]]:
    model.check_name(request.model)
    text = conversation_text(request, model)
    token_ids = _tokenise(text, "messages", model, add_special_tokens=bool(request.add_special_tokens))
    ignored_fields = bounded_names([*request.ignored_fields(), *ignored_variables(request, model)])
    return to_json(_tokenization(request, token_ids, model)), ignored_fields


def _tokenise(text: str, param: str, model: ServedModel, *, add_special_tokens: bool) -> tuple[int, ...]:
    limit = max(_MIN_TEXT_LIMIT, _TEXT_BYTES_PER_TOKEN * model.max_model_len)
    num_bytes = len(text.encode("utf-8", "surrogatepass"))
    if num_bytes > limit:
        raise InvalidRequest(f"{param} has {num_bytes} bytes; at most {limit} are tokenised at once.", param)
    return model.tokenise(text, param, add_special_tokens=add_special_tokens)


def _tokenization(
    request: TokenizeRequest | TokenizeChatRequest, token_ids: tuple[int, ...], model: ServedModel
) -> Tokenization:
    tokenizer = model.tokenizer
    return Tokenization(
        count=len(token_ids),
        max_model_len=model.max_model_len,
        tokens=[_piece(token_id, tokenizer) for token_id in token_ids] if request.with_pieces else token_ids,
        token_strs=[tokenizer.spelling(token_id) for token_id in token_ids] if request.return_token_strs else None,
    )


def _piece(token_id: int, tokenizer: Tokenizer) -> TokenPiece:
    raw = tokenizer.token_bytes(token_id)
    try:
        return TokenPiece(token_id, raw.decode("utf-8"))
    except UnicodeDecodeError:
        return TokenPiece(token_id, tuple(raw))
