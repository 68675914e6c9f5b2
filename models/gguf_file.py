"""Reads a GGUF file: metadata, the list of tensors, and each tensor's bytes out of a memory map.

Knows the container (GGUF versions 2 and 3, little-endian), no architecture. The `gguf` package names the tensor types
and dequantises; its own reader builds an object for each token of the vocabulary, which took 9 s and 2 GB for Gemma's
262,144 tokens.
"""

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType
from gguf.quants import dequantize

from models.errors import CheckpointError, UnsupportedModelError

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING = 8
_ARRAY = 9
_MAX_DIMS = 4

# Values dequantised at once: a piece of 512 Ki float32 stays in the caches of one core.
_PIECE_VALUES = 512 * 1024


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where one tensor lies."""

    name: str
    shape: tuple[int, ...]  # row-major; GGUF itself lists the fastest dimension first
    type: GGMLQuantizationType
    offset: int  # of its first byte in the file
    num_bytes: int


class GGUFFile:
    """An open GGUF file. `metadata` holds Python scalars, strings, lists of strings and numpy arrays of numbers."""

    def __init__(self, path: Path) -> None:
        """Map the file and read its header. Raises CheckpointError where it is not a whole GGUF file."""
        self.path = path
        try:
            # A private mapping: pages are shared with the page cache until written, and nobody writes.
            self._bytes = np.memmap(path, dtype=np.uint8, mode="c")
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        self._read_header(_Cursor(self._bytes.data, path))

    def pieces(self, name: str, rows_multiple: int) -> Iterator[tuple[int, np.ndarray]]:
        """Dequantised float32 pieces of a tensor, in order: the first row of each, and its values.

        A piece has a multiple of `rows_multiple` rows (but for the last), so that a caller may reorder rows within
        groups of that size. A vector comes in one piece.
        """
        tensor = self.tensors[name]
        for start, data in self.byte_pieces(name, rows_multiple):
            values = _dequantize(data, tensor.type)
            yield start, values.reshape(-1, *tensor.shape[1:]) if len(tensor.shape) > 1 else values[0]

    def byte_pieces(self, name: str, rows_multiple: int) -> Iterator[tuple[int, np.ndarray]]:
        """The bytes of such pieces as they lie in the file."""
        tensor = self.tensors[name]
        data = self._bytes[tensor.offset : tensor.offset + tensor.num_bytes]
        if len(tensor.shape) < 2:
            yield 0, data
            return
        row_values = math.prod(tensor.shape[1:])
        num_rows = tensor.shape[0]
        row_bytes = tensor.num_bytes // num_rows
        step = max(1, _PIECE_VALUES // (row_values * rows_multiple)) * rows_multiple
        for start in range(0, num_rows, step):
            yield start, data[start * row_bytes : min(start + step, num_rows) * row_bytes]

    def _read_header(self, cursor: "_Cursor") -> None:
        if bytes(cursor.take(4)) != b"GGUF":
            raise CheckpointError(f"{self.path} is not a GGUF file: it does not begin with GGUF")
        version = cursor.scalar("<I")
        if version not in (2, 3):
            raise UnsupportedModelError(f"{self.path}: GGUF version {version}; supported are 2 and 3, little-endian")
        num_tensors, num_pairs = cursor.scalar("<Q"), cursor.scalar("<Q")
        for _ in range(num_pairs):
            key = cursor.string()
            self.metadata[key] = cursor.value(cursor.scalar("<I"))
        entries = [self._read_entry(cursor) for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise CheckpointError(f"{self.path}: general.alignment is {alignment!r}")
        start = -(-cursor.offset // alignment) * alignment
        for name, shape, kind, offset in entries:
            self._add_tensor(name, shape, kind, start + offset)

    def _read_entry(self, cursor: "_Cursor") -> tuple[str, tuple[int, ...], int, int]:
        name = cursor.string()
        num_dims = cursor.scalar("<I")
        if num_dims > _MAX_DIMS:
            raise CheckpointError(f"{self.path}: tensor {name} has {num_dims} dimensions")
        shape = tuple(cursor.scalar("<Q") for _ in range(num_dims))[::-1]
        return name, shape, cursor.scalar("<I"), cursor.scalar("<Q")

    def _add_tensor(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> None:
        if name in self.tensors:
            raise CheckpointError(f"{self.path} lists tensor {name} twice")
        try:
            tensor_type = GGMLQuantizationType(kind)
        except ValueError:
            raise UnsupportedModelError(f"{self.path}: tensor {name} is of the unknown type {kind}") from None
        block_values, block_bytes = GGML_QUANT_SIZES[tensor_type]
        if 0 in shape or not shape or shape[-1] % block_values:
            raise CheckpointError(f"{self.path}: tensor {name} of type {tensor_type.name} has the shape {list(shape)}")
        num_bytes = math.prod(shape) // block_values * block_bytes
        if offset + num_bytes > len(self._bytes):
            raise CheckpointError(
                f"{self.path} is truncated: tensor {name} ends at byte {offset + num_bytes}, the file at "
                f"{len(self._bytes)}"
            )
        self.tensors[name] = GGUFTensor(name, shape, tensor_type, offset, num_bytes)


def can_dequantize(tensor_type: GGMLQuantizationType) -> bool:
    """Whether the `gguf` package turns this type into float32."""
    try:
        dequantize(np.zeros(GGML_QUANT_SIZES[tensor_type][1], dtype=np.uint8), tensor_type)
    except NotImplementedError:
        return False
    return True


def _dequantize(data: np.ndarray, tensor_type: GGMLQuantizationType) -> np.ndarray:
    # One long row: blocks do not depend on each other, and gguf splits its work by rows, 16 at a time.
    return dequantize(data.reshape(1, -1), tensor_type)


class _Cursor:
    """Reads little-endian values one after the other and never past the end."""

    def __init__(self, data: memoryview, path: Path) -> None:
        self._data = data
        self._path = path
        self.offset = 0

    def take(self, count: int) -> memoryview:
        end = self.offset + count
        if end > len(self._data):
            raise CheckpointError(f"{self._path} is truncated or damaged: its header does not end within the file")
        piece = self._data[self.offset : end]
        self.offset = end
        return piece

    def scalar(self, layout: str) -> Any:  # noqa: ANN401 - the layout decides
        return struct.unpack(layout, self.take(struct.calcsize(layout)))[0]

    def string(self) -> str:
        raw = self.take(self.scalar("<Q"))
        try:
            return str(raw, "utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self._path}: a string before byte {self.offset} is not UTF-8") from error

    def value(self, kind: int) -> Any:  # noqa: ANN401 - the kind decides
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array(self.scalar("<I"), self.scalar("<Q"))
        return self.scalar(self._layout(kind))

    def _array(self, kind: int, count: int) -> list[Any] | np.ndarray:
        if kind == _STRING:
            return self._strings(count)
        dtype = np.dtype(self._layout(kind))
        return np.frombuffer(self.take(count * dtype.itemsize), dtype=dtype)

    def _strings(self, count: int) -> list[str]:
        """`count` strings: a vocabulary, in a third of the time that as many calls would take."""
        data, offset = self._data, self.offset
        length_at = struct.Struct("<Q").unpack_from
        texts = []
        try:
            for _ in range(count):
                start = offset + 8
                offset = start + length_at(data, offset)[0]
                texts.append(str(data[start:offset], "utf-8"))
        except (struct.error, IndexError, OverflowError):
            offset = len(data) + 1
        except UnicodeDecodeError as error:
            if offset <= len(data):
                raise CheckpointError(f"{self._path}: a string before byte {offset} is not UTF-8") from error
        self.take(offset - self.offset)  # what ends past the file is refused
        return texts

    def _layout(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise CheckpointError(f"{self._path} is damaged: unknown metadata type {kind} before byte {self.offset}")
        return _SCALARS[kind]
