"""The sockets below the channels of simulated processes: connections, cuts and silent drops.

Dialers and listeners are production's; what libzmq and its I/O thread do is simulated here. That
thread works while the loop of its process is stalled: it notices that a connection ended, dials
again under the same identity, and takes what comes. A listener's socket learns of new connections
when its loop uses it next. If such a connection has the identity of an older one, what is unread of
the older one is dropped, or comes under an invented identity if that connection had ended.

A connection carries messages in order. A link that drops silently loses nothing at first, as TCP
sends again; after the time-out of heartbeats, each end learns in its own time that the connection
is lost, with all that was under way.
"""

import errno
import itertools
import random
from collections import deque
from collections.abc import Callable
from typing import TypeVar

import zmq

from baton.protocol.codec import Codec
from baton.protocol.messages import Cancel, CancelDone
from baton.runtime.channels.dialer import Dialer, Disconnected
from baton.runtime.channels.keys import NO_KEYS, KeyPair, Keys
from baton.runtime.channels.listener import Channels, Listener, Received
from baton.runtime.channels.wire import (
    HEADER,
    HEADER_BYTES,
    QUEUED_MESSAGES,
    ConnectionChange,
    Wire,
    name_of,
)
from tests.sim.clock import PROCESS, Process, SimLoop

Out = TypeVar("Out")
In = TypeVar("In")
Pair = tuple[str, str]  # the names of two processes, in the direction of the bytes
HEARTBEAT_TIMEOUT_S = (2.5, 3.2)  # that of libzmq, as the channels set it
RECONNECT_S = (0.05, 0.5)
# After a `disconnect`.
LATE_CHANGES: tuple[ConnectionChange, ...] = ("up", "lost", "refused")
# What a message costs the loop that sends or handles it, on a core that is several times slower
# than those on which a router took 20 to 35 µs for a heartbeat.
MESSAGE_S = 100e-6
BYTE_S = 10e-9
P_NO_MEMORY = 0.2  # that a message cannot be allocated while memory is short


