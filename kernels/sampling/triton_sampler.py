"""Chooses tokens in one Triton kernel, one program a row, without sorting and without waiting for the device.

The semantics are those of torch_sampler.py. Knows no sequences.
"""
# A kernel's constants are upper case, and its pointers have no type to annotate.
# ruff: noqa: ANN001, ANN201, N803

import torch
import triton
import triton.language as tl

from kernels.sampling.sampling_batch import SamplingBatch
from kernels.triton_math import LOG2E

MIN_WEIGHT = tl.constexpr(2.0**-126)  # of a token relative to the likeliest: the smallest normal float32
MIN_TEMPERATURE = tl.constexpr(1e-30)  # its reciprocal is finite; far below it only the likeliest token has mass
TILE = 2048
NUM_WARPS = 8
NUM_STAGES = 5  # tiles in flight: one program reads its row alone, and must keep enough of it on the way


@triton.jit
def load_exponents(logits, begin, vocab_size, best, scale, floor, TILE: tl.constexpr):
    """Log2 of each token's weight relative to the likeliest, and which tokens are not below the floor, [TILE]."""
    token = begin + tl.arange(0, TILE)
    logit = tl.load(logits + token, mask=token < vocab_size, other=float("-inf"))
    exponent = (logit - best) * scale
    return exponent, exponent >= floor


@triton.jit
def smallest_kept(
    logits, vocab_size, best, scale, floor, target, BY_MASS: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr
):
    """The smallest exponent of a token above which there are fewer than `target` tokens, or less than that mass.

    Bisection. Each pass moves a bound to an exponent that occurs, so the passes are about as many as it takes to
    tell the threshold from its neighbours, and never more than there are different exponents.
    """
    low = floor  # the threshold is not below
    high = 0.0  # nothing is above the likeliest token: it is always kept
    while low < high:
        middle = low + (high - low) * 0.5
        middle = tl.where(middle < high, middle, low)
        above = tl.zeros([TILE], tl.float32)
        highest_below = tl.full([TILE], float("-inf"), tl.float32)
        lowest_above = tl.full([TILE], float("inf"), tl.float32)
        for begin in tl.range(0, vocab_size, TILE, num_stages=STAGES):
            exponent, is_kept = load_exponents(logits, begin, vocab_size, best, scale, floor, TILE)
            is_above = exponent > middle
            if BY_MASS:
                above += tl.where(is_above & is_kept, tl.exp2(exponent), 0.0)
            else:
                above += tl.where(is_above & is_kept, 1.0, 0.0)
            lowest_above = tl.minimum(lowest_above, tl.where(is_above & is_kept, exponent, float("inf")))
            highest_below = tl.maximum(highest_below, tl.where(is_kept & (exponent <= middle), exponent, float("-inf")))
        if tl.sum(above, 0) < target:
            high = tl.maximum(tl.max(highest_below, 0), low)
        else:
            low = tl.min(lowest_above, 0)
    return high


