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
    probe_frame,
    reset_frame,
)
from baton.runtime.keys import NO_KEYS, Keys
from baton.runtime.log import logger
from baton.runtime.wire import ConnectionChange, Wire

# After a refused handshake ZMQ may never try again, so the dialer does, no more often than this.
RETRY_S = 1.0
# When a listener tries its sessions' connections after a hint that one ended: libzmq gives the hint
# a moment before it takes the connection away.
PROBE_DELAYS_S = (0.0, 0.01, 0.05, 0.25)
SKIPPED_FRAMES = 1000  # at most, in one call of `receive`
NONCE_BYTES = 8
SEPARATOR = b"/"

log = logger("channel")

Out = TypeVar("Out")
In = TypeVar("In")


class Received(msgspec.Struct, Generic[In], frozen=True):
    """A message of a peer, or (message None, disconnected) the end of its session.

    `peer` names one life of one dialer and is never used again; `name_of` says which dialer.
    """

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
    """The side that is dialled. A peer is one life of one dialer: a session.

    Which sessions live is learned from the sessions themselves. libzmq's connection events do not
    say whose connection ended, and come for failed handshakes too, so an event is only the reason
    to try every session's connection with a frame that dialers ignore.
    """

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
        self._unaware: dict[bytes, int] = {}  # ended sessions whose dialers were not told yet
        self._probes_at_s: deque[float] = deque()
        self._events: deque[Received[In]] = deque()
        self._wire = Wire(context, zmq.ROUTER, keys)
        self.socket = self._wire.socket
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # libzmq may reconnect a dialer under its old identity before the dialer takes a new one.
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
        except zmq.ZMQError:
            self.end(peer)
            return False
        session.sent()
        self._wire.wake_if_readable()
        return True

    def receive(self) -> Received[In] | None:
        """The next message or disconnect; None when there is nothing (more)."""
        for _ in range(SKIPPED_FRAMES):
            if self._events:
                return self._events.popleft()
            if self._wire.readable():
                self._read()
            elif changes := self._wire.changes():
                self.refusals += changes.count("refused")
                if "lost" in changes:
                    now_s = monotonic()
                    self._probes_at_s = deque(now_s + delay_s for delay_s in PROBE_DELAYS_S)
            elif self._probes_at_s and self._probes_at_s[0] <= monotonic():
                self._probes_at_s.popleft()
                self._probe()
            else:
                next_s = self._probes_at_s[0] - monotonic() if self._probes_at_s else None
                self._wire.settle(next_s)
                return None
        # A flood of frames that are no messages must not keep the caller here.
        self._wire.wake_if_readable(anything_else=True)
        return None

    def end(self, peer: bytes) -> None:
        """End a peer's session, if it has one: a disconnect event follows, and its dialer hears of
        it as soon as its queue has room."""
        session = self._sessions.pop(peer, None)
        if session is None:
            return
        self._events.append(Received(peer, None, disconnected=True))
        self._unaware[peer] = session.id
        self._tell_unaware()
        self._wire.wake_if_readable(anything_else=True)

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
                self.end(peer)
                self._sessions[peer] = session = Session(session_id)
                session.next_in = 1
            case Verdict.STALE:
                self._unaware[peer] = session_id
                self._tell_unaware()
                return
            case Verdict.GAP | Verdict.RESET | Verdict.PROBE:
                self.end(peer)
                return
            case _:
                assert_never(verdict)
        try:
            message = self._decode(frame.buffer[HEADER_BYTES:])
        except MalformedMessage as error:
            self._drop(error.message)
        else:
            self._events.append(Received(peer, message))

    def _probe(self) -> None:
        """End the sessions whose connections are gone. A full queue is a connection."""
        self._tell_unaware()
        for peer, session in list(self._sessions.items()):
            try:
                self.socket.send_multipart((peer, probe_frame(session.id)), zmq.NOBLOCK)
            except zmq.Again:
                continue
            except zmq.ZMQError:
                self.end(peer)

    def _tell_unaware(self) -> None:
        """A dialer that has moved on ignores this, one that is gone needs no word."""
        for peer, session_id in list(self._unaware.items()):
            try:
                self.socket.send_multipart((peer, reset_frame(session_id)), zmq.NOBLOCK)
            except zmq.Again:
                if not self._probes_at_s:
                    self._probes_at_s.append(monotonic() + PROBE_DELAYS_S[-1])
                continue
            except zmq.ZMQError:
                pass
            del self._unaware[peer]

    def _drop(self, reason: str) -> None:
        self.num_malformed += 1
        _tell_malformed(self.num_malformed, self.endpoint, reason)


class Dialer(Generic[Out, In]):
    """The side that dials. It reconnects for ever, each time with a new session."""

    def __init__(
        self,
        endpoint: str,
        name: bytes,
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
        self._name = name
        try:
            self._connect()
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
                for change in changes:
                    self._changed(change)
            elif self._retry_s is not None and monotonic() >= self._retry_s:
                self._lost = "the handshake failed"
            else:
                self._wire.settle(self._retry_s and self._retry_s - monotonic())
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
            case Verdict.STALE | Verdict.NEW_SESSION | Verdict.PROBE:
                pass
            case _:
                assert_never(verdict)
        return None

    def _drop(self, reason: str) -> None:
        self.num_malformed += 1
        _tell_malformed(self.num_malformed, self.endpoint, reason)

    def _changed(self, change: ConnectionChange) -> None:
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
        self._connect()
        return Disconnected(reason)

    def _connect(self) -> None:
        """Under an identity of its own: no two connections of a listener can be confused."""
        identity = self._name + SEPARATOR + secrets.token_hex(NONCE_BYTES).encode()
        self.socket.setsockopt(zmq.ROUTING_ID, identity)
        self.socket.connect(self.endpoint)


def name_of(peer: bytes) -> bytes:
    """The name that the dialer behind `peer` gave itself."""
    return peer.rpartition(SEPARATOR)[0]


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
