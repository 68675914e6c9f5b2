"""Integer codes, scales and minimums straight out of the blocks of a GGUF file, for products that take codes.

Knows the bytes of the block types whose values are scale * code + minimum over groups of 32 inputs. Must not know the
container (see gguf_file) or how codes are laid out for a kernel.
"""

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from kernels.quantized_weight import CODE_CENTRE, GROUP_SIZE
from models.quantization import CodedRows

_HALF = 2  # bytes of a float16
_Q4_K_GROUPS = 8  # of 32 values in a block of 256

# The bits of the codes that a type's blocks hold without a loss. Five-bit codes around a zero fit into eight.
CODE_BITS: dict[GGMLQuantizationType, frozenset[int]] = {
    GGMLQuantizationType.Q4_0: frozenset({4, 8}),
    GGMLQuantizationType.Q4_1: frozenset({4}),
    GGMLQuantizationType.Q4_K: frozenset({4}),
    GGMLQuantizationType.Q5_0: frozenset({8}),
    GGMLQuantizationType.Q8_0: frozenset({8}),
}


def coded_rows(data: np.ndarray, tensor_type: GGMLQuantizationType, in_features: int, bits: int) -> CodedRows:
    """Take blocks apart.

    Args:
        data: the bytes of whole rows.
        tensor_type: a key of CODE_BITS.
        in_features: values in a row.
        bits: of the codes, one of those that CODE_BITS names for the type.
    """
    assert bits in CODE_BITS[tensor_type]
    blocks = data.reshape(-1, GGML_QUANT_SIZES[tensor_type][1])
    match tensor_type:
        case GGMLQuantizationType.Q4_0:
            codes, scales = _nibbles(blocks[:, _HALF:]), _halves(blocks, 0)
            minimums = scales * np.float16(-8) if bits == 4 else None
            if bits == 8:
                codes += np.uint8(CODE_CENTRE - 8)
        case GGMLQuantizationType.Q4_1:
            codes, scales, minimums = _nibbles(blocks[:, 2 * _HALF :]), _halves(blocks, 0), _halves(blocks, 1)
        case GGMLQuantizationType.Q4_K:
            codes, scales, minimums = _q4_k(blocks)
        case GGMLQuantizationType.Q5_0:
            high = np.unpackbits(blocks[:, _HALF : _HALF + 4], axis=1, bitorder="little")
            codes = (_nibbles(blocks[:, _HALF + 4 :]) | high << 4) + np.uint8(CODE_CENTRE - 16)
            scales, minimums = _halves(blocks, 0), None
        case _:
            codes, scales, minimums = blocks[:, _HALF:] ^ np.uint8(CODE_CENTRE), _halves(blocks, 0), None
    shape = (-1, in_features // GROUP_SIZE)
    return CodedRows(
        torch.from_numpy(codes.reshape(-1, in_features)),
        torch.from_numpy(scales.reshape(shape)),
        None if minimums is None else torch.from_numpy(minimums.reshape(shape)),
    )


def _halves(blocks: np.ndarray, index: int) -> np.ndarray:  # [num_blocks] float16
    """The float16 with this index at the start of each block."""
    return np.ascontiguousarray(blocks[:, index * _HALF : (index + 1) * _HALF]).view(np.float16)[:, 0]


def _nibbles(data: np.ndarray) -> np.ndarray:  # [num_blocks, 2 * num_bytes]
    """The low halves of all bytes of a block, then the high ones."""
    return np.concatenate((data & np.uint8(15), data >> np.uint8(4)), axis=1)


def _q4_k(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, and for each group its scale and minimum: six bits each, times a float16 of the block.

    Twelve bytes hold the sixteen factors (ggml's block_q4_K): those of groups 0 to 3 in the low six bits of bytes 0 to
    3 (scales) and 4 to 7 (minimums); of groups 4 to 7 four bits are in bytes 8 to 11 and two atop the others.
    """
    packed = blocks[:, 2 * _HALF : 2 * _HALF + 12].reshape(-1, 3, 4)
    first, second, low = packed[:, 0], packed[:, 1], packed[:, 2]
    top = np.uint8(0x30)
    scale_factors = np.concatenate((first & 63, (low & 15) | (first >> 2 & top)), axis=1)  # [num_blocks, 8]
    minimum_factors = np.concatenate((second & 63, (low >> 4) | (second >> 2 & top)), axis=1)
    scales = _halves(blocks, 0)[:, None].astype(np.float32) * scale_factors
    minimums = _halves(blocks, 1)[:, None].astype(np.float32) * minimum_factors
    quarters = blocks[:, 2 * _HALF + 12 :].reshape(-1, _Q4_K_GROUPS // 2, GROUP_SIZE)
    codes = np.stack((quarters & np.uint8(15), quarters >> np.uint8(4)), axis=2)  # [num_blocks, 4, 2, 32]
    with np.errstate(over="ignore"):  # what float16 cannot hold is infinite, which whoever packs it refuses
        return codes, scales.astype(np.float16), (-minimums).astype(np.float16)