class Network:
    """The links between processes.

    `met` counts messages by kind and the states of their session and request at who receives them.
    """

    def __init__(
        self, loop: SimLoop, rng: random.Random, complain: Callable[[str], None]
    ) -> None:
        self.loop = loop
        self.rng = rng
        self.listeners: dict[str, RouterSocket] = {}
        self.cut: set[Pair] = set()  # refuses connections
        self.silent: set[Pair] = set()  # drops bytes
        self.resolving_s = 0.0  # how long a name server takes
        self.resolved_s = 0.0  # when the last look-up that took long has ended
        self.max_queued = rng.choice(
            (20, 10_000)
        )  # frames that a connection keeps for a silent peer
        self.connections: dict[Connection, None] = {}  # in the order of their begin
        self.met: dict[tuple[str, str], int] = {}
        self.numbers = itertools.count(1)
        self.complain = complain

    def latency_s(self) -> float:
        return self.rng.choice((0.0001, 0.0005, 0.002))

    def meet(self, process: Process, message: object, *, is_over: bool) -> None:
        entries = (
            getattr(message, "entries", None)
            or getattr(message, "keys", None)
            or [message]
        )
        key = getattr(entries[0], "key", entries[0])
        request_id = getattr(key, "request_id", "")
        state = f"{process.state_of(request_id)} request" if request_id else ""
        met = type(message).__name__, state + ", ended session" * is_over
        self.met[met] = self.met.get(met, 0) + 1

    def can_connect(self, dialer: Process, listener: Process) -> bool:
        pairs = (dialer.name, listener.name), (listener.name, dialer.name)
        blocked = any(pair in self.cut or pair in self.silent for pair in pairs)
        blocked = (
            blocked or dialer.is_out_of_descriptors or listener.is_out_of_descriptors
        )
        return not (
            blocked or dialer.is_frozen or listener.is_frozen or listener.is_dead
        )

    def is_calm(self, one: Process, other: Process) -> bool:
        """Return whether nothing hinders the bytes between two processes."""
        pairs = {(one.name, other.name), (other.name, one.name)}
        is_slow = self.resolving_s or self.loop.time() < self.resolved_s
        is_short = any(
            end.is_out_of_descriptors or end.is_out_of_memory for end in (one, other)
        )
        return not (pairs & self.cut or pairs & self.silent or is_slow or is_short)

    def check_memory(self, process: Process) -> None:
        """Fail as a socket does that cannot allocate a message, if the process has no memory."""
        if process.is_out_of_memory and self.rng.random() < P_NO_MEMORY:
            raise zmq.ZMQError(errno.ENOMEM)

    def of(self, process: Process) -> "list[Connection]":
        return [one for one in self.connections if process in one.ends]

    def between(self, one: str, other: str) -> "list[Connection]":
        names = {one, other}
        return [c for c in self.connections if {end.name for end in c.ends} == names]

    def in_touch_since_s(self, one: Process, other: Process, num: int = 2) -> float:
        """Return when the last of their `num` connections began, or infinity without all."""
        begun = [c.began_s for c in self.connections if set(c.ends) == {one, other}]
        return max(begun) if len(begun) == num else float("inf")

    def sever(self, one: str, other: str) -> None:
        """Cut the connections of two processes. Each end notices in its own time."""
        for connection in self.between(one, other):
            connection.lose(self.rng.uniform(0, 3.2), self.rng.uniform(0, 3.2))

    def fall_silent(self, pair: Pair) -> None:
        self.silent.add(pair)
        for connection in self.between(*pair):
            self.loop.call_later(
                self.rng.uniform(*HEARTBEAT_TIMEOUT_S), connection.time_out
            )

    def speak_again(self, pair: Pair) -> None:
        self.silent.discard(pair)
        for connection in self.between(*pair):
            connection.resume()

    def frozen(self, process: Process) -> None:
        """Let the other ends notice that a process answers no heartbeat."""
        for connection in self.of(process):
            self.loop.call_later(
                self.rng.uniform(*HEARTBEAT_TIMEOUT_S), connection.time_out
            )

    def died(self, process: Process) -> None:
        for endpoint in [
            e for e, one in self.listeners.items() if one.process is process
        ]:
            del self.listeners[endpoint]
        for connection in self.of(process):
            if self.rng.random() < 0.5:
                connection.lose(0.001, 0.001)
            else:  # the other end gets first what this one has sent
                connection.close(connection.ends.index(process))


class Connection:
    """One connection of one dialer. What is sent after its end vanishes."""

    def __init__(self, link: "Link", router: "RouterSocket") -> None:
        self.link = link
        self.router = router
        self.network = router.network
        self.ends = link.socket.process, router.process
        self.began_s = self.network.loop.time()
        self.is_lost = False
        self._last_s = [0.0, 0.0]
        self._stalled: list[tuple[int, Callable[[], None]]] = []
        self.network.connections[self] = None
        self.pipe = Pipe(link.identity, self)
        router.attach(self.pipe)

    def carry(self, side: int, deliver: Callable[[], None]) -> None:
        """Deliver after what was sent before. Side 0 is the dialer's."""
        pair = self.ends[side].name, self.ends[1 - side].name
        if pair in self.network.silent or any(one == side for one, _ in self._stalled):
            self._stalled.append((side, deliver))
            return
        loop = self.network.loop
        at_s = max(self._last_s[side] + 1e-6, loop.time() + self.network.latency_s())
        self._last_s[side] = at_s
        world_call_at(loop, at_s, lambda: None if self.is_lost else deliver())

    def is_full(self, side: int) -> bool:
        return sum(one == side for one, _ in self._stalled) >= self.network.max_queued

    def resume(self) -> None:
        """Carry what has waited, when TCP sends it again. What is sent now comes later."""
        stalled = self._stalled
        self._stalled = []
        if stalled and not self.is_lost:
            again_s = self.network.loop.time() + self.network.rng.choice(
                (0.0, 0.2, 0.8)
            )
            self._last_s = [max(last_s, again_s) for last_s in self._last_s]
            for side, deliver in stalled:
                self.carry(side, deliver)

    def close(self, side: int) -> None:
        """Let the other end learn that this one is closed, after all that it has sent."""
        self.carry(side, lambda: self.lose(0.0, 0.0))

    def time_out(self) -> None:
        """End the connection if heartbeats still do not pass."""
        one, other = (end.name for end in self.ends)
        silent = {(one, other), (other, one)} & self.network.silent
        if silent or any(end.is_frozen for end in self.ends):
            self.lose(0.0, self.network.rng.uniform(0, 0.7) if silent else 0.0)

    def lose(self, dialer_after_s: float, listener_after_s: float) -> None:
        if self.is_lost:
            return
        self.is_lost = True
        del self.network.connections[self]
        loop = self.network.loop
        world_call_at(loop, loop.time() + dialer_after_s, lambda: self.link.lost(self))
        world_call_at(
            loop, loop.time() + listener_after_s, lambda: self.router.lost(self.pipe)
        )


