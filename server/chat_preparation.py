"""From the body of a chat request to what the engine takes: its conversation, written out with the model's template.

Takes a while: runs off the event loop, for a large body in another process (see server/preparer.py). Knows no HTTP and
no engine.
"""

from dataclasses import replace
from typing import Any

from server.beam_fields import with_beam_search
from server.chat_template import ChatTemplate, ChatTemplateError
from server.chat_tools import ToolUse, answer_form_of, structured_output_of_tools, tool_use_of
from server.errors import InvalidRequest
from server.preparation import PreparedPrompt, PreparedRequest, prepared_request
from server.protocol.chat import ChatCompletionRequest
from server.protocol.fields import bounded_names, parse_body
from server.sampling_fields import max_tokens_of, sampling_params_of
from server.served_model import ServedModel
from server.token_ids import TokenIds
from server.tool_prompting import with_tools_as_text
from server.truncation import PromptTokens, prompt_tokens_of


def prepare_chat(body: bytes, model: ServedModel) -> PreparedRequest:
    """Read the body of `/v1/chat/completions`. Raises ApiError for what is wrong with it."""
    return prepare_conversation(parse_body(ChatCompletionRequest, body), model)


def prepare_conversation(
    request: ChatCompletionRequest, model: ServedModel, max_tokens: int | None = None
) -> PreparedRequest:
    """Write a conversation out with the model's template, and tokenise it. Raises ApiError.

    `max_tokens` bounds an answer of which the request does not say how long it may be: it ends there, or sooner with
    the window; None: with the window.
    """
    model.check_name(request.model)
    use = tool_use_of(request, model)
    tokens = _prompt_tokens(request, model, max_tokens)
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    bound = model.max_model_len if max_tokens is None else max_tokens
    most = max_tokens_of(request, len(tokens.token_ids), model, "messages", bound)
    params = sampling_params_of(request, model, most, logprobs, echo=False)
    structured_output = structured_output_of_tools(request, use, model, params.structured_output)
    params = with_beam_search(request, replace(params, structured_output=structured_output))
    prompt = PreparedPrompt(TokenIds(tokens.token_ids), None, params, num_truncated_tokens=tokens.num_truncated)
    prepared = prepared_request(request, model, [prompt], logprobs)
    return replace(
        prepared,
        ignored_fields=tuple(bounded_names([*prepared.ignored_fields, *ignored_variables(request, model)])),
        answer_form=answer_form_of(request, use, model),
    )


def conversation_tokens(request: ChatCompletionRequest, model: ServedModel) -> tuple[int, ...]:
    """The prompt that a conversation makes. Raises InvalidRequest where the template refuses it."""
    return _prompt_tokens(request, model).token_ids


def conversation_text(request: ChatCompletionRequest, model: ServedModel) -> str:
    """A conversation as the model's template writes it out. Raises InvalidRequest where the template refuses it."""
    template = model.tokenizer.chat_template
    if template is None:
        raise InvalidRequest(f"The model {model.names[0]} has no chat template; use /v1/completions.", "messages")
    use = tool_use_of(request, model)
    variables = _variables(request, template)
    messages = [message.for_template() for message in request.messages]
    tools = [tool.for_template() for tool in use.offered] or None
    if use.as_text and _speaks_of_tools(request, use):
        messages, tools = with_tools_as_text(messages, tools or []), None
    continues = bool(request.continue_final_message)
    try:
        return template.render(
            messages,
            add_generation_prompt=request.add_generation_prompt is not False and not continues,
            continue_final_message=continues,
            tools=tools,
            documents=request.documents,
            **variables,
        )
    except ChatTemplateError as error:
        raise InvalidRequest(f"The model's chat template refuses these messages: {error}", "messages") from None


def _prompt_tokens(request: ChatCompletionRequest, model: ServedModel, max_tokens: int | None = None) -> PromptTokens:
    text = conversation_text(request, model)
    add_special_tokens = bool(request.add_special_tokens)
    return prompt_tokens_of(
        request, model, text, "messages", add_special_tokens=add_special_tokens, max_tokens=max_tokens
    )


def _speaks_of_tools(request: ChatCompletionRequest, use: ToolUse) -> bool:
    return bool(use.offered) or any(message.role == "tool" or message.tool_calls for message in request.messages)


def _variables(request: ChatCompletionRequest, template: ChatTemplate) -> dict[str, Any]:
    """Further variables for the template. Raises InvalidRequest for what the template cannot honour."""
    variables = dict(request.chat_template_kwargs or {})
    for name in variables:
        if template.reserves(name):
            path = f"chat_template_kwargs.{name[:64]}"
            raise InvalidRequest(f"{path} has a meaning in chat templates already and cannot be set.", path)
    if request.documents and not template.takes("documents"):
        raise InvalidRequest("The model's chat template takes no documents.", "documents")
    if request.reasoning_effort is not None and "reasoning_effort" not in variables:
        if template.takes("reasoning_effort"):
            variables["reasoning_effort"] = request.reasoning_effort
        elif request.reasoning_effort != "none":
            raise InvalidRequest(
                "The model's chat template knows no reasoning_effort; this model does not reason by degrees.",
                "reasoning_effort",
            )
    return variables


def ignored_variables(request: ChatCompletionRequest, model: ServedModel) -> list[str]:
    """Names of the variables that the template does not look at, of a conversation that it has written out."""
    template = model.tokenizer.chat_template
    assert template is not None, "a chat was prepared without a template"
    return [f"chat_template_kwargs.{name}" for name in request.chat_template_kwargs or {} if not template.takes(name)]
