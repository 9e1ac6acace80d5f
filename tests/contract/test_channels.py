"""Channels over real sockets: every message once and in order, or a disconnect."""

import select
from pathlib import Path

import pytest
import zmq

from baton.protocol.codec import MAX_MESSAGE_BYTES, to_node_codec, to_router_codec
from baton.protocol.errors import ConfigError
from baton.protocol.messages import Cancel, Starting, ToNode, ToRouter
from baton.runtime.channel import Dialer, Disconnected, Received
from baton.runtime.framing import HEADER, RESET
from baton.runtime.keys import Keys
from tests.support.channel_ends import Ends, answers, connect, ends, frame, note, wait

MANY = 3000


def numbers(heard: list[Received[ToRouter]]) -> list[int]:
    return [item.message.done for item in heard if isinstance(item.message, Starting)]


def hello(number: int) -> ToNode:
    return Cancel((), str(number))


@pytest.mark.parametrize("kind", ["ipc", "tcp"])
def test_messages_come_once_and_in_order_both_ways(kind: str, tmp_path: Path) -> None:
    with ends(tmp_path, kind) as pair:
        dialer = pair.dial()
        for number in range(MANY):
            assert dialer.send(note(number))
        heard = pair.hear(MANY)
        assert numbers(heard) == list(range(MANY))
        assert {item.peer for item in heard} == {b"d0"}
        for number in range(MANY):
            assert pair.listener.send(b"d0", hello(number))
        assert answers(dialer, MANY) == [hello(number) for number in range(MANY)]
        assert pair.listener.receive() is None
        assert dialer.receive() is None


def test_a_message_waits_for_a_listener_that_comes_later(tmp_path: Path) -> None:
    with ends(tmp_path) as pair:
        pair.listener.close()
        assert pair.dial(endpoint=f"ipc://{tmp_path}/later").send(note(1))
        pair.listener = pair.listen(f"ipc://{tmp_path}/later")
        assert numbers(pair.hear(1)) == [1]


def test_peers_are_told_apart_by_their_names(tmp_path: Path) -> None:
    with ends(tmp_path) as pair:
        first, second = pair.dial("d0"), pair.dial("d1")
        first.send(note(1))
        second.send(note(2))
        heard = {item.peer: item.message for item in pair.hear(2)}
        assert heard == {b"d0": note(1), b"d1": note(2)}
        assert pair.listener.send(b"d1", hello(2))
        assert answers(second, 1) == [hello(2)]
        assert first.receive() is None


def test_nothing_is_sent_to_a_peer_that_never_spoke(tmp_path: Path) -> None:
    with ends(tmp_path) as pair:
        connect(pair.dial())
        assert not pair.listener.send(b"d0", hello(1))
        assert not pair.listener.send(b"nobody", hello(1))
        assert pair.listener.receive() is None


def test_a_dialer_that_leaves_is_a_disconnect(tmp_path: Path) -> None:
    with ends(tmp_path) as pair:
        dialer = pair.dial()
        dialer.send(note(1))
        pair.hear(1)
        dialer.close()
        assert pair.hear(1) == [Received(b"d0", None, disconnected=True)]
        assert not pair.listener.send(b"d0", hello(1))


def test_a_listener_that_leaves_is_a_disconnect_and_its_successor_gets_a_new_session(
    tmp_path: Path,
) -> None:
    with ends(tmp_path) as pair:
        dialer = pair.dial()
        dialer.send(note(1))
        pair.hear(1)
        pair.listener.close()
        (lost,) = answers(dialer, 1)
        assert isinstance(lost, Disconnected)
        pair.listener = pair.listen(f"ipc://{tmp_path}/channel")
        dialer.send(note(2))
        assert numbers(pair.hear(1)) == [2]


def test_a_restarted_dialer_ends_the_session_of_its_former_self(tmp_path: Path) -> None:
    with ends(tmp_path) as pair:
        pair.dial().send(note(1))
        pair.hear(1)
        pair.dial().send(note(2))
        gone, again = pair.hear(2)
        assert gone == Received(b"d0", None, disconnected=True)
        assert again == Received(b"d0", note(2))


def test_a_gap_is_a_disconnect(tmp_path: Path) -> None:
    with ends(tmp_path) as pair:
        bare = speaking(pair)
        bare.send(frame(7, 2, encoded(3)))  # the second frame is missing
        assert pair.hear(1) == [Received(b"d0", None, disconnected=True)]
        assert HEADER.unpack(bare.recv()) == (7, RESET)


def test_a_frame_that_comes_twice_is_a_disconnect(tmp_path: Path) -> None:
    with ends(tmp_path) as pair:
        bare = speaking(pair)
        bare.send(frame(7, 0, encoded(1)))
        assert pair.hear(1) == [Received(b"d0", None, disconnected=True)]


def test_a_new_session_is_a_disconnect_of_the_old_one(tmp_path: Path) -> None:
    with ends(tmp_path) as pair:
        bare = speaking(pair)
        bare.send(frame(8, 0, encoded(2)))
        assert pair.hear(2) == [
            Received(b"d0", None, disconnected=True),
            Received(b"d0", note(2)),
        ]


def test_a_frame_of_a_session_that_is_over_is_answered_and_not_delivered(tmp_path: Path) -> None:
    with ends(tmp_path) as pair:
        bare = speaking(pair)
        bare.send(frame(6, 5, encoded(9)))
        bare.send(frame(7, 1, encoded(2)))
        assert numbers(pair.hear(1)) == [2]
        assert HEADER.unpack(bare.recv()) == (6, RESET)


