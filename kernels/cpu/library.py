"""Loads the native CPU library and declares its functions. Knows the C types, no tensors and no attention.

The library is built by setup.py where a compiler is present; `load_library` says why when it cannot be had.
"""

import ctypes
import functools
import re
from pathlib import Path

import torch

LIBRARY_PATH = Path(__file__).parent / "_paged_attention.so"

ELEMENT_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
INSTRUCTION_SETS = {"avx512": 2, "avx2": 1, "generic": 0}  # best first

OUT_OF_MEMORY = 4
STATUS_MESSAGES = {
    1: "a block table names a block outside the cache",
    2: "the slot mapping names a slot outside the cache",
    3: "a row's query length, sequence length and block table do not fit together",
    OUT_OF_MEMORY: "out of memory for the scratch buffers",
    5: "this processor or this build lacks the instruction set asked for",
}


class NativeLibraryError(RuntimeError):
    """The native CPU library is not built, or does not load here."""


class WriteKVArgs(ctypes.Structure):
    """Mirrors `octavo::WriteKVArgs` of paged_attention.h."""

    _fields_ = (
        ("key", ctypes.c_void_p),
        ("value", ctypes.c_void_p),
        ("key_cache", ctypes.c_void_p),
        ("value_cache", ctypes.c_void_p),
        ("slot_mapping", ctypes.c_void_p),
        ("num_tokens", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("num_blocks", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("element_size", ctypes.c_int64),
        ("key_strides", ctypes.c_int64 * 2),
        ("value_strides", ctypes.c_int64 * 2),
        ("key_cache_strides", ctypes.c_int64 * 3),
        ("value_cache_strides", ctypes.c_int64 * 3),
        ("num_threads", ctypes.c_int32),
    )


class AttendArgs(ctypes.Structure):
    """Mirrors `octavo::AttendArgs` of paged_attention.h."""

    _fields_ = (
        ("query", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("key_cache", ctypes.c_void_p),
        ("value_cache", ctypes.c_void_p),
        ("query_start_loc", ctypes.c_void_p),
        ("seq_lens", ctypes.c_void_p),
        ("block_tables", ctypes.c_void_p),
        ("num_rows", ctypes.c_int64),
        ("num_tokens", ctypes.c_int64),
        ("num_q_heads", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("num_blocks", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("block_tables_width", ctypes.c_int64),
        ("block_tables_stride", ctypes.c_int64),
        ("query_strides", ctypes.c_int64 * 2),
        ("key_cache_strides", ctypes.c_int64 * 3),
        ("value_cache_strides", ctypes.c_int64 * 3),
        ("scale", ctypes.c_float),
        ("logit_softcap", ctypes.c_float),
        ("sliding_window", ctypes.c_int64),
        ("query_type", ctypes.c_int32),
        ("cache_type", ctypes.c_int32),
        ("instruction_set", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
    )


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
    library.octavo_attend.argtypes = (ctypes.POINTER(AttendArgs),)
    library.octavo_attend.restype = ctypes.c_int32
    library.octavo_write_kv.argtypes = (ctypes.POINTER(WriteKVArgs),)
    library.octavo_write_kv.restype = ctypes.c_int32
    library.octavo_supports.argtypes = (ctypes.c_int32,)
    library.octavo_supports.restype = ctypes.c_int32
    return library


def supported_instruction_sets(library: ctypes.CDLL) -> list[str]:
    """Instruction sets that both the build and this processor have, best first."""
    return [name for name, code in INSTRUCTION_SETS.items() if library.octavo_supports(code)]


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
