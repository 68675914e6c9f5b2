"""From the body of a request to what the engine takes: checked against the model, templated, tokenised, with defaults.

Pure functions that may take a while: they run in a thread, off the event loop. Knows no HTTP and no engine process.
"""

import secrets
from dataclasses import dataclass

from scheduler.sampling_params import SamplingParams
from server.chat_template import ChatTemplateError
from server.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound
from server.protocol.chat import ChatCompletionRequest
from server.protocol.completions import DEFAULT_MAX_TOKENS, CompletionRequest
from server.protocol.completions import Prompt as PromptField
from server.protocol.fields import GenerationFields, parse_body
from server.tokenizer import Tokenizer, TokenizerError

_MAX_STOP_CHARS = 1 << 18  # of one request, over all its answers: each of them looks for the stop strings by itself
# Log-probabilities of one request: those of every token that it may answer with, and of the likeliest beside it. Each
# takes some 150 bytes and 2 µs of the edge, so this is 300 MB and a few seconds at worst. Enough for 128 whole windows
# of 8192 tokens with echo and logprobs 1, which is how evaluations ask, and for 12 of them with logprobs 20.
_MAX_LOGPROBS_OF_REQUEST = 1 << 21
_MAX_SHOWN_TOKEN = 64  # characters
_GREEDY_BELOW = 1e-5  # logits divided by less than this overflow; vLLM draws the same line


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What requests are checked against."""

    names: tuple[str, ...]
    tokenizer: Tokenizer
    longest_token: int  # bytes
    vocab_size: int  # ids that have an embedding and a text
    max_model_len: int


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """One prompt, ready for the engine."""

    token_ids: tuple[int, ...]
    echo: str | None  # the prompt's text, if it shall stand before each answer
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that can be submitted: n answers for each of its prompts."""

    model: str
    prompts: tuple[PreparedPrompt, ...]
    n: int
    stop: tuple[str, ...]
    logprobs: int | None  # how many of the likeliest tokens go with each token; None: no logprobs
    stream: bool
    include_usage: bool
    return_token_ids: bool
    ignored_fields: tuple[str, ...]


def longest_token(tokenizer: Tokenizer) -> int:
    """Bytes of the longest token of a vocabulary: no prompt has fewer tokens than its length over this."""
    return max(len(tokenizer.token_bytes(token_id)) for token_id in range(tokenizer.vocab_size))


def prepare_completion(body: bytes, model: ServedModel) -> PreparedRequest:
    """Read the body of `/v1/completions`. Raises ApiError for what is wrong with it."""
    request = parse_body(CompletionRequest, body)
    _check_common(request, model)
    prompts = []
    for prompt in request.prompt:
        token_ids = _prompt_tokens(prompt, model)
        echo = _echoed_text(prompt, model) if request.echo else None
        max_tokens = _max_tokens(request, len(token_ids), model, "prompt", DEFAULT_MAX_TOKENS)
        params = _sampling_params(request, model, max_tokens, request.logprobs, echo=bool(request.echo))
        prompts.append(PreparedPrompt(token_ids, echo, params))
    return _prepared(request, model, prompts, request.logprobs)


def prepare_chat(body: bytes, model: ServedModel) -> PreparedRequest:
    """Read the body of `/v1/chat/completions` and write it out with the model's template. Raises ApiError."""
    request = parse_body(ChatCompletionRequest, body)
    _check_common(request, model)
    template = model.tokenizer.chat_template
    if template is None:
        raise InvalidRequest(f"The model {model.names[0]} has no chat template; use /v1/completions.", "messages")
    try:
        text = template.render([message.for_template() for message in request.messages])
    except ChatTemplateError as error:
        raise InvalidRequest(f"The model's chat template refuses these messages: {error}", "messages") from None
    token_ids = _encode(text, model, "messages", add_special_tokens=False)
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    max_tokens = _max_tokens(request, len(token_ids), model, "messages", model.max_model_len)
    prompt = PreparedPrompt(token_ids, None, _sampling_params(request, model, max_tokens, logprobs, echo=False))
    return _prepared(request, model, [prompt], logprobs)


def _prepared(
    request: GenerationFields, model: ServedModel, prompts: list[PreparedPrompt], logprobs: int | None
) -> PreparedRequest:
    n = request.n or 1
    num_answers = n * len(prompts)
    if sum(map(len, request.stop)) * num_answers > _MAX_STOP_CHARS:
        raise InvalidRequest(f"The stop strings are too long for a request for {num_answers} answers.", "stop")
    if logprobs is not None:
        _check_num_logprobs(prompts, n, logprobs, request.wanted_tokens or 0)
    return PreparedRequest(
        model=request.model or model.names[0],
        prompts=tuple(prompts),
        n=n,
        stop=request.stop,
        logprobs=logprobs,
        stream=bool(request.stream),
        include_usage=request.include_usage,
        return_token_ids=bool(request.return_token_ids),
        ignored_fields=tuple(request.ignored_fields()),
    )


