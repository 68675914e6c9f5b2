"""Loads the native CPU library and declares its functions. Knows the C types, no tensors and no attention.

The library is built by setup.py where a compiler is present; `load_library` says why when it cannot be had.
"""

import ctypes
import functools
import re
from pathlib import Path
from typing import Any

import torch

LIBRARY_PATH = Path(__file__).parent / "_paged_attention.so"

ELEMENT_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
CACHE_TYPES = {**ELEMENT_TYPES, torch.int8: 3, torch.float8_e4m3fn: 4}
LAYER_PARTS = ("norms", "products", "gated products", "rotation", "attention", "rounding")
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}
INSTRUCTION_SETS = {"avx512_bf16": 4, "avx512_vnni": 3, "avx512": 2, "avx2": 1, "generic": 0}  # best first

OUT_OF_MEMORY = 4
STATUS_MESSAGES = {
    1: "a block table names a block outside the cache",
    2: "the slot mapping names a slot outside the cache",
    3: "a row's query length, sequence length and block table do not fit together",
    OUT_OF_MEMORY: "out of memory for the scratch buffers",
    5: "this processor or this build lacks the instruction set asked for",
    6: "a token id lies outside the vocabulary",
}


class NativeLibraryError(RuntimeError):
    """The native CPU library is not built, or does not load here."""


def _fields(ctype: type[Any], *names: str) -> tuple[tuple[str, type[Any]], ...]:
    return tuple((name, ctype) for name in names)


class WriteKVArgs(ctypes.Structure):
    """Mirrors `octavo::WriteKVArgs` of paged_attention.h."""

    _fields_ = (
        *_fields(ctypes.c_void_p, "key", "value", "key_cache", "value_cache"),
        *_fields(ctypes.c_void_p, "key_scale", "value_scale", "slot_mapping"),
        *_fields(ctypes.c_int64, "num_tokens", "num_kv_heads", "head_dim", "num_blocks", "block_size"),
        *_fields(ctypes.c_int64 * 2, "key_strides", "value_strides"),
        *_fields(ctypes.c_int64 * 3, "key_cache_strides", "value_cache_strides"),
        *_fields(ctypes.c_int64 * 3, "key_scale_strides", "value_scale_strides"),
        *_fields(ctypes.c_int32, "source_type", "cache_type", "instruction_set", "num_threads"),
    )


class AttendArgs(ctypes.Structure):
    """Mirrors `octavo::AttendArgs` of paged_attention.h."""

    _fields_ = (
        *_fields(ctypes.c_void_p, "query", "out", "key_cache", "value_cache", "key_scale", "value_scale"),
        *_fields(ctypes.c_void_p, "query_start_loc", "seq_lens", "block_tables"),
        *_fields(ctypes.c_int64, "num_rows", "num_tokens", "num_q_heads", "num_kv_heads", "head_dim"),
        *_fields(ctypes.c_int64, "num_blocks", "block_size", "block_tables_width", "block_tables_stride"),
        *_fields(ctypes.c_int64 * 2, "query_strides"),
        *_fields(ctypes.c_int64 * 3, "key_cache_strides", "value_cache_strides"),
        *_fields(ctypes.c_int64 * 3, "key_scale_strides", "value_scale_strides"),
        *_fields(ctypes.c_float, "scale", "logit_softcap"),
        *_fields(ctypes.c_int64, "sliding_window"),
        *_fields(ctypes.c_int32, "query_type", "out_type", "cache_type", "instruction_set", "num_threads"),
    )


class RotateAndWriteArgs(ctypes.Structure):
    """Mirrors `octavo::RotateAndWriteArgs` of model_ops.h."""

    _fields_ = (
        *_fields(ctypes.c_void_p, "heads", "cos", "sin", "norm_weight", "query"),
        *_fields(ctypes.c_void_p, "key_cache", "value_cache", "key_scale", "value_scale", "slot_mapping"),
        *_fields(ctypes.c_int64, "num_tokens", "num_q_heads", "num_kv_heads", "head_dim", "num_blocks", "block_size"),
        *_fields(ctypes.c_int64 * 2, "heads_strides"),
        *_fields(ctypes.c_int64 * 3, "key_cache_strides", "value_cache_strides"),
        *_fields(ctypes.c_int64 * 3, "key_scale_strides", "value_scale_strides"),
        *_fields(ctypes.c_float, "norm_eps"),
        *_fields(ctypes.c_int32, "heads_type", "query_type", "cache_type", "instruction_set", "num_threads"),
    )


class LinearArgs(ctypes.Structure):
    """Mirrors `octavo::LinearArgs` of model_ops.h."""

    _fields_ = (
        *_fields(ctypes.c_void_p, "inputs", "weight", "bias", "out"),
        *_fields(ctypes.c_int64, "num_rows", "num_outputs", "in_features", "input_stride"),
        *_fields(ctypes.c_int32, "element_type", "instruction_set", "num_threads"),
    )


