"""Channels over real sockets: messages come once and in order; strangers do no harm."""

import os
import resource
import select
import signal
import socket
import struct
import subprocess
import threading
import time
from contextlib import suppress
from itertools import cycle

import pytest
import zmq

from baton.protocol.codec import MAX_MESSAGE_BYTES, to_node_codec, to_router_codec
from baton.protocol.errors import ConfigError
from baton.protocol.messages import Cancel, ToRouter
from baton.runtime.channels import dialer as dialer_module
from baton.runtime.channels.dialer import Destination, Disconnected
from baton.runtime.channels.keys import NO_KEYS
from baton.runtime.channels.listener import Channels, Received
from baton.runtime.channels.wire import (
    HEADER,
    HEARTBEAT_INTERVAL_MS,
    HEARTBEAT_TIMEOUT_MS,
    RESET,
    new_identity,
)
from baton.runtime.clock import monotonic
from tests.support.channel_ends import (
    DEADLINE_S,
    answers,
    connect,
    encoded,
    ends,
    frame,
    hello,
    note,
    numbers,
    process,
    speaking,
    stranger,
    wait,
    work,
)

MANY = 3000
# ZMTP 3.1: the signature, the version, the mechanism NULL, and who listens.
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x04\x1c\x05READY\x0bSocket-Type\0\0\0\x06DEALER"


@pytest.mark.parametrize("kind", ["ipc", "tcp"])
def test_messages_come_once_and_in_order_both_ways(kind, tmp_path):
    with ends(tmp_path, kind) as pair:
        dialer = pair.dial()
        for number in range(MANY):
            assert dialer.send(note(number))
        heard = pair.hear(MANY)
        assert numbers(heard) == list(range(MANY))
        assert {item.peer for item in heard} == {b"d0"}
        for number in range(MANY):
            assert pair.answer(b"d0", hello(number))
        assert answers(dialer, MANY) == [hello(number) for number in range(MANY)]
        assert pair.listener.receive() is None
        assert dialer.receive() is None


def test_nothing_is_sent_to_a_peer_that_never_spoke(tmp_path):
    with ends(tmp_path) as pair:
        connect(pair.dial())
        assert not pair.answer(b"d0", hello(1))
        assert not pair.answer(b"nobody", hello(1))
        assert pair.listener.receive() is None


def test_a_listener_that_leaves_is_a_disconnect_and_its_successor_gets_a_new_session(
    tmp_path,
):
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


def test_a_slow_name_server_delays_no_other_channel(tmp_path, monkeypatch):
    """Neither this process nor libzmq's thread waits for it. Messages are kept meanwhile."""
    is_slow = threading.Event()
    resolve = socket.getaddrinfo
    asked = list[str]()

    def look_up(host: str, *how: object, **more: object) -> object:
        asked.append(host)
        if host == "router.test":
            assert is_slow.wait(DEADLINE_S)
            host = "127.0.0.1"
        return resolve(host, *how, **more)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    with ends(tmp_path, "tcp") as pair:
        port = pair.listener.endpoint.rpartition(":")[2]
        named = pair.dial("named", f"tcp://router.test:{port}")
        steady = pair.dial("steady")
        for number in range(20):
            assert named.send(note(number))
            assert named.receive() is None
            steady.send(note(number))
            assert pair.hear(1) == [Received(b"steady", note(number))]
        is_slow.set()
        connect(named)
        assert numbers(pair.hear(20)) == list(range(20))
        assert named.endpoint == f"tcp://router.test:{port}"
    assert asked == ["router.test"]


def test_a_name_of_another_host_is_not_dialled_without_a_key(monkeypatch):
    was_asked = threading.Event()

    def look_up(*_: object, **__: object) -> list[tuple[object, ...]]:
        was_asked.set()
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.1", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    destination = Destination("tcp://router.test:5", NO_KEYS)
    assert not destination.look()
    assert was_asked.wait(DEADLINE_S)
    for _ in range(20):
        assert not destination.look()
        assert destination.address is None
        time.sleep(0.01)


def test_a_name_that_comes_to_stand_for_another_address_is_followed(
    tmp_path, monkeypatch
):
    found: list[str] = []  # until the name is known

    def look_up(*_: object, **__: object) -> object:
        if not found:
            raise socket.gaierror(socket.EAI_NONAME, "unknown")
        return [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, 0)) for host in found
        ]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    with ends(tmp_path, "tcp") as pair:
        port = pair.listener.endpoint.rpartition(":")[2]
        dialer = pair.dial("d0", f"tcp://router.test:{port}")
        assert dialer.receive() is None
        found.append("127.0.0.9")  # nothing listens there
        while dialer.receive() is None and dialer._dialled != f"tcp://127.0.0.9:{port}":
            wait(dialer)
        found[:] = ["127.0.0.1"]
        assert answers(dialer, 1) == [Disconnected("the listener has moved")]
        dialer.send(note(1))
        assert numbers(pair.hear(1)) == [1]


