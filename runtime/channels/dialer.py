"""The side of a channel that dials; see the room's docstring for what a channel promises.

Nodes and their beat threads dial routers with it, and prefill nodes dial decode nodes. It never
interprets a message.
"""

import contextlib
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar, assert_never

import msgspec
import zmq

from baton.protocol.codec import Codec, MalformedMessage
from baton.protocol.errors import ConfigError, NodeError
from baton.runtime.channels.endpoint import SCHEME, Endpoint, address_in
from baton.runtime.channels.keys import NO_KEYS, KeyPair, Keys
from baton.runtime.channels.wire import (
    HEADER,
    HEADER_BYTES,
    SESSION_BITS,
    ConnectionChange,
    Session,
    Verdict,
    Wire,
    new_identity,
    tell_malformed,
)
from baton.runtime.clock import monotonic
from baton.runtime.file_state import state_of
from baton.runtime.log import logger

# After a refused handshake ZMQ may never try again, so the dialer does: soon with its next key, and
# no more often than this once all keys were refused.
RETRY_S = 1.0
NEXT_KEY_S = 0.05
# A changed file takes effect within this time.
LOOK_AGAIN_S = 1.0

log = logger("channel")

Out = TypeVar("Out")
In = TypeVar("In")


class Disconnected(msgspec.Struct, frozen=True):
    """The dialer's session is over. In the new one, its owner must introduce itself again.

    Earlier messages may or may not have arrived. Later messages are queued until the listener is
    there.
    """

    reason: str


class Dialer(Generic[Out, In]):
    """The side that dials. It reconnects until it is closed, each time with a new session."""

    def __init__(
        self,
        endpoint: str,
        name: bytes,
        outgoing: Codec[Out],
        incoming: Codec[In],
        context: "zmq.Context[zmq.Socket[bytes]]",
        keys: Keys = NO_KEYS,
    ) -> None:
        """Begin to connect; the listener need not be there yet. Raises `ConfigError`.

        `endpoint` is an address, or `file:///path` with the address of a listener that may move.
        """
        self._destination = Destination(endpoint, keys)
        self.endpoint = self._destination.address.dial_endpoint
        self.connected = False  # as the last `receive` found it
        # Handshakes in a row that failed: wrong keys, not a channel, or a listener that ended.
        self.refusals = 0
        self.num_malformed = 0
        self._encode, self._decode = outgoing.encode, incoming.decode
        self._session = Session(secrets.randbits(SESSION_BITS))
        self._lost: str | None = None
        self._retry_s: float | None = None
        self._keys = keys
        self._pair: KeyPair | None = None  # of the connection
        self._num_tried = 0  # keys whose handshake has failed since the last connection
        self._name = name
        with contextlib.ExitStack() as undo:
            try:
                self._wire = Wire(context, zmq.DEALER, keys)
                undo.callback(self._wire.close)
                self.socket = self._wire.socket
                self._connect()
            except (zmq.ZMQError, OSError, NodeError) as error:
                raise ConfigError(f"cannot dial {self.endpoint}: {error}") from error
            undo.pop_all()

    def fileno(self) -> int:
        return self._wire.fileno()

    def send(self, message: Out) -> bool:
        """Queue a message. Return False if the queue is full; Disconnected follows."""
        if self._lost is not None:
            return False  # this session has lost a message, so no later one may arrive
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
            elif self._retry_s is not None and monotonic() >= self._retry_s:
                self._lost = "the handshake failed"
                self._num_tried += 1
            elif self._pair is not None and self._pair not in self._keys.pairs:
                self._lost = "the key of the connection was removed"
            elif self._destination.has_moved():
                self._lost = "the listener has moved"
            else:
                self._wire.settle(self._next_look_in_s())
                return None

    def close(self, linger_ms: int = 0) -> None:
        """Close the socket. Its context ends once the queue is empty, or `linger_ms` later."""
        self._wire.close(linger_ms)

    def _next_look_in_s(self) -> float | None:
        look_in_s = self._destination.look_in_s
        if self._retry_s is None:
            return look_in_s
        retry_in_s = self._retry_s - monotonic()
        return retry_in_s if look_in_s is None else min(retry_in_s, look_in_s)

    def _read(self) -> In | None:
        frame = self.socket.recv(zmq.NOBLOCK, copy=False)
        if frame.more or len(frame) < HEADER_BYTES:
            self._wire.skip_rest()
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
        tell_malformed(self.num_malformed, self.endpoint, reason)

    def _changed(self, change: ConnectionChange) -> None:
        if change == "up":
            self.refusals, self._retry_s, self._num_tried = 0, None, 0
        elif change == "lost" and self.connected:
            self._lost = "the connection was lost"
        elif self._retry_s is None:
            # An immediate restart would be refused immediately, over and over.
            has_next = (self._num_tried + 1) % max(1, len(self._keys.pairs)) != 0
            self._retry_s = monotonic() + (NEXT_KEY_S if has_next else RETRY_S)
        self.refusals += change == "refused"
        self.connected = change == "up"

    def _restart(self, reason: str) -> Disconnected:
        # Disconnecting drops what was queued for or from the old session. The socket stays, and
        # with it the descriptor that the owner watches.
        with contextlib.suppress(zmq.ZMQError):
            self.socket.disconnect(self.endpoint)
        self._lost = self._retry_s = None
        self.connected = False
        self._session = Session(secrets.randbits(SESSION_BITS))
        self.endpoint = self._destination.address.dial_endpoint
        self._connect()
        return Disconnected(reason)

    def _connect(self) -> None:
        """Connect under a new identity, so that a listener cannot confuse two connections."""
        if pairs := self._keys.pairs:
            self._pair = pairs[self._num_tried % len(pairs)]
            self._wire.lock(self._pair)
        self.socket.setsockopt(zmq.IPV6, int(not self._destination.address.is_ipv4))
        self.socket.setsockopt(zmq.ROUTING_ID, new_identity(self._name))
        self.socket.connect(self.endpoint)


class Destination:
    """The address of a listener. Only one thread may use it."""

    def __init__(self, text: str, keys: Keys, clock: Callable[[], float] = monotonic) -> None:
        """Raises `ConfigError` if the address cannot be dialled, or must not be without a key."""
        self._text = text
        self._keys = keys
        self._clock = clock
        self._file = Path(text.removeprefix(SCHEME)) if text.startswith(SCHEME) else None
        self._state = state_of(self._file) if self._file else None
        self._look_at_s = clock() + LOOK_AGAIN_S
        self.address = self._read()

    @property
    def look_in_s(self) -> float | None:
        """Return for how long the address cannot change; None means for ever."""
        return max(0.0, self._look_at_s - self._clock()) if self._file else None

    def has_moved(self) -> bool:
        """Return whether `address` has changed since the last call, after looking once a second."""
        if self._file is None or self._clock() < self._look_at_s:
            return False
        self._look_at_s = self._clock() + LOOK_AGAIN_S
        state, before = state_of(self._file), self.address
        if state == self._state:
            return False
        self._state = state
        try:
            self.address = self._read()
        except ConfigError as error:
            log.warning(f"the address {before} stays in use", reason=error.message)
        return self.address != before

    def _read(self) -> Endpoint:
        address = address_in(self._text)
        self._keys.check(address, "dialling")
        _ = address.dial_endpoint  # raises for an address that only a listener could use
        return address
