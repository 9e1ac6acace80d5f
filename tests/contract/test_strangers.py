"""Connections that are not channels do no harm, nor does a process without free descriptors."""

import os
import resource
import socket
import struct
import time
from contextlib import suppress
from itertools import cycle

import pytest

from baton.protocol.errors import ConfigError
from baton.runtime.clock import monotonic
from tests.support.channel_ends import (
    DEADLINE_S,
    answers,
    connect,
    ends,
    hello,
    note,
    numbers,
    process,
    stranger,
)

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
            strangers[0].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
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
