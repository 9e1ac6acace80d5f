"""Both ends of a channel in one process, and a bare socket that says what no dialer would.

`python -m tests.support.channel_ends ROLE ENDPOINT` is one end as a process: `dial` says its number
whenever a session begins, `listen` reads nothing, and `flood` is a bare socket that says more than
any queue holds.
"""

import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import zmq

from baton.protocol.codec import to_node_codec, to_router_codec
from baton.protocol.config import KeysConfig
from baton.protocol.ids import Epoch, NodeId
from baton.protocol.messages import Cancel, Starting, ToNode, ToRouter
from baton.runtime.channels.dialer import Dialer, Disconnected
from baton.runtime.channels.keys import NO_KEYS, Keys, load_keys, write_key
from baton.runtime.channels.listener import Listener, Received
from baton.runtime.channels.wire import HEADER, name_of
from baton.runtime.clock import monotonic
from tests.support.sources import REPOSITORY

DEADLINE_S = 20.0


def note(number: int, size: int = 0) -> Starting:
    """A message that can be told apart from others and be of any size."""
    return Starting(NodeId("d0"), Epoch("e"), "x" * size, number, 0)


class Ends:
    """A listener and its dialers. `peers` has the latest session of each name that was heard."""

    def __init__(self, endpoint: str, keys: Keys = NO_KEYS) -> None:
        self.keys = keys
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.listener = self.listen(endpoint)
        self.peers: dict[bytes, bytes] = {}
        self._dialers: list[Dialer[ToRouter, ToNode]] = []
        self._bare: list[zmq.Socket[bytes]] = []

    def listen(self, endpoint: str) -> Listener[ToNode, ToRouter]:
        return Listener(
            endpoint, to_node_codec(), to_router_codec(), self.context, self.keys
        )

    def dial(
        self, name: str = "d0", endpoint: str = "", keys: Keys | None = None
    ) -> Dialer[ToRouter, ToNode]:
        dialer: Dialer[ToRouter, ToNode] = Dialer(
            endpoint or self.listener.endpoint,
            name.encode(),
            to_router_codec(),
            to_node_codec(),
            self.context,
            self.keys if keys is None else keys,
        )
        self._dialers.append(dialer)
        return dialer

    def bare(self, name: str = "d0") -> "zmq.Socket[bytes]":
        """A socket without any of the rules."""
        bare = self.context.socket(zmq.DEALER)
        bare.setsockopt(zmq.ROUTING_ID, name.encode())
        bare.setsockopt(zmq.LINGER, 0)
        bare.connect(self.listener.endpoint)
        self._bare.append(bare)
        return bare

    def hear(self, count: int) -> list[Received[ToRouter]]:
        """What the listener says next, by name, `count` times; its descriptor alone wakes it."""
        heard: list[Received[ToRouter]] = []
        while len(heard) < count:
            received = self.listener.receive()
            if received is None:
                wait(self.listener)
            else:
                # A bare socket's is whole.
                name = name_of(received.peer) or received.peer
                self.peers[name] = received.peer
                heard.append(Received(name, received.message, received.disconnected))
        return heard

    def answer(self, name: bytes, message: ToNode) -> bool:
        return self.listener.send(self.peers.get(name, name), message)

    def close(self) -> None:
        for dialer in self._dialers:
            dialer.close()
        for bare in self._bare:
            bare.close()
        self.listener.close()
        self.context.term()


@contextmanager
def ends(folder: Path, kind: str = "ipc", keys: Keys = NO_KEYS) -> Iterator[Ends]:
    made = Ends(f"ipc://{folder}/channel" if kind == "ipc" else "tcp://127.0.0.1", keys)
    try:
        yield made
    finally:
        made.close()


def answers(
    dialer: Dialer[ToRouter, ToNode], count: int
) -> list[ToNode | Disconnected]:
    """The next `count` things that a dialer says, woken by its descriptor alone."""
    said: list[ToNode | Disconnected] = []
    while len(said) < count:
        message = dialer.receive()
        if message is None:
            wait(dialer)
        else:
            said.append(message)
    return said


