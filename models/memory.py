"""How many bytes the KV cache may take: what the machine or the card has left. Knows no scheduler."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from models.control_groups import control_groups, text_of

GIB = 2**30
_DEFAULT_HOST_CACHE = 4 * GIB
_BYTES_PER_GRAPH = 16 * 2**20  # a captured graph's launches on the device, and its lists of work
_BYTES_PER_LOGIT = 12  # the product, its float32 copy, and the tensor that all graphs leave their logits in


class NotEnoughMemory(RuntimeError):
    """Nothing is left for the KV cache; the message says of how much, and which setting to change."""


def host_cache_bytes() -> int:
    """Bytes for a KV cache in main memory where no setting says: 4 GiB, or half of what is free if that is less."""
    return min(_DEFAULT_HOST_CACHE, available_host_bytes() // 2)


def graph_bytes(batch_sizes: Sequence[int], vocab_size: int) -> int:
    """An upper estimate of what CUDA graphs of these batch sizes take: they are captured once the cache is allocated.

    Logits are nearly all of a decode step's activations, and the largest graph's memory serves the others too.
    """
    return len(batch_sizes) * _BYTES_PER_GRAPH + max(batch_sizes, default=0) * vocab_size * _BYTES_PER_LOGIT


def gpu_cache_bytes(
    device: torch.device, utilization: float, run_largest_step: Callable[[], None], num_spare_bytes: int = 0
) -> int:
    """Bytes of a card that remain for the KV cache.

    Args:
        device: the card, with the weights on it.
        utilization: share of its memory that this process may use, 0 to 1.
        run_largest_step: executes the step with the greatest need, so that its peak is measured and not guessed.
        num_spare_bytes: left for what is allocated after the cache.

    Raises:
        NotEnoughMemory: if weights and the largest step leave nothing.
    """
    torch.cuda.reset_peak_memory_stats(device)
    run_largest_step()
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    peak = torch.cuda.max_memory_allocated(device)
    # What the driver and other processes hold counts as used: it is not ours to give.
    taken_outside = total - free - torch.cuda.memory_reserved(device)
    needed = peak + taken_outside + num_spare_bytes
    left = int(total * utilization) - needed
    if left <= 0:
        raise NotEnoughMemory(
            f"The model and its largest step need {needed / GIB:.1f} GiB of the card's "
            f"{total / GIB:.1f} GiB, and --gpu-memory-utilization {utilization} leaves no room for a KV cache. "
            "Raise it, or lower --max-num-batched-tokens."
        )
    return left


def available_host_bytes(root: Path = Path("/")) -> int:
    """Free memory of the machine, or of the container's limit where that is less. `root` is of the file system."""
    meminfo = dict(line.split(":") for line in (root / "proc/meminfo").read_text().splitlines())
    available = int(meminfo["MemAvailable"].split()[0]) * 1024
    left = [num for folder in control_groups("memory", root) if (num := _bytes_left(folder)) is not None]
    return max(0, min(available, *left)) if left else available


def _bytes_left(folder: Path) -> int | None:
    """Of one control group's limit, in version 2 or version 1; None = it has none.

    File pages count as used there, and are dropped when memory is needed: mostly the mapped weights.
    """
    for limit, used, prefix in (
        ("memory.max", "memory.current", ""),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        statistics = dict(line.split() for line in text_of(folder / "memory.stat").splitlines())
        try:
            in_use = int(text_of(folder / used)) - sum(
                int(statistics[f"{prefix}{kind}_file"]) for kind in ("active", "inactive")
            )
            return int(text_of(folder / limit)) - in_use
        except (KeyError, ValueError):  # "max", or no such file
            continue
    return None
