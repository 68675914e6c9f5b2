"""Cuts a prompt to its last tokens, for requests that ask for it with `truncate_prompt_tokens`, and only for them.

Knows no HTTP and no engine.
"""

from dataclasses import dataclass

from server.errors import ContextLengthExceeded, InvalidRequest
from server.protocol.fields import PromptFields
from server.served_model import ServedModel

_MAX_CHARS = 1 << 22  # of a text that is tokenised to be cut: a second or two of a thread
_ALL_THAT_FITS = -1
# Of an answer that may be as long as it gets: room for a good page, but of small windows most is the prompt's.
_MAX_TOKENS_RESERVED = 1024
_WINDOW_SHARE_RESERVED = 4  # a fourth


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """One prompt as the model reads it."""

    token_ids: tuple[int, ...]  # at least one, at most a window
    num_truncated: int = 0  # tokens cut off at its front


def prompt_tokens_of(
    request: PromptFields,
    model: ServedModel,
    prompt: str | tuple[int, ...],
    param: str,
    *,
    add_special_tokens: bool,
    max_tokens: int | None = None,
) -> PromptTokens:
    """Tokenise a prompt that stands in the field `param`, and cut it if the request says so.

    Args:
        request: says how to cut, and perhaps how long the answer may be.
        model: whose window the two share.
        prompt: text or token ids.
        param: the field.
        add_special_tokens: put the tokenizer's own around a text.
        max_tokens: of the answer, where the request does not say; None: what the prompt leaves.

    Raises:
        InvalidRequest: for a prompt that is none, that is too long, or that cannot be cut as asked.
    """
    if request.truncate_prompt_tokens is None:
        return PromptTokens(model.prompt_tokens(prompt, param, add_special_tokens=add_special_tokens))
    limit = _limit(request, model, max_tokens)
    if isinstance(prompt, tuple):
        model.check_token_ids(prompt, param)
        return PromptTokens(prompt[-limit:], max(0, len(prompt) - limit))
    if len(prompt) > _MAX_CHARS:
        raise ContextLengthExceeded(
            f"{param} has {len(prompt)} characters; at most {_MAX_CHARS} are tokenised to be truncated.", param
        )
    token_ids = model.tokenise(prompt, param, add_special_tokens=add_special_tokens)
    if len(token_ids) <= limit:
        return PromptTokens(model.prompt_tokens(prompt, param, add_special_tokens=add_special_tokens))
    own = model.tokenise(prompt, param, add_special_tokens=False) if add_special_tokens else token_ids
    kept = _cut(token_ids, own, limit)
    model.check_token_ids(kept, param)
    return PromptTokens(kept, len(token_ids) - len(kept))


def _limit(request: PromptFields, model: ServedModel, max_tokens: int | None) -> int:
    """The most tokens to keep."""
    asked = request.truncate_prompt_tokens
    assert asked is not None, "nobody asked to truncate"
    if asked == _ALL_THAT_FITS:
        return max(1, model.max_model_len - _reserved(request, model, max_tokens))
    if asked > model.max_model_len:
        raise InvalidRequest(
            f"truncate_prompt_tokens is {asked}; the model's window is {model.max_model_len}.",
            "truncate_prompt_tokens",
        )
    return asked


def _reserved(request: PromptFields, model: ServedModel, max_tokens: int | None) -> int:
    """How much of the window to leave to the answer: as much as is asked for, and of what is not, a part."""
    if request.wanted_tokens is not None:
        return request.wanted_tokens
    if max_tokens is None or max_tokens >= model.max_model_len:
        max_tokens = min(_MAX_TOKENS_RESERVED, model.max_model_len // _WINDOW_SHARE_RESERVED)
    return max_tokens


def _cut(token_ids: tuple[int, ...], own: tuple[int, ...], limit: int) -> tuple[int, ...]:
    """The last tokens of the text, whose `own` they are, between those that the tokenizer puts around any text."""
    num_added = len(token_ids) - len(own)
    for num_before in range(num_added + 1):
        if num_added < limit and token_ids[num_before : num_before + len(own)] == own:
            before, after = token_ids[:num_before], token_ids[num_before + len(own) :]
            return (*before, *own[-(limit - num_added) :], *after)
    return token_ids[-limit:]
