"""Builds a decoder and fills it from a checkpoint, tensor by tensor, after checking every name and shape.

The one place where formats and the decoder meet.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch

from kernels.model_ops.ops import ModelOps
from kernels.quantized_weight import QuantizedWeight
from models.config import ModelConfig
from models.config_reader import is_gguf, open_gguf, read_config
from models.decoder import Decoder
from models.errors import CheckpointError
from models.gguf_checkpoint import GGUFCheckpoint
from models.gguf_config import read_gguf_config
from models.hf_config import read_hf_config
from models.layers import Slots
from models.native_layers import native_layers
from models.packed_weights import MIN_BYTES, PackedModel, PackedShape, PackedWeights
from models.quantization import CodedRows, Quantization, can_quantize, has_scale_by_output, quantize_weight, weight_bits
from models.safetensors_checkpoint import SafetensorsCheckpoint

__all__ = ["load_model", "read_config"]


class Checkpoint(Protocol):
    """Weights in files, by the names in the files."""

    path: Path
    files: list[Path]  # that hold the weights
    shapes: dict[str, tuple[int, ...]]

    def source_name(self, name: str) -> str:
        """The name in the files of the weight that the decoder calls `name`."""
        ...

    def num_bytes(self, source_name: str) -> int:
        """Bytes of the tensor in the files."""
        ...

    def pieces(self, source_name: str) -> Iterator[tuple[int, torch.Tensor]]:
        """Row pieces of the tensor, in order, each with the number of its first row; a vector is one piece."""
        ...

    def code_bits(self, source_name: str) -> frozenset[int]:
        """See `models.quantization.WeightSource`."""
        ...

    def coded_pieces(self, source_name: str, bits: int) -> Iterator[tuple[int, CodedRows]]:
        """See `models.quantization.WeightSource`."""
        ...


def load_model(
    path: Path,
    dtype: torch.dtype,
    device: torch.device,
    ops: ModelOps,
    on_progress: Callable[[int, int], None],
    quantization: Quantization = "none",
    packed: PackedWeights | None = None,
) -> Decoder:
    """Load a Hugging Face directory or a .gguf file.

    The files are memory mapped and copied one tensor at a time, so the peak is the model plus one tensor.

    Args:
        path: the directory or file.
        dtype: of the weights and hidden states: float32, bfloat16 or float16.
        device: where the weights go.
        ops: what the decoder computes with.
        on_progress: called with bytes read so far and in all, at the start and after each matrix or vector.
        quantization: what matrices become; other than "none" takes float32 and operations that read codes.
        packed: where they are kept between starts.

    Raises:
        ModelError: the model cannot be served; the message says why, and names every missing, surplus and
            misshapen tensor.
    """
    config, checkpoint = _open(path)
    if checkpoint.source_name("lm_head.weight") in checkpoint.shapes:
        # Some checkpoints declare a tied head and store one all the same; what is stored counts.
        config = replace(config, tie_word_embeddings=False)
    # Checked on a decoder without storage, so that a wrong size costs a message and not the machine's memory.
    _check(_slots(Decoder(config, dtype, torch.device("meta"), ops), checkpoint), checkpoint)
    decoder = Decoder(config, dtype, device, ops)
    slots = _slots(decoder, checkpoint)
    progress = _Progress(on_progress, {name: checkpoint.num_bytes(name) for name in slots})
    if quantization != "none":
        for names in _quantize(decoder, checkpoint, quantization, packed, progress):
            for name in names:
                del slots[name]
            progress.add(names)
    for name, slot in slots.items():
        for start_row, piece in checkpoint.pieces(name):
            slot.write(start_row, piece)
        progress.add([name])
    decoder.native_layers = native_layers(decoder)
    return decoder


class _Progress:
    """Tells how many bytes are done of how many in all; what is done twice counts once."""

    def __init__(self, on_progress: Callable[[int, int], None], num_bytes: dict[str, int]) -> None:
        self._on_progress = on_progress
        self._to_do = dict(num_bytes)
        self._done = 0
        self._total = sum(num_bytes.values())
        self.add([])

    def add(self, names: Iterable[str]) -> None:
        self._done += sum(self._to_do.pop(name, 0) for name in names)
        self._on_progress(self._done, self._total)


def _quantize(
    decoder: Decoder,
    checkpoint: Checkpoint,
    quantization: Quantization,
    packed: PackedWeights | None,
    progress: _Progress,
) -> Iterator[list[str]]:
    """Put codes in the place of every matrix that can be had as such, and yield the names in the files of its tensors.

    The floats that the decoder was made with were never written, so that they take no memory.
    """
    fused_weights = [fused for fused in decoder.fused_weights() if can_quantize(fused.shape)]
    sources = [[checkpoint.source_name(name) for name in fused.names] for fused in fused_weights]
    shapes = tuple(
        PackedShape(
            fused.names[0],
            *fused.shape,
            weight_bits(checkpoint, names, quantization),
            has_scale_by_output(quantization),
        )
        for fused, names in zip(fused_weights, sources, strict=True)
    )
    model = PackedModel(checkpoint.path, tuple(checkpoint.files), quantization, shapes)

    def made_weights() -> Iterator[QuantizedWeight | None]:
        for names in sources:
            yield quantize_weight(checkpoint, names, quantization)
            progress.add(names)  # here too: to keep them, all are made before the first is used

    kept = None if packed is None else _kept_weights(model, packed, made_weights)
    weights = made_weights() if kept is None else (kept[fused.names[0]] for fused in fused_weights)
    for fused, names, weight in zip(fused_weights, sources, weights, strict=True):
        if weight is not None:
            fused.replace(weight)
            yield names


def _kept_weights(
    model: PackedModel, packed: PackedWeights, make: Callable[[], Iterable[QuantizedWeight | None]]
) -> dict[str, QuantizedWeight] | None:
    """From their file, which is made where there is none and a later start gains by it."""
    if model.num_bytes < MIN_BYTES:
        return None
    kept = packed.read(model)
    if kept is None and packed.write(model, make()):
        kept = packed.read(model)
    return kept


def _open(path: Path) -> tuple[ModelConfig, Checkpoint]:
    if is_gguf(path):
        file = open_gguf(path)
        config = read_gguf_config(file)
        return config, GGUFCheckpoint(file, config)
    return read_hf_config(path), SafetensorsCheckpoint(path)


def _slots(decoder: Decoder, checkpoint: Checkpoint) -> Slots:
    """The decoder's slots by the names in the files."""
    return {checkpoint.source_name(name): slot for name, slot in decoder.slots().items()}


def _check(slots: Slots, checkpoint: Checkpoint) -> None:
    """Compare what the decoder needs with what the files hold, and report all differences at once."""
    problems = [f"missing tensor {name}" for name in slots if name not in checkpoint.shapes]
    problems += [f"surplus tensor {name}" for name in checkpoint.shapes if name not in slots]
    for name, slot in slots.items():
        found = checkpoint.shapes.get(name, slot.shape)
        if found != slot.shape:
            problems.append(f"tensor {name} has the shape {list(found)}; expected {list(slot.shape)}")
    if problems:
        raise CheckpointError(f"{checkpoint.path} does not fit its configuration: " + "; ".join(problems))
