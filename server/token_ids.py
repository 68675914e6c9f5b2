"""The token ids of a prompt, packed: as Python's integers, 128,000 of them hold the event loop for milliseconds.

Knows no vocabulary and no request.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import overload

_FOUR_BYTES = "i"


class TokenIds(Sequence[int]):
    """Equal to any sequence of the same ids. Never changes."""

    __slots__ = ("_ids",)

    def __init__(self, token_ids: Iterable[int] = ()) -> None:
        """Pack ids of a vocabulary: they are checked before. Raises OverflowError for one of more than 31 bits."""
        self._ids = array(_FOUR_BYTES, token_ids)

    @classmethod
    def unpack(cls, packed: bytes) -> "TokenIds":
        """The ids that `packed` was called on, perhaps by another process of this machine."""
        token_ids = cls()
        token_ids._ids.frombytes(packed)
        return token_ids

    def packed(self) -> bytes:
        """Four bytes for each id, in the machine's order."""
        return self._ids.tobytes()

    def __len__(self) -> int:
        """How many."""
        return len(self._ids)

    def __iter__(self) -> Iterator[int]:
        """One by one."""
        return iter(self._ids)

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> "TokenIds": ...
    def __getitem__(self, place: int | slice) -> "int | TokenIds":
        """One of them, or some."""
        return TokenIds(self._ids[place]) if isinstance(place, slice) else self._ids[place]

    def __eq__(self, other: object) -> bool:
        """The same ids in the same order, whatever holds them."""
        if isinstance(other, TokenIds):
            return self._ids == other._ids
        return isinstance(other, Sequence) and tuple(self._ids) == tuple(other)

    def __hash__(self) -> int:
        """As of the tuple that it is equal to."""
        return hash(tuple(self._ids))

    def __repr__(self) -> str:
        """For a test that fails."""
        return f"TokenIds({self._ids.tolist()})"
