"""Finds the first stop string in a text that arrives piece by piece, and how much of its tail may still become one.

Knows characters only: no tokens, no requests.
"""

from collections import deque
from collections.abc import Sequence


class StopMatcher:
    """All stop strings at once, one step per character (Aho and Corasick 1975).

    The stop that is complete first ends the text; of those complete at the same character, the longest, so that none
    of it remains. What is found does not depend on how the text is cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Build the automaton: time and memory grow with the characters of all stops. Empty stops match nothing."""
        self._next: list[dict[str, int]] = [{}]  # state -> character -> state; a state is a prefix of some stop
        self._depth = [0]  # length of the state's prefix
        self._match_length = [0]  # of the longest stop that the state's prefix ends with
        self._fallback = [0]  # the longest other state that the state's prefix ends with
        self._state = 0
        for stop in stops:
            self._insert(stop)
        self._link()

    def _insert(self, stop: str) -> None:
        state = 0
        for char in stop:
            if char not in self._next[state]:
                self._next[state][char] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._match_length.append(0)
                self._fallback.append(0)
            state = self._next[state][char]
        self._match_length[state] = len(stop)

    def _link(self) -> None:
        """Breadth first: a state's fallback is shorter than itself, so it stands already."""
        queue = deque([0])
        while queue:
            state = queue.popleft()
            for char, child in self._next[state].items():
                if state != 0:
                    self._fallback[child] = self._step(self._fallback[state], char)
                if self._match_length[child] == 0:
                    self._match_length[child] = self._match_length[self._fallback[child]]
                queue.append(child)

    def _step(self, state: int, char: str) -> int:
        while state != 0 and char not in self._next[state]:
            state = self._fallback[state]
        return self._next[state].get(char, 0)

    @property
    def num_pending(self) -> int:
        """How many of the last characters are a proper prefix of some stop."""
        state = self._state
        while state != 0 and not self._next[state]:  # a whole stop that was passed over
            state = self._fallback[state]
        return self._depth[state]

    def pass_over(self, text: str) -> None:
        """Take the next piece, whatever it completes. A stop may begin in it and be complete later."""
        if len(self._next) > 1:
            for char in text:
                self._state = self._step(self._state, char)

    def find_end(self, text: str) -> tuple[int, int] | None:
        """Take the next piece. (end in this piece, length of the stop) where one is complete; else None.

        After a match the matcher must not be used again.
        """
        if len(self._next) == 1:
            return None
        for index, char in enumerate(text):
            self._state = self._step(self._state, char)
            length = self._match_length[self._state]
            if length:
                return index + 1, length
        return None
