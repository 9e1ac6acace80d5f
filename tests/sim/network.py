"""Channels between simulated processes: sessions, heartbeats, cuts and silent drops.

Messages go through the codecs and the framing of production. A connection carries them in order. A
link that drops silently loses nothing at first, as TCP sends again; after the time-out of
heartbeats, each end learns in its own time that the connection is lost, with all that was under
way.
"""

import itertools
import random
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from baton.protocol.codec import Codec, MalformedMessage
from baton.protocol.messages import Attach, Attached, Cancel, CancelDone, NotAttached
from baton.runtime.channels.dialer import Disconnected
from baton.runtime.channels.listener import Channels, Received
from baton.runtime.channels.wire import HEADER, HEADER_BYTES, SEPARATOR, Session, Verdict
from tests.sim.clock import PROCESS, Process, SimLoop

Out = TypeVar("Out")
In = TypeVar("In")
Pair = tuple[str, str]  # the names of two processes, in the direction of the bytes
HEARTBEAT_TIMEOUT_S = (2.5, 3.2)  # that of libzmq, as the channels set it


class Network:
    """The links between processes.

    `met` counts messages by kind and the states of their session and request at who receives them.
    """

    def __init__(self, loop: SimLoop, rng: random.Random, complain: Callable[[str], None]) -> None:
        self.loop, self.rng = loop, rng
        self.listeners: dict[str, SimListener] = {}  # type: ignore[type-arg]
        self.cut: set[Pair] = set()  # refuses connections
        self.silent: set[Pair] = set()  # drops bytes
        self.resolving_s = 0.0  # how long a name server takes
        self.max_queued = rng.choice(
            (20, 10_000)
        )  # frames that a connection keeps for a silent peer
        self.connections: dict[Connection, None] = {}  # in the order of their begin
        self.have_met: set[frozenset[Process]] = set()  # pairs that ever had a connection
        self.met: dict[tuple[str, str], int] = {}
        self.numbers = itertools.count(1)
        self.complain = complain

    def latency_s(self) -> float:
        return self.rng.choice((0.0001, 0.0005, 0.002))

    def meet(self, process: Process, message: object, *, is_over: bool) -> None:
        entries = getattr(message, "entries", None) or getattr(message, "keys", None) or [message]
        key = getattr(entries[0], "key", entries[0])
        request_id = getattr(key, "request_id", "")
        state = f"{process.state_of(request_id)} request" if request_id else ""
        met = type(message).__name__, state + ", ended session" * is_over
        self.met[met] = self.met.get(met, 0) + 1

    def can_connect(self, dialer: Process, listener: Process) -> bool:
        pairs = (dialer.name, listener.name), (listener.name, dialer.name)
        blocked = any(pair in self.cut or pair in self.silent for pair in pairs)
        return not (blocked or dialer.is_frozen or listener.is_frozen or listener.is_dead)

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
            self.loop.call_later(self.rng.uniform(*HEARTBEAT_TIMEOUT_S), connection.time_out)

    def speak_again(self, pair: Pair) -> None:
        self.silent.discard(pair)
        for connection in self.between(*pair):
            connection.resume()

    def frozen(self, process: Process) -> None:
        """Let the other ends notice that a process answers no heartbeat."""
        for connection in self.of(process):
            self.loop.call_later(self.rng.uniform(*HEARTBEAT_TIMEOUT_S), connection.time_out)

    def died(self, process: Process) -> None:
        for endpoint in [e for e, one in self.listeners.items() if one.process is process]:
            del self.listeners[endpoint]
        for connection in self.of(process):
            if self.rng.random() < 0.5:
                connection.lose(0.001, 0.001)
            else:  # the other end gets first what this one has sent
                connection.close(connection.ends.index(process))


