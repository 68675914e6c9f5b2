"""Chooses and ranks tokens in plain torch, vectorised over the rows of a step.

A row's token depends on its own logits and parameters alone: never on the batch it ran in. Knows no sequences.
"""

import torch

from kernels.sampling.sampling_batch import SamplingBatch

# Tokens of equal log-probability come in an order that depends on how many are asked for. The number asked for is
# therefore fixed, at the most that a request may want: a row's order must not depend on what other rows want.
_NUM_CANDIDATES = 20


def sample(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Choose one token for each row.

    The distribution is softmax(logits / temperature), cut by min_p, then top_k, then top_p, and drawn from by
    inverting its cumulative sum at `batch.uniform`.

    Args:
        logits: [num_rows, vocab_size] float32.
        batch: one entry per row.

    Returns:
        [num_rows] int64.
    """
    token_ids = logits.argmax(dim=-1)
    if batch.all_greedy:
        return token_ids
    rows = batch.temperature.nonzero().squeeze(-1)
    probs = torch.softmax(logits[rows] / batch.temperature[rows, None], dim=-1)
    probs = _keep_min_p(probs, batch.min_p[rows])
    probs = _keep_top_k(probs, batch.top_k[rows])
    probs = _keep_top_p(probs, batch.top_p[rows])
    token_ids[rows] = _draw(probs, batch.uniform[rows])
    return token_ids


def token_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor | None, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities of some tokens and of each row's best; see `kernels.model_ops.ops.ModelOps.token_logprobs`."""
    logprobs = torch.log_softmax(logits, dim=-1)
    num_candidates = max(num_top, _NUM_CANDIDATES) if num_top else 0
    top_logprobs, top_ids = logprobs.topk(min(num_candidates, logits.shape[-1]), dim=-1)
    chosen = logprobs[:0, 0] if token_ids is None else logprobs.gather(-1, token_ids[:, None]).squeeze(-1)
    return chosen, top_ids[:, :num_top], top_logprobs[:, :num_top]


def _keep_min_p(probs: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Drop tokens less likely than `min_p` times the likeliest."""
    if not min_p.any():
        return probs
    return probs.masked_fill(probs < min_p[:, None] * probs.amax(dim=-1, keepdim=True), 0.0)


def _keep_top_k(probs: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """Keep the `top_k` likeliest tokens, and what ties with the last of them."""
    rows = top_k.nonzero().squeeze(-1)
    if rows.numel() == 0:
        return probs
    k = top_k[rows].clamp(max=probs.shape[-1])
    best = probs[rows].topk(int(k.max()), dim=-1).values
    threshold = best.gather(-1, k[:, None] - 1)
    probs[rows] = probs[rows].masked_fill(probs[rows] < threshold, 0.0)
    return probs


def _keep_top_p(probs: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Keep the smallest set of likeliest tokens that holds `top_p` of the remaining mass, and ties with its last."""
    rows = (top_p < 1.0).nonzero().squeeze(-1)
    if rows.numel() == 0:
        return probs
    ordered = probs[rows].sort(dim=-1, descending=True).values
    mass = ordered.double().cumsum(dim=-1)
    # A token stays while the mass before it has not reached top_p; the likeliest always stays.
    num_kept = ((mass - ordered) < top_p[rows, None] * mass[:, -1:]).sum(dim=-1).clamp(min=1)
    threshold = ordered.gather(-1, num_kept[:, None] - 1)
    probs[rows] = probs[rows].masked_fill(probs[rows] < threshold, 0.0)
    return probs


def _draw(probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The first token at which the cumulative mass exceeds `uniform` of the whole."""
    mass = probs.double().cumsum(dim=-1)
    target = uniform[:, None] * mass[:, -1:]
    drawn = torch.searchsorted(mass, target, right=True).squeeze(-1)
    # Rounding may put the target at the very end; the last token with any mass is then the one.
    last = probs.shape[-1] - 1 - (probs > 0).flip(-1).to(torch.uint8).argmax(dim=-1)
    return torch.minimum(drawn, last)
