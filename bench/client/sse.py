"""Server-sent events out of bytes that arrive in any pieces. Pure.

The client feeds what it read and gets the data of every event that is complete. Lines end in LF or
CRLF, which is what servers of this API write; comments, ids and event names carry nothing here. It
must never wait for bytes that are not needed: an event is out with its empty line.
"""

MAX_EVENT_BYTES = 16 << 20
_MARK = b"\xef\xbb\xbf"  # a byte order mark may open the stream


class OversizedEvent(ValueError):
    """An event that is longer than any answer of this API."""


class EventParser:
    """One stream. `feed` never keeps more than one incomplete event."""

    __slots__ = ("_data", "_num_bytes", "_rest", "_started")

    def __init__(self) -> None:
        self._rest = b""  # of a line that is not complete
        self._data: list[bytes] = []  # lines of the event that is not complete
        self._num_bytes = 0
        self._started = False

    @property
    def in_event(self) -> bool:
        """Whether an event began and is not complete."""
        return bool(self._data or self._rest)

    def feed(self, data: bytes) -> list[bytes]:
        """The data of the events that became complete; raises `OversizedEvent`."""
        if self._rest:
            data = self._rest + data
        if not self._started and data:
            if len(data) < len(_MARK) and _MARK.startswith(data):
                self._rest = data
                return []
            data, self._started = data.removeprefix(_MARK), True
        lines = data.split(b"\n")
        self._rest = lines.pop()
        events = []
        for line in lines:
            if line in (b"", b"\r"):
                if self._data:
                    events.append(b"\n".join(self._data))
                    self._data, self._num_bytes = [], 0
            elif line.startswith(b"data:"):
                self._add(line[6:] if line[5:6] == b" " else line[5:])
            elif line.rstrip(b"\r") == b"data":
                self._add(b"")
        if self._num_bytes + len(self._rest) > MAX_EVENT_BYTES:
            raise OversizedEvent(f"an event of more than {MAX_EVENT_BYTES >> 20} MiB")
        return events

    def _add(self, line: bytes) -> None:
        line = line.removesuffix(b"\r")
        self._data.append(line)
        self._num_bytes += len(line)
