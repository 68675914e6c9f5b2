"""Zeroed main memory in huge pages, and having the system back it with pages before anything waits for one.

Knows no tensors and no blocks: kv_cache.py gives it bytes.
"""

import ctypes
import mmap
import time
from collections.abc import Callable
from contextlib import suppress

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14, which Python's mmap does not name
_CHUNK_BYTES = 4 << 20  # one call: work that comes meanwhile waits no longer than for this many zeros
_BUSY_SECONDS = 0.05  # between two looks at whether there is still other work


def zeroed(num_bytes: int) -> mmap.mmap:
    """Private zeroed memory that has no pages yet, in huge ones where the system has them.

    Blocks are read in an order that no cache of small pages' addresses holds.

    Raises:
        OSError: if the system will not promise that much.
    """
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def populate(memory: mmap.mmap, is_busy: Callable[[], bool]) -> bool:
    """Have every page backed, beside whatever reads and writes the memory; its contents stay.

    The first write to a huge page waits for two mebibytes of zeros, and each layer's part of a new block may lie in a
    page of its own: a step that fills blocks for the first time otherwise waits for all of those. In a virtual machine
    whose host has to find the memory first it waits far longer still.

    Args:
        memory: from `zeroed`.
        is_busy: whether there is work that wants the processors; this goes on when there is none.

    Returns:
        Whether all pages are there; False where the kernel is older or has no memory left, which does no harm.
    """
    place = ctypes.c_char.from_buffer(memory)  # keeps the memory mapped for as long as this runs
    address, num_bytes = ctypes.addressof(place), len(memory)
    system = ctypes.CDLL(None)  # unlike mmap.madvise, lets other threads run meanwhile
    for first in range(0, num_bytes, _CHUNK_BYTES):
        while is_busy():
            time.sleep(_BUSY_SECONDS)
        size = min(_CHUNK_BYTES, num_bytes - first)
        if system.madvise(ctypes.c_void_p(address + first), ctypes.c_size_t(size), _POPULATE_WRITE) != 0:
            return False
    return True
