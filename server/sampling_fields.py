"""From the fields of a request to what the engine samples by: checked against the model, with defaults.

Knows no HTTP and no prompt.
"""

import secrets

from scheduler.sampling_params import SamplingParams
from server.errors import ContextLengthExceeded
from server.protocol.fields import GenerationFields
from server.served_model import ServedModel

_GREEDY_BELOW = 1e-5  # logits divided by less than this overflow; vLLM draws the same line


def max_tokens_of(request: GenerationFields, num_prompt: int, model: ServedModel, param: str, default: int) -> int:
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


def sampling_params_of(
    request: GenerationFields, model: ServedModel, max_tokens: int, logprobs: int | None, *, echo: bool
) -> SamplingParams:
    """How to sample one answer of at most `max_tokens` tokens. Raises InvalidRequest for a token id that is none."""
    model.check_token_ids(request.stop_token_ids, "stop_token_ids")
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
