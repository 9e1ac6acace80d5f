"""One ZMQ socket with what a channel needs around it: sessions, connection events, one descriptor.

A monitor socket reports connections that came and went; an epoll instance joins the socket, its
monitor, a wake-up and a timer into one descriptor, so that an asyncio loop or a poller has a single
thing to watch.

The input queue has no bound in ZMQ: libzmq 4.3.5 aborts the process if a connection dies after its
input was stopped. Each sender is bounded by `QUEUED_MESSAGES`. The queue of connection events has
no bound either: when it is full, libzmq's thread waits for its reader, and every peer with it.
"""

import contextlib
import ctypes
import os
import secrets
import select
import struct
import time
from collections.abc import Callable
from enum import Enum
from typing import Literal

import zmq
from zmq.utils.monitor import parse_monitor_message

from baton.protocol.codec import MAX_MESSAGE_BYTES
from baton.protocol.errors import NodeError
from baton.runtime.channels.keys import DOMAIN, Authenticator, KeyPair, Keys
from baton.runtime.clock import monotonic
from baton.runtime.log import logger

log = logger("channel")

HEADER = struct.Struct("<QQ")
HEADER_BYTES = HEADER.size
COUNT = struct.Struct("<Q")
SESSION_BITS = 64
# These take the place of a sequence number. The first says that the listener does not know this
# session (any more). The second asks: a listener tests with it whether a connection still takes
# frames, and a dialer whether the listener has got all frames of the session so far.
RESET = (1 << 64) - 1
PROBE = (1 << 64) - 2
SEPARATOR = b"/"  # in an identity
# The name of a command that a person runs. No node has this name, because node ids have no spaces.
OPERATOR = b"an operator"
NONCE_BYTES = 8
# A silent peer is noticed after interval + timeout = 3.2 s, if `Channels` sets no other timeout. A
# peer that pauses for 2 s keeps its connection, because the timeout alone is longer than that.
HEARTBEAT_INTERVAL_MS = 700
HEARTBEAT_TIMEOUT_MS = 2500
UNSET = -1  # of a socket's option
QUEUED_MESSAGES = 4096
RECONNECT_MS = 50
RECONNECT_MAX_MS = 1000
CONNECT_TIMEOUT_MS = 3000
# Encryption adds to a frame the command's name, a nonce, an authenticator and flags.
CURVE_BYTES = 33

_REFUSALS = (zmq.Event.HANDSHAKE_FAILED_AUTH, zmq.Event.HANDSHAKE_FAILED_PROTOCOL)
# A dialer with another key learns only that the listener closed the connection. To a listener the
# same event says nothing about the dialer: it also comes when a process pauses or ends in a
# handshake.
_CLOSED = zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
_WATCHED = (
    zmq.Event.DISCONNECTED
    | zmq.Event.HANDSHAKE_SUCCEEDED
    | zmq.Event.HANDSHAKE_FAILED_AUTH
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | _CLOSED
)

_INPUT = int(zmq.POLLIN)  # testing an int takes a tenth of the time of testing a flag


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


def probe_frame(session_id: int, num_sent: int = 0) -> bytes:
    """Return a frame that asks whether the peer has got all `num_sent` frames of a session.

    Dialers ignore it. Sending it shows whether the connection still exists.
    """
    return HEADER.pack(session_id, PROBE) + COUNT.pack(num_sent)


def has_all(session: Session, probe: memoryview) -> bool:
    """Return whether this end of a session has got every frame that the other one has sent."""
    return len(probe) == COUNT.size and COUNT.unpack(probe)[0] == session.next_in


def new_identity(name: bytes) -> bytes:
    """Return an identity that was never used before."""
    return name + SEPARATOR + secrets.token_hex(NONCE_BYTES).encode()


def is_invented(identity: bytes) -> bool:
    """Return whether libzmq made up this identity. No name of a dialer begins with a zero byte.

    libzmq does so for a dialer without an identity, and when a newer connection takes an identity
    over: the unread messages of the older connection then come under an invented one.
    """
    return identity[:1] == b"\0"


