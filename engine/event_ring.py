"""The last events of one loop, written to a file when an invariant breaks.

The engine loop records what it hears; its node dumps the ring, so that a bug report is a file. It
reads no clock. The stages of a single request travel as `StageTimes` instead.
"""

from collections import deque
from pathlib import Path

import msgspec


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
