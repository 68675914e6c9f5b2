"""The shape of the KV cache, and the one place that computes its bytes. No torch: dtypes are names."""

from dataclasses import dataclass

DTYPE_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """One KV cache: every layer holds a key and a value of `head_dim` for each KV head and each slot."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int  # tokens per block
    dtype: str  # a key of DTYPE_BYTES

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes over all layers (PagedAttention paper, section 3: 800 KB for OPT-13B)."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def bytes_per_block(self) -> int:
        """Bytes that one block takes over all layers."""
        return self.block_size * self.bytes_per_token

    def num_blocks_in(self, num_bytes: int) -> int:
        """Whole blocks that fit in `num_bytes`."""
        return num_bytes // self.bytes_per_block
