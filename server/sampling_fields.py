"""From the fields of a request to what the engine samples by: checked against the model, with defaults.

Knows no HTTP and no prompt.
"""

import secrets

from scheduler.sampling_params import SamplingParams
from server.errors import ContextLengthExceeded, InvalidRequest
from server.protocol.fields import GenerationFields
from server.protocol.structured_outputs import structured_output_of
from server.served_model import ServedModel

_GREEDY_BELOW = 1e-5  # logits divided by less than this overflow; vLLM draws the same line


def max_tokens_of(request: GenerationFields, num_prompt: int, model: ServedModel, param: str, default: int) -> int:
    """The most tokens to generate: what is asked for, or the default as far as the window allows it."""
    room = model.max_model_len - num_prompt
    wanted = request.wanted_tokens
    if wanted is None and room == 0 and default > 0:
        raise ContextLengthExceeded(
            f"{param} has {num_prompt} tokens and fills the model's window of {model.max_model_len}: "
            "there is no room for an answer.",
            param,
        )
    if wanted is not None and wanted > room:
        raise ContextLengthExceeded(
            f"{param} has {num_prompt} tokens and max_tokens is {wanted}, together {num_prompt + wanted}; "
            f"the model's window is {model.max_model_len}, which leaves {room} for the answer.",
            "max_tokens" if request.max_tokens is not None else "max_completion_tokens",
        )
    max_tokens = min(default, room) if wanted is None else wanted
    if (request.min_tokens or 0) > max_tokens:
        raise InvalidRequest(
            f"min_tokens is {request.min_tokens}, but the answer may have {max_tokens} tokens at most (max_tokens).",
            "min_tokens",
        )
    return max_tokens


def sampling_params_of(
    request: GenerationFields, model: ServedModel, max_tokens: int, logprobs: int | None, *, echo: bool
) -> SamplingParams:
    """How to sample one answer of at most `max_tokens` tokens. Raises InvalidRequest for a token id that is none.

    Once a request: it checks and tokenises lists. Its further prompts differ in `max_tokens` and `seed` alone.
    """
    temperature = 1.0 if request.temperature is None else request.temperature
    top_k = max(0, request.top_k or 0)
    stop_token_ids = _stop_token_ids(request, model)
    return SamplingParams(
        max_tokens=max_tokens,
        n=request.n or 1,
        temperature=0.0 if temperature < _GREEDY_BELOW else temperature,
        top_k=top_k if top_k < model.vocab_size else 0,
        top_p=1.0 if request.top_p is None else request.top_p,
        min_p=request.min_p or 0.0,
        seed=seed_of(request),
        stop_token_ids=stop_token_ids,
        ignore_eos=bool(request.ignore_eos),
        logprobs=logprobs,
        prompt_logprobs=_prompt_logprobs(request, logprobs if echo else None),
        min_tokens=request.min_tokens or 0,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=1.0 if request.repetition_penalty is None else request.repetition_penalty,
        logit_bias=_logit_bias(request, model),
        allowed_token_ids=_allowed_token_ids(request, model, stop_token_ids),
        bad_words=_bad_words(request, model),
        structured_output=structured_output_of(
            response_format=request.response_format,
            structured_outputs=request.structured_outputs,
            guided_json=request.guided_json,
            guided_regex=request.guided_regex,
            guided_choice=request.guided_choice,
            guided_grammar=request.guided_grammar,
            guided_whitespace_pattern=request.guided_whitespace_pattern,
            grammar=request.grammar,
            json_schema=request.json_schema,
        ),
    )


def seed_of(request: GenerationFields) -> int:
    """The caller's, or one drawn anew at each call: without a seed, and for the -1 of vLLM and llama.cpp."""
    return secrets.randbits(63) if request.seed is None or request.seed == -1 else request.seed & (2**63 - 1)


def _prompt_logprobs(request: GenerationFields, echoed: int | None) -> int | None:
    """As many as the more curious of two askers wants."""
    wanted = [count for count in (request.prompt_logprobs, echoed) if count is not None]
    return max(wanted, default=None)


def _stop_token_ids(request: GenerationFields, model: ServedModel) -> tuple[int, ...]:
    """The caller's, and the tokenizer's own: a chat fine-tune often ends its turns with a token that only they know."""
    model.check_token_ids(request.stop_token_ids, "stop_token_ids")
    own = () if request.ignore_eos else model.tokenizer.eos_token_ids
    return tuple(dict.fromkeys((*request.stop_token_ids, *(i for i in own if i < model.vocab_size))))


def _logit_bias(request: GenerationFields, model: ServedModel) -> tuple[tuple[int, float], ...]:
    model.check_token_ids(tuple(token_id for token_id, _ in request.logit_bias), "logit_bias")
    return request.logit_bias


def _allowed_token_ids(
    request: GenerationFields, model: ServedModel, stop_token_ids: tuple[int, ...]
) -> tuple[int, ...]:
    allowed = request.allowed_token_ids
    model.check_token_ids(allowed, "allowed_token_ids")
    if allowed and request.min_tokens and set(allowed) <= set(stop_token_ids):
        raise InvalidRequest(
            "allowed_token_ids has only tokens that end an answer, which min_tokens forbids.", "allowed_token_ids"
        )
    return allowed


def _bad_words(request: GenerationFields, model: ServedModel) -> tuple[tuple[int, ...], ...]:
    """Each word as it is spelled at the beginning of a text and after a space.

    Unlike vLLM, which leaves it out then, also where a word after a space takes fewer tokens or more.
    """
    spellings: list[tuple[int, ...]] = []
    for word in request.bad_words:
        bare = word.lstrip()
        first = model.tokenise(bare or word, "bad_words", add_special_tokens=False)
        after_space = model.tokenise(f" {bare}", "bad_words", add_special_tokens=False) if bare else first
        # Where the second ends with the first, whoever completes it completes the first as well.
        spellings += [first] if after_space[-len(first) :] == first else [first, after_space]
    model.check_token_ids(tuple(token_id for spelling in spellings for token_id in spelling), "bad_words")
    return tuple(dict.fromkeys(filter(None, spellings)))