GONE = Received[ToRouter](b"d0", None, disconnected=True)


@pytest.mark.parametrize(
    ("frames", "heard", "reset"),
    [
        pytest.param([(7, 2, 3)], [GONE], 7, id="a gap"),
        pytest.param([(7, 0, 1)], [GONE], 7, id="twice"),
        pytest.param(
            [(8, 0, 2)], [GONE, Received(b"d0", note(2))], None, id="a new session"
        ),
        pytest.param(
            [(6, 5, 9), (7, 1, 2)], [Received(b"d0", note(2))], 6, id="one that is over"
        ),
        pytest.param(
            [(8, 1, 9), (7, 1, 2)], [Received(b"d0", note(2))], 8, id="in its middle"
        ),
    ],
)
def test_a_frame_that_does_not_continue_a_session_is_not_delivered(
    frames, heard, reset, tmp_path
):
    with ends(tmp_path) as pair:
        bare = speaking(pair)
        for session, sequence, number in frames:
            bare.send(frame(session, sequence, encoded(number)))
        assert pair.hear(len(heard)) == heard
        if reset is not None:
            assert HEADER.unpack(bare.recv()) == (reset, RESET)


def test_a_dialer_hears_that_its_session_is_over_and_starts_another(tmp_path):
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


def test_a_dialer_that_gave_a_handshake_up_begins_anew_although_libzmq_had_reconnected(
    tmp_path, monkeypatch
):
    """Its process was stalled, so it reads of the failure and of the next success together."""
    monkeypatch.setattr(dialer_module, "ASK_INTERVAL_S", 1e9)  # it knows without asking
    endpoint = f"ipc://{tmp_path}/late"
    with ends(tmp_path) as pair:
        with socket.socket(socket.AF_UNIX) as ending:
            ending.bind(f"{tmp_path}/late")
            ending.listen()
            dialer = pair.dial("d0", endpoint)
            dialer.send(note(1))
            connection, _ = ending.accept()
            with connection:
                connection.sendall(GREETING)
                time.sleep(0.1)
        os.unlink(f"{tmp_path}/late")
        pair.listener.close()
        pair.listener = pair.listen(endpoint)
        # Libzmq has reconnected, and the dialer knows nothing.
        assert numbers(pair.hear(1)) == [1]
        assert isinstance(*answers(dialer, 1), Disconnected)
        dialer.send(note(2))
        heard = pair.hear(2)
        assert GONE in heard
        assert numbers(heard) == [2]


def test_what_is_left_of_a_connection_that_another_one_replaced_begins_no_session(
    tmp_path,
):
    """libzmq reconnects under the same identity, and gives the older connection an invented one."""
    identity = new_identity(b"d0").decode()
    with ends(tmp_path) as pair:
        before = pair.bare(identity)
        for number in range(3):
            before.send(frame(7, number, encoded(number)))
        time.sleep(0.2)  # the listener's process is stalled while libzmq's thread reads
        before.close()
        time.sleep(0.2)
        after = pair.bare(identity)
        after.send(frame(7, 3, encoded(3)))
        after.send(frame(8, 0, encoded(4)))
        time.sleep(0.2)
        assert numbers(pair.hear(1)) == [4]
        assert pair.listener.receive() is None
        assert pair.listener.num_unnamed == 3
        assert HEADER.unpack(after.recv()) == (7, RESET)


@pytest.fixture
def _asks_often(monkeypatch):
    monkeypatch.setattr(dialer_module, "ASK_INTERVAL_S", 0.05)


@pytest.mark.usefixtures("_asks_often")
def test_a_dialer_without_news_learns_that_the_listener_lacks_its_last_message(
    tmp_path,
):
    with ends(tmp_path) as pair:
        dialer = pair.dial()
        dialer.send(note(1))
        pair.hear(1)
        dialer._session.next_out += 1  # a message that was lost with its connection
        work(pair, dialer, lambda: dialer._session.next_out == 0)
        dialer.send(note(2))
        assert numbers(pair.hear(1)) == [2]


