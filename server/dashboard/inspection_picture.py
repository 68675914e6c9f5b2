"""Tensors of an inspection as bytes for a browser.

Layout: four bytes with the length of a JSON head, little-endian; the head, padded with spaces to a multiple of four;
then the tensors that it names in its order, as float16 in little-endian order. Pure functions.
"""

import struct
import sys

import msgspec
import torch

from models.inspection import HeadView

_ALIGNMENT = 4
_LARGEST = torch.finfo(torch.float16).max


class Tensors(msgspec.Struct, frozen=True):
    """What the bytes after the head are."""

    num_tokens: int
    names: list[str]
    sizes: list[int]  # values of each


def draw_head(view: HeadView) -> bytes:
    """What a head did: of the weights only the lower triangle, row by row, since nobody sees what comes after him."""
    num_tokens = len(view.weights)
    rows, columns = torch.tril_indices(num_tokens, num_tokens)
    parts = {name: getattr(view, name) for name in view.__slots__} | {"weights": view.weights[rows, columns]}
    return _draw(num_tokens, parts)


def draw_input(values: torch.Tensor) -> bytes:
    """One row of X, [hidden_size]."""
    return _draw(1, {"input": values})


def _draw(num_tokens: int, parts: dict[str, torch.Tensor]) -> bytes:
    head = msgspec.json.encode(Tensors(num_tokens, list(parts), [part.numel() for part in parts.values()]))
    head += b" " * (-len(head) % _ALIGNMENT)
    return b"".join((struct.pack("<I", len(head)), head, *(_as_bytes(part) for part in parts.values())))


def _as_bytes(tensor: torch.Tensor) -> bytes:
    values = tensor.clamp(-_LARGEST, _LARGEST).half().contiguous().numpy()
    return (values.byteswap() if sys.byteorder == "big" else values).tobytes()
