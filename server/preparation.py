"""From the body of a request to what the engine takes: checked against the model, tokenised, with defaults.

Chats are prepared in server/chat_preparation.py. Pure functions that may take a while: they run off the event
loop, for a large body in another process (see server/preparer.py). Knows no HTTP and no engine process.
"""

from dataclasses import dataclass, field, replace

from scheduler.sampling_params import SamplingParams
from server.beam_fields import with_beam_search
from server.errors import InvalidRequest
from server.infilling import prompt_with_gap
from server.protocol.completions import DEFAULT_MAX_TOKENS, CompletionRequest
from server.protocol.fields import GenerationFields, parse_body
from server.protocol.prompts import Prompt
from server.request_bounds import check_bounds
from server.sampling_fields import max_tokens_of, sampling_params_of, seed_of
from server.served_model import ServedModel
from server.service_terms import ServiceTerms, terms_of
from server.token_ids import TokenIds
from server.tool_parsers.answer_form import ALL_CONTENT, AnswerForm
from server.truncation import PromptTokens, prompt_tokens_of


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """One prompt, ready for the engine."""

    token_ids: TokenIds
    echo: str | None  # the prompt's text, if it shall stand before each answer
    params: SamplingParams
    echo_spells_special_tokens: bool = False  # those that the caller wrote; others come from the tokenizer
    num_truncated_tokens: int = 0  # cut off at its front, as asked


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
    prompt_logprobs: int | None = None  # the same as logprobs for each prompt token, apart from an echo
    include_stop: bool = False  # in the text: a stop string, or a stop token as far as it is shown
    skip_special_tokens: bool = True
    tokens_as_ids: bool = False  # log-probabilities name tokens by their ids
    continuous_usage: bool = False  # a stream counts tokens in each chunk
    include_obfuscation: bool = False  # a stream's chunks are filled up to sizes that tell less
    include_timings: bool = False
    terms: ServiceTerms = field(default_factory=ServiceTerms)
    stop_token_ids: tuple[int, ...] = ()  # the caller's; an answer tells which of them ended it

    @property
    def num_sequences(self) -> int:
        """Answers that are generated to each prompt; more than n where the best of them are wanted."""
        return self.prompts[0].params.n

    @property
    def num_truncated_tokens(self) -> int:
        """Prompt tokens that were cut off, as asked."""
        return sum(prompt.num_truncated_tokens for prompt in self.prompts)


def prepare_completion(body: bytes, model: ServedModel) -> PreparedRequest:
    """Read the body of `/v1/completions`. Raises ApiError for what is wrong with it."""
    request = parse_body(CompletionRequest, body)
    model.check_name(request.model)
    prompts: list[PreparedPrompt] = []
    for prompt in request.prompt:
        tokens = _prompt_tokens(request, prompt, model)
        max_tokens = max_tokens_of(request, len(tokens.token_ids), model, "prompt", DEFAULT_MAX_TOKENS)
        if prompts:  # lists and grammars are read once
            params = replace(prompts[0].params, max_tokens=max_tokens, seed=seed_of(request))
        else:
            params = _params(request, model, max_tokens)
        echo = _echoed_text(request, prompt, tokens, model) if request.echo else None
        spells = isinstance(prompt, str) and not tokens.num_truncated
        prompts.append(PreparedPrompt(TokenIds(tokens.token_ids), echo, params, spells, tokens.num_truncated))
    return prepared_request(request, model, prompts, request.logprobs)


def prepared_request(
    request: GenerationFields, model: ServedModel, prompts: list[PreparedPrompt], logprobs: int | None
) -> PreparedRequest:
    """What all kinds of requests for text have in common. Raises InvalidRequest for one that asks for too much."""
    check_bounds(request, prompts, logprobs)
    _refuse_min_tokens_of_a_form(prompts[0].params)
    streaming = request.streaming
    return PreparedRequest(
        model=request.model or model.names[0],
        prompts=tuple(prompts),
        n=request.n or 1,
        stop=request.stop,
        logprobs=logprobs,
        stream=bool(request.stream),
        include_usage=bool(streaming.include_usage),
        return_token_ids=bool(request.return_token_ids),
        ignored_fields=tuple(request.ignored_fields()),
        prompt_logprobs=request.prompt_logprobs,
        include_stop=bool(request.include_stop_str_in_output),
        skip_special_tokens=request.skip_special_tokens is not False,
        tokens_as_ids=bool(request.return_tokens_as_token_ids),
        continuous_usage=bool(streaming.continuous_usage_stats),
        include_obfuscation=bool(streaming.include_obfuscation),
        include_timings=bool(request.timings_per_token),
        terms=terms_of(request),
        stop_token_ids=request.stop_token_ids,
    )


def _refuse_min_tokens_of_a_form(params: SamplingParams) -> None:
    """A number of tokens cannot be promised of an answer that ends where its form is complete."""
    form = params.structured_output
    if form is not None and params.min_tokens:
        raise InvalidRequest(
            f"min_tokens and {form.param} exclude each other: an answer ends where its form is complete.", "min_tokens"
        )


def _prompt_tokens(request: CompletionRequest, prompt: Prompt, model: ServedModel) -> PromptTokens:
    if request.suffix:
        prompt = prompt_with_gap(prompt, request.suffix, model)
    return prompt_tokens_of(
        request,
        model,
        prompt,
        "prompt",
        add_special_tokens=request.add_special_tokens is not False,
        max_tokens=DEFAULT_MAX_TOKENS,
    )


def _params(request: CompletionRequest, model: ServedModel, max_tokens: int) -> SamplingParams:
    params = sampling_params_of(request, model, max_tokens, request.logprobs, echo=bool(request.echo))
    params = with_beam_search(request, params)
    if request.num_sequences == params.n:
        return params
    # The best are found by the log-probabilities of their tokens.
    return replace(params, n=request.num_sequences, logprobs=request.logprobs or 0)


def _echoed_text(request: CompletionRequest, prompt: Prompt, tokens: PromptTokens, model: ServedModel) -> str:
    """A text as it came; tokens, be they the caller's or the rest of a text, as an answer would show them."""
    if isinstance(prompt, str) and not tokens.num_truncated:
        return prompt
    return model.tokenizer.decode(tokens.token_ids, skip_special_tokens=request.skip_special_tokens is not False)
