"""Sessions and sequence numbers, which show a channel that nothing was lost.

Every frame is a 16-byte header (session, sequence number) and one encoded message. The dialer draws
a session at random for each life of its connection and the listener answers within it, so frames of
an earlier life are recognised in both directions. This file is pure.
"""

import struct
from enum import Enum

HEADER = struct.Struct("<QQ")
HEADER_BYTES = HEADER.size
SESSION_BITS = 64
# These take the place of a sequence number. The first says that the listener does not know this
# session (any more). The second only tests whether the connection still takes frames.
RESET = (1 << 64) - 1
PROBE = (1 << 64) - 2


class Verdict(Enum):
    """What a frame means for the session that it names."""

    NEXT = "next"
    GAP = "gap"
    NEW_SESSION = "new_session"
    STALE = "stale"
    RESET = "reset"
    PROBE = "probe"


class Session:
    """Both directions of one life of a connection."""

    __slots__ = ("id", "next_in", "next_out")

    def __init__(self, session_id: int) -> None:
        self.id = session_id
        self.next_in = 0
        self.next_out = 0

    def frame(self, payload: bytes) -> bytes:
        """Return the next frame to send. Call `sent` once the socket has taken it."""
        return HEADER.pack(self.id, self.next_out) + payload

    def sent(self) -> None:
        self.next_out += 1

    def accept(self, session_id: int, sequence: int) -> Verdict:
        """Judge a frame, and count it if it is the next one."""
        if session_id != self.id:
            return Verdict.NEW_SESSION if sequence == 0 else Verdict.STALE
        if sequence == self.next_in:
            self.next_in += 1
            return Verdict.NEXT
        return _SIGNALS.get(sequence, Verdict.GAP)


_SIGNALS = {RESET: Verdict.RESET, PROBE: Verdict.PROBE}


def reset_frame(session_id: int) -> bytes:
    """Return the frame that tells a dialer that its session is over."""
    return HEADER.pack(session_id, RESET)


def probe_frame(session_id: int) -> bytes:
    """Return a frame that dialers ignore. Sending it shows whether the connection still exists."""
    return HEADER.pack(session_id, PROBE)
