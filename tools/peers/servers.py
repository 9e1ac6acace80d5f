"""Run servers of any kind as child processes: start, await, pin and end them by id, with a log.

Every server leads a process group of its own; ending a server ends the group, and no process is
ever looked up by name.
"""

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import psutil

from baton.protocol.errors import NodeError

READY_POLL_S = 0.2
GRACE_S = 15.0


class ServerCommand(msgspec.Struct, frozen=True):
    """The command of a server, which serves once `ready_url` answers 200.

    An empty `ready_url` marks a server that serves through another one.
    """

    name: str
    argv: tuple[str, ...]
    env: dict[str, str] = {}
    ready_url: str = ""
    cpus: tuple[int, ...] = ()  # all its threads are bound to these once it is ready


class Server:
    """One server, which starts at once."""

    def __init__(self, command: ServerCommand, logs: Path) -> None:
        self.command = command
        self.log = logs / f"{command.name}.log"
        with self.log.open("wb") as log:
            try:
                self._process = subprocess.Popen(
                    command.argv, env=os.environ | command.env, stdin=subprocess.DEVNULL,
                    stdout=log, stderr=subprocess.STDOUT, cwd=logs, start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                raise NodeError(f"{command.name} cannot be started: {error}") from error

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_until_ready(self, deadline_s: float) -> None:
        """Raise `NodeError` with the end of the log if the server dies or the deadline passes."""
        while self.command.ready_url and not _answers(self.command.ready_url):
            if self._process.poll() is not None:
                raise NodeError(f"{self.command.name} ended while starting: {self.last_line()}")
            if time.monotonic() > deadline_s:
                raise NodeError(f"{self.command.name} is not ready in time: {self.last_line()}")
            time.sleep(READY_POLL_S)
        if self.command.cpus:
            self.pin()

    def pin(self) -> None:
        """Bind all threads of the group: a server's own settings bind only some of them."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):  # one of them ended meanwhile
                if os.getpgid(process.pid) == self.pid:
                    for thread in process.threads():
                        os.sched_setaffinity(thread.id, self.command.cpus)

    def last_line(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return f"{lines[-1][:300] if lines else 'it wrote nothing'} (all of it in {self.log})"

    def ask_to_stop(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()

    def stop(self) -> None:
        """Ask the leader to end, give the group some time, then end the rest of it."""
        self.ask_to_stop()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()


@contextlib.contextmanager
def running(commands: Sequence[ServerCommand], logs: Path, timeout_s: float) -> Iterator[None]:
    """Start all servers, each within `timeout_s` of the one before; end all in any case."""
    logs.mkdir(parents=True, exist_ok=True)
    servers: list[Server] = []
    try:
        servers += [Server(command, logs) for command in commands]
        for server in servers:
            server.wait_until_ready(time.monotonic() + timeout_s)
        yield
    finally:
        for server in servers:
            server.ask_to_stop()
        for server in servers:
            server.stop()


def free_ports(count: int) -> list[int]:
    """Return ports of this host on which no process listens now."""
    with contextlib.ExitStack() as stack:
        sockets = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)
        ]
        return [int(taken.getsockname()[1]) for taken in sockets]


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2.0) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False
