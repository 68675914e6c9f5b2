"""The likeliest next tokens of rows whose answers are searched for: what a beam search chooses among.

Chooses nothing, and knows no beams: each row brings its own candidates, under its own edits of the logits.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby

import torch

from kernels.model_ops.ops import ModelOps
from models.step_outputs import Candidates, to_host
from scheduler.sampling_params import SamplingParams


def num_candidates(params: SamplingParams, eos_token_ids: Sequence[int]) -> int:
    """How many of its likeliest tokens a row must bring.

    The `width` best continuations that go on may all be of one row, behind every token that would end it. The number
    depends on the request alone, for it decides in which order topk puts tokens that are equally likely.
    """
    assert params.beam_search is not None
    width = params.beam_search.width
    end_token_ids = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
    return max(2 * width, width + len(end_token_ids), params.logprobs or 0)


def wanted_candidates(num_candidates: Mapping[int, int], rows: Sequence[int]) -> list[tuple[int, int]]:
    """Of the rows that sample, those that bring candidates: (how many, place), those that bring as many together."""
    return sorted((num_candidates[row], place) for place, row in enumerate(rows) if row in num_candidates)


def launch_candidates(
    ops: ModelOps,
    logits: torch.Tensor,  # [num_sampled, vocab_size] float32, edited
    places: torch.Tensor,  # [num_wanted] int64, those of `wanted`, on the device
    wanted: list[tuple[int, int]],
) -> Candidates:
    """Rank each row's tokens by their log-probabilities under the softmax of its edited logits."""
    groups, start = [], 0
    for count, members in groupby(wanted, key=lambda want: want[0]):
        end = start + len(list(members))
        _, token_ids, best = ops.token_logprobs(logits[places[start:end]], None, min(count, logits.shape[-1]))
        groups.append((to_host(token_ids), to_host(best)))
        start = end
    return Candidates([place for _, place in wanted], groups)
