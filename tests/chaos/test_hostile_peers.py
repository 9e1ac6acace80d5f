"""Strangers at every port of a real cluster: they take nothing from those who belong to it."""

import socket
import struct
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import cycle
from pathlib import Path

import psutil

from tests.support.checkpoints import tiny_cluster
from tests.support.cluster import Cluster
from tests.support.stream_reader import StreamReader
from tests.support.waiting import until

PROMPT = [10 + (i * i + 7 * i) % 241 for i in range(70)]
BODY = {"prompt": PROMPT, "max_tokens": 100, "temperature": 0, "ignore_eos": True}
ALARMS = ("Traceback", "Assertion failed", "a request broke", "an invariant broke")
DEADLINE_S = 120.0
NUM_STRANGERS = 3_000
HELD = 400  # connections that stay open at the same time
# ZMTP 3.1: the signature, the version, the mechanism NULL, and who listens.
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x04\x1c\x05READY\x0bSocket-Type\0\0\0\x06DEALER"
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
Dial = Callable[[], socket.socket]


class Strangers:
    """Keeps coming, with a bounded number of connections at a time."""

    def __init__(self, dials: list[Dial]) -> None:
        self.num_made = 0
        self._ways = cycle([(dial, said) for said in SAID for dial in dials])
        self._held: deque[socket.socket] = deque()

    def come(self, count: int) -> None:
        for dial, said in (next(self._ways) for _ in range(count)):
            while len(self._held) >= HELD:
                self._drop(self._held.popleft())
            link = dial()
            self._held.append(link)
            with suppress(OSError):  # it may have been turned away already
                link.sendall(said)
            self.num_made += 1

    def leave(self) -> None:
        while self._held:
            self._drop(self._held.popleft())

    def _drop(self, link: socket.socket) -> None:
        if len(self._held) % 2:  # with a reset instead of an end
            with suppress(OSError):
                link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        link.close()


def ports_of(cluster: Cluster) -> list[Dial]:
    """Ways to dial everything that listens: control, peers, HTTP, and the sockets of shm."""
    found: list[Dial] = []
    for child in cluster.children.values():
        process = psutil.Process(child.pid)
        for one in process.net_connections("tcp"):
            if one.status == psutil.CONN_LISTEN:
                found.append(lambda where=tuple(one.laddr): to_tcp(where))  # type: ignore[misc]
        pools = {one.laddr for one in process.net_connections("unix")}
        for pool in sorted(name for name in pools if str(name).startswith("@baton-")):
            found.append(lambda name=pool: to_pool(name))  # type: ignore[misc]
    return found


def to_tcp(where: tuple[str, int]) -> socket.socket:
    return socket.create_connection(where, DEADLINE_S)


def to_pool(name: str) -> socket.socket:
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link.settimeout(DEADLINE_S)
    link.connect("\0" + name[1:])
    return link


def files_of(cluster: Cluster) -> dict[str, int]:
    return {n: psutil.Process(one.pid).num_fds() for n, one in cluster.children.items()}


def test_strangers_at_every_port_end_no_process_and_no_stream(tmp_path: Path) -> None:
    config = tiny_cluster(
        cache={"num_blocks": 600}, engine={"max_num_batched_tokens": 64},
        router={"local_prefill": "never"}, node={"http": "127.0.0.1:0"},
    )  # fmt: skip
    with Cluster(tmp_path, config, over="tcp") as cluster:
        (alone,) = cluster.complete(**BODY)["choices"]  # type: ignore[misc]
        before = files_of(cluster)
        pids = {name: child.pid for name, child in cluster.children.items()}
        strangers = Strangers(ports_of(cluster))
        reader = StreamReader(cluster, BODY, again=True)
        for _ in range(10):
            strangers.come(NUM_STRANGERS // 10)
            reader.wait_for_more(10)
        strangers.leave()
        assert reader.join() is None
        assert set(reader.texts) == {alone["text"]}
        assert cluster.complete(**BODY)["choices"] == [alone]
        cluster.wait_until_healthy()
        assert {name: child.pid for name, child in cluster.children.items()} == pids
        assert all(child.poll() is None for child in cluster.children.values())
        until(lambda: all(now <= before[name] + 8 for name, now in files_of(cluster).items()))
        alarms = [line for line in cluster.lines if any(alarm in line for alarm in ALARMS)]
        assert not alarms, alarms
        assert strangers.num_made == NUM_STRANGERS
