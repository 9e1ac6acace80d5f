"""Servers of any make are started, waited for, pinned and ended, with all their children."""

import os
import sys
import time
from pathlib import Path

import pytest

from baton.protocol.errors import NodeError
from tools.peers.servers import Server, ServerCommand, free_ports, group, running

# Answers 200, and has a child that would outlive it.
SERVES = """
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *words):
        pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def command(port: int, code: str = SERVES, cpus: tuple[int, ...] = ()) -> ServerCommand:
    argv = (sys.executable, "-c", code, str(port))
    return ServerCommand("served", argv, ready_url=f"http://127.0.0.1:{port}/", cpus=cpus)


def test_a_server_is_ready_when_it_answers_and_ends_with_its_children(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    server = Server(command(port), tmp_path)
    try:
        server.wait_until_ready(time.monotonic() + 30)
        members = group(server.pid)
        assert len(members) == 2
        assert server.pid in members
    finally:
        server.stop()
    deadline_s = time.monotonic() + 10
    while group(server.pid):
        assert time.monotonic() < deadline_s
    server.stop()  # again: nothing is left to end


def test_every_thread_of_a_server_is_pinned(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    core = min(os.sched_getaffinity(0))
    server = Server(command(port, cpus=(core,)), tmp_path)
    try:
        server.wait_until_ready(time.monotonic() + 30)
        assert {frozenset(os.sched_getaffinity(pid)) for pid in group(server.pid)} == {
            frozenset({core})
        }
    finally:
        server.stop()


@pytest.mark.parametrize(
    ("code", "timeout_s", "said"),
    [
        ("raise SystemExit('no such model')", 30, "ended while starting: no such model"),
        ("import time; time.sleep(600)", 0.5, "not ready in time"),
    ],
)
def test_a_server_that_does_not_serve_is_an_error(
    code: str, timeout_s: float, said: str, tmp_path: Path
) -> None:
    failing = command(*free_ports(1), code)
    with (
        pytest.raises(NodeError, match=said),
        running([failing], tmp_path, timeout_s=timeout_s),
    ):
        pytest.fail("it never served")