class RmsNormArgs(ctypes.Structure):
    """Mirrors `octavo::RmsNormArgs` of model_ops.h."""

    _fields_ = (
        *_fields(ctypes.c_void_p, "inputs", "residual", "weight", "out", "total"),
        *_fields(ctypes.c_int64, "num_rows", "size"),
        *_fields(ctypes.c_float, "eps"),
        *_fields(ctypes.c_int32, "element_type", "instruction_set", "num_threads"),
    )


class GateArgs(ctypes.Structure):
    """Mirrors `octavo::GateArgs` of model_ops.h."""

    _fields_ = (
        *_fields(ctypes.c_void_p, "gate_up", "out"),
        *_fields(ctypes.c_int64, "num_rows", "size"),
        *_fields(ctypes.c_int32, "activation", "element_type", "instruction_set", "num_threads"),
    )


class RotaryAnglesArgs(ctypes.Structure):
    """Mirrors `octavo::RotaryAnglesArgs` of model_ops.h."""

    _fields_ = (
        *_fields(ctypes.c_void_p, "positions", "inverse_frequencies", "cos", "sin"),
        *_fields(ctypes.c_int64, "num_tokens", "size"),
        *_fields(ctypes.c_float, "magnitude"),
        *_fields(ctypes.c_int32, "instruction_set", "num_threads"),
    )


class SoftCapArgs(ctypes.Structure):
    """Mirrors `octavo::SoftCapArgs` of model_ops.h."""

    _fields_ = (
        *_fields(ctypes.c_void_p, "scores", "out"),
        *_fields(ctypes.c_int64, "num_rows", "size"),
        *_fields(ctypes.c_float, "cap"),
        *_fields(ctypes.c_int32, "instruction_set", "num_threads"),
    )


class QuantizedWeightArgs(ctypes.Structure):
    """Mirrors `octavo::QuantizedWeight` of quantized.h."""

    _fields_ = (
        *_fields(ctypes.c_void_p, "codes", "scales", "minimums", "bias"),
        *_fields(ctypes.c_int64, "num_outputs", "in_features", "num_scales"),
    )


class QuantizedLinearArgs(ctypes.Structure):
    """Mirrors `octavo::QuantizedLinearArgs` of quantized.h."""

    _fields_ = (
        ("weight", QuantizedWeightArgs),
        *_fields(ctypes.c_void_p, "inputs", "out"),
        *_fields(ctypes.c_int64, "num_rows", "input_stride"),
        *_fields(ctypes.c_int32, "instruction_set", "num_threads"),
    )


class EmbedArgs(ctypes.Structure):
    """Mirrors `octavo::EmbedArgs` of quantized.h."""

    _fields_ = (
        ("weight", QuantizedWeightArgs),
        *_fields(ctypes.c_void_p, "ids", "out"),
        *_fields(ctypes.c_int64, "num_rows"),
        *_fields(ctypes.c_float, "factor"),
        *_fields(ctypes.c_int32, "instruction_set", "num_threads"),
    )


class LayerWeights(ctypes.Structure):
    """Mirrors `octavo::LayerWeights` of decoder_layers.h."""

    _fields_ = (
        *_fields(QuantizedWeightArgs, "qkv", "output", "gate_up", "down"),
        *_fields(
            ctypes.c_void_p, "attention_norm", "mlp_norm", "attention_output_norm", "mlp_output_norm", "head_norm"
        ),
        *_fields(ctypes.c_int64, "rope", "sliding_window"),
    )


class LayerCache(ctypes.Structure):
    """Mirrors `octavo::LayerCache` of decoder_layers.h."""

    _fields_ = _fields(ctypes.c_void_p, "key", "value", "key_scale", "value_scale")


class DecoderArgs(ctypes.Structure):
    """Mirrors `octavo::DecoderArgs` of decoder_layers.h."""

    _fields_ = (
        ("layers", ctypes.POINTER(LayerWeights)),
        ("caches", ctypes.POINTER(LayerCache)),
        *_fields(ctypes.c_void_p, "final_norm", "residual", "wanted", "out"),
        *_fields(ctypes.c_void_p * 2, "cos", "sin"),
        ("write", RotateAndWriteArgs),
        ("attend", AttendArgs),
        ("seconds", ctypes.c_void_p),
        *_fields(ctypes.c_int64, "num_layers", "num_tokens", "num_wanted", "hidden_size", "intermediate_size"),
        *_fields(ctypes.c_float, "eps"),
        *_fields(ctypes.c_int32, "activation", "instruction_set", "num_threads"),
    )


class SampleArgs(ctypes.Structure):
    """Mirrors `octavo::SampleArgs` of sampler.h."""

    _fields_ = (
        *_fields(ctypes.c_void_p, "logits", "temperature", "top_k", "top_p", "min_p", "uniform", "token_ids"),
        *_fields(ctypes.c_int64, "num_rows", "vocab_size", "logits_stride"),
        *_fields(ctypes.c_int32, "instruction_set", "num_threads"),
    )