def _check_num_logprobs(prompts: list[PreparedPrompt], n: int, logprobs: int, wanted_tokens: int) -> None:
    """Bound what the caller asks for; an answer that may fill the window by default comes slowly, token by token."""
    num_tokens = n * sum(wanted_tokens + (0 if prompt.echo is None else len(prompt.token_ids)) for prompt in prompts)
    num_logprobs = num_tokens * (logprobs + 1)
    if num_logprobs > _MAX_LOGPROBS_OF_REQUEST:
        raise InvalidRequest(
            f"The answer may have {num_tokens} tokens and {num_logprobs} log-probabilities, of which one "
            f"request gets at most {_MAX_LOGPROBS_OF_REQUEST}. Ask for fewer logprobs (in a chat: top_logprobs), a "
            "smaller max_tokens, fewer answers (n), or fewer prompts, or leave out echo.",
            "logprobs",
        )


def _check_common(request: GenerationFields, model: ServedModel) -> None:
    if request.model is not None and request.model not in model.names:
        raise ModelNotFound(f"The model {request.model[:256]!r} is not served here; {model.names[0]!r} is.", "model")
    _check_token_ids(request.stop_token_ids, "stop_token_ids", model)


def _check_token_ids(token_ids: tuple[int, ...], param: str, model: ServedModel) -> None:
    unknown = _id_without_embedding(token_ids, model)
    if unknown is not None:
        shown = str(unknown)[:20]
        raise InvalidRequest(f"{param} has the token id {shown}; ids go from 0 to {model.vocab_size - 1}.", param)


def _id_without_embedding(token_ids: tuple[int, ...], model: ServedModel) -> int | None:
    extremes = (min(token_ids), max(token_ids)) if token_ids else ()
    return next((extreme for extreme in extremes if not 0 <= extreme < model.vocab_size), None)


def _prompt_tokens(prompt: PromptField, model: ServedModel) -> tuple[int, ...]:
    if isinstance(prompt, str):
        return _encode(prompt, model, "prompt", add_special_tokens=True)
    _check_window(len(prompt), model, "prompt")
    _check_token_ids(prompt, "prompt", model)
    return prompt


def _encode(text: str, model: ServedModel, param: str, *, add_special_tokens: bool) -> tuple[int, ...]:
    # Before the tokenizer spends seconds on megabytes that cannot fit.
    _check_window(len(text) // model.longest_token, model, param, "at least ")
    try:
        token_ids = tuple(model.tokenizer.encode(text, add_special_tokens=add_special_tokens))
    except TokenizerError as error:
        raise InvalidRequest(f"{param} cannot be tokenised: {error}", param) from None
    if not token_ids:
        raise InvalidRequest(f"{param} has no tokens.", param)
    _check_window(len(token_ids), model, param)
    # Special tokens for what a model was not trained to read, such as images, may lie past its embeddings.
    unknown = _id_without_embedding(token_ids, model)
    if unknown is not None:
        shown = model.tokenizer.token_text(unknown)[:_MAX_SHOWN_TOKEN]
        raise InvalidRequest(f"{param} contains a token, {shown!r}, that the model has no embedding for.", param)
    return token_ids


def _echoed_text(prompt: PromptField, model: ServedModel) -> str:
    return prompt if isinstance(prompt, str) else model.tokenizer.decode(prompt, skip_special_tokens=True)


def _check_window(num_tokens: int, model: ServedModel, param: str, qualifier: str = "") -> None:
    if num_tokens > model.max_model_len:
        raise ContextLengthExceeded(
            f"{param} has {qualifier}{num_tokens} tokens; the model's window is {model.max_model_len}.", param
        )


def _max_tokens(request: GenerationFields, num_prompt: int, model: ServedModel, param: str, default: int) -> int:
    """The most tokens to generate: what is asked for, or the default as far as the window allows it."""
    room = model.max_model_len - num_prompt
    wanted = request.wanted_tokens
    if wanted is None:
        if room == 0:
            raise ContextLengthExceeded(
                f"{param} has {num_prompt} tokens and fills the model's window of {model.max_model_len}: "
                "there is no room for an answer.",
                param,
            )
        return min(default, room)
    if wanted > room:
        raise ContextLengthExceeded(
            f"{param} has {num_prompt} tokens and max_tokens is {wanted}, together {num_prompt + wanted}; "
            f"the model's window is {model.max_model_len}, which leaves {room} for the answer.",
            "max_tokens" if request.max_tokens is not None else "max_completion_tokens",
        )
    return wanted


def _sampling_params(
    request: GenerationFields, model: ServedModel, max_tokens: int, logprobs: int | None, *, echo: bool
) -> SamplingParams:
    temperature = 1.0 if request.temperature is None else request.temperature
    top_k = max(0, request.top_k or 0)
    seed = secrets.randbits(63) if request.seed is None else request.seed & (2**63 - 1)
    return SamplingParams(
        max_tokens=max_tokens,
        n=request.n or 1,
        temperature=0.0 if temperature < _GREEDY_BELOW else temperature,
        top_k=top_k if top_k < model.vocab_size else 0,
        top_p=1.0 if request.top_p is None else request.top_p,
        min_p=request.min_p or 0.0,
        seed=seed,
        stop_token_ids=_stop_token_ids(request, model),
        ignore_eos=bool(request.ignore_eos),
        logprobs=logprobs,
        prompt_logprobs=logprobs if echo else None,
    )


def _stop_token_ids(request: GenerationFields, model: ServedModel) -> tuple[int, ...]:
    """The caller's, and the tokenizer's own: a chat fine-tune often ends its turns with a token that only they know."""
    own = () if request.ignore_eos else model.tokenizer.eos_token_ids
    return tuple(dict.fromkeys((*request.stop_token_ids, *(i for i in own if i < model.vocab_size))))
