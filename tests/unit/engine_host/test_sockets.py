"""The sockets of two nodes that face each other: who is who, and what a wrong peer cannot do."""

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from baton.engine.links import LinkEvent
from baton.engine.sockets import EngineSockets
from baton.kv_transfer.interfaces import DialPeer, DropPeer, FromPeer, PeerLost, ToPeer
from baton.protocol.codec import Codec, Unreadable, to_router_codec
from baton.protocol.errors import NodeError
from baton.protocol.ids import Epoch, NodeId
from baton.protocol.messages import (
    PROTOCOL_VERSION,
    Cancel,
    Crashed,
    Done,
    Hello,
    NodeInfo,
    Offered,
    PeerHello,
    Renew,
    Role,
    ToRouter,
)
from baton.runtime.channels.listener import Listener
from baton.runtime.clock import monotonic
from tests.support.connectors import node
from tests.support.drive import key, local

DEADLINE_S = 20.0
DECODE = (NodeId("d0"), Epoch("d0-1"))
OFFERED = Offered(key("a"), 5, 2, 30.0)

Make = Callable[[str, Role], EngineSockets]


@pytest.fixture
def make() -> Iterator[Make]:
    """Nodes without a router; closed in the end."""
    made: list[EngineSockets] = []

    def one(name: str, role: Role) -> EngineSockets:
        hello = Hello(PROTOCOL_VERSION, NodeId(name), role, Epoch(f"{name}-1"))
        made.append(EngineSockets((), hello))
        return made[-1]

    yield one
    for sockets in made:
        sockets.close()


def hello(name: str) -> PeerHello:
    return PeerHello(PROTOCOL_VERSION, NodeId(name), Epoch(f"{name}-1"), "model", "layout")


def from_peer(name: str, message: PeerHello | Offered | Renew | Done) -> FromPeer:
    return FromPeer(NodeId(name), Epoch(f"{name}-1"), message)


def listening(make: Make, folder: Path) -> tuple[EngineSockets, NodeInfo]:
    decode = make("d0", "decode")
    endpoint = decode.listen(f"ipc://{folder}/d0")
    return decode, msgspec.structs.replace(node("d0", "decode"), control_endpoint=endpoint)


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


@pytest.mark.parametrize(
    "endpoint",
    ["", "garbage", "tcp://0.0.0.0:0", "ipc:///no/such/folder/d0"],
)
def test_a_peer_that_nobody_can_dial_is_lost_and_nothing_else(make: Make, endpoint: str) -> None:
    info = msgspec.structs.replace(node("d0", "decode"), control_endpoint=endpoint)
    prefill = dialled(make, "p0", info)
    tell(prefill, hello("p0"))
    assert hear(prefill, 1) == [PeerLost(*DECODE)]
    assert prefill.receive() == []


class Bytes(Codec[bytes]):
    """Sends what no encoder would."""

    def __init__(self) -> None: ...

    def encode(self, message: bytes) -> bytes:
        return message


def test_a_request_that_cannot_be_read_is_answered_and_other_garbage_is_counted(
    tmp_path: Path,
) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = Listener[bytes, ToRouter](
        f"ipc://{tmp_path}/router", Bytes(), to_router_codec(), context
    )
    introduction = Hello(PROTOCOL_VERSION, NodeId("d0"), "decode", Epoch("d0-1"))
    sockets = EngineSockets((router.endpoint,), introduction)
    try:
        while (greeting := router.receive()) is None:
            sockets.wait(0.01)
        request = msgspec.to_builtins(local("r", [1, 2, 3]))
        request["sampling"]["max_tokens"] = 1 << 64 - 1
        for data in (b"garbage", {**request, "key": "r"}, request, {"type": "Cancel", "keys": []}):
            router.send(greeting.peer, msgspec.msgpack.encode(data))
        unreadable, cancel = (event.message for event in hear(sockets, 2))  # type: ignore[union-attr]
        assert isinstance(unreadable, Unreadable)
        assert unreadable.key == key("r")
        assert cancel == Cancel(())
    finally:
        sockets.close()
        router.close()
        context.term()