def _asked_by(message: object) -> set[object]:
    match message:
        case Cancel(keys=keys):
            return set(keys)
    return set()


def _answered_by(message: object) -> set[object]:
    match message:
        case CancelDone(keys=keys):
            return set(keys)
    return set()


def world_call_at(loop: SimLoop, at_s: float, callback: Callable[[], None]) -> None:
    """Schedule what happens outside of processes, such as the arrival of bytes in a kernel."""
    token = PROCESS.set(None)
    try:
        loop.call_at(at_s, callback)
    finally:
        PROCESS.reset(token)


class SimChannels(Channels):
    """The channels of one thread of a process. `wait` only notes how long the thread would wait."""

    def __init__(
        self,
        network: Network,
        process: Process,
        wake: Callable[[], None],
        keys: Keys = NO_KEYS,
    ) -> None:
        self.network = network
        self.process = process
        self.wake = wake
        self.keys = keys
        self.timeout_s = 0.0
        self.opened: list[SimDialer | SimListener] = []  # type: ignore[type-arg]

    def dial(  # type: ignore[override]
        self, endpoint: str, name: bytes, outgoing: Codec[Out], incoming: Codec[In]
    ) -> "SimDialer[Out, In]":
        dialer = SimDialer(self, endpoint, name, outgoing, incoming)
        self.opened.append(dialer)
        return dialer

    def listen(  # type: ignore[override]
        self, endpoint: str, outgoing: Codec[Out], incoming: Codec[In]
    ) -> "SimListener[Out, In]":
        listener = SimListener(self, endpoint, outgoing, incoming)
        self.opened.append(listener)
        return listener

    def open_wire(self, _context: object, kind: int, keys: Keys) -> "SimWire":
        if self.process.is_out_of_descriptors:
            raise zmq.ZMQError(errno.EMFILE)
        wire = SimWire(
            self, DealerSocket(self) if kind == zmq.DEALER else RouterSocket(self)
        )
        if kind == zmq.ROUTER and keys.first is not None:
            wire.use_key(keys.first)
        return wire

    def watch(self, fileno: int) -> None: ...

    def unwatch(self, fileno: int) -> None: ...

    def wait(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s

    def close(self) -> None: ...


class SimDialer(Dialer[Out, In]):
    """A dialer that checks what its owner says in which session, and takes its owner's time."""

    def __init__(
        self,
        channels: SimChannels,
        endpoint: str,
        name: bytes,
        outgoing: Codec[Out],
        incoming: Codec[In],
    ) -> None:
        self.process = channels.process
        self.network = channels.network
        self.open_wire = channels.open_wire  # type: ignore[assignment]
        self.clock = self.network.loop.time
        self.is_closed = False
        self._asked: set[object] = set()  # what must be answered in this session
        super().__init__(endpoint, name, outgoing, incoming, None, channels.keys)  # type: ignore[arg-type]

    def send(self, message: Out) -> bool:
        if not self._asked.issuperset(_answered_by(message)):
            self.network.complain(
                f"{self.process.name} answers what another session asked"
            )
        self.process.spend(MESSAGE_S)
        return super().send(message)

    def receive(self) -> In | Disconnected | None:
        message = super().receive()
        if isinstance(message, Disconnected):
            self._asked = set()
        elif message is not None:
            self._asked |= _asked_by(message)
            self.process.spend(MESSAGE_S)
            link = self.socket.link
            is_over = link is None or link.connection is None
            self.network.meet(self.process, message, is_over=is_over)
        return message

    def close(self, linger_ms: int = 0) -> None:
        self.is_closed = True
        super().close(linger_ms)


class SimListener(Listener[Out, In]):
    """A listener that takes its owner's time."""

    def __init__(
        self,
        channels: SimChannels,
        endpoint: str,
        outgoing: Codec[Out],
        incoming: Codec[In],
    ) -> None:
        self.process = channels.process
        self.network = channels.network
        self.open_wire = channels.open_wire  # type: ignore[assignment]
        self.clock = self.network.loop.time
        self.is_closed = False
        super().__init__(endpoint, outgoing, incoming, None, channels.keys)  # type: ignore[arg-type]

    def receive(self) -> Received[In] | None:
        received = super().receive()
        if received is not None and received.message is not None:
            self.process.spend(MESSAGE_S)
            if not name_of(received.peer):
                self.network.complain(
                    f"{self.process.name} hears a peer that no dialer is"
                )
            pipe = self.socket.routes.get(received.peer)
            is_over = pipe is None or pipe.is_closed
            self.network.meet(self.process, received.message, is_over=is_over)
        return received

    def send_encoded(self, peer: bytes, encoded: bytes) -> bool:
        self.process.spend(MESSAGE_S)
        return super().send_encoded(peer, encoded)

    def close(self) -> None:
        self.is_closed = True
        super().close()


class SimWire(Wire):
    """A wire on a simulated socket.

    Its descriptor signals an arrival once, until its owner looks, and stays readable from
    `wake_if_readable` to `clear_signal`.
    """

    def __init__(
        self, channels: SimChannels, socket: "DealerSocket | RouterSocket"
    ) -> None:
        self.socket = socket  # type: ignore[assignment]
        self._sim = socket
        self.endpoint = ""
        self.num_malformed = 0
        self._network = channels.network
        self._process = channels.process
        self._wake = channels.wake  # type: ignore[assignment]
        self._number = next(self._network.numbers)
        self._is_awake = False
        self._is_told = False  # of what has come since its owner looked
        self._timer_at_s: float | None = None
        socket.notify = self._notify

    def fileno(self) -> int:
        return self._number

    def use_key(self, pair: KeyPair) -> None:
        self._sim.key = pair

    def readable(self) -> bool:
        self._is_told = False
        return self._sim.is_readable()

    def changes(self) -> list[ConnectionChange]:
        changes = self._sim.changes
        self._sim.changes = []
        return changes

    def wake_if_readable(self, anything_else: bool = False) -> None:
        if not self._is_awake and (anything_else or self.readable()):
            self._is_awake = True
            self._network.loop.are_signalled.add(self._number)
            self._notify()

    def clear_signal(self, wake_at_s: float | None = None) -> None:
        self._is_awake = False
        self._network.loop.are_signalled.discard(self._number)
        if wake_at_s is None:
            return
        loop = self._network.loop
        if self._timer_at_s is None or not loop.time() < self._timer_at_s <= wake_at_s:
            self._timer_at_s = wake_at_s
            world_call_at(
                loop, max(wake_at_s, loop.time()), lambda: self._ring(wake_at_s)
            )

    def read(self) -> tuple[int, int, memoryview] | None:
        frame = self._sim.read()
        self._process.spend(BYTE_S * len(frame))
        return *HEADER.unpack_from(frame), memoryview(frame)[HEADER_BYTES:]

    def drop(self, reason: str) -> None:
        self.num_malformed += 1

    def close(self, linger_ms: int = 0) -> None:
        self._sim.close()

    def _ring(self, at_s: float) -> None:
        if self._timer_at_s == at_s:
            self._timer_at_s = None
            self._notify()

    def _notify(self) -> None:
        if self._is_told or self._process.is_dead or self._sim.is_closed:
            return
        self._is_told = True
        if not self._network.loop.is_readable(self._number):
            self._wake()  # type: ignore[operator]


class Link:
    """What libzmq makes of one `connect`: a queue, and a connection that it makes again."""

    def __init__(self, socket: "DealerSocket", endpoint: str, identity: bytes) -> None:
        self.socket = socket
        self.endpoint = endpoint
        self.identity = identity
        self.network = socket.network
        self.key = socket.key
        self.connection: Connection | None = None
        self.unsent: deque[bytes] = deque()
        self.is_over = False
        self.retry_in(0.0)

    def retry_in(self, seconds: float) -> None:
        loop = self.network.loop
        world_call_at(loop, loop.time() + seconds + self.network.resolving_s, self._try)

    def end(self) -> None:
        self.is_over = True
        self.unsent.clear()
        if self.connection is not None:
            self.connection.close(0)

    def lost(self, connection: Connection) -> None:
        if self.connection is connection:
            self.connection = None
            if not self.is_over:
                self.socket.changed("lost")
                self.retry_in(self.network.rng.uniform(*RECONNECT_S))

    def _try(self) -> None:
        process = self.socket.process
        network = self.network
        if self.is_over or process.is_dead or self.connection is not None:
            return
        router = network.listeners.get(self.endpoint)
        can_connect = router is not None and network.can_connect(
            process, router.process
        )
        if router is None or not can_connect or router.key != self.key:
            if can_connect or (
                router is not None
                and not process.is_frozen
                and network.rng.random() < 0.3
            ):
                # The handshake failed. libzmq reports that twice, and tries again.
                self.socket.changed("refused")
                self.socket.changed("lost")
            self.retry_in(network.rng.uniform(*RECONNECT_S))
            return
        self.connection = Connection(self, router)
        self.socket.changed("up")
        while self.unsent:
            self.carry(self.connection, self.unsent.popleft())

    def carry(self, connection: Connection, frame: bytes) -> None:
        connection.carry(0, lambda: connection.router.arrive(connection.pipe, frame))


class DealerSocket:
    """The socket of a dialer."""

    def __init__(self, channels: SimChannels) -> None:
        self.network = channels.network
        self.process = channels.process
        self.link: Link | None = None
        self.key: KeyPair | None = None  # of the next connection
        self.changes: list[ConnectionChange] = []
        self.notify: Callable[[], None]
        self.is_closed = False
        self._identity = b""
        self._inbox: deque[bytes] = deque()

    def setsockopt(self, option: int, value: int | bytes) -> None:
        if option == zmq.ROUTING_ID and isinstance(value, bytes):
            self._identity = value

    def connect(self, endpoint: str) -> None:
        self.link = Link(self, endpoint, self._identity)

    def disconnect(self, _endpoint: str) -> None:
        if self.link is not None:
            self.link.end()
            self.link = None
            if self.network.rng.random() < 0.1:
                # The I/O thread has just noticed something, and hears of this a moment later.
                loop = self.network.loop
                late = self.network.rng.choice(LATE_CHANGES)
                world_call_at(loop, loop.time() + 0.0002, lambda: self.changed(late))
        self._inbox.clear()

    def send(self, frame: bytes, _flags: int) -> None:
        self.network.check_memory(self.process)
        link = self.link
        if link is None:
            raise zmq.Again
        if link.connection is None:
            if len(link.unsent) >= QUEUED_MESSAGES:
                raise zmq.Again
            link.unsent.append(frame)
        elif link.connection.is_full(0):
            raise zmq.Again
        else:
            link.carry(link.connection, frame)

    def is_readable(self) -> bool:
        return bool(self._inbox)

    def read(self) -> bytes:
        return self._inbox.popleft()

    def take(self, link: Link, frame: bytes) -> None:
        if link is self.link:
            self._inbox.append(frame)
            self.notify()

    def changed(self, change: ConnectionChange) -> None:
        self.changes.append(change)
        self.notify()

    def close(self) -> None:
        self.is_closed = True
        self.disconnect("")


class Pipe:
    """What a listener's socket has of one connection."""

    def __init__(self, identity: bytes, connection: Connection) -> None:
        self.identity = identity
        self.connection = connection
        self.frames: deque[bytes] = deque()
        self.is_closed = False  # its connection has ended; its frames can still be read


class RouterSocket:
    """The socket of a listener, with ROUTER_MANDATORY and ROUTER_HANDOVER."""

    def __init__(self, channels: SimChannels) -> None:
        self.network = channels.network
        self.process = channels.process
        self.key: KeyPair | None = None
        self.changes: list[ConnectionChange] = []
        self.notify: Callable[[], None]
        self.is_closed = False
        self.routes: dict[bytes, Pipe] = {}
        self._endpoint = ""
        self._new: deque[Pipe] = deque()
        self._readable: deque[Pipe] = deque()  # in the order in which they are read
        self._frame = b""  # the second part of the message that is being read
        self._receiver: Pipe

    def setsockopt(self, option: int, value: int) -> None: ...

    def getsockopt(self, _option: int) -> bytes:
        return self._endpoint.encode()

    def bind(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self.network.listeners[endpoint] = self

    # What the I/O thread does.

    def attach(self, pipe: Pipe) -> None:
        self._new.append(pipe)
        self.changes.append("up")
        self.notify()

    def arrive(self, pipe: Pipe, frame: bytes) -> None:
        if not self.is_closed:
            pipe.frames.append(frame)
            self.notify()

    def lost(self, pipe: Pipe) -> None:
        pipe.is_closed = True
        self.changes.append("lost")
        self.notify()

    # What the loop does.

    def is_readable(self) -> bool:
        self._learn()
        return any(pipe.frames for pipe in self.routes.values())

    def recv(self, _flags: int) -> bytes:
        """Return the identity of the next message, and keep its frame for `read`."""
        self._learn()
        pipe = next(pipe for pipe in self.routes.values() if pipe.frames)
        self._frame = pipe.frames.popleft()
        if self.routes.pop(pipe.identity) is pipe:
            self.routes[pipe.identity] = pipe  # the others come first
        return pipe.identity

    def read(self) -> bytes:
        return self._frame

    def send(self, part: bytes, flags: int) -> None:
        if not flags & zmq.SNDMORE:
            connection = self._receiver.connection
            link = self._receiver.connection.link
            connection.carry(1, lambda: link.socket.take(link, part))
            return
        self.network.check_memory(self.process)
        self._learn()
        pipe = self.routes.get(part)
        if pipe is None or pipe.is_closed:
            raise zmq.ZMQError(errno.EHOSTUNREACH)
        if pipe.connection.is_full(1):
            raise zmq.Again
        self._receiver = pipe

    def send_multipart(self, parts: tuple[bytes, bytes], flags: int) -> None:
        self.send(parts[0], flags | zmq.SNDMORE)
        self.send(parts[1], flags)

    def close(self) -> None:
        self.is_closed = True
        for pipe in (*self.routes.values(), *self._new):
            pipe.connection.close(1)
        if self.network.listeners.get(self._endpoint) is self:
            del self.network.listeners[self._endpoint]

    def _learn(self) -> None:
        """Learn of the connections that came and went."""
        while self._new:
            pipe = self._new.popleft()
            before = self.routes.pop(pipe.identity, None)
            if before is not None and before.is_closed:
                before.identity = b"\0" + next(self.network.numbers).to_bytes(4, "big")
                self.routes[before.identity] = before
            elif before is not None:
                before.connection.close(1)
            self.routes[pipe.identity] = pipe
        for pipe in [
            one for one in self.routes.values() if one.is_closed and not one.frames
        ]:
            del self.routes[pipe.identity]