def test_a_session_cannot_begin_in_the_middle(tmp_path: Path) -> None:
    with ends(tmp_path) as pair:
        bare = pair.bare()
        bare.send(frame(7, 1, encoded(1)))
        bare.send(frame(7, 0, encoded(2)))
        assert numbers(pair.hear(1)) == [2]


def test_a_dialer_hears_that_its_session_is_over_and_starts_another(tmp_path: Path) -> None:
    with ends(tmp_path) as pair:
        dialer = pair.dial()
        dialer.send(note(1))
        pair.hear(1)
        # A frame of the dialer's future: the listener sees a gap and ends the session.
        dialer._session.next_out += 1
        dialer.send(note(3))
        assert pair.hear(1) == [Received(b"d0", None, disconnected=True)]
        assert answers(dialer, 1) == [Disconnected("the listener ended the session")]
        dialer.send(note(4))
        assert numbers(pair.hear(1)) == [4]


def test_what_is_no_message_is_counted_and_costs_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ends(tmp_path) as pair:
        bare = speaking(pair)
        bare.send(frame(7, 1, b"\xc1 nonsense"))
        bare.send(b"short")
        bare.send_multipart([b"several", b"parts"])
        bare.send(frame(7, 2, encoded(2)))
        assert numbers(pair.hear(1)) == [2]
        assert pair.listener.num_malformed == 3
    dropped = [r for r in caplog.records if r.getMessage() == "dropped a malformed message"]
    assert len(dropped) == 2, "the first and the second, and not every one"


def test_a_frame_that_is_too_long_costs_its_sender_the_connection(tmp_path: Path) -> None:
    with ends(tmp_path) as pair:
        bare = speaking(pair)
        bare.send(frame(7, 1, bytes(MAX_MESSAGE_BYTES + 1)))
        assert pair.hear(1) == [Received(b"d0", None, disconnected=True)]
        pair.dial("d1").send(note(5))
        assert numbers(pair.hear(1)) == [5]


def test_a_full_queue_to_a_dialer_is_a_disconnect(tmp_path: Path) -> None:
    with ends(tmp_path) as pair:
        dialer = pair.dial()
        dialer.send(note(1))
        pair.hear(1)
        large = Cancel((), "x" * 100_000)
        # The dialer reads nothing. The sockets' buffers and both queues are bounded.
        assert any(not pair.listener.send(b"d0", large) for _ in range(20_000))
        assert pair.hear(1) == [Received(b"d0", None, disconnected=True)]


def test_a_full_queue_to_a_listener_is_a_disconnect(tmp_path: Path) -> None:
    with ends(tmp_path) as pair:
        dialer = pair.dial()
        connect(dialer)
        assert any(not dialer.send(note(number, 100_000)) for number in range(20_000))
        assert answers(dialer, 1) == [Disconnected("the queue to the listener is full")]


def test_the_descriptor_of_a_busy_channel_fires_although_its_owner_sends(tmp_path: Path) -> None:
    """Sending may swallow the signal of an arrival; the channel has to give it back."""
    with ends(tmp_path) as pair:
        dialer = pair.dial()
        dialer.send(note(0))
        pair.hear(1)
        for number in range(200):
            assert pair.listener.send(b"d0", hello(number))
            dialer.send(note(number))
            assert numbers(pair.hear(1)) == [number]
            dialer.send(note(-1))
            assert answers(dialer, 1) == [hello(number)]
            assert numbers(pair.hear(1)) == [-1]


def test_a_descriptor_is_quiet_when_there_is_nothing(tmp_path: Path) -> None:
    with ends(tmp_path) as pair:
        dialer = pair.dial()
        dialer.send(note(1))
        pair.hear(1)
        while dialer.receive() is not None:
            wait(dialer)
        assert pair.listener.receive() is None
        ready, _, _ = select.select([pair.listener.fileno()], [], [], 0)
        if ready:  # an event that means nothing to us, such as a finished handshake
            assert pair.listener.receive() is None


def test_an_address_that_is_taken_is_a_config_error(tmp_path: Path) -> None:
    with ends(tmp_path, "tcp") as pair, pytest.raises(ConfigError, match="cannot listen"):
        pair.listen(pair.listener.endpoint)


@pytest.mark.parametrize(
    ("endpoint", "why"),
    [
        ("udp://127.0.0.1", "not an address"),
        ("127.0.0.1:80", "not an address"),
        ("tcp://host:99999", "not an address"),
        ("ipc:///" + "x" * 120, "at most"),
        ("ipc:///no/such/folder/socket", "does not exist"),
    ],
)
def test_an_address_that_cannot_be_is_refused(endpoint: str, why: str, tmp_path: Path) -> None:
    with ends(tmp_path) as pair, pytest.raises(ConfigError, match=why):
        pair.listen(endpoint)


def test_nobody_dials_an_address_without_a_port(tmp_path: Path) -> None:
    with ends(tmp_path) as pair, pytest.raises(ConfigError, match="needs a host and a port"):
        pair.dial(endpoint="tcp://127.0.0.1")


def encoded(number: int) -> bytes:
    return to_router_codec().encode(note(number))


def speaking(pair: Ends) -> "zmq.Socket[bytes]":
    """A bare socket whose session 7 has had one message."""
    bare = pair.bare()
    bare.send(frame(7, 0, encoded(1)))
    assert numbers(pair.hear(1)) == [1]
    return bare


def test_an_address_that_cannot_be_dialled_is_named() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with pytest.raises(ConfigError, match="no such host"):
        Dialer(
            "tcp://no such host:5", b"d", to_router_codec(), to_node_codec(), context,
            Keys(is_insecure=True),
        )  # fmt: skip
    context.term()
