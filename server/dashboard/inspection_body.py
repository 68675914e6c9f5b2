"""From the body of an inspector's request to tokens. Runs off the event loop. Knows no HTTP and no process."""

from dataclasses import dataclass

from pydantic import Field

from server.chat_preparation import conversation_tokens
from server.dashboard.inspection_messages import MAX_PROMPT_TOKENS, MAX_TOKENS
from server.errors import InvalidRequest
from server.protocol.chat import ChatCompletionRequest
from server.protocol.fields import RequestFields, parse_body
from server.served_model import ServedModel
from server.token_ids import TokenIds

MAX_BODY_BYTES = 64 << 10
DEFAULT_TOKENS = 8


class InspectionRequest(RequestFields):
    """A prompt to look at."""

    prompt: str = Field(min_length=1, description=f"At most {MAX_PROMPT_TOKENS} tokens.")
    chat: bool | None = Field(None, description="Write it as a user's message, with the model's template.")
    max_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS, description="Generated after it, greedily.")


@dataclass(frozen=True, slots=True)
class InspectionPrompt:
    """What the inspector takes."""

    token_ids: TokenIds
    max_tokens: int


def prepare_inspection(body: bytes, model: ServedModel) -> InspectionPrompt:
    """Read a body and tokenise its prompt. Raises ApiError."""
    request = parse_body(InspectionRequest, body)
    model.check_name(request.model)
    if request.chat:
        conversation = {"messages": [{"role": "user", "content": request.prompt}]}
        token_ids = conversation_tokens(ChatCompletionRequest.model_validate(conversation), model)
    else:
        token_ids = model.encode(request.prompt, "prompt", add_special_tokens=True)
    if len(token_ids) > MAX_PROMPT_TOKENS:
        raise InvalidRequest(
            f"The prompt has {len(token_ids)} tokens, and the inspector takes at most {MAX_PROMPT_TOKENS}. Shorten it.",
            "prompt",
        )
    max_tokens = request.max_tokens or min(DEFAULT_TOKENS, max(1, model.max_model_len - len(token_ids)))
    model.check_window(len(token_ids) + max_tokens, "prompt", "with max_tokens ")
    return InspectionPrompt(TokenIds(token_ids), max_tokens)
