"""Quantised weights in files of the cache folder, so that a model is rounded and laid out only once.

A file belongs to one state of a model's files and one layout: anything else, and a file that is damaged or that others
could have written, is no file. Nothing here fails a start: what cannot be kept is made again. Must not know formats.
"""

import hashlib
import json
import logging
import math
import mmap
import os
import re
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass
from pathlib import Path

import torch

from kernels.quantized_weight import GROUP_SIZE, PANEL, QuantizedWeight

# Counts changes of the layout in kernels/quantized_weight.py and of how values are rounded; older files are made again.
FORMAT_VERSION = 1

MIN_BYTES = 16 << 20  # of weights that are worth a file: less is rounded in a fraction of a second
_MAX_FILES = 16
_ABANDONED_SECONDS = 3600.0  # the age of an unfinished file whose writer must be gone
_ALIGNMENT = 64  # bytes of a cache line, which a vector must not straddle
_PIECE_BYTES = 8 << 20  # read and hashed by one thread
_SAMPLE_BYTES = 64 << 10
_NUM_SAMPLES = 64
_NO_DIGEST = "0" * 64
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH

logger = logging.getLogger("octavo.packed_weights")


@dataclass(frozen=True, slots=True)
class PackedShape:
    """A weight as a file holds it."""

    name: str
    out_features: int
    in_features: int
    bits: int  # 4 or 8
    by_output: bool = False  # one scale for each output, not for each group of inputs

    def parts(self) -> dict[str, tuple[int, ...]]:
        """The shapes of its tensors: of uint8 codes, and of float16 scales and minimums."""
        num_panels, num_groups = -(-self.out_features // PANEL), self.in_features // GROUP_SIZE
        scales = (num_panels, 1 if self.by_output else num_groups, PANEL)
        parts = {"codes": (num_panels, num_groups, GROUP_SIZE * PANEL * self.bits // 8), "scales": scales}
        return parts | ({"minimums": scales} if self.bits == 4 else {})


@dataclass(frozen=True, slots=True)
class PackedModel:
    """What names a file: the model's own files, what its weights become, and their shapes in order."""

    path: Path  # of the model
    files: tuple[Path, ...]  # that hold its weights
    quantization: str
    shapes: tuple[PackedShape, ...]

    @property
    def num_bytes(self) -> int:
        """Of the weights."""
        parts = (part for shape in self.shapes for part in shape.parts().items())
        return sum(math.prod(shape) * (1 if name == "codes" else 2) for name, shape in parts)


class PackedWeights:
    """The files of one folder, in safetensors' format. They hold no code, and their shapes are never believed."""

    def __init__(self, folder: Path, num_threads: int) -> None:
        """Use `folder`, which is made when something is kept."""
        self._folder = folder
        self._num_threads = num_threads

    def read(self, model: PackedModel) -> dict[str, QuantizedWeight] | None:
        """The weights by their names; None where there is no file of them that can be trusted.

        They lie in memory of their own, in huge pages where the system has them: through a memory map a file that is
        cut short would end the process, and products read small pages a fifth more slowly.
        """
        path = self._folder
        try:
            layout = _Layout(model)
            path = self._folder / layout.file_name
            with _opened(path) as file:
                data = self._verified(layout, file)
                if data is None:
                    logger.warning("%s is damaged; the weights are packed again.", path)
                    return None
                with suppress(OSError):  # on a read-only file system nothing is removed either
                    os.utime(file)
        except FileNotFoundError:
            return None
        except OSError as error:
            logger.warning("Packed weights in %s are not used: %s.", path, error.strerror or error)
            return None
        self._remove_old(layout)
        return layout.weights(data)

    def write(self, model: PackedModel, weights: Iterable[QuantizedWeight | None]) -> bool:
        """Keep the weights, made one after the other in the order of the shapes; tells whether they are kept.

        Nothing is where one of them is None. Raises what making a weight raises. Unfinished files are never read.
        """
        unfinished: Path | None = None
        try:
            layout = _Layout(model)
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _refuse_others(self._folder.stat())
            descriptor, name = tempfile.mkstemp(prefix=f".{layout.file_name}.", suffix=".tmp", dir=self._folder)
            unfinished = Path(name)
            with os.fdopen(descriptor, "w+b", buffering=0) as file:
                for weight, offsets in zip(weights, layout.offsets, strict=True):
                    if weight is None:
                        return False
                    for part, offset in zip(_parts(weight), offsets, strict=True):
                        _write_all(file.fileno(), part, offset)
                digest = self._digest(file.fileno(), layout, None)
                _write_all(file.fileno(), layout.header(digest), 0)
            if _Layout(model).file_name != layout.file_name:  # the model was replaced meanwhile
                return False
            unfinished.rename(self._folder / layout.file_name)
            unfinished = None
        except OSError as error:
            logger.warning(
                "The packed weights cannot be kept in %s (%s): every start packs them again. Give --home a folder that "
                "you alone can write to, with %d MB free.",
                self._folder,
                error.strerror or error,
                model.num_bytes // 10**6,
            )
            return False
        finally:
            if unfinished is not None:
                with suppress(OSError):
                    unfinished.unlink()
        self._remove_old(layout)
        return True

    def _verified(self, layout: "_Layout", descriptor: int) -> mmap.mmap | None:
        """The file in memory, unless it is not exactly what its digest and the layout say."""
        if os.fstat(descriptor).st_size != layout.num_bytes:
            return None
        data = mmap.mmap(-1, layout.num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without them
                data.madvise(mmap.MADV_HUGEPAGE)
        digest = self._digest(descriptor, layout, data)
        header = os.pread(descriptor, layout.start, 0)
        return data if header == layout.header(digest) else None

    def _digest(self, descriptor: int, layout: "_Layout", into: mmap.mmap | None) -> str:
        """SHA-256 over those of the pieces behind the header; these are left in `into` too."""

        def of_piece(start: int) -> bytes:
            num_bytes = min(_PIECE_BYTES, layout.num_bytes - start)
            piece = memoryview(bytearray(num_bytes) if into is None else into)
            piece = piece if into is None else piece[start : start + num_bytes]
            return hashlib.sha256(piece[: _read_all(descriptor, piece, start)]).digest()

        with ThreadPoolExecutor(self._num_threads) as pool:
            digests = list(pool.map(of_piece, range(layout.start, layout.num_bytes, _PIECE_BYTES)))
        return hashlib.sha256(b"".join(digests)).hexdigest()

    def _remove_old(self, layout: "_Layout") -> None:
        """Files of the same model in another state, all but the last that were used, and what was never finished."""
        with suppress(OSError):  # another server may do the same
            kept = [path for path in self._folder.glob("*.safetensors") if not layout.replaces(path.name)]
            kept = sorted(kept, key=lambda path: path.stat().st_mtime)[-_MAX_FILES:]
            for path in self._folder.iterdir():
                is_packed = path.suffix == ".safetensors" and path not in kept
                is_abandoned = path.suffix == ".tmp" and time.time() - path.stat().st_mtime > _ABANDONED_SECONDS
                if is_packed or is_abandoned:
                    path.unlink(missing_ok=True)


class _Layout:
    """Where a model's weights lie in its file, and what the file is called."""

    def __init__(self, model: PackedModel) -> None:
        """Look at the model's files as they are now. Raises OSError."""
        self._shapes = model.shapes
        self._key = _key(model)
        stem = re.sub(r"[^\w.-]", "_", model.path.stem)[:40].lstrip(".")
        place = hashlib.blake2b(os.fsencode(model.path.absolute()), digest_size=4).hexdigest()
        self._prefix = f"{stem}-{place}-{model.quantization}-"
        self.file_name = f"{self._prefix}{self._key}.safetensors"
        # All codes come first: their sizes are whole cache lines, those of scales may be halves of one.
        parts = [
            (part == "codes", index, part, shape)
            for index, each in enumerate(model.shapes)
            for part, shape in each.parts().items()
        ]
        self._entries: dict[str, object] = {}
        positions: dict[tuple[int, str], int] = {}
        end = 0
        for is_codes, index, part, shape in sorted(parts, key=lambda entry: not entry[0]):
            positions[index, part] = end
            begin, end = end, end + math.prod(shape) * (1 if is_codes else 2)
            self._entries[f"{model.shapes[index].name}.{part}"] = {
                "dtype": "U8" if is_codes else "F16",
                "shape": list(shape),
                "data_offsets": [begin, end],
            }
        self.start = len(self.header(_NO_DIGEST))  # of the first byte behind the header
        self.num_bytes = self.start + end
        self.offsets = [
            [self.start + positions[index, part] for part in each.parts()] for index, each in enumerate(model.shapes)
        ]

    def header(self, digest: str) -> bytes:
        """What the file begins with, padded so that a cache line begins behind it."""
        metadata = {"key": self._key, "sha256": digest, "format": f"octavo packed weights {FORMAT_VERSION}"}
        text = json.dumps({"__metadata__": metadata, **self._entries}).encode()
        text += b" " * (-(len(text) + 8) % _ALIGNMENT)
        return len(text).to_bytes(8, "little") + text

    def weights(self, data: mmap.mmap) -> dict[str, QuantizedWeight]:
        """Views of the file's bytes."""
        weights = {}
        for each, offsets in zip(self._shapes, self.offsets, strict=True):
            views = [
                torch.frombuffer(data, dtype=dtype, count=math.prod(shape), offset=offset).view(shape)
                for shape, offset, dtype in zip(
                    each.parts().values(), offsets, (torch.uint8, torch.float16, torch.float16), strict=False
                )
            ]
            minimums = views[2] if each.bits == 4 else None
            weights[each.name] = QuantizedWeight(views[0], views[1], minimums, each.out_features)
        return weights

    def replaces(self, file_name: str) -> bool:
        """Whether that file is of another state of the same model."""
        return file_name.startswith(self._prefix) and file_name != self.file_name


def _key(model: PackedModel) -> str:
    """Names the state of the model's files: sizes, times, and samples of what is in them. Raises OSError.

    Not all of it: reading a large model whole would take as long as packing a small one.
    """
    shapes = [astuple(each) for each in model.shapes]
    digest = hashlib.blake2b(repr((FORMAT_VERSION, model.quantization, shapes)).encode(), digest_size=16)
    for path in model.files:
        with path.open("rb", buffering=0) as file:
            state = os.fstat(file.fileno())
            digest.update(repr((path.name, state.st_size, state.st_mtime_ns)).encode())
            last = max(0, state.st_size - _SAMPLE_BYTES)
            for start in sorted({last * sample // (_NUM_SAMPLES - 1) for sample in range(_NUM_SAMPLES)}):
                digest.update(os.pread(file.fileno(), _SAMPLE_BYTES, start))
    return digest.hexdigest()


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """The descriptor of a plain file that nobody else can have written. Raises OSError."""
    # Without O_NONBLOCK a named pipe in the file's place would hold up the start for ever.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        state = os.fstat(descriptor)
        if not stat.S_ISREG(state.st_mode):
            raise OSError("it is no plain file")
        _refuse_others(state)
        yield descriptor
    finally:
        os.close(descriptor)


def _refuse_others(state: os.stat_result) -> None:
    """Raises OSError for what belongs to somebody else, or that others may write to."""
    if state.st_uid != os.geteuid():
        raise OSError("it belongs to another user")
    if stat.S_IMODE(state.st_mode) & _OTHERS_WRITE:
        raise OSError("other users may write to it")


def _parts(weight: QuantizedWeight) -> Sequence[memoryview]:
    tensors = (weight.codes, weight.scales, weight.minimums)
    return [memoryview(part.numpy()).cast("B") for part in tensors if part is not None]


def _write_all(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def _read_all(descriptor: int, into: memoryview, offset: int) -> int:
    """Fill `into`, or as much of it as the file has; returns how much."""
    done = 0
    while done < len(into) and (count := os.preadv(descriptor, [into[done:]], offset + done)):
        done += count
    return done
