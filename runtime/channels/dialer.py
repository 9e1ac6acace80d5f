"""The side of a channel that dials: nodes to routers, prefill nodes to decode nodes.

libzmq resolves names in its one I/O thread, so a slow name server for one absent listener would
silence every channel of the process. A dialer therefore resolves names in a thread of its own, and
gives libzmq numeric addresses only.
"""

import contextlib
import secrets
import threading
from collections import deque
from typing import Generic, TypeVar, assert_never

import msgspec
import zmq

from baton.protocol.codec import UNREADABLE, Codec
from baton.protocol.errors import ConfigError, NodeError
from baton.runtime.channels.endpoint import Endpoint, parse_endpoint
from baton.runtime.channels.keys import NO_KEYS, Keys
from baton.runtime.channels.wire import (
    CONNECT_TIMEOUT_MS,
    QUEUED_MESSAGES,
    SESSION_BITS,
    ConnectionChange,
    OpenWire,
    Session,
    Verdict,
    Wire,
    log,
    new_identity,
    probe_frame,
)
from baton.runtime.clock import Clock, monotonic

# After a refused handshake ZMQ tries again at once or never, so the dialer does it: soon with its
# next key, and less and less often, down to this, once all keys were refused.
RETRY_S = 1.0
NEXT_KEY_S = 0.05
# Between two lookups of the address of a listener that is not connected, and between two looks at
# whether a lookup has ended.
LOOK_AGAIN_S = 1.0
LOOKUP_POLL_S = 0.02
# How often a dialer that has nothing to send asks whether the listener still has its session.
ASK_INTERVAL_S = 1.0

Out = TypeVar("Out")
In = TypeVar("In")


class Disconnected(msgspec.Struct, frozen=True):
    """The dialer's session is over. In the new one, its owner must introduce itself again.

    Earlier messages may or may not have arrived. Later messages are queued until the listener is
    there.
    """

    reason: str


