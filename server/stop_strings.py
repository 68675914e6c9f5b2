"""Finds the first stop string in a text that arrives piece by piece, and how much of its tail may still become one.

Knows characters only: no tokens, no requests.
"""

from collections import deque
from collections.abc import Sequence

_CODE_POINT_BITS = 21


class StopAutomaton:
    """All stop strings at once, one step per character (Aho and Corasick 1975). Never changes: many texts share it.

    Building it takes about a microsecond for each character of the stops, and 300 bytes.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """For these stops. Empty ones match nothing."""
        self._next: dict[int, int] = {}  # state and character -> state; a state is a prefix of some stop
        self._characters = [""]  # of each state: those with a next state
        self.depths = [0]  # length of the state's prefix
        self.match_lengths = [0]  # of the longest stop that the state's prefix ends with
        self._fallbacks = [0]  # the longest other state that the state's prefix ends with
        for stop in stops:
            self._insert(stop)
        self._link()

    @property
    def is_empty(self) -> bool:
        """There is nothing to find."""
        return not self._next

    def step(self, state: int, char: str) -> int:
        """The state after one more character."""
        code_point = ord(char)
        while True:
            target = self._next.get(state << _CODE_POINT_BITS | code_point)
            if target is not None:
                return target
            if state == 0:
                return 0
            state = self._fallbacks[state]

    def num_pending(self, state: int) -> int:
        """How many of the last characters are a proper prefix of some stop."""
        while state != 0 and not self._characters[state]:  # a whole stop that was passed over
            state = self._fallbacks[state]
        return self.depths[state]

    def _insert(self, stop: str) -> None:
        state = 0
        for char in stop:
            key = state << _CODE_POINT_BITS | ord(char)
            if key not in self._next:
                self._next[key] = len(self.depths)
                self._characters[state] += char
                self._characters.append("")
                self.depths.append(self.depths[state] + 1)
                self.match_lengths.append(0)
                self._fallbacks.append(0)
            state = self._next[key]
        self.match_lengths[state] = len(stop)

    def _link(self) -> None:
        """Breadth first: a state's fallback is shorter than itself, so it stands already."""
        queue = deque([0])
        while queue:
            state = queue.popleft()
            for char in self._characters[state]:
                child = self._next[state << _CODE_POINT_BITS | ord(char)]
                if state != 0:
                    self._fallbacks[child] = self.step(self._fallbacks[state], char)
                if self.match_lengths[child] == 0:
                    self.match_lengths[child] = self.match_lengths[self._fallbacks[child]]
                queue.append(child)


class StopMatcher:
    """Where one text stands.

    The stop that is complete first ends the text; of those complete at the same character, the longest, so that none
    of it remains. What is found does not depend on how the text is cut into pieces.
    """

    def __init__(self, automaton: StopAutomaton) -> None:
        """At the beginning of a text."""
        self._automaton = automaton
        self._state = 0

    @property
    def num_pending(self) -> int:
        """How many of the last characters are a proper prefix of some stop."""
        return self._automaton.num_pending(self._state)

    def pass_over(self, text: str) -> None:
        """Take the next piece, whatever it completes. A stop may begin in it and be complete later."""
        if not self._automaton.is_empty:
            for char in text:
                self._state = self._automaton.step(self._state, char)

    def find_end(self, text: str) -> tuple[int, int] | None:
        """Take the next piece. (end in this piece, length of the stop) where one is complete; else None.

        After a match the matcher must not be used again.
        """
        automaton = self._automaton
        if automaton.is_empty:
            return None
        for index, char in enumerate(text):
            self._state = automaton.step(self._state, char)
            length = automaton.match_lengths[self._state]
            if length:
                return index + 1, length
        return None
