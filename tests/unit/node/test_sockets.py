"""The sockets of two nodes that face each other: who is who, and what a wrong peer cannot do."""

import select
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import zmq

from baton.kv_transfer.interfaces import DialPeer, DropPeer, FromPeer, ToPeer
from baton.node.heartbeat import FIRST_LOGGED_S, LONGEST_UNLOGGED_S, RouterWatch
from baton.node.sockets import JOINING_S, EngineSockets, FromRouter, LinkEvent
from baton.protocol.codec import to_node_codec, to_router_codec
from baton.protocol.errors import Failure, NodeError
from baton.protocol.ids import Epoch, NodeId
from baton.protocol.messages import (
    PROTOCOL_VERSION,
    Done,
    Hello,
    NodeInfo,
    Offered,
    PeerHello,
    Peers,
    Ready,
    Refused,
    Renew,
    Role,
    ToNode,
    ToRouter,
)
from baton.runtime.channels.listener import Channels, Listener
from baton.runtime.clock import monotonic
from tests.support.connectors import node
from tests.support.drive import key
from tests.support.refusals import raises
from tests.support.virtual_clock import VirtualClock
from tests.support.waiting import until

DEADLINE_S = 20.0
DECODE = (NodeId("d0"), Epoch("d0-1"))
OFFERED = Offered(key("a"), 5, 2, 30.0)

Make = Callable[[str, Role], EngineSockets]


@pytest.fixture
def make():
    """Nodes without a router; closed in the end."""
    made: list[EngineSockets] = []

    def one(name: str, role: Role) -> EngineSockets:
        hello = Hello(PROTOCOL_VERSION, NodeId(name), role, Epoch(f"{name}-1"))
        made.append(EngineSockets((), hello, Channels()))
        return made[-1]

    yield one
    for sockets in made:
        sockets.close()


def hello(name: str) -> PeerHello:
    return PeerHello(
        PROTOCOL_VERSION, NodeId(name), Epoch(f"{name}-1"), "model", "layout"
    )


def from_peer(name: str, message: PeerHello | Offered | Renew | Done) -> FromPeer:
    return FromPeer(NodeId(name), Epoch(f"{name}-1"), message)


def listening(make: Make, folder: Path) -> tuple[EngineSockets, NodeInfo]:
    decode = make("d0", "decode")
    endpoint = decode.listen(f"ipc://{folder}/d0")
    return decode, msgspec.structs.replace(
        node("d0", "decode"), control_endpoint=endpoint
    )


def dialled(make: Make, name: str, info: NodeInfo) -> EngineSockets:
    prefill = make(name, "prefill")
    prefill.to_peer(DialPeer(info))
    return prefill


def tell(sockets: EngineSockets, *messages: PeerHello | Offered) -> None:
    for message in messages:
        sockets.to_peer(ToPeer(*DECODE, message))


def hear(sockets: EngineSockets, count: int) -> list[LinkEvent]:
    """The next `count` events."""
    heard: list[LinkEvent] = []
    deadline_s = monotonic() + DEADLINE_S
    while len(heard) < count:
        assert monotonic() < deadline_s, f"only {heard} came"
        heard += sockets.receive()
        if len(heard) < count:
            sockets.wait(0.1)
    return heard


class RouterEnd:
    """The router's end of a node's channel, which sends what the test tells it to."""

    def __init__(self, folder: Path) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._listener = Listener[ToNode, ToRouter](
            f"ipc://{folder}/router", to_node_codec(), to_router_codec(), self._context
        )
        self.endpoint = self._listener.endpoint
        self._peer = b""

    def hear(self, node: EngineSockets | None = None) -> ToRouter:
        """The next message, while `node` has its turns."""
        deadline_s = monotonic() + DEADLINE_S
        while (
            received := self._listener.receive()
        ) is None or received.message is None:
            assert monotonic() < deadline_s
            if node is not None:
                node.receive()
            select.select([self._listener.fileno()], [], [], 0.01)
        self._peer = received.peer
        return received.message

    def say(self, message: ToNode) -> None:
        assert self._listener.send(self._peer, message)

    def close(self) -> None:
        self._listener.close()
        self._context.term()


@pytest.fixture
def router(tmp_path):
    end = RouterEnd(tmp_path)
    yield end
    end.close()


INTRODUCTION = Hello(PROTOCOL_VERSION, NodeId("d0"), "decode", Epoch("d0-1"))
REFUSED = Refused(Failure("model_mismatch", "it serves another model"))


