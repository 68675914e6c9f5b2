"""From the body of a request to what the engine takes: checked against the model, tokenised, with defaults.

Chats are prepared in server/chat_preparation.py. Pure functions that may take a while: they run in a thread, off the
event loop. Knows no HTTP and no engine process.
"""

from dataclasses import dataclass

from scheduler.sampling_params import SamplingParams
from server.errors import InvalidRequest
from server.protocol.completions import DEFAULT_MAX_TOKENS, CompletionRequest
from server.protocol.fields import GenerationFields, parse_body
from server.protocol.prompts import Prompt
from server.sampling_fields import max_tokens_of, sampling_params_of
from server.served_model import ServedModel
from server.tool_parsers.answer_form import ALL_CONTENT, AnswerForm

_MAX_STOP_CHARS = 1 << 18  # of one request, over all its answers: each of them looks for the stop strings by itself
# Log-probabilities of one request: those of every token that it may answer with, and of the likeliest beside it. Each
# takes some 150 bytes and 2 µs of the edge, so this is 300 MB and a few seconds at worst. Enough for 128 whole windows
# of 8192 tokens with echo and logprobs 1, which is how evaluations ask, and for 12 of them with logprobs 20.
_MAX_LOGPROBS_OF_REQUEST = 1 << 21


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
    answer_form: AnswerForm = ALL_CONTENT  # of chats


def prepare_completion(body: bytes, model: ServedModel) -> PreparedRequest:
    """Read the body of `/v1/completions`. Raises ApiError for what is wrong with it."""
    request = parse_body(CompletionRequest, body)
    model.check_name(request.model)
    prompts = []
    for prompt in request.prompt:
        token_ids = model.prompt_tokens(prompt, "prompt")
        echo = _echoed_text(prompt, model) if request.echo else None
        max_tokens = max_tokens_of(request, len(token_ids), model, "prompt", DEFAULT_MAX_TOKENS)
        params = sampling_params_of(request, model, max_tokens, request.logprobs, echo=bool(request.echo))
        prompts.append(PreparedPrompt(token_ids, echo, params))
    return prepared_request(request, model, prompts, request.logprobs)


def prepared_request(
    request: GenerationFields, model: ServedModel, prompts: list[PreparedPrompt], logprobs: int | None
) -> PreparedRequest:
    """What all kinds of requests for text have in common. Raises InvalidRequest for one that asks for too much."""
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
        include_usage=bool(request.streaming.include_usage),
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


def _echoed_text(prompt: Prompt, model: ServedModel) -> str:
    return prompt if isinstance(prompt, str) else model.tokenizer.decode(prompt, skip_special_tokens=True)
