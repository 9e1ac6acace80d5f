"""Finds stop strings in text that arrives in pieces, and holds back what may become one.

There is one Aho-Corasick automaton per set of stop strings, shared by all choices that use it, and
one scanner per choice. The match that *completes* first wins, and of several that complete together
the longest, so the result does not depend on how the text was cut into tokens.
(A. Aho, M. Corasick: Efficient string matching, CACM 18(6), 1975.)
"""

from collections import deque


class StopAutomaton:
    """The automaton of a set of stop strings. It never changes, and node 0 is its root."""

    __slots__ = ("depth", "fallback", "first_chars", "following", "match_length")

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.following: list[dict[str, int]] = [{}]
        self.depth = [0]
        # The length of the longest stop string that ends at a node; 0 where none does.
        self.match_length = [0]
        self.first_chars = frozenset(stop[0] for stop in stops)
        for stop in stops:
            self._insert(stop)
        # The longest proper suffix of a node's text that is itself a prefix of a stop string.
        self.fallback = [0] * len(self.depth)
        self._link()

    def step(self, node: int, char: str) -> int:
        """Return the node of the longest suffix, with `char`, that can become a stop string."""
        while node and char not in self.following[node]:
            node = self.fallback[node]
        return self.following[node].get(char, 0)

    def unfinished(self, node: int) -> int:
        """Return `node`, or its longest suffix that can still grow into a stop string."""
        while node and not self.following[node]:
            node = self.fallback[node]
        return node

    def _insert(self, stop: str) -> None:
        node = 0
        for char in stop:
            child = self.following[node].get(char)
            if child is None:
                child = len(self.depth)
                self.following[node][char] = child
                self.following.append({})
                self.depth.append(self.depth[node] + 1)
                self.match_length.append(0)
            node = child
        self.match_length[node] = len(stop)

    def _link(self) -> None:
        queue = deque(self.following[0].values())
        while queue:
            node = queue.popleft()
            for char, child in self.following[node].items():
                self.fallback[child] = self.step(self.fallback[node], char)
                queue.append(child)
            if not self.match_length[node]:
                self.match_length[node] = self.match_length[self.fallback[node]]


class StopScanner:
    """The state of one choice: its place in the automaton, and the text that it holds back."""

    __slots__ = ("_automaton", "_held", "_node", "matched")

    def __init__(self, automaton: StopAutomaton) -> None:
        self._automaton = automaton
        self._node = 0
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, *, may_match: bool, include_match: bool) -> str:
        """Return the text that may be shown now. A match sets `matched` and ends the text.

        Matches that complete while `may_match` is False do not count.
        """
        automaton, node = self._automaton, self._node
        if not node and automaton.first_chars.isdisjoint(text):
            return text
        buffer = self._held + text
        for index, char in enumerate(text, start=len(self._held) + 1):
            node = automaton.step(node, char)
            length = automaton.match_length[node]
            if length and may_match:
                self.matched = buffer[index - length : index]
                return buffer[: index if include_match else index - length]
        self._node = automaton.unfinished(node)
        shown = len(buffer) - automaton.depth[self._node]
        self._held = buffer[shown:]
        return buffer[:shown]

    def flush(self) -> str:
        """Return what was held back, when the choice ends without a stop string."""
        held, self._held, self._node = self._held, "", 0
        return held
