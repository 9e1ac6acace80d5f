"""The bytes of HTTP/1.1 as a client writes and reads them. Pure: no sockets, no clock.

`connection.py` feeds what arrives and gets the pieces of the body at once, so that each can be
stamped with the read that brought it. It never decompresses, follows no redirect and merges no
pieces; an answer that is not HTTP/1.1 is a `WireError` in one line.
"""

from enum import Enum

from baton.protocol.errors import BatonError

MAX_HEAD_BYTES = 64 << 10
MAX_LINE_BYTES = 16 << 10  # of a chunk's size or a trailer


class WireError(BatonError):
    """The server does not speak HTTP/1.1 as this client knows it."""

    code = "malformed_http"


class _Part(Enum):
    HEAD = "head"
    FIXED = "fixed"  # a body of known length
    UNTIL_CLOSE = "until_close"
    CHUNK_SIZE = "chunk_size"
    CHUNK = "chunk"
    CHUNK_END = "chunk_end"
    TRAILER = "trailer"
    COMPLETE = "complete"


class ResponseParser:
    """One answer. `status` is 0 until its head is complete."""

    __slots__ = ("_left", "_part", "_rest", "headers", "keep_alive", "status")

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}  # names in lower case
        self.keep_alive = False
        self._part = _Part.HEAD
        self._rest = b""
        self._left = 0

    @property
    def is_complete(self) -> bool:
        return self._part is _Part.COMPLETE

    def end_of_input(self) -> bool:
        """The connection ended: whether nothing of the answer is missing."""
        if self._part is _Part.UNTIL_CLOSE:
            self._part = _Part.COMPLETE
        return self.is_complete

    def feed(self, data: bytes) -> list[bytes]:
        """The pieces of the body in `data`, none of them empty; raises `WireError`."""
        if self._part is _Part.HEAD:
            data = self._head(self._rest + data)
        if not data or self._part is _Part.HEAD:
            return []
        if self._part is _Part.UNTIL_CLOSE:
            return [data]
        if self._part is _Part.FIXED:
            return self._fixed(data)
        return self._chunked(data)

    def _head(self, data: bytes) -> bytes:
        """What follows the head; the head itself waits in `_rest` until it is complete."""
        while True:
            end = data.find(b"\r\n\r\n")
            if end < 0:
                if data.startswith(b"\x15\x03"):
                    raise WireError("the server wants TLS: https:// instead of http://?")
                if not b"HTTP/1.".startswith(data[:7]) or len(data) > MAX_HEAD_BYTES:
                    raise WireError("the answer is not HTTP/1.1")
                self._rest = data
                return b""
            head, data = data[:end], data[end + 4 :]
            status, headers = _parse_head(head)
            if not 100 <= status < 200:
                self._rest = b""
                self._begin(head, status, headers)
                return data
            if status == 101:
                raise WireError("the server wants to speak another protocol (status 101)")

    def _begin(self, head: bytes, status: int, headers: dict[str, str]) -> None:
        self.status, self.headers = status, headers
        connection = headers.get("connection", "").lower()
        self.keep_alive = head.startswith(b"HTTP/1.1") and "close" not in connection
        if (coding := headers.get("content-encoding", "identity").lower()) != "identity":
            raise WireError(f"the answer is compressed ({coding}) though nobody asked for that")
        transfer = headers.get("transfer-encoding", "").lower()
        length = headers.get("content-length")
        if status in (204, 304):
            self._part = _Part.COMPLETE
        elif transfer == "chunked":
            self._part = _Part.CHUNK_SIZE
        elif transfer:
            raise WireError(f"the answer has the transfer encoding {transfer}")
        elif length is not None:
            if not length.isdecimal():
                raise WireError(f"the answer has the length {length!r}")
            self._left = int(length)
            self._part = _Part.FIXED if self._left else _Part.COMPLETE
        else:
            self._part, self.keep_alive = _Part.UNTIL_CLOSE, False

    def _fixed(self, data: bytes) -> list[bytes]:
        piece = data[: self._left]
        self._left -= len(piece)
        if not self._left:
            self._part = _Part.COMPLETE
            self.keep_alive &= len(piece) == len(data)
        return [piece]

    def _chunked(self, data: bytes) -> list[bytes]:
        if self._rest:
            data, self._rest = self._rest + data, b""
        pieces, at, num_bytes = [], 0, len(data)
        while at < num_bytes:
            if self._part is _Part.CHUNK:
                piece = data[at : at + self._left]
                pieces.append(piece)
                at += len(piece)
                self._left -= len(piece)
                if not self._left:
                    self._part = _Part.CHUNK_END
                continue
            if self.is_complete:
                self.keep_alive = False  # bytes that nobody asked for
                break
            end = data.find(b"\r\n", at)
            if end < 0:
                self._rest = data[at:]
                if len(self._rest) > MAX_LINE_BYTES:
                    raise WireError("the answer is not chunked as it says")
                break
            self._line(data[at:end])
            at = end + 2
        return pieces

    def _line(self, line: bytes) -> None:
        if self._part is _Part.CHUNK_SIZE:
            digits = line.partition(b";")[0].strip()
            try:
                self._left = int(digits, 16) if digits.isalnum() else -1
            except ValueError:
                self._left = -1
            if self._left < 0:
                raise WireError("the answer is not chunked as it says")
            self._part = _Part.CHUNK if self._left else _Part.TRAILER
        elif self._part is _Part.CHUNK_END:
            if line:
                raise WireError("the answer is not chunked as it says")
            self._part = _Part.CHUNK_SIZE
        elif not line:
            self._part = _Part.COMPLETE


def _parse_head(head: bytes) -> tuple[int, dict[str, str]]:
    first, *lines = head.decode("latin-1").split("\r\n")
    version, _, rest = first.partition(" ")
    code = rest[:3]
    if version not in ("HTTP/1.0", "HTTP/1.1") or not (code.isdecimal() and len(code) == 3):
        raise WireError("the answer is not HTTP/1.1")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon:
            raise WireError("the answer has a header without a colon")
        name, value = name.strip().lower(), value.strip()
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return int(code), headers
