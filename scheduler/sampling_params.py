"""What a request asks of the sampler and of the stop checks, already validated by the edge. Frozen; no torch."""

from dataclasses import dataclass
from typing import Literal

StructuredOutputKind = Literal["json_object", "json_schema", "regex", "choice", "grammar"]
Pooling = Literal["mean", "last"]


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """The language that an answer must belong to."""

    kind: StructuredOutputKind
    value: str = ""  # a JSON schema; a regular expression; a JSON list of strings; a Lark grammar
    whitespace: str | None = None  # between the tokens of JSON: a regular expression; "" = none; None = the engine's
    param: str = "structured_outputs"  # the field that asks for it: a refusal names it


@dataclass(frozen=True, slots=True)
class BeamSearch:
    """Search for the likeliest answers instead of sampling them; the meanings are those of transformers."""

    width: int  # >= 1, live beams; at least the n answers that are wanted
    length_penalty: float = 1.0  # an answer's log-probability is divided by its generated length to this power
    early_stopping: bool = False  # end as soon as `width` answers are complete, whatever may still come


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling and stopping of one request; every sequence of the request shares it.

    `seed` is always set: the edge draws one for a request that brings none, so that a preempted sequence
    samples the same tokens again. A token is drawn from (seed, sequence index, position) alone.
    """

    max_tokens: int  # >= 0; 0 computes the prompt only
    n: int = 1
    temperature: float = 1.0  # 0 = greedy
    top_k: int = 0  # 0 = off
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0  # 0 <= seed < 2**63
    stop_token_ids: tuple[int, ...] = ()  # end the sequence, besides the model's own end tokens
    ignore_eos: bool = False  # the model's own end tokens do not end the sequence
    logprobs: int | None = None  # None = none; k = the sampled token's and the k best
    prompt_logprobs: int | None = None  # the same for each prompt token
    min_tokens: int = 0  # before them no end token and no stop token can be sampled
    presence_penalty: float = 0.0  # subtracted from the logit of a token that was generated
    frequency_penalty: float = 0.0  # the same, times how often it was
    repetition_penalty: float = 1.0  # > 0; divides positive logits, multiplies negative ones, of tokens that occurred
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its logit)
    allowed_token_ids: tuple[int, ...] = ()  # none other can be sampled; () = all can
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that are never completed
    structured_output: StructuredOutput | None = None
    beam_search: BeamSearch | None = None  # then temperature, top_k, top_p, min_p and seed have no meaning
    pooling: Pooling | None = None  # no answer, but the prompt's normed hidden states: their mean, or the last

    @property
    def looks_back(self) -> bool:
        """Sampling depends on the tokens before, so their ids must be known on the host when a step is built."""
        return bool(
            self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1.0
            or self.bad_words
            or self.structured_output
            or self.beam_search
        )
