"""Typed, ordered, non-blocking channels between processes: one `Listener`, many `Dialer`s.

Router and nodes talk through these, and so do prefill and decode nodes. A channel delivers every
message of a session once and in order, or says `disconnected`: a lost connection, a gap, a peer
that restarted and a queue that is full are all the same event, and nothing is resent. A listener
notices a dead dialer and a dialer a dead listener within 3.5 s (at once if the process ended).

Watch `fileno()` for reading (asyncio's `add_reader`, or register the channel itself with a
`zmq.Poller`) and, whenever it fires, call `receive` until it returns None. The descriptor signals
changes, so stopping earlier may leave messages unnoticed; sending needs no care. Each channel
belongs to one thread.
"""

import contextlib
import secrets
from collections import deque
from typing import Generic, TypeVar, assert_never

import msgspec
import zmq

from baton.protocol.codec import Codec, MalformedMessage
from baton.protocol.errors import ConfigError
from baton.runtime.clock import monotonic
from baton.runtime.endpoint import bindable
from baton.runtime.framing import (
    HEADER,
    HEADER_BYTES,
    SESSION_BITS,
    Session,
    Verdict,
    reset_frame,
)
from baton.runtime.keys import NO_KEYS, Keys
from baton.runtime.log import logger
from baton.runtime.wire import Change, Wire

# After a refused handshake ZMQ may never try again, so the dialer does, no more often than this.
RETRY_S = 1.0

log = logger("channel")

Out = TypeVar("Out")
In = TypeVar("In")


class Received(msgspec.Struct, Generic[In], frozen=True):
    """A message of a peer, or (message None, disconnected) the end of its session."""

    peer: bytes
    message: In | None
    disconnected: bool = False


class Disconnected(msgspec.Struct, frozen=True):
    """The dialer's session is over and a new one has begun: introduce yourself again.

    What was sent before may or may not have arrived; what is sent from now on is queued until the
    listener is there.
    """

    reason: str


