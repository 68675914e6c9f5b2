"""The random numbers that the choice of a token draws on.

A row's numbers depend on its own seed and position alone: never on the batch it ran in, nor on how often it was
preempted. Knows no sequences; the choice itself is in kernels/sampling.
"""

import numpy as np

_GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_SHIFTS = tuple(map(np.uint64, (30, 27, 31)))
_FACTORS = tuple(map(np.uint64, (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)))
_LOW_BITS = np.uint64(11)  # that a float64 has no room for


def uniform_numbers(seeds: np.ndarray, indices: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """One number in [0, 1) for each row, a pure function of (seed, sequence index, position of the sampled token).

    A counter-based generator in the manner of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): no state to keep,
    so that a sequence that is recomputed draws the same numbers again.

    Args:
        seeds: [num_rows] int64, not negative.
        indices: [num_rows] int64.
        positions: [num_rows] int64.

    Returns:
        [num_rows] float64, multiples of 2**-53.
    """
    return uniform_numbers_at(sequence_keys(seeds, indices), positions)


def sequence_keys(seeds: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """What the numbers of a sequence depend on besides the position, [num_rows] uint64."""
    keys = _mix(seeds.astype(np.uint64) + _GOLDEN_GAMMA)
    return _mix(keys ^ (indices.astype(np.uint64) + _GOLDEN_GAMMA))


def uniform_numbers_at(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """The numbers of sequences with these keys; see `uniform_numbers`."""
    return (_mix(keys + positions.astype(np.uint64) * _GOLDEN_GAMMA) >> _LOW_BITS) * 2.0**-53


def _mix(state: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser; unsigned arithmetic wraps."""
    state = (state ^ (state >> _SHIFTS[0])) * _FACTORS[0]
    state = (state ^ (state >> _SHIFTS[1])) * _FACTORS[1]
    return state ^ (state >> _SHIFTS[2])