@triton.jit
def sample_kernel(
    logits,  # [num_rows, vocab_size] float32
    temperature,  # [num_rows] float32; 0 = greedy
    top_k,  # [num_rows] int64; 0 = off
    top_p,  # [num_rows] float32; 1 = off
    min_p,  # [num_rows] float32; 0 = off
    uniform,  # [num_rows] float64 in [0, 1)
    token_ids,  # [num_rows] int64
    vocab_size,
    logits_stride,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One row: the likeliest token, the cuts as one threshold on the logits, and the inverse of what is left."""
    # grid: (num_rows,)
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_stride
    offset = tl.arange(0, TILE)

    best_of_lane = tl.full([TILE], float("-inf"), tl.float32)
    token_of_lane = offset
    for begin in tl.range(0, vocab_size, TILE, num_stages=STAGES):
        logit = tl.load(logits + begin + offset, mask=begin + offset < vocab_size, other=float("-inf"))
        token_of_lane = tl.where(logit > best_of_lane, begin + offset, token_of_lane)
        best_of_lane = tl.maximum(best_of_lane, logit)
    best = tl.max(best_of_lane, 0)
    token_id = tl.min(tl.where(best_of_lane == best, token_of_lane, vocab_size - 1), 0)  # ties: the lowest
    row_temperature = tl.load(temperature + row)
    if row_temperature == 0.0:
        tl.store(token_ids + row, token_id.to(tl.int64))
        return

    scale = LOG2E / tl.maximum(row_temperature, MIN_TEMPERATURE)
    floor = tl.log2(tl.maximum(tl.load(min_p + row), MIN_WEIGHT))
    k = tl.load(top_k + row)
    if (k > 0) & (k < vocab_size):
        floor = smallest_kept(logits, vocab_size, best, scale, floor, k.to(tl.float32), False, TILE, STAGES)
    p = tl.load(top_p + row)
    if p < 1.0:
        mass_of_lane = tl.zeros([TILE], tl.float32)
        for begin in tl.range(0, vocab_size, TILE, num_stages=STAGES):
            exponent, is_kept = load_exponents(logits, begin, vocab_size, best, scale, floor, TILE)
            mass_of_lane += tl.where(is_kept, tl.exp2(exponent), 0.0)
        target = p * tl.sum(mass_of_lane, 0)
        floor = smallest_kept(logits, vocab_size, best, scale, floor, target, True, TILE, STAGES)

    total = tl.full([], 0.0, tl.float64)
    for begin in tl.range(0, vocab_size, TILE, num_stages=STAGES):
        exponent, is_kept = load_exponents(logits, begin, vocab_size, best, scale, floor, TILE)
        total += tl.sum(tl.where(is_kept, tl.exp2(exponent), 0.0), 0).to(tl.float64)
    target = tl.load(uniform + row) * total

    # The last tile with mass that begins before the target, and the mass before it.
    drawn_tile = -1
    mass_before = tl.full([], 0.0, tl.float64)
    mass = tl.full([], 0.0, tl.float64)
    for begin in tl.range(0, vocab_size, TILE, num_stages=STAGES):
        exponent, is_kept = load_exponents(logits, begin, vocab_size, best, scale, floor, TILE)
        next_mass = mass + tl.sum(tl.where(is_kept, tl.exp2(exponent), 0.0), 0).to(tl.float64)
        is_drawn = (mass <= target) & (next_mass > mass)
        drawn_tile = tl.where(is_drawn, begin, drawn_tile)
        mass_before = tl.where(is_drawn, mass, mass_before)
        mass = next_mass

    if drawn_tile >= 0:  # else no token has mass, of a row without a finite logit: the likeliest stays
        exponent, is_kept = load_exponents(logits, drawn_tile, vocab_size, best, scale, floor, TILE)
        weight = tl.where(is_kept, tl.exp2(exponent), 0.0)
        # A running sum adds in another order than the sum of the tile: it may step over tokens without mass, which
        # must not be drawn, and end below the target, which then means the tile's last token.
        is_past = (tl.cumsum(weight, 0) > (target - mass_before).to(tl.float32)) & (weight > 0.0)
        first_past = tl.min(tl.where(is_past, drawn_tile + offset, vocab_size), 0)
        token_id = tl.minimum(first_past, tl.max(tl.where(weight > 0.0, drawn_tile + offset, -1), 0))
    tl.store(token_ids + row, token_id.to(tl.int64))


def sample(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Choose one token for each row; see `kernels.sampling.torch_sampler.sample`.

    The cumulative distribution is within 1e-6 of the exact one; tokens whose probabilities differ by less than the
    rounding of float32 tie at a cut.

    Args:
        logits: [num_rows, vocab_size] float32.
        batch: one entry per row.

    Returns:
        [num_rows] int64.
    """
    if batch.all_greedy:
        return logits.argmax(dim=-1)
    num_rows, vocab_size = logits.shape
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return token_ids
    assert logits.stride(1) == 1
    sample_kernel[(num_rows,)](
        logits,
        batch.temperature,
        batch.top_k,
        batch.top_p,
        batch.min_p,
        batch.uniform,
        token_ids,
        vocab_size,
        logits.stride(0),
        TILE=TILE,
        STAGES=NUM_STAGES,
        num_warps=NUM_WARPS,
        enable_fp_fusion=True,
    )
    return token_ids
