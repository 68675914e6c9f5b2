"""From the body of a chat request to what the engine takes: its conversation, written out with the model's template.

Takes a while: runs in a thread, off the event loop. Knows no HTTP and no engine.
"""

from server.chat_template import ChatTemplateError
from server.errors import InvalidRequest
from server.preparation import PreparedPrompt, PreparedRequest, prepared_request
from server.protocol.chat import ChatCompletionRequest
from server.protocol.fields import parse_body
from server.sampling_fields import max_tokens_of, sampling_params_of
from server.served_model import ServedModel
from server.token_ids import TokenIds


def prepare_chat(body: bytes, model: ServedModel) -> PreparedRequest:
    """Read the body of `/v1/chat/completions`. Raises ApiError for what is wrong with it."""
    return prepare_conversation(parse_body(ChatCompletionRequest, body), model)


def prepare_conversation(request: ChatCompletionRequest, model: ServedModel) -> PreparedRequest:
    """Write a conversation out with the model's template, and tokenise it. Raises ApiError."""
    model.check_name(request.model)
    token_ids = conversation_tokens(request, model)
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    max_tokens = max_tokens_of(request, len(token_ids), model, "messages", model.max_model_len)
    params = sampling_params_of(request, model, max_tokens, logprobs, echo=False)
    return prepared_request(request, model, [PreparedPrompt(TokenIds(token_ids), None, params)], logprobs)


def conversation_tokens(request: ChatCompletionRequest, model: ServedModel) -> tuple[int, ...]:
    """The prompt that a conversation makes. Raises InvalidRequest where the template refuses it."""
    return model.encode(conversation_text(request, model), "messages", add_special_tokens=False)


def conversation_text(request: ChatCompletionRequest, model: ServedModel) -> str:
    """A conversation as the model's template writes it out. Raises InvalidRequest where the template refuses it."""
    template = model.tokenizer.chat_template
    if template is None:
        raise InvalidRequest(f"The model {model.names[0]} has no chat template; use /v1/completions.", "messages")
    try:
        return template.render([message.for_template() for message in request.messages])
    except ChatTemplateError as error:
        raise InvalidRequest(f"The model's chat template refuses these messages: {error}", "messages") from None