def name_of(identity: bytes) -> bytes:
    """Return the name in a dialer's `identity`."""
    return identity.rpartition(SEPARATOR)[0]


SHORTEST_S = 1e-6  # zero would switch the timer off


class Timer:
    """A descriptor that becomes readable at a set time. Linux only, as eventfd and epoll.

    Python itself has timerfd from 3.13 on.
    """

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        flags = os.O_NONBLOCK | os.O_CLOEXEC
        self._descriptor: int = self._libc.timerfd_create(time.CLOCK_MONOTONIC, flags)
        if self._descriptor < 0:
            raise NodeError(f"cannot make a timer: {os.strerror(ctypes.get_errno())}")

    def fileno(self) -> int:
        return self._descriptor

    def set(self, seconds: float | None) -> None:
        """Fire once after `seconds`; None means never. A call replaces the one before it."""
        whole, part = (
            divmod(max(seconds, SHORTEST_S), 1.0) if seconds is not None else (0, 0)
        )
        # `struct itimerspec`: the repetition, then the first expiry, as seconds and nanoseconds.
        wanted = (ctypes.c_long * 4)(0, 0, int(whole), int(part * 1e9))
        self._libc.timerfd_settime(self._descriptor, 0, wanted, None)

    def close(self) -> None:
        os.close(self._descriptor)


# These are hints only: libzmq reports failed handshakes as "lost" too.
ConnectionChange = Literal["up", "lost", "refused"]


