"""The side of a channel that is dialled: routers for nodes, decode nodes for prefill nodes.

`Channels` opens the channels of one thread, all with one set of keys, and waits for any of them.
"""

import contextlib
import math
import select
from collections import deque
from typing import Generic, TypeVar, assert_never

import msgspec
import zmq

from baton.protocol.codec import UNREADABLE, Codec
from baton.runtime.channels.dialer import Dialer
from baton.runtime.channels.endpoint import parse_endpoint
from baton.runtime.channels.keys import NO_KEYS, Keys
from baton.runtime.channels.wire import (
    HEARTBEAT_INTERVAL_MS,
    OpenWire,
    Session,
    Verdict,
    Wire,
    has_all,
    is_invented,
    log,
    probe_frame,
    reset_frame,
)
from baton.runtime.clock import Clock, monotonic

# When a listener tries its sessions' connections after a hint that one ended: libzmq gives the hint
# shortly before it removes the connection.
PROBE_DELAYS_S = (0.0, 0.01, 0.05, 0.25)
# The least time between two first tries: thousands of strangers that connect and leave must not
# make the listener try the connections of all its sessions each time.
HINTS_APART_S = 0.1
SKIPPED_FRAMES = 1000  # at most, in one call of `receive`
FRAMES_PER_LOOK = 256  # a flooding peer must not delay the handshakes of newcomers
# A connection ends this long before its peer counts as silent.
MARGIN_MS = 300
# The flags of the two frames of a message, as numbers, because combining flags is slow.
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_LAST = int(zmq.NOBLOCK)

Out = TypeVar("Out")
In = TypeVar("In")


class Received(msgspec.Struct, Generic[In], frozen=True):
    """A message from a peer, or the end of the peer's session (then `message` is None).

    `peer` names one connection of one dialer and is never reused; `name_of` returns the dialer's
    name.
    """

    peer: bytes
    message: In | None
    disconnected: bool = False


