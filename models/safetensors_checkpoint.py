"""The weights of a Hugging Face directory: one or more safetensors files, memory mapped.

Knows the layout of the directory, no model. Pickle files are refused: loading one runs the code in it.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from models.errors import CheckpointError, UnsupportedModelError
from models.hf_fields import Fields
from models.quantization import CodedRows

_DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
# Written by old releases of transformers; recomputed from the configuration.
_NOT_WEIGHTS = (".rotary_emb.inv_freq",)
# Where a multimodal checkpoint keeps the layers and the head of its text model (in transformers 4 and 5), and the parts
# beside it that are not loaded.
_TEXT_PREFIXES = {"language_model.model.": "language_model.", "model.language_model.": ""}
_OTHER_TOWERS = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")


class SafetensorsCheckpoint:
    """All tensors of a directory, by the names in its files."""

    def __init__(self, directory: Path) -> None:
        """Open every shard and read its header.

        Raises:
            CheckpointError: a shard is missing or damaged, or the index and the shards disagree.
            UnsupportedModelError: no safetensors but pickle files, or a tensor that is not of a float type.
        """
        self.path = directory
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._num_bytes: dict[str, int] = {}
        self._shard_of: dict[str, safe_open] = {}
        index = self._read_index()
        self.files = self._shard_paths(index)
        for file in self.files:
            self._add_shard(file, index)
        for name in index:
            if name not in self.shapes:
                raise CheckpointError(f"{directory / _INDEX} lists {name} in {index[name]}, which does not hold it")
        prefixes = [prefix for prefix in _TEXT_PREFIXES if any(name.startswith(prefix) for name in self.shapes)]
        self._text_prefix = prefixes[0] if prefixes else None
        self.shapes = {name: shape for name, shape in self.shapes.items() if self._is_weight(name)}

    def source_name(self, name: str) -> str:
        """The name in the files of the weight that the decoder calls `name`."""
        if self._text_prefix is None:
            return name
        if name.startswith("model."):
            return self._text_prefix + name.removeprefix("model.")
        return _TEXT_PREFIXES[self._text_prefix] + name

    def num_bytes(self, source_name: str) -> int:
        """Bytes of the tensor in the file."""
        return self._num_bytes[source_name]

    def pieces(self, source_name: str) -> Iterator[tuple[int, torch.Tensor]]:
        """The tensor, a view of the memory map, with the number of its first row: 0."""
        yield 0, self._shard_of[source_name].get_tensor(source_name)

    def code_bits(self, source_name: str) -> frozenset[int]:
        """None: only float types are served."""
        return frozenset()

    def coded_pieces(self, source_name: str, bits: int) -> Iterator[tuple[int, CodedRows]]:
        """Never asked for, as no tensor has codes."""
        raise AssertionError(f"{source_name} holds floats")

    def _is_weight(self, name: str) -> bool:
        if name.endswith(_NOT_WEIGHTS):
            return False
        return self._text_prefix is None or not name.startswith(_OTHER_TOWERS)

    def _read_index(self) -> dict[str, str]:
        """The shard of each tensor; empty without an index."""
        if not (self.path / _INDEX).exists():
            return {}
        weight_map = Fields.read(self.path / _INDEX).raw("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{self.path / _INDEX} has no weight_map")
        for name, file in weight_map.items():
            # Only a plain name: an index must not reach files outside its own directory.
            if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
                raise CheckpointError(
                    f"{self.path / _INDEX}: weight_map has {file!r} for {name}; expected a .safetensors file name"
                )
        return weight_map

    def _shard_paths(self, index: dict[str, str]) -> list[Path]:
        if index:
            paths = [self.path / file for file in sorted(set(index.values()))]
            for path in paths:
                if not path.is_file():
                    raise CheckpointError(f"{self.path / _INDEX} lists {path.name}, which is not there")
            return paths
        # Mistral's own layout of the same weights lies beside the Hugging Face one under this name.
        paths = sorted(path for path in self.path.glob("*.safetensors") if not path.name.startswith("consolidated"))
        if paths:
            return paths
        if any(path for pattern in _PICKLES for path in self.path.glob(pattern)):
            raise UnsupportedModelError(
                f"{self.path} holds its weights as pickle files, which can run code when loaded; "
                "only safetensors and GGUF are supported"
            )
        raise CheckpointError(f"{self.path} has no .safetensors file")

    def _add_shard(self, file: Path, index: dict[str, str]) -> None:
        try:
            shard = safe_open(file, framework="pt", device="cpu")
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(f"{file} is truncated or damaged: {error}") from error
        for name in shard.keys():  # noqa: SIM118 - a safetensors file is not a mapping
            if name in self.shapes:
                raise CheckpointError(f"{self.path} holds {name} in two files, one of them {file.name}")
            if index and index.get(name) != file.name:
                raise CheckpointError(f"{file} holds {name}, which {_INDEX} does not list there")
            header = shard.get_slice(name)
            dtype = header.get_dtype()
            if dtype not in _DTYPE_BYTES:
                raise UnsupportedModelError(
                    f"{file}: {name} is of type {dtype}; supported are {', '.join(_DTYPE_BYTES)}"
                )
            self.shapes[name] = tuple(header.get_shape())
            self._num_bytes[name] = _DTYPE_BYTES[dtype] * torch.Size(self.shapes[name]).numel()
            self._shard_of[name] = shard