def test_the_last_words_of_a_process_are_heard_before_it_ends(tmp_path: Path) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = Listener[bytes, ToRouter](
        f"ipc://{tmp_path}/router", Bytes(), to_router_codec(), context
    )
    introduction = Hello(PROTOCOL_VERSION, NodeId("d0"), "decode", Epoch("d0-1"))
    sockets = EngineSockets((router.endpoint,), introduction)
    crashed = Crashed((key("r"),), NodeError("no such kernel").to_failure())
    try:
        while (greeting := router.receive()) is None:
            sockets.wait(0.01)
        router.send(greeting.peer, msgspec.msgpack.encode(Cancel((key("another"),))))
        hear(sockets, 1)
        sockets.last_words(crashed)  # nobody answers
        heard = router.receive()
        assert heard is not None
        assert heard.message == crashed
    finally:
        sockets.close()
        router.close()
        context.term()


def test_before_it_introduces_itself_a_peer_is_nobody(make: Make, tmp_path: Path) -> None:
    decode, info = listening(make, tmp_path)
    tell(dialled(make, "p0", info), OFFERED, hello("p0"), OFFERED)
    assert hear(decode, 2) == [from_peer("p0", hello("p0")), from_peer("p0", OFFERED)]


def test_a_peer_that_takes_another_name_is_lost_under_the_first(make: Make, tmp_path: Path) -> None:
    decode, info = listening(make, tmp_path)
    prefill = dialled(make, "p0", info)
    tell(prefill, hello("p0"), hello("p0"), hello("x"), OFFERED)
    assert hear(decode, 5) == [
        from_peer("p0", hello("p0")),
        from_peer("p0", hello("p0")),
        PeerLost(NodeId("p0"), Epoch("p0-1")),
        from_peer("x", hello("x")),
        from_peer("x", OFFERED),
    ]
    prefill.to_peer(DropPeer(*DECODE))
    assert hear(decode, 1) == [PeerLost(NodeId("x"), Epoch("x-1"))]


def test_of_two_that_claim_one_name_the_newer_is_believed(make: Make, tmp_path: Path) -> None:
    decode, info = listening(make, tmp_path)
    older, newer = dialled(make, "p0", info), dialled(make, "p1", info)
    tell(older, hello("p0"))
    hear(decode, 1)
    tell(newer, hello("p0"))
    assert hear(decode, 1) == [from_peer("p0", hello("p0"))]
    decode.to_peer(ToPeer(NodeId("p0"), Epoch("p0-1"), Renew((key("a"),))))
    assert hear(newer, 1) == [FromPeer(*DECODE, Renew((key("a"),)))]
    tell(older, OFFERED)
    older.to_peer(DropPeer(*DECODE))
    tell(newer, OFFERED)
    assert hear(decode, 1) == [from_peer("p0", OFFERED)]
    assert older.receive() == []


def test_a_peer_that_was_dropped_but_never_left_is_known_when_it_speaks(
    make: Make, tmp_path: Path
) -> None:
    """A router forgot it for a while; the peer itself has not noticed anything."""
    decode, info = listening(make, tmp_path)
    prefill = dialled(make, "p0", info)
    tell(prefill, hello("p0"))
    hear(decode, 1)
    peer = (NodeId("p0"), Epoch("p0-1"))
    decode.to_peer(ToPeer(*peer, hello("d0")))
    assert hear(prefill, 1) == [FromPeer(*DECODE, hello("d0"))]
    decode.to_peer(DropPeer(*peer))
    decode.to_peer(ToPeer(*peer, Renew((key("b"),))))  # nobody is there to be told
    tell(prefill, OFFERED)
    assert hear(decode, 2) == [from_peer("p0", hello("p0")), from_peer("p0", OFFERED)]
    # To the peer a second greeting would mean that this node began anew.
    decode.to_peer(ToPeer(*peer, hello("d0")))
    decode.to_peer(ToPeer(*peer, Renew((key("a"),))))
    assert hear(prefill, 1) == [FromPeer(*DECODE, Renew((key("a"),)))]
    decode.to_peer(DropPeer(*peer))
    prefill.to_peer(DropPeer(*DECODE))
    tell(dialled(make, "p1", info), hello("p1"))
    assert hear(decode, 1) == [from_peer("p1", hello("p1"))]
