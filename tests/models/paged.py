"""Runs a decoder over paged blocks: a plain attention backend and a driver of prefill and decode steps."""

import random
from collections.abc import Sequence

import numpy as np
import torch

from kernels.attention.backend import AttentionBackend
from kernels.attention.metadata import AttentionMetadata, AttentionParams, KVLayer, Rotation
from kernels.attention.rotation import rotate_heads
from models.decoder import Decoder
from models.forward_batch import ForwardBatch
from paged_cache.kv_cache import KVCache
from paged_cache.spec import KVCacheSpec

BLOCK_SIZE = 4


class GatherBackend:
    """Gathers each sequence's blocks and attends by definition, in float64."""

    name = "gather"

    def write_kv(self, key: torch.Tensor, value: torch.Tensor, kv_layer: KVLayer, metadata: AttentionMetadata) -> None:
        written = metadata.slot_mapping >= 0
        slots = metadata.slot_mapping[written]
        block_ids, offsets = slots // kv_layer.block_size, slots % kv_layer.block_size
        kv_layer.key[block_ids, :, offsets] = key[written]
        kv_layer.value[block_ids, :, offsets] = value[written]

    def rotate_and_write(
        self, heads: torch.Tensor, rotation: Rotation, kv_layer: KVLayer, metadata: AttentionMetadata
    ) -> torch.Tensor:
        query, key, value = rotate_heads(heads, rotation, kv_layer.key.shape[1])
        self.write_kv(key, value, kv_layer, metadata)
        return query

    def attend(
        self, query: torch.Tensor, kv_layer: KVLayer, metadata: AttentionMetadata, params: AttentionParams
    ) -> torch.Tensor:
        out = torch.zeros_like(query)
        starts = metadata.query_start_loc.tolist()
        for row, seq_len in enumerate(metadata.seq_lens.tolist()):
            tokens = slice(starts[row], starts[row + 1])
            num_blocks = -(-seq_len // kv_layer.block_size)
            block_ids = metadata.block_tables[row, :num_blocks].long()
            # [num_q_heads, seq_len, head_dim]
            group = query.shape[1] // kv_layer.key.shape[1]
            keys, values = (
                cache[block_ids].transpose(0, 1).flatten(1, 2)[:, :seq_len].repeat_interleave(group, 0).double()
                for cache in (kv_layer.key, kv_layer.value)
            )
            scores = query[tokens].double().transpose(0, 1) @ keys.transpose(1, 2) * params.scale
            if params.logit_softcap is not None:
                scores = params.logit_softcap * torch.tanh(scores / params.logit_softcap)
            key_positions = torch.arange(seq_len)
            query_positions = torch.arange(seq_len - (tokens.stop - tokens.start), seq_len)[:, None]
            hidden = key_positions > query_positions
            if params.sliding_window is not None:
                hidden |= key_positions <= query_positions - params.sliding_window
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            out[tokens] = (weights @ values).transpose(0, 1).to(query.dtype)
        return out


def run_paged(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    chunk_sizes: Sequence[int],
    num_last: int = 1_000_000,
    backend: AttentionBackend | None = None,
    cache_dtype: torch.dtype | None = None,
) -> list[torch.Tensor]:
    """Logits of the last `num_last` tokens of every prompt, [min(num_last, len(prompt)), vocab_size] each.

    All prompts advance together, prompt i by `chunk_sizes[i % len(chunk_sizes)]` tokens a step, through blocks in a
    shuffled order; blocks hold NaN until they are written, and table entries past a sequence's end are arbitrary.
    Without a `backend`, attention is that of GatherBackend; without a `cache_dtype`, the cache is of the model's.
    """
    backend = GatherBackend() if backend is None else backend
    config = decoder.config
    tables = _shuffled_block_tables(prompts)
    dtype = str(cache_dtype or decoder.dtype).removeprefix("torch.")
    spec = KVCacheSpec(config.num_layers, config.num_kv_heads, config.head_dim, BLOCK_SIZE, dtype)
    cache = KVCache(spec, int(tables.max()) + 1, torch.device("cpu"))
    for layer in cache.layers if not spec.is_quantised else ():
        layer.key.fill_(float("nan"))
        layer.value.fill_(float("nan"))
    computed = [0] * len(prompts)
    logits: list[list[torch.Tensor]] = [[] for _ in prompts]
    while any(done < len(prompt) for done, prompt in zip(computed, prompts, strict=True)):
        rows = [
            (i, computed[i], min(computed[i] + chunk_sizes[i % len(chunk_sizes)], len(prompt)))
            for i, prompt in enumerate(prompts)
            if computed[i] < len(prompt)
        ]
        rows.sort(key=lambda row: row[2] - row[1] != 1)  # decodes first
        hidden = decoder(_batch(prompts, rows, tables), backend, cache.layers)
        pieces = hidden.split([stop - start for _, start, stop in rows])
        for (i, start, stop), piece in zip(rows, pieces, strict=True):
            computed[i] = stop
            logits[i].append(decoder.logits(piece[max(0, len(prompts[i]) - num_last - start) :]))
    return [torch.cat(pieces) for pieces in logits]


def _shuffled_block_tables(prompts: Sequence[Sequence[int]]) -> torch.Tensor:
    num_blocks = [-(-len(prompt) // BLOCK_SIZE) for prompt in prompts]
    ids = list(range(sum(num_blocks) + 3))
    rng = random.Random(7)
    rng.shuffle(ids)
    width = max(num_blocks) + 2
    tables = [[ids.pop() for _ in range(count)] for count in num_blocks]
    padded = [table + [rng.choice(ids) for _ in range(width - len(table))] for table in tables]
    return torch.tensor(padded, dtype=torch.int32)


def _batch(
    prompts: Sequence[Sequence[int]], rows: Sequence[tuple[int, int, int]], tables: torch.Tensor
) -> ForwardBatch:
    positions = torch.cat([torch.arange(start, stop) for _, start, stop in rows])
    lengths = torch.tensor([stop - start for _, start, stop in rows])
    row_of_token = torch.tensor([i for i, _, _ in rows]).repeat_interleave(lengths)
    slots = tables[row_of_token, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
    attn = AttentionMetadata(
        query_start_loc=torch.cat((torch.zeros(1, dtype=torch.long), lengths.cumsum(0))).int(),
        seq_lens=torch.tensor([stop for _, _, stop in rows], dtype=torch.int32),
        block_tables=tables[[i for i, _, _ in rows]],
        slot_mapping=slots,
        host_query_start_loc=np.cumsum([0, *lengths]).astype(np.int32),
        host_seq_lens=np.array([stop for _, _, stop in rows], dtype=np.int32),
    )
    input_ids = torch.tensor([token for i, start, stop in rows for token in prompts[i][start:stop]])
    return ForwardBatch(input_ids, positions, torch.arange(len(positions)), attn)
