"""Connections that are not channels do no harm, nor does a process without free descriptors."""

import os
import resource
import time
from contextlib import suppress
from pathlib import Path

import pytest

from baton.protocol.errors import ConfigError
from baton.runtime.channels.listener import HINTS_APART_S, PROBE_DELAYS_S
from baton.runtime.channels.wire import HEADER, PROBE
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
    speaking,
    stranger,
)


@pytest.mark.parametrize("kind", ["ipc", "tcp"])
def test_connections_that_are_no_channels_end_no_session(kind: str, tmp_path: Path) -> None:
    """Each closes with the event that a lost session has, and leaves its descriptor's number to the
    next connection, which may be a session's."""
    with ends(tmp_path, kind) as pair:
        steady = pair.dial("steady")
        steady.send(note(0))
        assert numbers(pair.hear(1)) == [0]
        for number in range(100):
            strangers = [stranger(pair.listener.endpoint) for _ in range(3)]
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


def test_strangers_who_come_while_a_listener_reads_nothing_keep_no_peer_out(tmp_path: Path) -> None:
    """libzmq's thread waits for room when the queue of its events is full, and peers with it."""
    endpoint = f"ipc://{tmp_path}/busy"
    with ends(tmp_path) as pair, process("listen", endpoint):
        connect(pair.dial(endpoint=endpoint))
        for _ in range(3000):
            stranger(endpoint).close()
        connect(pair.dial("late", endpoint))


def test_strangers_make_a_listener_try_its_sessions_seldom(tmp_path: Path) -> None:
    """Each that leaves might have been a session's connection; a try of all is a frame to each."""
    with ends(tmp_path) as pair:
        bare = speaking(pair)
        began_s = monotonic()
        for _ in range(1000):
            stranger(pair.listener.endpoint).close()
            assert pair.listener.receive() is None
        pair.dial("late").send(note(2))
        assert numbers(pair.hear(1)) == [2]
        passed_s = monotonic() - began_s
        num_tries = 0
        while bare.poll(0):
            assert HEADER.unpack(bare.recv())[1] == PROBE
            num_tries += 1
        assert num_tries <= len(PROBE_DELAYS_S) * (passed_s / HINTS_APART_S + 2)


def test_a_process_without_descriptors_cannot_dial_and_says_so(tmp_path: Path) -> None:
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
