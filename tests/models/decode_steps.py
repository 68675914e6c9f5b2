"""Random decode steps of a toy model over a poisoned cache, each run as it is and as a graph, and compared."""

from collections.abc import Sequence

import numpy as np
import torch

from kernels.attention.backend import AttentionBackend
from kernels.attention.metadata import AttentionMetadata
from kernels.model_ops.ops import ModelOps
from models.config import LayerConfig, ModelConfig, RopeParams
from models.cuda_graphs import CudaGraphs
from models.decoder import Decoder
from models.forward_batch import ForwardBatch
from paged_cache.kv_cache import KVCache
from paged_cache.spec import KVCacheSpec

POISONED_BLOCK_ID = 1 << 29
SLIDING_WINDOW = 24
# Every step of the decoder that a config can turn on.
EVERYTHING = {"embedding_scale": 1.5, "final_logit_softcap": 4.0, "sandwich_norms": True, "qk_norm": True}


def toy_model(ops: ModelOps, device: torch.device, dtype: torch.dtype = torch.float32, **settings: object) -> Decoder:
    """Two layers, one of them with a sliding window, and weights that all matter."""
    rope = RopeParams(theta=10_000.0)
    config = ModelConfig(
        family="llama",
        vocab_size=53,
        hidden_size=32,
        intermediate_size=48,
        num_q_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_position_embeddings=4096,
        layers=(LayerConfig(rope), LayerConfig(rope, sliding_window=SLIDING_WINDOW)),
        rms_norm_eps=1e-5,
        attention_scale=0.25,
        eos_token_ids=(0,),
        **settings,
    )
    model = Decoder(config, dtype, device, ops)
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


class DecodeSteps:
    """One cache, whose unused slots hold NaN, and batches of random sequences in random blocks of it."""

    def __init__(self, model: Decoder, block_size: int, num_blocks: int, seed: int = 0) -> None:
        config = model.config
        dtype = str(model.dtype).removeprefix("torch.")
        spec = KVCacheSpec(len(config.layers), config.num_kv_heads, config.head_dim, block_size, dtype)
        self.model = model
        self.cache = KVCache(spec, num_blocks, model.device)
        self.forget()
        self._generator = torch.Generator().manual_seed(seed)

    @property
    def cached(self) -> list[torch.Tensor]:
        """Keys and values of each layer, [num_blocks, num_kv_heads, block_size, head_dim] each."""
        return [data for layer in self.cache.layers for data in (layer.key, layer.value)]

    def forget(self) -> None:
        for data in self.cached:
            data.fill_(torch.nan)

    def batch(self, seq_lens: Sequence[int], query_lens: Sequence[int] | None = None) -> ForwardBatch:
        """Rows of sequences whose earlier tokens are in the cache; all else in it is NaN."""
        query_lens = query_lens or [1] * len(seq_lens)
        block_size = self.cache.spec.block_size
        self.forget()
        free = torch.randperm(self.cache.num_blocks, generator=self._generator).tolist()
        width = -(-max(seq_lens) // block_size)
        tables = torch.full((len(seq_lens), width), POISONED_BLOCK_ID, dtype=torch.int32)
        positions, slots = [], []
        for row, (seq_len, query_len) in enumerate(zip(seq_lens, query_lens, strict=True)):
            num_blocks = -(-seq_len // block_size)
            tables[row, :num_blocks] = torch.tensor([free.pop() for _ in range(num_blocks)])
            position = torch.arange(seq_len)
            slot = tables[row, position // block_size].long() * block_size + position % block_size
            self._fill(slot[: seq_len - query_len])
            positions.append(position[seq_len - query_len :])
            slots.append(slot[seq_len - query_len :])
        starts = np.cumsum([0, *query_lens]).astype(np.int32)
        device = self.model.device
        attn = AttentionMetadata(
            query_start_loc=torch.from_numpy(starts).to(device),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
            block_tables=tables.to(device),
            slot_mapping=torch.cat(slots).to(device),
            host_query_start_loc=starts,
            host_seq_lens=np.array(seq_lens, dtype=np.int32),
        )
        input_ids = torch.randint(self.model.config.vocab_size, (int(starts[-1]),), generator=self._generator)
        logits_indices = torch.from_numpy(starts[1:].astype(np.int64) - 1)
        return ForwardBatch(input_ids.to(device), torch.cat(positions).to(device), logits_indices.to(device), attn)

    def _fill(self, slots: torch.Tensor) -> None:
        block_ids, offsets = slots // self.cache.spec.block_size, slots % self.cache.spec.block_size
        for data in self.cached:
            values = torch.randn((len(slots), *data.shape[1::2]), generator=self._generator)
            data[block_ids.to(data.device), :, offsets.to(data.device)] = values.to(data)

    def compare(self, graphs: CudaGraphs, eager: AttentionBackend, seq_lens: Sequence[int], tolerance: float) -> None:
        """A replay gives what the same step gives without a graph, and writes the same slots and no other."""
        batch = self.batch(seq_lens)
        before = [data.clone() for data in self.cached]
        result = graphs.run(batch)
        assert result is not None
        hidden, logits = (x.clone() for x in result)
        after = [data.clone() for data in self.cached]
        for data, old in zip(self.cached, before, strict=True):
            data.copy_(old)
        expected_hidden = self.model(batch, eager, self.cache.layers)
        near = {"rtol": tolerance, "atol": tolerance}
        torch.testing.assert_close(hidden, expected_hidden, **near)
        torch.testing.assert_close(logits, self.model.logits(expected_hidden), **near)
        written = torch.zeros((self.cache.num_blocks, self.cache.spec.block_size), dtype=torch.bool)
        written.view(-1)[batch.attn.slot_mapping.cpu()] = True
        for new, old, expected in zip(after, before, self.cached, strict=True):
            torch.testing.assert_close(new, expected, equal_nan=True, **near)
            kept = ~written.to(new.device)[:, None, :, None].expand_as(new)
            torch.testing.assert_close(new[kept], old[kept], equal_nan=True, rtol=0, atol=0)
