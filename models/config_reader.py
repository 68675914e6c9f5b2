"""Reads the configuration of a model, whatever its format, without its weights and without torch."""

from pathlib import Path

from models.config import ModelConfig
from models.errors import CheckpointError, UnsupportedModelError
from models.gguf_config import read_gguf_config
from models.gguf_file import GGUFFile
from models.hf_config import read_hf_config


def read_config(path: Path) -> ModelConfig:
    """The configuration of a Hugging Face directory or a .gguf file.

    Raises:
        ModelError: the path holds no model that can be served; the message says why.
    """
    return read_gguf_config(open_gguf(path)) if is_gguf(path) else read_hf_config(path)


def is_gguf(path: Path) -> bool:
    """Whether `path` is a GGUF file rather than a model directory. Raises CheckpointError where it is neither."""
    if path.is_dir():
        return False
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    if path.suffix != ".gguf":
        raise CheckpointError(f"{path} is neither a model directory nor a .gguf file")
    return True


def open_gguf(path: Path) -> GGUFFile:
    """Open a GGUF file that holds a whole model. Raises ModelError."""
    file = GGUFFile(path)
    num_parts = file.metadata.get("split.count", 1)
    if num_parts > 1:
        raise UnsupportedModelError(
            f"{path} is one of {num_parts} parts of a split GGUF; merge them with llama.cpp's gguf-split --merge"
        )
    return file