class TokenLogprobsArgs(ctypes.Structure):
    """Mirrors `octavo::TokenLogprobsArgs` of sampler.h."""

    _fields_ = (
        *_fields(ctypes.c_void_p, "logits", "token_ids", "logprobs", "top_ids", "top_logprobs"),
        *_fields(ctypes.c_int64, "num_rows", "vocab_size", "logits_stride", "num_top"),
        *_fields(ctypes.c_int32, "instruction_set", "num_threads"),
    )


_FUNCTIONS = {
    "octavo_attend": AttendArgs,
    "octavo_write_kv": WriteKVArgs,
    "octavo_rotate_and_write": RotateAndWriteArgs,
    "octavo_linear": LinearArgs,
    "octavo_rms_norm": RmsNormArgs,
    "octavo_gate": GateArgs,
    "octavo_rotary_angles": RotaryAnglesArgs,
    "octavo_soft_cap": SoftCapArgs,
    "octavo_sample": SampleArgs,
    "octavo_token_logprobs": TokenLogprobsArgs,
    "octavo_quantized_linear": QuantizedLinearArgs,
    "octavo_embed": EmbedArgs,
    "octavo_run_layers": DecoderArgs,
}


def _openmp_runtime() -> str:
    """Path of the OpenMP runtime that torch has loaded, else the name of the system's.

    Two runtimes in one process keep two thread pools that spin against each other on the same cores.
    """
    maps = Path("/proc/self/maps")
    if maps.exists():
        loaded: list[str] = re.findall(r"(/\S*/lib(?:gomp|iomp5|omp)\b\S*\.so\S*)", maps.read_text())
        beside_torch = [path for path in loaded if Path(torch.__file__).parent.parent in Path(path).parents]
        if loaded:
            return (beside_torch or loaded)[0]
    bundled = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    return str(bundled[0]) if bundled else "libgomp.so.1"


@functools.cache
def load_library() -> ctypes.CDLL:
    """Load the library, once per process.

    Raises:
        NativeLibraryError: it is not built, or needs something that this machine lacks.
    """
    if not LIBRARY_PATH.exists():
        raise NativeLibraryError(f"{LIBRARY_PATH.name} is not built (no C++ compiler when the package was installed)")
    try:
        # The library leaves its OpenMP symbols open; this runtime, made global, supplies them.
        ctypes.CDLL(_openmp_runtime(), mode=ctypes.RTLD_GLOBAL)
        library = ctypes.CDLL(str(LIBRARY_PATH))
    except OSError as error:
        raise NativeLibraryError(f"{LIBRARY_PATH.name} does not load: {error}") from error
    for name in (*_FUNCTIONS, "octavo_argument_bytes"):
        if not hasattr(library, name):
            raise NativeLibraryError(f"{LIBRARY_PATH.name} is of an older version: it lacks {name}")
    for name, structure in _FUNCTIONS.items():
        function = getattr(library, name)
        function.argtypes = (ctypes.POINTER(structure),)
        function.restype = ctypes.c_int32
    library.octavo_argument_bytes.restype = ctypes.c_int64
    structures = (*_FUNCTIONS.values(), LayerWeights, LayerCache)
    if library.octavo_argument_bytes() != sum(map(ctypes.sizeof, structures)):
        raise NativeLibraryError(f"{LIBRARY_PATH.name} is of another version: its arguments are laid out otherwise")
    library.octavo_supports.argtypes = (ctypes.c_int32,)
    library.octavo_supports.restype = ctypes.c_int32
    return library


def supported_instruction_sets(library: ctypes.CDLL) -> list[str]:
    """Instruction sets that both the build and this processor have, best first."""
    return [name for name, code in INSTRUCTION_SETS.items() if library.octavo_supports(code)]


def select_instruction_set(library: ctypes.CDLL, name: str | None) -> str:
    """The instruction set of that name; None = the best.

    Raises:
        ValueError: this processor or this build lacks it.
    """
    supported = supported_instruction_sets(library)
    if name is None:
        return supported[0]
    if name not in supported:
        raise ValueError(f"instruction set {name!r} is not one of {', '.join(supported)}")
    return name


def element_type(dtype: torch.dtype) -> int:
    """The code of a dtype.

    Raises:
        ValueError: the native kernels do not take it.
    """
    if dtype not in ELEMENT_TYPES:
        raise ValueError(f"the native CPU kernels take float32, bfloat16 and float16, not {dtype}")
    return ELEMENT_TYPES[dtype]


def cache_type(dtype: torch.dtype) -> int:
    """The code of the dtype of a KV cache.

    Raises:
        ValueError: the native kernels do not take it.
    """
    if dtype not in CACHE_TYPES:
        names = ", ".join(str(known).removeprefix("torch.") for known in CACHE_TYPES)
        raise ValueError(f"the native CPU kernels take a KV cache of {names}, not {dtype}")
    return CACHE_TYPES[dtype]


def check_status(status: int) -> None:
    """Turn a status of the library into an exception.

    Raises:
        MemoryError: the scratch buffers could not be had.
        ValueError: the batch's metadata do not fit the cache; says which and how.
    """
    if status == OUT_OF_MEMORY:
        raise MemoryError(STATUS_MESSAGES[status])
    if status:
        raise ValueError(STATUS_MESSAGES[status])