@pytest.mark.usefixtures("_asks_often")
def test_a_dialer_without_news_learns_that_the_listener_has_forgotten_it(tmp_path):
    with ends(tmp_path) as pair:
        dialer = pair.dial()
        dialer.send(note(1))
        pair.hear(1)
        pair.listener._sessions.clear()  # as after a reset that could not be sent
        work(pair, dialer, lambda: dialer._session.next_out == 0)
        dialer.send(note(2))
        assert numbers(pair.hear(1)) == [2]


@pytest.mark.usefixtures("_asks_often")
def test_a_dialer_without_news_keeps_its_session(tmp_path):
    with ends(tmp_path) as pair:
        dialer = pair.dial()
        dialer.send(note(1))
        pair.hear(1)
        for _ in range(20):
            select.select([dialer.fileno()], [], [], 0.05)
            assert dialer.receive() is None
            assert pair.listener.receive() is None
        assert pair.answer(b"d0", hello(1))


def test_what_is_no_message_is_counted_and_costs_nothing_else(tmp_path, caplog):
    with ends(tmp_path) as pair:
        bare = speaking(pair)
        bare.send(frame(7, 1, b"\xc1 nonsense"))
        bare.send(b"short")
        bare.send_multipart([b"several", b"parts"])
        bare.send(frame(7, 2, encoded(2)))
        assert numbers(pair.hear(1)) == [2]
        assert pair.listener._wire.num_malformed == 3
    dropped = [
        r for r in caplog.records if r.getMessage() == "dropped a malformed message"
    ]
    assert len(dropped) == 2, "the first and the second, and not every one"


def test_a_frame_that_is_too_long_costs_its_sender_the_connection(tmp_path):
    with ends(tmp_path) as pair:
        bare = speaking(pair)
        bare.send(frame(7, 1, bytes(MAX_MESSAGE_BYTES + 1)))
        assert pair.hear(1) == [Received(b"d0", None, disconnected=True)]
        pair.dial("d1").send(note(5))
        assert numbers(pair.hear(1)) == [5]


def test_a_dialer_that_is_frozen_is_a_disconnect_and_hears_of_it_once_it_wakes(
    tmp_path,
):
    """Its queue and the sockets' buffers are bounded; the frozen process reads nothing."""
    with ends(tmp_path) as pair, process("dial", pair.listener.endpoint) as dialer:
        assert numbers(pair.hear(1)) == [0]
        os.kill(dialer.pid, signal.SIGSTOP)
        large = Cancel((), "x" * 100_000)
        assert any(not pair.answer(b"d0", large) for _ in range(20_000))
        assert pair.hear(1) == [Received(b"d0", None, disconnected=True)]
        os.kill(dialer.pid, signal.SIGCONT)
        assert numbers(pair.hear(1)) == [1], "it begins a second session"


def test_a_session_that_lost_a_message_sends_no_later_one(tmp_path):
    with (
        ends(tmp_path) as pair,
        process("listen", f"ipc://{tmp_path}/frozen") as listener,
    ):
        dialer = pair.dial(endpoint=f"ipc://{tmp_path}/frozen")
        connect(dialer)
        os.kill(listener.pid, signal.SIGSTOP)
        assert any(not dialer.send(note(number, 100_000)) for number in range(20_000))
        os.kill(listener.pid, signal.SIGCONT)
        assert dialer.socket.poll(int(1000 * DEADLINE_S), zmq.POLLOUT), "no room again"
        assert not dialer.send(note(-1))
        assert answers(dialer, 1) == [Disconnected("the queue to the listener is full")]
        assert dialer.send(note(-1))


def test_how_long_a_peer_may_be_silent_is_a_setting(tmp_path):
    channels = Channels(heartbeat_timeout_s=20.0)
    codecs = to_router_codec(), to_node_codec()
    dialer = channels.dial(f"ipc://{tmp_path}/absent", b"d0", *codecs)
    assert dialer.socket.getsockopt(zmq.HEARTBEAT_TIMEOUT) == 19_000
    dialer.close()
    channels.close()


@pytest.mark.release
def test_a_listener_that_reads_nothing_outlives_the_death_of_a_busy_dialer(tmp_path):
    """libzmq aborts a process at the next heartbeat if it stopped the input of such a dialer."""
    endpoint = f"ipc://{tmp_path}/deaf"
    with process("listen", endpoint) as listener:
        with process("flood", endpoint) as flood:
            assert flood.stdout.readline() == "sent\n"
            time.sleep(0.5)  # the listener takes what its queue holds, and stops
            flood.kill()
            flood.wait()
        with pytest.raises(subprocess.TimeoutExpired):
            listener.wait(2 * (HEARTBEAT_INTERVAL_MS + HEARTBEAT_TIMEOUT_MS) / 1000)