def test_a_ready_node_that_is_refused_says_so_once_and_asks_until_it_is_taken_in(
    router, caplog
):
    caplog.set_level("INFO")
    sockets = EngineSockets((router.endpoint,), INTRODUCTION, Channels())
    try:
        sockets.ready(node("d0", "decode"))
        for answer in (REFUSED, REFUSED, REFUSED, Peers(())):
            assert router.hear(sockets) == INTRODUCTION
            assert router.hear(sockets) == Ready(node("d0", "decode"))
            router.say(answer)
        assert hear(sockets, 1) == [FromRouter(0, Peers(()))]
        assert [one.state for one in sockets.standings()] == ["in service"]
        router.say(Peers((), "d0 is stuck"))
        hear(sockets, 1)
        (standing,) = sockets.standings()
        assert (standing.state, standing.reason) == ("out of service", "d0 is stuck")
        said = [record.message for record in caplog.records]
        assert [text for text in said if "refused" in text] == [
            "the router refused this node, which asks again from time to time"
        ]
        assert said[-1] == "the router took this node in"
    finally:
        sockets.close()


def test_a_node_without_an_answer_introduces_itself_again_until_it_has_one(router):
    clock = VirtualClock()
    sockets = EngineSockets((router.endpoint,), INTRODUCTION, Channels(), clock)
    try:
        sockets.ready(node("d0", "decode"))
        for _ in range(3):
            assert router.hear(sockets) == INTRODUCTION
            assert router.hear(sockets) == Ready(node("d0", "decode"))
            while [one.state for one in sockets.standings()] != ["joining"]:
                assert sockets.receive() == []
            clock.advance(JOINING_S)
        router.say(Peers(()))
        hear(sockets, 1)
        clock.advance(10 * JOINING_S)
        sockets.receive()
        assert [one.state for one in sockets.standings()] == ["in service"]
    finally:
        sockets.close()


def test_a_node_that_is_refused_while_it_loads_ends_at_once(router):
    """The second process under an id loaded its whole model before it heard of the first."""
    sockets = EngineSockets((router.endpoint,), INTRODUCTION, Channels())
    try:
        router.hear()
        router.say(REFUSED)
        with raises(NodeError, "model_mismatch"):
            until(sockets.starting)
    finally:
        sockets.close()


def test_before_it_introduces_itself_a_peer_is_nobody(make, tmp_path):
    decode, info = listening(make, tmp_path)
    tell(dialled(make, "p0", info), OFFERED, hello("p0"), OFFERED)
    assert hear(decode, 2) == [from_peer("p0", hello("p0")), from_peer("p0", OFFERED)]


def test_a_peer_that_was_dropped_but_never_left_is_known_when_it_speaks(make, tmp_path):
    """A router forgot it for a while; the peer itself has not noticed anything."""
    decode, info = listening(make, tmp_path)
    prefill = dialled(make, "p0", info)
    tell(prefill, hello("p0"))
    hear(decode, 1)
    peer = (NodeId("p0"), Epoch("p0-1"))
    decode.to_peer(ToPeer(*peer, hello("d0")))
    assert hear(prefill, 1) == [FromPeer(*DECODE, hello("d0"))]
    decode.to_peer(DropPeer(*peer))
    tell(prefill, OFFERED)
    assert hear(decode, 2) == [from_peer("p0", hello("p0")), from_peer("p0", OFFERED)]
    # To the peer a second greeting would mean that this node began anew.
    decode.to_peer(ToPeer(*peer, hello("d0")))
    decode.to_peer(ToPeer(*peer, Renew((key("a"),))))
    assert hear(prefill, 1) == [FromPeer(*DECODE, Renew((key("a"),)))]


@dataclass
class Link:
    endpoint: str
    connected: bool = False
    refusals: int = 0
    is_resolved: bool = True


def test_a_router_that_does_not_answer_is_told_of_after_5_s_and_then_ever_more_rarely(
    caplog,
):
    caplog.set_level("INFO")
    clock = VirtualClock()
    watch = RouterWatch()
    link = Link("tcp://front:5570")

    def said(seconds: float = 0.0) -> list[str]:
        """The lines of the next `seconds`, looked at as often as heartbeats do."""
        caplog.clear()
        end_s = clock() + seconds
        while True:
            watch.look(clock(), link)
            if clock() >= end_s:
                return [record.message for record in caplog.records]
            clock.advance(0.5)

    line = "waiting for router tcp://front:5570: nothing answers there"
    assert said(FIRST_LOGGED_S - 0.5) == []
    assert said(0.5) == [line]
    assert said(3600.0).count(line) <= 3600.0 / LONGEST_UNLOGGED_S + 3
    link.is_resolved = False
    assert said(LONGEST_UNLOGGED_S) == [
        "waiting for router tcp://front:5570: name does not resolve"
    ]
    link.connected = True
    assert said() == ["found the router"]
    link.connected = False
    assert said(FIRST_LOGGED_S - 0.5) == []  # a router that restarts is back by then
    link.connected = True
    assert said() == []
