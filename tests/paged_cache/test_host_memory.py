"""Pages are there after `populate`, and what was written before and meanwhile stays."""

import mmap
import threading
from pathlib import Path

from paged_cache import host_memory
from paged_cache.host_memory import populate, zeroed

NUM_BYTES = 24 << 20


def num_resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_every_page_is_backed(monkeypatch):
    monkeypatch.setattr(host_memory, "_CHUNK_BYTES", 10 << 20)  # which does not divide the memory
    memory = zeroed(NUM_BYTES)
    before = num_resident_bytes()
    assert populate(memory, lambda: False)
    assert num_resident_bytes() - before > 0.9 * NUM_BYTES
    assert memory[:] == bytes(NUM_BYTES)


def test_what_is_written_stays():
    memory = zeroed(NUM_BYTES)
    memory[5] = 7
    ending = threading.Thread(target=populate, args=(memory, lambda: False))
    ending.start()
    places = range(100, NUM_BYTES, 4999)
    for place in places:
        memory[place] = 1
    ending.join()
    assert memory[5] == 7
    assert sum(memory[:]) == 7 + len(places)


def test_a_kernel_without_it_is_no_error(monkeypatch):
    monkeypatch.setattr(host_memory, "_POPULATE_WRITE", 9999)  # no such advice: EINVAL, as old kernels say
    memory = zeroed(NUM_BYTES)
    assert not populate(memory, lambda: False)
    assert memory[:] == bytes(NUM_BYTES)


def test_it_waits_for_other_work(monkeypatch):
    monkeypatch.setattr(host_memory, "_BUSY_SECONDS", 0.0)
    before, looks = num_resident_bytes(), []

    def is_busy() -> bool:
        looks.append(num_resident_bytes())
        return len(looks) <= 5

    assert populate(zeroed(NUM_BYTES), is_busy)
    assert max(looks[:6]) - before < 2 << 20 < looks[-1] - before