def wait(end: Listener[ToNode, ToRouter] | Dialer[ToRouter, ToNode]) -> None:
    ready, _, _ = select.select([end.fileno()], [], [], DEADLINE_S)
    assert ready, f"nothing came within {DEADLINE_S:g} s"


def connect(dialer: Dialer[ToRouter, ToNode]) -> None:
    """Until the dialer knows that the listener is there."""
    deadline_s = monotonic() + DEADLINE_S
    while not dialer.connected:
        assert dialer.receive() is None
        assert monotonic() < deadline_s
        if not dialer.connected:
            wait(dialer)


def frame(session: int, sequence: int, payload: bytes) -> bytes:
    return HEADER.pack(session, sequence) + payload


def new_key(folder: Path, name: str = "own.key") -> Keys:
    write_key(folder / name)
    return load_keys(KeysConfig(str(folder / name)))


def work(
    pair: Ends, dialer: Dialer[ToRouter, ToNode], until: Callable[[], bool]
) -> None:
    """Keep both sides at work until a condition holds; nothing but the end of a session is said."""
    end_s = monotonic() + DEADLINE_S
    while not until():
        heard = pair.listener.receive()
        said = dialer.receive()
        assert heard is None or heard.disconnected
        assert said is None or isinstance(said, Disconnected)
        assert monotonic() < end_s
        # Also without news: a dialer that was refused for good tries again by the clock.
        select.select([dialer.fileno(), pair.listener.fileno()], [], [], 0.05)


def until_refused(dialer: Dialer[ToRouter, ToNode], pair: Ends, count: int = 1) -> None:
    work(pair, dialer, lambda: dialer.refusals >= count)
    assert not dialer.connected


def numbers(heard: list[Received[ToRouter]]) -> list[int]:
    return [item.message.done for item in heard if isinstance(item.message, Starting)]


def hello(number: int) -> ToNode:
    return Cancel((), str(number))


@contextmanager
def bare(endpoint: str, identity: bytes) -> "Iterator[zmq.Socket[bytes]]":
    """A socket without any of the rules, and without a bound on what it queues."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.ROUTING_ID, identity)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(endpoint)
        yield socket


@contextmanager
def process(role: str, endpoint: str) -> "Iterator[subprocess.Popen[str]]":
    """The other end of a channel in a process of its own, which may be frozen or killed."""
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.support.channel_ends", role, endpoint],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def stranger(endpoint: str) -> socket.socket:
    """A connection to the listener that never shakes hands."""
    if endpoint.startswith("ipc://"):
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(DEADLINE_S)
        deadline_s = monotonic() + DEADLINE_S
        while connection.connect_ex(endpoint.removeprefix("ipc://")):
            assert monotonic() < deadline_s, "its queue stays full"
            time.sleep(0.001)
        return connection
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host, int(port)))


def encoded(number: int) -> bytes:
    return to_router_codec().encode(note(number))


def speaking(pair: Ends) -> "zmq.Socket[bytes]":
    """A bare socket whose session 7 has had one message."""
    bare = pair.bare()
    bare.send(frame(7, 0, encoded(1)))
    assert numbers(pair.hear(1)) == [1]
    return bare


FLOOD = 20_000


def dial(endpoint: str) -> None:
    dialer = Dialer(endpoint, b"d0", to_router_codec(), to_node_codec(), zmq.Context())
    number = 0
    dialer.send(note(number))
    while True:
        select.select([dialer.fileno()], [], [])
        while (message := dialer.receive()) is not None:
            if isinstance(message, Disconnected):
                number += 1
                dialer.send(note(number))


def listen(endpoint: str) -> None:
    listener = Listener(endpoint, to_node_codec(), to_router_codec(), zmq.Context())
    time.sleep(600)
    listener.close()


def flood(endpoint: str) -> None:
    socket = zmq.Context().socket(zmq.DEALER)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.connect(endpoint)
    payload = to_router_codec().encode(note(1, 200))
    for number in range(FLOOD):
        socket.send(frame(7, number, payload))
    print("sent", flush=True)
    time.sleep(600)


if __name__ == "__main__":
    {"dial": dial, "listen": listen, "flood": flood}[sys.argv[1]](sys.argv[2])
