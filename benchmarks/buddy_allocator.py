"""A buddy allocator over contiguous slots: how servers without paging find room for a request's keys and values.

The PagedAttention paper (section 6.1) assumes it of Orca. Sizes are powers of two; knows no requests.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Region:
    """Contiguous slots that are in use."""

    start: int
    num_slots: int  # a power of two, `start` is a multiple of it


class BuddyAllocator:
    """Splits regions in halves until one fits, and joins two halves as soon as both are free."""

    def __init__(self, num_slots: int) -> None:
        """Manage any number of slots: as regions of powers of two, the largest first."""
        self.num_free_slots = num_slots
        self._free: dict[int, set[int]] = {1 << order: set() for order in range(num_slots.bit_length())}
        start = 0
        for size in sorted(self._free, reverse=True):
            if num_slots & size:
                self._free[size].add(start)
                start += size

    def allocate(self, num_slots: int) -> Region | None:
        """A region of at least `num_slots` slots, at least 1; None if no free region is large enough."""
        wanted = power_of_two(num_slots)
        size = wanted
        while size in self._free and not self._free[size]:
            size *= 2
        if size not in self._free:
            return None
        start = min(self._free[size])  # low addresses first, so that high ones stay whole
        self._free[size].remove(start)
        while size > wanted:
            size //= 2
            self._free[size].add(start + size)
        self.num_free_slots -= wanted
        return Region(start, wanted)

    def release(self, region: Region) -> None:
        """Give a region back that `allocate` gave."""
        start, size = region.start, region.num_slots
        self.num_free_slots += size
        while size in self._free and start ^ size in self._free[size]:
            self._free[size].remove(start ^ size)
            start &= ~size
            size *= 2
        self._free[size].add(start)


def power_of_two(number: int) -> int:
    """The least power of two that is at least `number`, for `number` >= 1."""
    return 1 << (number - 1).bit_length()
