"""How much one request may ask for in total, over all its prompts and answers. Knows no model and no engine."""

from collections.abc import Sequence
from typing import Protocol

from scheduler.sampling_params import SamplingParams
from server.errors import InvalidRequest
from server.protocol.fields import GenerationFields

_MAX_TOKENS_OF_REQUEST = 1 << 22  # that it may be answered with; 32 whole windows of 131,072 tokens
# Log-probabilities of one request: those of every token that it may answer with, and of the likeliest beside it. Each
# takes some 150 bytes and 2 µs of the edge, so this is 300 MB and a few seconds at worst. Enough for 128 whole windows
# of 8192 tokens with echo and logprobs 1, which is how evaluations ask, and for 12 of them with logprobs 20.
_MAX_LOGPROBS_OF_REQUEST = 1 << 21
# Numbers and characters in the lists and schemas that go to the engine with each prompt; 1 to 5 bytes each.
_MAX_LISTED = 1 << 22


class _Prompt(Protocol):
    @property
    def token_ids(self) -> Sequence[int]: ...

    @property
    def echo(self) -> str | None: ...

    @property
    def params(self) -> SamplingParams: ...


def check_bounds(request: GenerationFields, prompts: Sequence[_Prompt], logprobs: int | None) -> None:
    """Bound what the caller asks for; an answer that may fill the window by default comes slowly, token by token.

    Raises:
        InvalidRequest: naming the field that multiplies most.
    """
    params = prompts[0].params  # the prompts differ in seed and max_tokens alone
    num_sequences = params.n * len(prompts)
    num_tokens = num_sequences * (request.wanted_tokens or 0)
    if num_tokens > _MAX_TOKENS_OF_REQUEST:
        raise InvalidRequest(
            f"The request may be answered with {num_tokens} tokens: {len(prompts)} prompts, {params.n} answers to each "
            f"of {request.wanted_tokens} tokens. One request gets at most {_MAX_TOKENS_OF_REQUEST}.",
            "max_tokens" if request.max_tokens is not None else "max_completion_tokens",
        )
    _check_num_logprobs(request, prompts, logprobs, num_tokens)
    _check_lists(params, len(prompts))


def _check_num_logprobs(
    request: GenerationFields, prompts: Sequence[_Prompt], logprobs: int | None, num_tokens: int
) -> None:
    n = request.n or 1
    num_prompt_tokens = n * sum(len(prompt.token_ids) for prompt in prompts)
    num_logprobs = 0
    if logprobs is not None:
        num_logprobs += (num_tokens + (0 if prompts[0].echo is None else num_prompt_tokens)) * (logprobs + 1)
    if request.prompt_logprobs is not None:
        num_logprobs += num_prompt_tokens * (request.prompt_logprobs + 1)
    if num_logprobs > _MAX_LOGPROBS_OF_REQUEST:
        raise InvalidRequest(
            f"The answer may have {num_logprobs} log-probabilities, of which one request gets at most "
            f"{_MAX_LOGPROBS_OF_REQUEST}. Ask for fewer logprobs (in a chat: top_logprobs) or prompt_logprobs, a "
            "smaller max_tokens, fewer answers (n), or fewer prompts, or leave out echo.",
            "logprobs" if logprobs is not None else "prompt_logprobs",
        )


def _check_lists(params: SamplingParams, num_prompts: int) -> None:
    sizes = {
        "allowed_token_ids": len(params.allowed_token_ids),
        "logit_bias": len(params.logit_bias),
        "bad_words": sum(map(len, params.bad_words)),
        "stop_token_ids": len(params.stop_token_ids),
    }
    if params.structured_output is not None:
        sizes[params.structured_output.param] = len(params.structured_output.value)
    largest = max(sizes, key=lambda name: sizes[name])
    if sum(sizes.values()) * num_prompts > _MAX_LISTED:
        raise InvalidRequest(f"{largest} is too large for a request with {num_prompts} prompts.", largest)
