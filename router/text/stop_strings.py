"""Find stop strings in text that arrives in pieces, and hold back text that may become one.

There is one Aho-Corasick automaton per set of stop strings, shared by all choices that use it, and
one scanner per choice. The match that *completes* first wins, and of several that complete together
the longest, so the result does not depend on how the text was cut into tokens.
(A. Aho, M. Corasick: Efficient string matching, CACM 18(6), 1975.)
"""

from array import array
from collections import OrderedDict, deque

# An automaton takes about 110 bytes per character, so all cached ones take 2 MB at most.
KEPT_CHARS = 16 * 1024
_CODE_POINTS = 0x110000


class StopAutomaton:
    """The automaton of a set of stop strings. It never changes, and node 0 is its root."""

    __slots__ = ("_following", "_is_inner", "depth", "fallback", "first_chars", "match_length")

    def __init__(self, stops: tuple[str, ...]) -> None:
        # One table serves all nodes, because a dict per node would take four times the memory.
        self._following: dict[int, int] = {}
        self._is_inner = bytearray(1)  # whether a node has children
        self.depth = array("I", [0])
        # The length of the longest stop string that ends at a node; 0 if none does.
        self.match_length = array("I", [0])
        self.first_chars = frozenset(stop[0] for stop in stops)
        for stop in stops:
            self._insert(stop)
        # The longest proper suffix of a node's text that is itself a prefix of a stop string.
        self.fallback = array("I", bytes(4 * len(self.depth)))
        self._link()

    def step(self, node: int, char: str) -> int:
        """Return the node of the longest suffix, with `char`, that can become a stop string."""
        code = ord(char)
        following = self._following
        while (child := following.get(node * _CODE_POINTS + code)) is None and node:
            node = self.fallback[node]
        return child or 0

    def unfinished(self, node: int) -> int:
        """Return `node`, or its longest suffix that can still grow into a stop string."""
        while node and not self._is_inner[node]:
            node = self.fallback[node]
        return node

    def _insert(self, stop: str) -> None:
        node = 0
        for char in stop:
            edge = node * _CODE_POINTS + ord(char)
            child = self._following.get(edge)
            if child is None:
                child = self._following[edge] = len(self.depth)
                self._is_inner[node] = True
                self._is_inner.append(False)
                self.depth.append(self.depth[node] + 1)
                self.match_length.append(0)
            node = child
        self.match_length[node] = len(stop)

    def _link(self) -> None:
        edges: list[list[tuple[str, int]]] = [[] for _ in self.depth]
        for edge, child in self._following.items():
            node, code = divmod(edge, _CODE_POINTS)
            edges[node].append((chr(code), child))
        queue = deque(child for _, child in edges[0])
        while queue:
            node = queue.popleft()
            for char, child in edges[node]:
                self.fallback[child] = self.step(self.fallback[node], char)
                queue.append(child)
            if not self.match_length[node]:
                self.match_length[node] = self.match_length[self.fallback[node]]


class AutomatonCache:
    """The automata that were used last. Requests with the same stop strings share one.

    It is bounded by characters, because clients choose the length of stop strings.
    """

    def __init__(self, max_chars: int = KEPT_CHARS) -> None:
        self._max_chars = max_chars
        self._kept: OrderedDict[tuple[str, ...], StopAutomaton] = OrderedDict()
        self.num_chars = 0  # of the stop strings of all cached automata

    def of(self, stops: tuple[str, ...]) -> StopAutomaton:
        automaton = self._kept.get(stops)
        if automaton is not None:
            self._kept.move_to_end(stops)
            return automaton
        automaton = self._kept[stops] = StopAutomaton(stops)
        self.num_chars += _num_chars(stops)
        while self.num_chars > self._max_chars:
            dropped, _ = self._kept.popitem(last=False)
            self.num_chars -= _num_chars(dropped)
        return automaton


def _num_chars(stops: tuple[str, ...]) -> int:
    return sum(len(stop) for stop in stops)


class StopScanner:
    """The state of one choice: its place in the automaton, and its held-back text."""

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
        """Return the held-back text when the choice ends without a stop string."""
        held, self._held, self._node = self._held, "", 0
        return held
