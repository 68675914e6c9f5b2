"""Runs a decoder over one prompt and a few tokens that follow it greedily, and keeps what a person may want to see.

That is what goes into each layer's attention, its queries, keys and values before and after the rotary embedding, and
what each query makes of the keys. Keys and values lie in a paged cache and are read from there. Knows no tokenizer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from kernels.attention.metadata import AttentionMetadata, AttentionParams, KVLayer, Rotation
from kernels.attention.rotation import rotate_heads
from kernels.attention.torch_gather import TorchBackend
from models.config import ModelConfig
from models.decoder import Decoder
from models.forward_batch import ForwardBatch
from paged_cache.kv_cache import KVCache
from paged_cache.spec import KVCacheSpec

NUM_CANDIDATES = 5  # next tokens that are told of, with their probabilities
HABITS = ("first", "itself", "previous", "repeated")  # where a head may look: see Inspection.habits
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class InspectedStep:
    """One pass through the model: the whole prompt, or one token."""

    first_position: int  # of the tokens that it computed; all before them were read from the cache
    num_tokens: int  # that it computed
    candidates: tuple[tuple[int, float], ...]  # the likeliest next tokens and their probabilities, likeliest first

    @property
    def next_token_id(self) -> int:
        """The token that greedy decoding takes."""
        return self.candidates[0][0]


@dataclass(frozen=True, slots=True)
class HeadView:
    """What one query head of one layer did, and the KV head that it shares with others of its group."""

    weights: torch.Tensor  # [num_computed, num_computed] float32; row t: how much token t took of each value
    query: torch.Tensor  # [num_computed, head_dim] float32, as projected and, where the model does that, normed
    rotated_query: torch.Tensor  # the same with its position in it
    key: torch.Tensor
    rotated_key: torch.Tensor  # as the cache holds it
    value: torch.Tensor  # as the cache holds it


@dataclass(slots=True)
class Inspection:
    """Everything that was computed. The last token was chosen and not computed: it has no keys and values."""

    decoder: Decoder
    token_ids: list[int]
    num_prompt_tokens: int
    block_size: int
    kv_layers: list[KVLayer]  # float32
    block_ids: list[int]  # the block table: token t lies in block t // block_size of it
    inputs: torch.Tensor  # [num_layers, max_computed, hidden_size] float32: X, what the projections take
    projected: torch.Tensor  # [num_layers, max_computed, num_q_heads + 2 * num_kv_heads, head_dim], straight from W
    queries: torch.Tensor  # [num_layers, max_computed, num_q_heads, head_dim], rotated
    steps: list[InspectedStep] = field(default_factory=list)

    @property
    def num_computed(self) -> int:
        """Tokens whose keys and values are in the cache."""
        return len(self.token_ids) - 1

    @property
    def num_bytes(self) -> int:
        """Of memory that it takes, beside the model."""
        block_bytes = sum(cache[0].nbytes for layer in self.kv_layers for cache in (layer.key, layer.value))
        held = len(self.block_ids) * block_bytes  # the others were never written, so there is no memory behind them
        return held + sum(tensor.nbytes for tensor in (self.inputs, self.projected, self.queries))

    @torch.inference_mode()
    def head(self, layer: int, head: int) -> HeadView:
        """What query head `head` of layer `layer` did."""
        attention = self.decoder.layers[layer].attention
        config = self.decoder.config
        kv_head = kv_head_of(config, head)
        count = self.num_computed
        # No rotation leaves what norms make of the projections.
        still = torch.ones(count, config.head_dim // 2), torch.zeros(count, config.head_dim // 2)
        norm = attention.qk_norm
        rotation = Rotation(*still) if norm is None else Rotation(*still, norm.weight, norm.eps)
        queries, keys, _ = rotate_heads(self.projected[layer, :count], rotation, config.num_kv_heads)
        query = self.queries[layer, :count, head]
        key, value = (
            self._cached(cache, kv_head) for cache in (self.kv_layers[layer].key, self.kv_layers[layer].value)
        )
        weights = attention_weights(query, key, attention.params)
        return HeadView(weights, queries[:, head], query, keys[:, kv_head], key, value)

    @torch.inference_mode()
    def habits(self) -> torch.Tensor:
        """How much each head looks in ways that many models know, [num_layers, num_q_heads, len(HABITS)] float32.

        Mean shares of attention: to the first token; to the token itself; to the one before it; and, of tokens that
        stood in the text before, to what came after them then (induction heads: Olsson et al. 2022). The first two
        tokens, which have little to choose from, do not count.
        """
        config, count = self.decoder.config, self.num_computed
        shares = torch.zeros(config.num_layers, config.num_q_heads, len(HABITS))
        if count < 3:
            return shares
        tokens = torch.tensor(self.token_ids[:count])
        after_same = torch.zeros(count, count, dtype=torch.bool)
        after_same[:, 1:] = (tokens[:, None] == tokens).tril(-2)[:, :-1]
        is_repeated = after_same.any(dim=1)
        for layer in range(config.num_layers):
            params = self.decoder.layers[layer].attention.params
            for head in range(config.num_q_heads):
                key = self._cached(self.kv_layers[layer].key, kv_head_of(config, head))
                weights = attention_weights(self.queries[layer, :count, head], key, params)
                shares[layer, head, 0] = weights[2:, 0].mean()
                shares[layer, head, 1] = weights.diagonal()[2:].mean()
                shares[layer, head, 2] = weights.diagonal(-1)[1:].mean()
                if is_repeated.any():
                    shares[layer, head, 3] = (weights * after_same).sum(dim=1)[is_repeated].mean()
        return shares

    def _cached(self, cache: torch.Tensor, kv_head: int) -> torch.Tensor:
        """What the blocks of the table hold of one head, [num_computed, head_dim]."""
        return cache[self.block_ids, kv_head].flatten(0, 1)[: self.num_computed]


def kv_head_of(config: ModelConfig, head: int) -> int:
    """The KV head that a query head reads: consecutive query heads share one (grouped-query attention)."""
    return head // (config.num_q_heads // config.num_kv_heads)


def attention_weights(query: torch.Tensor, key: torch.Tensor, params: AttentionParams) -> torch.Tensor:
    """softmax(q k^T * scale) of one head over what each token may see: [num_tokens, num_tokens], rows sum to 1."""
    scores = query @ key.T * params.scale
    if params.logit_softcap is not None:
        scores = params.logit_softcap * torch.tanh(scores / params.logit_softcap)
    positions = torch.arange(len(query))
    distance = positions[:, None] - positions
    is_hidden = distance < 0
    if params.sliding_window is not None:
        is_hidden |= distance >= params.sliding_window
    return scores.masked_fill(is_hidden, float("-inf")).softmax(dim=-1)


def record_bytes(config: ModelConfig, num_tokens: int) -> int:
    """Memory that an inspection of that many computed tokens takes, empty slots of the cache not counted."""
    heads = (2 * config.num_q_heads + 4 * config.num_kv_heads) * config.head_dim
    return 4 * config.num_layers * num_tokens * (config.hidden_size + heads)


@torch.inference_mode()
def inspect(
    decoder: Decoder,
    token_ids: Sequence[int],
    max_tokens: int,
    num_blocks: int,
    block_size: int,
    allocate: Callable[[int], Sequence[int]],
) -> Inspection:
    """Compute a prompt, and up to `max_tokens` tokens after it, each the likeliest one, until the model ends.

    Args:
        decoder: with its weights in float32, computing in plain torch.
        token_ids: the prompt, at least one.
        max_tokens: at least one.
        num_blocks: in the cache.
        block_size: tokens per block.
        allocate: called before each step with the number of tokens that the cache must hold then; returns the block
            table for as many, which begins with what it was before.
    """
    config = decoder.config
    most = len(token_ids) + max_tokens - 1
    spec = KVCacheSpec(config.num_layers, config.num_kv_heads, config.head_dim, block_size, "float32")
    cache = KVCache(spec, num_blocks, _CPU)
    num_heads = config.num_q_heads + 2 * config.num_kv_heads
    inspection = Inspection(
        decoder=decoder,
        token_ids=list(token_ids),
        num_prompt_tokens=len(token_ids),
        block_size=block_size,
        kv_layers=cache.layers,
        block_ids=[],
        inputs=torch.empty(config.num_layers, most, config.hidden_size),
        projected=torch.empty(config.num_layers, most, num_heads, config.head_dim),
        queries=torch.empty(config.num_layers, most, config.num_q_heads, config.head_dim),
    )
    first = 0
    while len(inspection.steps) < max_tokens:
        inspection.block_ids = list(allocate(len(inspection.token_ids)))
        step = _compute(inspection, first)
        inspection.steps.append(step)
        first = len(inspection.token_ids)
        inspection.token_ids.append(step.next_token_id)
        if step.next_token_id in config.eos_token_ids:
            break
    return inspection


def _compute(inspection: Inspection, first: int) -> InspectedStep:
    """Run the model over the tokens from position `first` on."""
    decoder, end = inspection.decoder, len(inspection.token_ids)
    batch = _batch_of(inspection, first)
    watching = [
        layer.attention.register_forward_pre_hook(_keeper(inspection.inputs[index], first, end))
        for index, layer in enumerate(decoder.layers)
    ]
    try:
        hidden = decoder(batch, _Recorder(inspection, first), inspection.kv_layers)
    finally:
        for handle in watching:
            handle.remove()
    probabilities = decoder.logits(hidden[-1:])[0].softmax(dim=-1)
    best = probabilities.topk(min(NUM_CANDIDATES, len(probabilities)))
    candidates = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return InspectedStep(first, end - first, candidates)


def _keeper(kept: torch.Tensor, first: int, end: int) -> Callable[[torch.nn.Module, tuple[torch.Tensor, ...]], None]:
    """A hook that keeps the hidden states that an attention is called with."""

    def keep(_: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        kept[first:end] = arguments[0]

    return keep


def _batch_of(inspection: Inspection, first: int) -> ForwardBatch:
    end, block_size = len(inspection.token_ids), inspection.block_size
    positions = torch.arange(first, end)
    table = torch.tensor([inspection.block_ids], dtype=torch.int32)
    attn = AttentionMetadata(
        query_start_loc=torch.tensor([0, end - first], dtype=torch.int32),
        seq_lens=torch.tensor([end], dtype=torch.int32),
        block_tables=table,
        slot_mapping=table[0, positions // block_size].long() * block_size + positions % block_size,
        host_query_start_loc=np.array([0, end - first], dtype=np.int32),
        host_seq_lens=np.array([end], dtype=np.int32),
    )
    return ForwardBatch(torch.tensor(inspection.token_ids[first:]), positions, torch.tensor([end - first - 1]), attn)


class _Recorder(TorchBackend):
    """Attends in plain torch, and keeps what passes by."""

    def __init__(self, inspection: Inspection, first: int) -> None:
        """Keep the tokens from position `first` on."""
        self._inspection = inspection
        self._rows = slice(first, len(inspection.token_ids))

    def rotate_and_write(
        self, heads: torch.Tensor, rotation: Rotation, kv_layer: KVLayer, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """As TorchBackend does."""
        kept = self._inspection
        layer = next(index for index, each in enumerate(kept.kv_layers) if each is kv_layer)
        query = super().rotate_and_write(heads, rotation, kv_layer, metadata)
        kept.projected[layer, self._rows] = heads
        kept.queries[layer, self._rows] = query
        return query