class Dialer(Generic[Out, In]):
    """The side that dials. It reconnects until it is closed, each time with a new session.

    libzmq reconnects by itself, too, and the listener may end a session without this side noticing.
    So a dialer asks every second whether its session stands. A listener that does not have it, or
    not all of its messages, answers with a reset.
    """

    # Sockets and time are simulated as a whole, or not at all.
    open_wire: OpenWire = Wire
    clock: Clock = staticmethod(monotonic)

    def __init__(
        self,
        endpoint: str,
        name: bytes,
        outgoing: Codec[Out],
        incoming: Codec[In],
        context: "zmq.Context[zmq.Socket[bytes]]",
        keys: Keys = NO_KEYS,
    ) -> None:
        """Begin to connect; the listener need not be there yet. Raises `ConfigError`."""
        self._destination = Destination(endpoint, keys, self.clock)
        # With the listener's name, if it has one.
        self.endpoint = str(self._destination.given)
        self.connected = False  # as the last `receive` found it
        # Handshakes in a row that failed: wrong keys, not a channel, or a listener that ended.
        self.refusals = 0
        self._encode = outgoing.encode
        self._decode = incoming.decode
        self._session = Session(secrets.randbits(SESSION_BITS))
        self._lost: str | None = None
        self._retry_s: float | None = None
        self._is_dialling = False  # a connection stands, or libzmq tries to make one
        self._ask_at_s = self.clock() + ASK_INTERVAL_S
        self._has_sent = False  # since it asked last
        self._keys = keys
        self._num_tried = 0  # keys whose handshake has failed since the last connection
        self._name = name
        self._dialled = ""  # empty until the listener's name is resolved
        self._unsent: deque[bytes] = deque()  # until then
        with contextlib.ExitStack() as undo:
            try:
                self._wire = self.open_wire(context, zmq.DEALER, keys)
                undo.callback(self._wire.close)
                self._wire.endpoint = self.endpoint
                self.socket = self._wire.socket
                self._connect()
            except (zmq.ZMQError, OSError, NodeError) as error:
                raise ConfigError(f"cannot dial {self.endpoint}: {error}") from error
            undo.pop_all()

    def fileno(self) -> int:
        return self._wire.fileno()

    def send(self, message: Out) -> bool:
        """Queue a message. Return False if that is not possible; Disconnected follows."""
        if self._lost is not None:
            return False  # this session has lost a message, so no later one may arrive
        frame = self._session.frame(self._encode(message))
        try:
            if self._dialled:
                self.socket.send(frame, zmq.NOBLOCK)
            elif len(self._unsent) < QUEUED_MESSAGES:
                self._unsent.append(frame)
            else:
                raise zmq.Again
        except zmq.ZMQError as error:
            self._lost = _why_unsent(error)
            self._wire.wake_if_readable(anything_else=True)
            return False
        self._session.sent()
        self._has_sent = True
        self._wire.wake_if_readable()
        return True

    @property
    def is_resolved(self) -> bool:
        """Return whether the listener's name stands for an address."""
        return self._destination.address is not None

    def receive(self) -> In | Disconnected | None:
        """Return the next message or the end of the session; None if neither has arrived."""
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
            elif self._retry_s is not None and self.clock() >= self._retry_s:
                self._lost = "the handshake failed"
                self._num_tried += 1
            elif self.connected and self.clock() >= self._ask_at_s:
                self._ask()
            elif self.connected or not self._destination.look():
                next_s = (
                    self._ask_at_s if self.connected else self._destination.look_at_s
                )
                times = (self._retry_s, next_s)
                self._wire.clear_signal(
                    min((time for time in times if time is not None), default=None)
                )
                return None
            elif self._dialled:
                self._lost = "the listener has moved"
            else:
                self._connect()

    def close(self, linger_ms: int = 0) -> None:
        """Close the socket. Its context ends once the queue is empty, or `linger_ms` later."""
        self._wire.close(linger_ms)

    def _read(self) -> In | None:
        if (frame := self._wire.read()) is None:
            return None
        session_id, sequence, payload = frame
        verdict = self._session.accept(session_id, sequence)
        match verdict:
            case Verdict.NEXT:
                try:
                    return self._decode(payload)
                except UNREADABLE as error:
                    self._wire.drop(str(error))
            case Verdict.GAP:
                self._lost = "messages were lost"
            case Verdict.RESET:
                self._lost = "the listener ended the session"
            case Verdict.STALE | Verdict.NEW_SESSION | Verdict.PROBE:
                pass
            case _:
                assert_never(verdict)
        return None

    def _ask(self) -> None:
        """Let the listener answer with a reset if it has not got all of this session."""
        self._ask_at_s = self.clock() + ASK_INTERVAL_S
        has_sent = self._has_sent
        self._has_sent = False
        if has_sent or self._session.next_out == 0:
            # Each message asks the same, and a session begins with the first one.
            return
        try:
            self.socket.send(
                probe_frame(self._session.id, self._session.next_out), zmq.NOBLOCK
            )
        # There may be no connection, whatever its events said.
        except zmq.ZMQError as error:
            self._lost = _why_unsent(error)

    def _changed(self, change: ConnectionChange) -> None:
        if change == "up" and not self._is_dialling:
            return  # libzmq had reconnected before this dialer disconnected
        if change == "up":
            self.refusals = 0
            self._retry_s = None
            self._num_tried = 0
        elif change == "lost" and self.connected:
            self._lost = "the connection was lost"
        elif self._retry_s is None:
            # An immediate restart would be refused immediately, over and over.
            num_rounds, nth = divmod(self._num_tried + 1, max(1, len(self._keys.pairs)))
            wait_s = NEXT_KEY_S if nth else min(RETRY_S, NEXT_KEY_S * 2.0**num_rounds)
            self._retry_s = self.clock() + wait_s
            if change == "refused":
                self._disconnect()
        self.refusals += change == "refused"
        self.connected = change == "up"

    def _restart(self, reason: str) -> Disconnected:
        # Disconnecting drops what was queued for or from the old session. The socket stays, and
        # with it the descriptor that the owner watches.
        self._disconnect()
        self._unsent.clear()
        self._lost = self._retry_s = None
        self.connected = False
        self._session = Session(secrets.randbits(SESSION_BITS))
        self._wire.changes()  # they are of connections of the old session
        self._connect()
        return Disconnected(reason)

    def _disconnect(self) -> None:
        self._is_dialling = False
        with contextlib.suppress(zmq.ZMQError):  # there may be no connection
            self.socket.disconnect(self._dialled)

    def _connect(self) -> None:
        """Connect under a new identity, so that a listener cannot confuse two connections."""
        if (address := self._destination.address) is None:
            return
        if pairs := self._keys.pairs:
            self._wire.use_key(pairs[self._num_tried % len(pairs)])
        self.socket.setsockopt(zmq.IPV6, int(":" in address.host))
        self.socket.setsockopt(zmq.ROUTING_ID, new_identity(self._name))
        self._dialled = address.dial_endpoint
        self._destination.tried_s = self.clock()
        self.socket.connect(self._dialled)
        self._is_dialling = True
        try:
            while self._unsent:
                self.socket.send(self._unsent.popleft(), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self._lost = _why_unsent(error)


def _why_unsent(error: zmq.ZMQError) -> str:
    if isinstance(error, zmq.Again):
        return "the queue to the listener is full"
    return f"a message could not be sent: {error.strerror}"


class Destination:
    """The numeric address of a listener, whose name may come to stand for another one."""

    def __init__(self, text: str, keys: Keys, clock: Clock = monotonic) -> None:
        """Raises `ConfigError` if the address cannot be dialled, or must not be without a key."""
        self._clock = clock
        self.given = parse_endpoint(text)
        self._keys = keys
        # The addresses of a name are checked once they are known.
        if not self.given.is_name:
            keys.check(self.given, "dialling")
        # Raises for an address that only a listener could use.
        _ = self.given.dial_endpoint
        # None until the name is resolved.
        self.address: Endpoint | None = None if self.given.is_name else self.given
        self.tried_s = 0.0  # when the dialer last began to connect
        self._look_at_s = clock()
        self._is_looking = False
        # By the thread that looks; empty: nothing.
        self._found: list[Endpoint] | None = None

    @property
    def look_at_s(self) -> float | None:
        """Return when `look` should be called again; None means never."""
        return self._look_at_s if self.given.is_name else None

    def look(self) -> bool:
        """Begin or end a lookup, without waiting. Return whether `address` has changed."""
        if not self.given.is_name or (now_s := self._clock()) < self._look_at_s:
            return False
        if not self._is_looking:
            self._is_looking = True
            threading.Thread(
                target=self._look_up, name="name lookup", daemon=True
            ).start()
        if (found := self._found) is None:
            self._look_at_s = now_s + LOOKUP_POLL_S
            return False
        self._found, self._is_looking, self._look_at_s = (
            None,
            False,
            now_s + LOOK_AGAIN_S,
        )
        if not found:
            return False
        wanted = found[0]
        if self.address in found:
            if now_s < self.tried_s + CONNECT_TIMEOUT_MS / 1000:
                return False
            # Nothing answers there, but the name may stand for other addresses too.
            wanted = found[(found.index(self.address) + 1) % len(found)]
        if wanted == self.address:
            return False
        self.address = wanted
        return True

    def _look_up(self) -> None:
        try:
            found = self.given.resolved()
            for address in found:
                self._keys.check(address, f"dialling {self.given} at")
            self._found = found
        except ConfigError as error:  # the name may have another address later
            log.debug("cannot dial a router or a node", reason=error.message)
            self._found = []