class Listener(Generic[Out, In]):
    """The side that is dialled. Peers are told apart by the identity that each dialer chose."""

    def __init__(
        self,
        endpoint: str,
        outgoing: Codec[Out],
        incoming: Codec[In],
        context: "zmq.Context[zmq.Socket[bytes]]",
        keys: Keys = NO_KEYS,
    ) -> None:
        """Binds `endpoint`: tcp://host (or port 0) takes a free port; `endpoint` tells which.

        Raises `ConfigError` when the address cannot be bound, or may not be without a key.
        """
        address = bindable(endpoint)
        keys.check(address, "listening on")
        self.num_malformed = 0
        self.refusals = 0  # handshakes turned down: wrong keys or not a channel
        self._encode, self._decode = outgoing.encode, incoming.decode
        self._sessions: dict[bytes, Session] = {}
        self._connections = _Connections()
        self._events: deque[Received[In]] = deque()
        self._wire = Wire(context, zmq.ROUTER, keys)
        self.socket = self._wire.socket
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # A dialer that comes back before its old connection was seen to end replaces it.
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        with contextlib.ExitStack() as undo:
            undo.callback(self._wire.close)
            self.endpoint = address.bind(self.socket)
            undo.pop_all()

    def fileno(self) -> int:
        return self._wire.fileno()

    def send(self, peer: bytes, message: Out) -> bool:
        """False: that peer is unknown, gone, or too slow. Its session is over either way.

        If the peer was known until now, a disconnect event for it follows from `receive` too.
        """
        session = self._sessions.get(peer)
        if session is None:
            return False
        frame = session.frame(self._encode(message))
        try:
            self.socket.send_multipart((peer, frame), zmq.NOBLOCK)
        except (zmq.Again, zmq.ZMQError):
            self._end(peer)
            self._wire.wake_if_readable(anything_else=True)
            return False
        session.sent()
        self._wire.wake_if_readable()
        return True

    def receive(self) -> Received[In] | None:
        """The next message or disconnect; None when there is nothing (more)."""
        while True:
            if self._events:
                return self._events.popleft()
            if self._wire.readable():
                self._read()
            elif changes := self._wire.changes():
                for change, descriptor in changes:
                    self.refusals += change == "refused"
                    peer = self._connections.lost(descriptor) if change == "lost" else None
                    if peer is not None:
                        self._end(peer)
            else:
                self._wire.settle()
                return None

    def close(self) -> None:
        self._wire.close()

    def _read(self) -> None:
        peer = self.socket.recv(zmq.NOBLOCK)
        frame = self.socket.recv(zmq.NOBLOCK, copy=False)
        if frame.more or len(frame) < HEADER_BYTES:
            _skip_rest(self.socket)
            self._drop("not a frame of a channel")
            return
        session_id, sequence = HEADER.unpack_from(frame.buffer)
        session = self._sessions.get(peer)
        if session is None:
            verdict = Verdict.NEW_SESSION if sequence == 0 else Verdict.STALE
        else:
            verdict = session.accept(session_id, sequence)
        match verdict:
            case Verdict.NEXT:
                pass
            case Verdict.NEW_SESSION:
                self._end(peer)
                self._sessions[peer] = session = Session(session_id)
                session.next_in = 1
                self._connections.joined(peer, int(frame.get("__fd")))
            case Verdict.GAP | Verdict.STALE | Verdict.RESET:
                if verdict is not Verdict.STALE:
                    self._end(peer)
                # The dialer may not know yet; if it has moved on, it ignores this.
                with contextlib.suppress(zmq.ZMQError):
                    self.socket.send_multipart((peer, reset_frame(session_id)), zmq.NOBLOCK)
                return
            case _:
                assert_never(verdict)
        try:
            message = self._decode(frame.buffer[HEADER_BYTES:])
        except MalformedMessage as error:
            self._drop(error.message)
        else:
            self._events.append(Received(peer, message))

    def _drop(self, reason: str) -> None:
        self.num_malformed += 1
        _tell_malformed(self.num_malformed, self.endpoint, reason)

    def _end(self, peer: bytes) -> None:
        if self._sessions.pop(peer, None) is not None:
            self._connections.left(peer)
            self._events.append(Received(peer, None, disconnected=True))


