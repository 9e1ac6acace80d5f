"""The last events of one loop, written to a file when an invariant breaks.

The engine loop records its events and its node dumps the ring, so a bug report is a file. Events
hold prompts, so only the user of the process may read the file. Nothing here reads a clock. The
stages of a single request are sent as `StageTimes` instead.
"""

import os
import tempfile
from collections import deque
from pathlib import Path

import msgspec

# An event keeps its prompt alive, and long ones would add up to gigabytes.
MAX_TOKENS = 1_000_000


class EventRing:
    """The last `capacity` events of one loop, which are encoded only when they are dumped.

    It holds fewer events if their prompts have more than `max_tokens` tokens together.
    """

    def __init__(self, capacity: int = 10_000, max_tokens: int = MAX_TOKENS) -> None:
        self._capacity = capacity
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._events: deque[tuple[float, msgspec.Struct]] = deque()

    def record(self, now_s: float, event: msgspec.Struct) -> None:
        events = self._events
        events.append((now_s, event))
        self._num_tokens += _num_tokens(event)
        while len(events) > self._capacity or self._num_tokens > self._max_tokens:
            _, oldest = events.popleft()
            self._num_tokens -= _num_tokens(oldest)

    def __len__(self) -> int:
        return len(self._events)

    def dump(self, path: Path) -> int:
        """Write one JSON object `{"now_s", "type", "event"}` per line; return how many.

        The file gets mode 0600. Raises `FileExistsError` if it exists.
        """
        encoder = msgspec.json.Encoder()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
            for now_s, event in self._events:
                line = _Line(now_s, type(event).__name__, event)
                file.write(encoder.encode(line) + b"\n")
        return len(self._events)


def folder_for_dumps(chosen: str) -> Path:
    """Return the `chosen` folder, or a new one that only this user can enter."""
    return Path(chosen or tempfile.mkdtemp(prefix="baton-events-"))


def _num_tokens(event: msgspec.Struct) -> int:
    message = getattr(event, "message", None)
    return len(getattr(message, "token_ids", ()))


class _Line(msgspec.Struct):
    now_s: float
    type: str
    event: msgspec.Struct
