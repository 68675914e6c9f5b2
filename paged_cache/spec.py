"""The shape of the KV cache, and the one place that computes its bytes. No torch: dtypes are names."""

from dataclasses import dataclass

DTYPE_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "float8_e4m3fn": 1}
SCALE_BYTES = 4  # a float32 for each key and each value of a quantised cache


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """One KV cache: every layer holds a key and a value of `head_dim` for each KV head and each slot."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int  # tokens per block
    dtype: str  # a key of DTYPE_BYTES

    @property
    def is_quantised(self) -> bool:
        """Every key and value of a head carries a scale."""
        return DTYPE_BYTES[self.dtype] == 1

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes over all layers (PagedAttention paper, section 3: 800 KB for OPT-13B)."""
        bytes_per_head = self.head_dim * DTYPE_BYTES[self.dtype] + SCALE_BYTES * self.is_quantised
        return 2 * self.num_layers * self.num_kv_heads * bytes_per_head

    @property
    def bytes_per_block(self) -> int:
        """Bytes that one block takes over all layers."""
        return self.block_size * self.bytes_per_token

    def num_blocks_in(self, num_bytes: int) -> int:
        """Whole blocks that fit in `num_bytes`."""
        return num_bytes // self.bytes_per_block