class Wire:
    """A bounded, non-blocking, heart-beating socket."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        kind: zmq.SocketType,
        keys: Keys,
    ) -> None:
        """A dialer with keys must call `use_key` with one of them before it connects.

        Raises `zmq.ZMQError`, `OSError` or `NodeError` when the process has no descriptor left.
        """
        is_listener = kind is zmq.ROUTER
        self._refusals = _REFUSALS if is_listener else (*_REFUSALS, _CLOSED)
        self._authenticator: Authenticator | None = None
        self.endpoint = ""  # for the log
        self.num_malformed = 0
        self._is_awake = False
        self._timer_at_s: float | None = None
        with contextlib.ExitStack() as opened:
            if is_listener and keys.first is not None:
                self._authenticator = Authenticator(context, keys.first)
                opened.callback(self._authenticator.close)
            self.socket: zmq.Socket[bytes] = context.socket(kind)
            opened.callback(self.socket.close)
            self._configure(has_keys=bool(keys.pairs))
            if is_listener and keys.first is not None:
                self.use_key(keys.first)
            self._monitor: zmq.Socket[bytes] = context.socket(zmq.PAIR)
            opened.callback(self._monitor.close, 0)
            self._monitor.setsockopt(zmq.RCVHWM, 0)
            address = f"inproc://monitor-{_descriptor_of(self.socket)}"
            self.socket.monitor(address, int(_WATCHED))
            opened.callback(self.socket.disable_monitor)
            self._monitor.connect(address)
            self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            opened.callback(os.close, self._wake)
            self._timer = Timer()
            opened.callback(self._timer.close)
            self._epoll = select.epoll()
            opened.callback(self._epoll.close)
            for socket in (
                self.socket,
                self._monitor,
                *([self._authenticator.socket] if self._authenticator else ()),
            ):
                self._epoll.register(_descriptor_of(socket), select.EPOLLIN)
            self._epoll.register(self._wake, select.EPOLLIN)
            self._epoll.register(self._timer.fileno(), select.EPOLLIN)
            self._opened = opened.pop_all()

    def _configure(self, *, has_keys: bool) -> None:
        # Larger frames cost their sender the connection before any memory is set aside for them.
        max_bytes = MAX_MESSAGE_BYTES + HEADER_BYTES + (CURVE_BYTES if has_keys else 0)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.SNDHWM, QUEUED_MESSAGES),
            (zmq.RCVHWM, 0),
            (zmq.MAXMSGSIZE, max_bytes),
            (zmq.HEARTBEAT_IVL, HEARTBEAT_INTERVAL_MS),
            (zmq.RECONNECT_IVL, RECONNECT_MS),
            (zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS),
            (zmq.CONNECT_TIMEOUT, CONNECT_TIMEOUT_MS),
        ):
            self.socket.setsockopt(option, value)
        if self.socket.getsockopt(zmq.HEARTBEAT_TIMEOUT) == UNSET:
            self.socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)

    def fileno(self) -> int:
        return self._epoll.fileno()

    def use_key(self, pair: KeyPair) -> None:
        """Talk only to processes that have this key, beginning with the next bind or connect."""
        self.socket.setsockopt(zmq.CURVE_SECRETKEY, pair.secret)
        self.socket.setsockopt(zmq.CURVE_PUBLICKEY, pair.public)
        if self._authenticator is None:
            self.socket.setsockopt(zmq.CURVE_SERVERKEY, pair.public)
            return
        self.socket.setsockopt(zmq.CURVE_SERVER, 1)
        self.socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
        # Without an authenticator, ZMQ lets no dialer in.
        self.socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def readable(self) -> bool:
        return _has_input(self.socket)

    def changes(self) -> list[ConnectionChange]:
        """Return the connections that came, went or were refused since the last call."""
        while self._authenticator is not None and _has_input(
            self._authenticator.socket
        ):
            self._authenticator.answer()
        found: list[ConnectionChange] = []
        while _has_input(self._monitor):
            event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
            if event["event"] == zmq.Event.HANDSHAKE_SUCCEEDED:
                found.append("up")
            elif event["event"] in self._refusals:
                found.append("refused")
            else:
                found.append("lost")
        return found

    def wake_if_readable(self, anything_else: bool = False) -> None:
        """Signal arrived messages again. Call it after every send, which may clear the signal."""
        if not self._is_awake and (anything_else or _has_input(self.socket)):
            self._is_awake = True
            os.eventfd_write(self._wake, 1)

    def clear_signal(self, wake_at_s: float | None = None) -> None:
        """Clear the signal. Call it once there is nothing left to read.

        The descriptor fires by `wake_at_s` on the monotonic clock, or earlier.
        """
        if self._is_awake:
            self._is_awake = False
            os.eventfd_read(self._wake)
        if wake_at_s is None and self._timer_at_s is None:
            return
        now_s = monotonic()
        # Setting the timer costs more than all the rest of this function, and an early wake-up is
        # harmless.
        if wake_at_s is None or not (now_s < (self._timer_at_s or 0.0) <= wake_at_s):
            self._timer.set(None if wake_at_s is None else wake_at_s - now_s)
            self._timer_at_s = wake_at_s

    def read(self) -> tuple[int, int, memoryview] | None:
        """Return a frame's session, its sequence number and its payload; None if it is no frame."""
        frame = self.socket.recv(zmq.NOBLOCK, copy=False)
        if frame.more or len(frame) < HEADER_BYTES:
            while self.socket.getsockopt(zmq.RCVMORE):
                self.socket.recv(zmq.NOBLOCK)
            self.drop("not a frame of a channel")
            return None
        return *HEADER.unpack_from(frame.buffer), frame.buffer[HEADER_BYTES:]

    def drop(self, reason: str) -> None:
        """Log the 1st, 2nd, 4th, 8th … dropped message, because a peer may send many."""
        self.num_malformed += 1
        if self.num_malformed.bit_count() == 1:
            log.warning(
                "dropped a malformed message",
                endpoint=self.endpoint,
                so_far=self.num_malformed,
                reason=reason,
            )

    def close(self, linger_ms: int = 0) -> None:
        if not self.socket.closed:
            self.socket.setsockopt(zmq.LINGER, linger_ms)
            self._opened.close()


# Opens the socket of a dialer or listener.
OpenWire = Callable[["zmq.Context[zmq.Socket[bytes]]", zmq.SocketType, Keys], Wire]


def _descriptor_of(socket: "zmq.Socket[bytes]") -> int:
    found = socket.getsockopt(zmq.FD)
    assert isinstance(found, int)
    return found


def _has_input(socket: "zmq.Socket[bytes]") -> bool:
    events = socket.getsockopt(zmq.EVENTS)
    assert isinstance(events, int)
    return bool(events & _INPUT)