def test_two_dialers_of_one_name_are_two_peers(tmp_path):
    with ends(tmp_path) as pair:
        first = pair.dial("twin")
        second = pair.dial("twin")
        first.send(note(1))
        assert numbers(pair.hear(1)) == [1]
        ours = pair.peers[b"twin"]
        second.send(note(2))
        assert numbers(pair.hear(1)) == [2]
        assert pair.peers[b"twin"] != ours
        assert pair.listener.send(ours, hello(1))
        assert answers(first, 1) == [hello(1)]
        assert second.receive() is None


def test_the_descriptor_of_a_busy_channel_fires_although_its_owner_sends(tmp_path):
    """Sending may swallow the signal of an arrival; the channel has to give it back."""
    with ends(tmp_path) as pair:
        dialer = pair.dial()
        dialer.send(note(0))
        pair.hear(1)
        for number in range(200):
            assert pair.answer(b"d0", hello(number))
            dialer.send(note(number))
            assert numbers(pair.hear(1)) == [number]
            dialer.send(note(1000))
            assert answers(dialer, 1) == [hello(number)]
            assert numbers(pair.hear(1)) == [1000]


def test_an_address_that_is_taken_is_a_config_error(tmp_path):
    with (
        ends(tmp_path, "tcp") as pair,
        pytest.raises(ConfigError, match="cannot listen"),
    ):
        pair.listen(pair.listener.endpoint)


SAID = (
    b"",
    GREETING[:11],
    GREETING,
    GREETING.replace(b"NULL", b"EVIL"),
    GREETING + READY[:-3],
    GREETING + READY + b"\x02" + b"\xff" * 8,  # a message of 2 ** 64 - 1 bytes
    GREETING + READY + b"\0\x05hello" * 50,  # no frames of a channel
    b"GET /live HTTP/1.1\r\nHost: x\r\n",
    b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03",  # a hello of TLS
    bytes(range(256)) * 8,
)


@pytest.mark.parametrize("kind", ["ipc", "tcp"])
def test_connections_that_are_no_channels_end_no_session(kind, tmp_path):
    """Each closes with the event that a lost session has, and leaves its descriptor's number to the
    next connection, which may be a session's. Every third one ends with a reset."""
    said = cycle(SAID)
    with ends(tmp_path, kind) as pair:
        steady = pair.dial("steady")
        steady.send(note(0))
        assert numbers(pair.hear(1)) == [0]
        for number in range(100):
            strangers = [stranger(pair.listener.endpoint) for _ in range(3)]
            for each in strangers:
                each.sendall(next(said))
            strangers[0].setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
            )
            visitor = pair.dial(f"visitor {number}")
            strangers.pop().close()
            visitor.send(note(number))
            assert numbers(pair.hear(1)) == [number]
            for each in strangers:
                each.close()
            steady.send(note(number))
            assert numbers(pair.hear(1)) == [number]
            assert pair.answer(b"steady", hello(number))
            assert pair.answer(f"visitor {number}".encode(), hello(number))
            assert answers(visitor, 1) == [hello(number)]
        assert answers(steady, 100) == [hello(number) for number in range(100)]


def test_strangers_who_come_while_a_listener_reads_nothing_keep_no_peer_out(tmp_path):
    """libzmq's thread waits for room when the queue of its events is full, and peers with it."""
    endpoint = f"ipc://{tmp_path}/busy"
    with ends(tmp_path) as pair, process("listen", endpoint):
        connect(pair.dial(endpoint=endpoint))
        for _ in range(3000):
            stranger(endpoint).close()
        connect(pair.dial("late", endpoint))


def test_a_process_without_descriptors_cannot_dial_and_says_so(tmp_path):
    """A node that meets this goes on without that peer, so nothing may be left half open."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ends(tmp_path) as pair:
        connect(pair.dial())
        files = len(os.listdir("/proc/self/fd"))
        num_refused = 0
        try:
            for limit in range(files, files + 100):
                resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limits[1]))
                with suppress(ConfigError):
                    pair.dial("late").close()
                    break
                num_refused += 1
            else:
                pytest.fail("a dialer takes fewer descriptors than that")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert num_refused > 0
        deadline_s = monotonic() + DEADLINE_S  # libzmq closes its part a little later
        while len(os.listdir("/proc/self/fd")) != files:
            assert monotonic() < deadline_s
            time.sleep(0.01)
