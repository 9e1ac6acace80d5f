"""When what happened: the stamps of one request, and the last events of one process.

Router and nodes stamp a `Timeline` per request and report its stages. The `EventRing` remembers the
latest events of a loop and is written to a file when an invariant breaks, for the simulator to
replay. Neither reads a clock.
"""

import itertools
from collections import deque
from pathlib import Path

import msgspec


class Stage(msgspec.Struct, frozen=True):
    """A stretch of a request's life, named by the stamp that began it."""

    name: str
    seconds: float


class Timeline:
    """Named stamps of one request on one clock; the first of a name counts."""

    __slots__ = ("_stamps",)

    def __init__(self) -> None:
        self._stamps: dict[str, float] = {}

    def stamp(self, name: str, now_s: float) -> None:
        self._stamps.setdefault(name, now_s)

    def at(self, name: str) -> float | None:
        return self._stamps.get(name)

    def between(self, first: str, then: str) -> float:
        """Seconds from one stamp to another; 0 where either is missing or they are reversed."""
        start_s, end_s = self._stamps.get(first), self._stamps.get(then)
        return max(0.0, end_s - start_s) if start_s is not None and end_s is not None else 0.0

    def stages(self) -> tuple[Stage, ...]:
        """The stretches between consecutive stamps, in order of time."""
        stamps = sorted(self._stamps.items(), key=lambda stamp: stamp[1])
        return tuple(
            Stage(name, end_s - start_s)
            for (name, start_s), (_, end_s) in itertools.pairwise(stamps)
        )


class EventRing:
    """The last `capacity` events of one loop, kept as they came and encoded only when dumped."""

    def __init__(self, capacity: int = 10_000) -> None:
        self._events: deque[tuple[float, msgspec.Struct]] = deque(maxlen=capacity)

    def record(self, now_s: float, event: msgspec.Struct) -> None:
        self._events.append((now_s, event))

    def __len__(self) -> int:
        return len(self._events)

    def dump(self, path: Path) -> int:
        """Writes one JSON object `{"now_s", "type", "event"}` a line; returns how many."""
        encoder = msgspec.json.Encoder()
        with path.open("wb") as file:
            for now_s, event in self._events:
                line = _Line(now_s, type(event).__name__, event)
                file.write(encoder.encode(line) + b"\n")
        return len(self._events)


class _Line(msgspec.Struct):
    now_s: float
    type: str
    event: msgspec.Struct