class Connection:
    """One connection of one dialer. What is sent after its end vanishes."""

    def __init__(self, dialer: "SimDialer[object, object]", listener: "SimListener[object, object]",
                 identity: bytes) -> None:  # fmt: skip
        self.dialer, self.listener, self.identity = dialer, listener, identity
        self.network = dialer.network
        self.ends = dialer.process, listener.process
        self.began_s = self.network.loop.time()
        self.is_lost = False
        self._last_s = [0.0, 0.0]
        self._stalled: list[tuple[int, Callable[[], None]]] = []
        self.network.connections[self] = None
        self.network.have_met.add(frozenset(self.ends))

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
        stalled, self._stalled = self._stalled, []
        if stalled and not self.is_lost:
            again_s = self.network.loop.time() + self.network.rng.choice((0.0, 0.2, 0.8))
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
        world_call_at(loop, loop.time() + dialer_after_s, lambda: self.dialer.lost(self))
        world_call_at(loop, loop.time() + listener_after_s, lambda: self.listener.lost(self))


def _asked_by(message: object) -> set[object]:
    match message:
        case Cancel(keys=keys):
            return set(keys)
        case Attach(request_id=request_id):
            return {request_id}
    return set()


def _answered_by(message: object) -> set[object]:
    match message:
        case CancelDone(keys=keys):
            return set(keys)
        case Attached(request_id=request_id) | NotAttached(request_id=request_id):
            return {request_id}
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

    def __init__(self, network: Network, process: Process, wake: Callable[[], None]) -> None:
        self.has_keys = False
        self.network, self.process, self.wake = network, process, wake
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

    def watch(self, fileno: int) -> None: ...

    def unwatch(self, fileno: int) -> None: ...

    def wait(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s

    def close(self) -> None: ...


class SimDialer(Generic[Out, In]):
    """Behaves as `Dialer` to its owner."""

    def __init__(
        self, channels: SimChannels, endpoint: str, name: bytes, outgoing: Codec[Out],
        incoming: Codec[In],
    ) -> None:  # fmt: skip
        self.endpoint = endpoint
        self.connected = False
        self.refusals = self.num_malformed = 0
        self.process, self.network = channels.process, channels.network
        self._wake, self._name = channels.wake, name
        self._encode, self._decode = outgoing.encode, incoming.decode
        self._number = next(self.network.numbers)
        self._inbox: deque[bytes | str] = deque()
        self._connection: Connection | None = None
        self.is_closed = False
        self._begin(0.0)

    def fileno(self) -> int:
        return self._number

    def send(self, message: Out) -> bool:
        if not self._asked.issuperset(_answered_by(message)):
            self.network.complain(f"{self.process.name} answers what another session asked")
        if self._is_full:
            return False
        frame = self._session.frame(self._encode(message))
        if self._connection is not None and self._connection.is_full(0):
            self._is_full = True
            self._connection.close(0)
            self._push("the queue to the listener is full")
            return False
        self._session.sent()
        if self._connection is None:
            self._unsent.append(frame)
        else:
            self._carry(self._connection, frame)
        return True

    def receive(self) -> In | Disconnected | None:
        while self._inbox:
            item = self._inbox.popleft()
            if item == "up":
                self.connected = True
            elif isinstance(item, str):
                self.connected = False
                self._inbox.clear()
                self._begin(self.network.rng.uniform(0.05, 0.3))
                return Disconnected(item)
            else:
                assert self._session.accept(*HEADER.unpack_from(item)) is Verdict.NEXT
                message = self._decode(item[HEADER_BYTES:])
                self._asked |= _asked_by(message)
                is_over = self._connection is None or self._connection.is_lost
                self.network.meet(self.process, message, is_over=is_over)
                return message
        return None

    def close(self, linger_ms: int = 0) -> None:
        self.is_closed = True
        if self._connection is not None:
            self._connection.close(0)

    def lost(self, connection: Connection) -> None:
        if connection is self._connection and not self.is_closed:
            self._push("the connection was lost")

    def take(self, connection: Connection, frame: bytes) -> None:
        if connection is self._connection and not self.is_closed:
            self._push(frame)

    def _push(self, item: bytes | str) -> None:
        self._inbox.append(item)
        if not self.process.is_dead:
            self._wake()

    def _begin(self, after_s: float) -> None:
        self._connection, self._is_full = None, False
        self._session = Session(next(self.network.numbers))
        self._unsent: list[bytes] = []
        self._asked: set[object] = set()  # what must be answered in this session
        session = self._session
        loop = self.network.loop
        at_s = loop.time() + after_s + self.network.resolving_s
        world_call_at(loop, at_s, lambda: self._try(session))

    def _try(self, session: Session) -> None:
        if self.is_closed or self.process.is_dead or session is not self._session:
            return
        network = self.network
        listener = network.listeners.get(self.endpoint)
        if listener is None or not network.can_connect(self.process, listener.process):
            at_s = network.loop.time() + network.rng.uniform(0.05, 0.5) + network.resolving_s
            world_call_at(network.loop, at_s, lambda: self._try(session))
            return
        identity = self._name + SEPARATOR + str(next(network.numbers)).encode()
        self._connection = connection = Connection(self, listener, identity)  # type: ignore[arg-type]
        listener.known[identity] = connection
        self._push("up")
        for frame in self._unsent:
            self._carry(connection, frame)
        self._unsent = []

    def _carry(self, connection: Connection, frame: bytes) -> None:
        connection.carry(0, lambda: connection.listener.arrive(connection, frame))


class SimListener(Generic[Out, In]):
    """Behaves as `Listener` to its owner."""

    def __init__(
        self, channels: SimChannels, endpoint: str, outgoing: Codec[Out], incoming: Codec[In]
    ) -> None:
        self.endpoint = endpoint
        self.refusals = self.num_malformed = 0
        self.process, self.network = channels.process, channels.network
        self.known: dict[bytes, Connection] = {}  # as libzmq knows them
        self._wake = channels.wake
        self._encode, self._decode = outgoing.encode, incoming.decode
        self._number = next(self.network.numbers)
        self._sessions: dict[bytes, tuple[Connection, Session]] = {}
        self._events: deque[tuple[Connection, bytes | None]] = deque()
        self.is_closed = False
        self.network.listeners[endpoint] = self

    def fileno(self) -> int:
        return self._number

    def arrive(self, connection: Connection, frame: bytes) -> None:
        self._note(connection, frame)

    def lost(self, connection: Connection) -> None:
        self.known.pop(connection.identity, None)
        self._note(connection, None)

    def _note(self, connection: Connection, frame: bytes | None) -> None:
        if not self.is_closed and not self.process.is_dead:
            self._events.append((connection, frame))
            if not self.network.loop.is_readable(self._number):
                self._wake()

    def receive(self) -> Received[In] | None:
        while self._events:
            connection, frame = self._events.popleft()
            peer = connection.identity
            if frame is None:
                if self._sessions.pop(peer, None) is not None:
                    return Received(peer, None, disconnected=True)
                continue
            session_id, sequence = HEADER.unpack_from(frame)
            if peer not in self._sessions:
                if sequence:
                    continue  # of a session that this end has given up
                self._sessions[peer] = connection, Session(session_id)
            assert self._sessions[peer][1].accept(session_id, sequence) is Verdict.NEXT
            try:
                message = self._decode(frame[HEADER_BYTES:])
            except MalformedMessage:
                self.num_malformed += 1
                continue
            self.network.meet(self.process, message, is_over=connection.is_lost)
            return Received(peer, message)
        return None

    def encode(self, message: Out) -> bytes:
        return self._encode(message)

    def send(self, peer: bytes, message: Out) -> bool:
        return self.send_encoded(peer, self._encode(message))

    def send_encoded(self, peer: bytes, data: bytes) -> bool:
        if peer not in self._sessions or self.is_closed:
            return False
        connection, session = self._sessions[peer]
        if connection.is_full(1):
            connection.close(1)
            self.known.pop(peer, None)
        if peer not in self.known:
            self._note(connection, None)
            return False
        frame = session.frame(data)
        session.sent()
        connection.carry(1, lambda: connection.dialer.take(connection, frame))
        return True

    def is_connected(self, peer: bytes) -> bool:
        return peer in self.known

    def close(self) -> None:
        self.is_closed = True
        for connection in list(self.known.values()):
            connection.close(1)
        if self.network.listeners.get(self.endpoint) is self:
            del self.network.listeners[self.endpoint]