class Dialer(Generic[Out, In]):
    """The side that dials. It reconnects for ever, each time with a new session."""

    def __init__(
        self,
        endpoint: str,
        identity: bytes,
        outgoing: Codec[Out],
        incoming: Codec[In],
        context: "zmq.Context[zmq.Socket[bytes]]",
        keys: Keys = NO_KEYS,
    ) -> None:
        """Starts to connect; the listener need not be there yet. Raises `ConfigError`."""
        address = bindable(endpoint)
        keys.check(address, "dialling")
        self.endpoint = address.dial_endpoint
        self.connected = False  # as of the last `receive`
        # Handshakes in a row that failed: wrong keys, not a channel, or a listener that ended.
        self.refusals = 0
        self.num_malformed = 0
        self._encode, self._decode = outgoing.encode, incoming.decode
        self._session = _new_session()
        self._lost: str | None = None
        self._retry_s: float | None = None
        self._wire = Wire(context, zmq.DEALER, keys)
        self.socket = self._wire.socket
        self.socket.setsockopt(zmq.ROUTING_ID, identity)
        try:
            self.socket.connect(self.endpoint)
        except zmq.ZMQError as error:
            self._wire.close()
            raise ConfigError(f"cannot dial {self.endpoint}: {error.strerror}") from error

    def fileno(self) -> int:
        return self._wire.fileno()

    def send(self, message: Out) -> bool:
        """Queues a message. False: the queue is full; `receive` will say Disconnected."""
        frame = self._session.frame(self._encode(message))
        try:
            self.socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            self._lost = "the queue to the listener is full"
            self._wire.wake_if_readable(anything_else=True)
            return False
        self._session.sent()
        self._wire.wake_if_readable()
        return True

    def receive(self) -> In | Disconnected | None:
        """The next message, the end of the session, or None when there is nothing (more)."""
        while True:
            if self._lost is not None:
                return self._restart(self._lost)
            if self._wire.readable():
                message = self._read()
                if message is not None:
                    return message
            elif changes := self._wire.changes():
                for change, _ in changes:
                    self._changed(change)
            elif self._retry_s is not None and monotonic() >= self._retry_s:
                self._lost = "the handshake failed"
            else:
                self._wire.settle()
                return None

    def close(self) -> None:
        self._wire.close()

    def _read(self) -> In | None:
        frame = self.socket.recv(zmq.NOBLOCK, copy=False)
        if frame.more or len(frame) < HEADER_BYTES:
            _skip_rest(self.socket)
            self._drop("not a frame of a channel")
            return None
        verdict = self._session.accept(*HEADER.unpack_from(frame.buffer))
        match verdict:
            case Verdict.NEXT:
                try:
                    return self._decode(frame.buffer[HEADER_BYTES:])
                except MalformedMessage as error:
                    self._drop(error.message)
            case Verdict.GAP:
                self._lost = "messages were lost"
            case Verdict.RESET:
                self._lost = "the listener ended the session"
            case Verdict.STALE | Verdict.NEW_SESSION:
                pass
            case _:
                assert_never(verdict)
        return None

    def _drop(self, reason: str) -> None:
        self.num_malformed += 1
        _tell_malformed(self.num_malformed, self.endpoint, reason)

    def _changed(self, change: Change) -> None:
        if change == "up":
            self.refusals, self._retry_s = 0, None
        elif change == "lost" and self.connected:
            self._lost = "the connection was lost"
        elif self._retry_s is None:
            # Restarting at once would be refused at once, as fast as both sides can.
            self._retry_s = monotonic() + RETRY_S
        self.refusals += change == "refused"
        self.connected = change == "up"

    def _restart(self, reason: str) -> Disconnected:
        # Taking the connection away drops whatever was queued for or from the old session; the
        # socket, and so the descriptor that others watch, stays.
        with contextlib.suppress(zmq.ZMQError):
            self.socket.disconnect(self.endpoint)
        self._lost = self._retry_s = None
        self.connected = False
        self._session = _new_session()
        self.socket.connect(self.endpoint)
        return Disconnected(reason)


class _Connections:
    """Which descriptor carries which peer, robust against numbers that are used again.

    Messages and loss events come on different sockets, so a new connection may speak before the
    end of an older one with the same number was read.
    """

    def __init__(self) -> None:
        self._peer_of: dict[int, bytes | None] = {}  # None: replaced, its end not yet read
        self._number_of: dict[bytes, int] = {}
        self._ends_to_skip: dict[int, int] = {}

    def joined(self, peer: bytes, number: int) -> None:
        if number in self._peer_of:
            self._ends_to_skip[number] = self._ends_to_skip.get(number, 0) + 1
        self._peer_of[number] = peer
        self._number_of[peer] = number

    def left(self, peer: bytes) -> None:
        number = self._number_of.pop(peer, None)
        if number is not None and self._peer_of.get(number) == peer:
            self._peer_of[number] = None

    def lost(self, number: int) -> bytes | None:
        """The peer that went with this connection, if it had one."""
        if self._ends_to_skip.get(number):
            self._ends_to_skip[number] -= 1
            return None
        return self._peer_of.pop(number, None)


def _new_session() -> Session:
    return Session(secrets.randbits(SESSION_BITS))


def _tell_malformed(num_malformed: int, endpoint: str, reason: str) -> None:
    """Log the first dropped message, the second, the fourth and so on: a peer may send many."""
    if num_malformed.bit_count() == 1:
        log.warning(
            "dropped a malformed message", endpoint=endpoint, so_far=num_malformed, reason=reason
        )


def _skip_rest(socket: "zmq.Socket[bytes]") -> None:
    while socket.getsockopt(zmq.RCVMORE):
        socket.recv(zmq.NOBLOCK)
