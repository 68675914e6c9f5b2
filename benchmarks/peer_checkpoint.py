"""Writes a .gguf file as a directory in Hugging Face layout, for peers that read no GGUF. Needs transformers.

The weights are the file's own, dequantised to float32, and the tokenizer is Octavo's: transformers' conversion of a
GGUF file's tokenizer leaves parts out. So every server computes with the same numbers on the same tokens.
"""

from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.saved_tokenizer import save_tokenizer
from models.config_reader import read_config
from models.gguf_checkpoint import GGUFCheckpoint
from models.gguf_file import GGUFFile
from server.tokenizer import load_tokenizer

_SAME_WEIGHTS = ("llama", "qwen2", "qwen3")  # families whose weights are the same in both formats, but for their order


class CheckpointNotWritten(RuntimeError):
    """The directory could not be made; the message says why."""


def write_checkpoint(gguf: Path, directory: Path) -> Path:
    """Write configuration, weights and tokenizer to `directory`, and return it.

    Raises:
        CheckpointNotWritten: transformers is not installed, or reads the file in another way than Octavo.
    """
    write_model(gguf, directory)
    save_tokenizer(load_tokenizer(gguf), directory)
    return directory


def write_model(gguf: Path, directory: Path) -> None:
    """Write configuration and weights. Raises CheckpointNotWritten."""
    try:
        import transformers  # slow to import, and only one peer needs it
    except ImportError as error:
        raise CheckpointNotWritten(
            f"{error}. Making a directory for vLLM needs transformers: pip install transformers, or give --vllm-model."
        ) from error
    config = transformers.AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if config.model_type not in _SAME_WEIGHTS:
        raise CheckpointNotWritten(
            f"{gguf} is of the family {config.model_type}, and only {', '.join(_SAME_WEIGHTS)} are written. "
            "Give --vllm-model."
        )
    checkpoint = GGUFCheckpoint(GGUFFile(gguf), read_config(gguf))
    config.dtype = torch.float32
    config.vocab_size = checkpoint.shapes[checkpoint.source_name("model.embed_tokens.weight")][0]
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    config.architectures = [type(model).__name__]
    config.save_pretrained(directory)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    weights = {name: _weight(checkpoint, name) for name in model.state_dict() if name not in tied}
    for name, weight in weights.items():
        if weight.shape != model.state_dict()[name].shape:
            raise CheckpointNotWritten(f"{name} of {gguf} has another shape than transformers reads from the file.")
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def _weight(checkpoint: GGUFCheckpoint, name: str) -> torch.Tensor:
    return torch.cat([rows for _, rows in checkpoint.pieces(checkpoint.source_name(name))]).contiguous()
