"""What each weight becomes under --quantization: the file's own 4-bit codes, 8-bit codes, or floats as they are.

Between checkpoints, which give rows of codes or of floats, and the layout of kernels/quantized_weight.py. Must not know
the decoder or any file format.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from kernels.quantized_weight import GROUP_SIZE, QuantizedWeight, pack, round_to_codes

Quantization = Literal["none", "int8", "gguf"]

_PIECE_VALUES = 512 * 1024  # rounded at once: a whole vocabulary would take several times its float32 size meanwhile


@dataclass(frozen=True, slots=True)
class CodedRows:
    """Consecutive rows of a weight as codes in groups of GROUP_SIZE inputs: value = scale * code + minimum."""

    codes: torch.Tensor  # [num_rows, in_features] uint8
    scales: torch.Tensor  # [num_rows, num_groups] float16, or [num_rows, 1] of one scale for each output
    minimums: torch.Tensor | None  # the same of 4-bit codes; None = 8-bit codes around CODE_CENTRE


class WeightSource(Protocol):
    """Matrices by the names in their files."""

    shapes: dict[str, tuple[int, ...]]

    def code_bits(self, source_name: str) -> frozenset[int]:
        """The bits of the codes that the tensor can be given in without a loss; none for most types."""
        ...

    def coded_pieces(self, source_name: str, bits: int) -> Iterator[tuple[int, CodedRows]]:
        """Row pieces of the tensor, in order, each with the number of its first row; `bits` is one of `code_bits`."""
        ...

    def pieces(self, source_name: str) -> Iterator[tuple[int, torch.Tensor]]:
        """The same as floats."""
        ...


def can_quantize(shape: Sequence[int]) -> bool:
    """Whether a weight of this shape, [out_features, in_features], is whole groups of inputs."""
    return len(shape) == 2 and shape[1] % GROUP_SIZE == 0


def weight_bits(source: WeightSource, names: Sequence[str], quantization: Quantization) -> int:
    """The bits of the codes that the tensors of these names become as one weight.

    4 where "gguf" is asked for and every one of the tensors is stored in such blocks, else 8.
    """
    return 4 if quantization == "gguf" and all(4 in source.code_bits(name) for name in names) else 8


def has_scale_by_output(quantization: Quantization) -> bool:
    """Whether a weight has one scale for each output, which multiplies faster, or one for each group of inputs."""
    return quantization == "int8"


def quantize_weight(source: WeightSource, names: Sequence[str], quantization: Quantization) -> QuantizedWeight | None:
    """The tensors of these names, end to end, as one quantised weight of `weight_bits`.

    For "gguf", codes of that many bits are taken from tensors that have them, and other values are rounded to eight;
    for "int8", all are rounded.

    Returns:
        None where a scale is beyond float16, as of values that are infinite or no numbers: the weight stays as it is.
    """
    bits, by_output = weight_bits(source, names, quantization), has_scale_by_output(quantization)
    num_rows = sum(source.shapes[name][0] for name in names)
    in_features = source.shapes[names[0]][1]
    codes = torch.empty((num_rows, in_features), dtype=torch.uint8)
    scales = torch.empty((num_rows, 1 if by_output else in_features // GROUP_SIZE), dtype=torch.float16)
    minimums = torch.empty_like(scales) if bits == 4 else None
    base = 0
    for name in names:
        is_coded = bits in source.code_bits(name) and not by_output
        pieces = source.coded_pieces(name, bits) if is_coded else _rounded_pieces(source, name, by_output=by_output)
        for start, piece in pieces:
            rows = slice(base + start, base + start + len(piece.codes))
            codes[rows] = piece.codes
            scales[rows] = piece.scales
            if minimums is not None and piece.minimums is not None:
                minimums[rows] = piece.minimums
        base += source.shapes[name][0]
    if not all(part.isfinite().all() for part in (scales, minimums) if part is not None):
        return None
    return pack(codes, scales, minimums)


def _rounded_pieces(source: WeightSource, name: str, *, by_output: bool) -> Iterator[tuple[int, CodedRows]]:
    for start, rows in source.pieces(name):
        num_rows = max(1, _PIECE_VALUES // rows.shape[1])
        for first in range(0, len(rows), num_rows):
            part = rows[first : first + num_rows]
            yield start + first, CodedRows(*round_to_codes(part, by_output=by_output), None)
