"""Paged attention on the native CPU library: the mixed batch in one call, straight over the block tables.

Turns tensors into pointers and strides, and nothing else; the arithmetic is in kernels/cpu.
"""

import ctypes
from typing import Any

import torch

from kernels.attention.metadata import AttentionMetadata, AttentionParams, KVLayer, Rotation
from kernels.cpu.native_library import (
    ELEMENT_TYPES,
    INSTRUCTION_SETS,
    AttendArgs,
    RotateAndWriteArgs,
    WriteKVArgs,
    cache_type,
    check_status,
    element_type,
    load_library,
    select_instruction_set,
)

_WITHIN_BFLOAT16 = (torch.bfloat16, torch.int8, torch.float8_e4m3fn)  # dtypes of a cache whose values it can hold


class CpuBackend:
    """Computes on torch's own threads, in float32, from any query and cache that the library takes.

    A bfloat16 query over a bfloat16, int8 or float8 cache is multiplied in bfloat16 where the processor can.
    """

    name = "cpu"

    def __init__(self, instruction_set: str | None = None) -> None:
        """Load the library.

        Args:
            instruction_set: one of `supported_instruction_sets`; None = the best.

        Raises:
            NativeLibraryError: the library is not built or does not load.
            ValueError: this processor or this build lacks the instruction set.
        """
        self._library = load_library()
        self.instruction_set = select_instruction_set(self._library, instruction_set)
        self._multiplies_bfloat16 = self.instruction_set == "avx512_bf16"

    def query_dtype(self, dtype: torch.dtype, kv_layer: KVLayer) -> torch.dtype:
        """What queries of `dtype` had best be rounded to: the type in which the processor multiplies with the cache."""
        return torch.bfloat16 if self._multiplies_bfloat16 and kv_layer.key.dtype in _WITHIN_BFLOAT16 else dtype

    def write_kv(
        self,
        key: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
        value: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
        kv_layer: KVLayer,
        metadata: AttentionMetadata,
    ) -> None:
        """Scatter this step's keys and values to `metadata.slot_mapping`; slot -1 writes nothing.

        Raises:
            ValueError: a slot lies outside the cache, or its dtype is not supported; nothing is written then.
        """
        key, value = _rows_contiguous(key), _rows_contiguous(value)
        num_blocks, num_kv_heads, block_size, head_dim = kv_layer.key.shape
        assert key.shape == value.shape == (metadata.slot_mapping.shape[0], num_kv_heads, head_dim)
        assert key.dtype == value.dtype
        args = WriteKVArgs(
            key=key.data_ptr(),
            value=value.data_ptr(),
            **cache_fields(kv_layer),
            slot_mapping=_pointer(metadata.slot_mapping, torch.int64),
            num_tokens=key.shape[0],
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            num_blocks=num_blocks,
            block_size=block_size,
            key_strides=key.stride()[:2],
            value_strides=value.stride()[:2],
            source_type=element_type(key.dtype),
            instruction_set=INSTRUCTION_SETS[self.instruction_set],
            num_threads=torch.get_num_threads(),
        )
        check_status(self._library.octavo_write_kv(ctypes.byref(args)))

    def rotate_and_write(
        self,
        heads: torch.Tensor,  # [num_tokens, num_q_heads + 2 * num_kv_heads, head_dim], queries, keys, values
        rotation: Rotation,
        kv_layer: KVLayer,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:  # [num_tokens, num_q_heads, head_dim]
        """Norm and rotate query and key heads, write keys and values to the cache, and return the queries.

        Raises:
            ValueError: a slot lies outside the cache (nothing is written then), or a dtype is not supported.
        """
        heads = _rows_contiguous(heads)
        num_blocks, num_kv_heads, block_size, head_dim = kv_layer.key.shape
        num_tokens, num_heads, _ = heads.shape
        num_q_heads = num_heads - 2 * num_kv_heads
        assert heads.shape[2] == head_dim == kv_layer.value.shape[3] == 2 * rotation.cos.shape[1]
        assert metadata.slot_mapping.shape[0] == rotation.cos.shape[0] == rotation.sin.shape[0] == num_tokens
        norm_weight = rotation.norm_weight
        assert norm_weight is None or norm_weight.shape == (num_q_heads + num_kv_heads, head_dim)
        query = torch.empty((num_tokens, num_q_heads, head_dim), dtype=heads.dtype)
        args = RotateAndWriteArgs(
            heads=heads.data_ptr(),
            cos=_pointer(rotation.cos, torch.float32),
            sin=_pointer(rotation.sin, torch.float32),
            norm_weight=None if norm_weight is None else _pointer(norm_weight, torch.float32),
            query=query.data_ptr(),
            **cache_fields(kv_layer),
            slot_mapping=_pointer(metadata.slot_mapping, torch.int64),
            num_tokens=num_tokens,
            num_q_heads=num_q_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            num_blocks=num_blocks,
            block_size=block_size,
            heads_strides=heads.stride()[:2],
            norm_eps=rotation.norm_eps,
            heads_type=element_type(heads.dtype),
            query_type=element_type(query.dtype),
            instruction_set=INSTRUCTION_SETS[self.instruction_set],
            num_threads=torch.get_num_threads(),
        )
        check_status(self._library.octavo_rotate_and_write(ctypes.byref(args)))
        return query

    def attend(
        self,
        query: torch.Tensor,  # [num_tokens, num_q_heads, head_dim]
        kv_layer: KVLayer,
        metadata: AttentionMetadata,
        params: AttentionParams,
    ) -> torch.Tensor:  # [num_tokens, num_q_heads, head_dim], dtype of query
        """Causal attention of every query token over its own sequence's blocks; padding tokens give zeros.

        Raises:
            ValueError: the metadata do not fit the cache, or a dtype is not supported.
        """
        query = _rows_contiguous(query)
        num_tokens, num_q_heads, head_dim = query.shape
        num_blocks, num_kv_heads, block_size, _ = kv_layer.key.shape
        assert num_q_heads % num_kv_heads == 0
        assert metadata.block_tables.dtype == torch.int32 and metadata.block_tables.stride(1) == 1
        assert head_dim == kv_layer.key.shape[3] == kv_layer.value.shape[3]
        out = torch.zeros(query.shape, dtype=query.dtype)
        args = AttendArgs(
            query=query.data_ptr(),
            out=out.data_ptr(),
            **cache_fields(kv_layer),
            query_start_loc=_pointer(metadata.query_start_loc, torch.int32),
            seq_lens=_pointer(metadata.seq_lens, torch.int32),
            block_tables=metadata.block_tables.data_ptr(),
            num_rows=metadata.seq_lens.shape[0],
            num_tokens=num_tokens,
            num_q_heads=num_q_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            num_blocks=num_blocks,
            block_size=block_size,
            block_tables_width=metadata.block_tables.shape[1],
            block_tables_stride=metadata.block_tables.stride(0),
            query_strides=query.stride()[:2],
            scale=params.scale,
            logit_softcap=params.logit_softcap or 0.0,
            sliding_window=params.sliding_window or 0,
            query_type=element_type(query.dtype),
            out_type=element_type(out.dtype),
            instruction_set=INSTRUCTION_SETS[self.instruction_set],
            num_threads=torch.get_num_threads(),
        )
        check_status(self._library.octavo_attend(ctypes.byref(args)))
        return out


def _rows_contiguous(x: torch.Tensor) -> torch.Tensor:
    """The tensor itself where its last dimension is contiguous (a slice of a packed QKV product), else a copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _pointer(x: torch.Tensor, dtype: torch.dtype) -> int:
    assert x.dtype == dtype and x.is_contiguous() and x.device.type == "cpu"
    return x.data_ptr()


def cache_fields(kv_layer: KVLayer) -> dict[str, Any]:
    """Where the cache of a layer lies and what it holds: fields that all argument structs have.

    Raises:
        ValueError: its dtype is not supported.
    """
    key, value, key_scale, value_scale = kv_layer.key, kv_layer.value, kv_layer.key_scale, kv_layer.value_scale
    code = cache_type(key.dtype)
    assert key.dtype == value.dtype and key.stride(3) == value.stride(3) == 1
    fields = {
        "key_cache": key.data_ptr(),
        "value_cache": value.data_ptr(),
        "key_cache_strides": key.stride()[:3],
        "value_cache_strides": value.stride()[:3],
        "cache_type": code,
    }
    assert (key_scale is None) == (value_scale is None) == (code in ELEMENT_TYPES.values())
    if key_scale is None or value_scale is None:
        return fields
    assert key_scale.dtype == value_scale.dtype == torch.float32
    assert key_scale.shape == value_scale.shape == key.shape[:3]
    return {
        **fields,
        "key_scale": key_scale.data_ptr(),
        "value_scale": value_scale.data_ptr(),
        "key_scale_strides": key_scale.stride(),
        "value_scale_strides": value_scale.stride(),
    }
