"""What a request asks of the sampler and of the stop checks, already validated by the edge. Frozen; no torch."""

from dataclasses import dataclass


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