class Listener(Generic[Out, In]):
    """The side that is dialled. A peer is one session of one dialer.

    libzmq's connection events do not say whose connection ended, and they come for failed
    handshakes too. An event is therefore only a reason to try every session's connection with a
    frame that dialers ignore.
    """

    # Sockets and time are simulated as a whole, or not at all.
    open_wire: OpenWire = Wire
    clock: Clock = staticmethod(monotonic)

    def __init__(
        self,
        endpoint: str,
        outgoing: Codec[Out],
        incoming: Codec[In],
        context: "zmq.Context[zmq.Socket[bytes]]",
        keys: Keys = NO_KEYS,
    ) -> None:
        """Bind `endpoint`: tcp://host (or port 0) takes a free port; `endpoint` tells which.

        Raises `ConfigError` if the address cannot be bound, or must not be bound without a key.
        """
        address = parse_endpoint(endpoint)
        keys.check(address, "listening on")
        # Refused handshakes: a wrong key, or a peer that is not a channel.
        self.refusals = 0
        self.num_unnamed = 0  # frames under identities that no dialer chose
        self._encode = outgoing.encode
        self._decode = incoming.decode
        self._sessions: dict[bytes, Session] = {}
        # Ended sessions whose dialers have not been told yet.
        self._unsent_resets: dict[bytes, int] = {}
        self._probes_at_s: deque[float] = deque()
        self._hinted_s = -math.inf  # the first try after the last hint
        self._num_read = 0  # frames since the last look at the connections
        self._events: deque[Received[In]] = deque()
        self._wire = self.open_wire(context, zmq.ROUTER, keys)
        self.socket = self._wire.socket
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # libzmq may reconnect a dialer under its old identity before the dialer takes a new one.
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        with contextlib.ExitStack() as undo:
            undo.callback(self._wire.close)
            self.endpoint = self._wire.endpoint = address.bind(self.socket)
            undo.pop_all()

    def fileno(self) -> int:
        return self._wire.fileno()

    def send(self, peer: bytes, message: Out) -> bool:
        """Send a message. Return False, and end the session, if the peer is gone or too slow.

        If the peer was known until now, `receive` also returns a disconnect event for it.
        """
        return self.send_encoded(peer, self.encode(message))

    def encode(self, message: Out) -> bytes:
        """Return the bytes of a message, for `send_encoded`."""
        return self._encode(message)

    def send_encoded(self, peer: bytes, encoded: bytes) -> bool:
        """Send a message that `encode` made. It behaves like `send` otherwise."""
        session = self._sessions.get(peer)
        if session is None:
            return False
        frame = session.frame(encoded)
        try:
            self.socket.send(peer, _MORE)
            self.socket.send(frame, _LAST)
        except zmq.ZMQError:
            self.end(peer)
            return False
        session.sent()
        self._wire.wake_if_readable()
        return True

    def receive(self) -> Received[In] | None:
        """Return the next message or disconnect event; None if neither has arrived."""
        for _ in range(SKIPPED_FRAMES):
            if self._events:
                return self._events.popleft()
            if self._num_read < FRAMES_PER_LOOK and self._wire.readable():
                self._num_read += 1
                self._read()
                continue
            self._num_read = 0
            if not self._check_connections() and not self._wire.readable():
                self._wire.clear_signal(
                    self._probes_at_s[0] if self._probes_at_s else None
                )
                return None
        # A flood of frames that are not messages must not keep the caller here.
        self._wire.wake_if_readable(anything_else=True)
        return None

    def is_connected(self, peer: bytes) -> bool:
        """Return whether a peer's connection exists. If it is gone, end the peer's session."""
        session = self._sessions.get(peer)
        if session is None:
            return False
        try:
            self.socket.send_multipart((peer, probe_frame(session.id)), zmq.NOBLOCK)
        except zmq.Again:  # a full queue shows that the connection exists
            return True
        except zmq.ZMQError:
            self.end(peer)
            return False
        self._wire.wake_if_readable()
        return True

    def end(self, peer: bytes) -> None:
        """End a peer's session, if it has one. A disconnect event follows."""
        session = self._sessions.pop(peer, None)
        if session is None:
            return
        self._events.append(Received(peer, None, disconnected=True))
        self._unsent_resets[peer] = session.id
        self._send_resets()
        self._wire.wake_if_readable(anything_else=True)

    def close(self) -> None:
        self._wire.close()

    def _check_connections(self) -> bool:
        """Answer handshakes and try connections that may be gone. Return whether there were any."""
        # Before a hint puts it off.
        if self._probes_at_s and self._probes_at_s[0] <= self.clock():
            self._probes_at_s.popleft()
            self._probe()
            return True
        if changes := self._wire.changes():
            self.refusals += changes.count("refused")
            if "lost" in changes:
                self._schedule_probes()
            return True
        return False

    def _schedule_probes(self) -> None:
        """Note a hint that a connection ended: try all of them soon, and again a bit later."""
        now_s = self.clock()
        if self._hinted_s > now_s:
            return  # the first try of an earlier hint is still to come
        self._hinted_s = max(now_s, self._hinted_s + HINTS_APART_S)
        self._probes_at_s = deque(
            self._hinted_s + delay_s for delay_s in PROBE_DELAYS_S
        )

    def _read(self) -> None:
        peer = self.socket.recv(zmq.NOBLOCK)
        if (frame := self._wire.read()) is None:
            return
        if is_invented(peer):
            # An answer could not reach the dialer. It asks by itself whether its session stands.
            self.num_unnamed += 1
            if self.num_unnamed.bit_count() == 1:  # the 1st, 2nd, 4th, 8th …
                log.warning(
                    "dropped what was left of a connection that a newer one has replaced",
                    endpoint=self.endpoint,
                    so_far=self.num_unnamed,
                )
            return
        session_id, sequence, payload = frame
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
                self._unsent_resets[peer] = session_id
                self._send_resets()
                return
            case Verdict.PROBE if session is not None and has_all(session, payload):
                return
            case Verdict.GAP | Verdict.RESET | Verdict.PROBE:
                self.end(peer)
                return
            case _:
                assert_never(verdict)
        try:
            message = self._decode(payload)
        except UNREADABLE as error:
            self._wire.drop(str(error))
        else:
            self._events.append(Received(peer, message))

    def _probe(self) -> None:
        """End the sessions whose connections are gone."""
        self._send_resets()
        for peer in list(self._sessions):
            self.is_connected(peer)

    def _send_resets(self) -> None:
        """Tell dialers that their sessions are over. One that has moved on ignores it."""
        for peer, session_id in list(self._unsent_resets.items()):
            try:
                self.socket.send_multipart((peer, reset_frame(session_id)), zmq.NOBLOCK)
            except zmq.Again:
                if not self._probes_at_s:
                    self._probes_at_s.append(self.clock() + PROBE_DELAYS_S[-1])
                continue
            except zmq.ZMQError:
                pass
            del self._unsent_resets[peer]


class Channels:
    """One ZMQ context with its I/O thread. Only `wait` blocks."""

    def __init__(self, keys: Keys = NO_KEYS, heartbeat_timeout_s: float = 3.5) -> None:
        """A silent peer is noticed before `heartbeat_timeout_s` have passed."""
        self._keys = keys
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        timeout_ms = int(1000 * heartbeat_timeout_s) - HEARTBEAT_INTERVAL_MS - MARGIN_MS
        self._context.setsockopt(zmq.HEARTBEAT_TIMEOUT, timeout_ms)  # of its sockets
        self._epoll = select.epoll()

    def dial(
        self, endpoint: str, name: bytes, outgoing: Codec[Out], incoming: Codec[In]
    ) -> Dialer[Out, In]:
        """Begin to connect. Raises `ConfigError` if the endpoint cannot or must not be dialled."""
        return Dialer(endpoint, name, outgoing, incoming, self._context, self._keys)

    def listen(
        self, endpoint: str, outgoing: Codec[Out], incoming: Codec[In]
    ) -> Listener[Out, In]:
        """Bind. Raises `ConfigError` if the endpoint cannot or must not be bound."""
        return Listener(endpoint, outgoing, incoming, self._context, self._keys)

    def watch(self, fileno: int) -> None:
        """Let this descriptor end a `wait`."""
        self._epoll.register(fileno, select.EPOLLIN)

    def unwatch(self, fileno: int) -> None:
        self._epoll.unregister(fileno)

    def wait(self, timeout_s: float) -> None:
        self._epoll.poll(timeout_s)

    def close(self) -> None:
        """End the context, once all dialers and listeners are closed."""
        self._epoll.close()
        self._context.term()
