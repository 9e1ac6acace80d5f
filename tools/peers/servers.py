"""Run servers of any kind as child processes: start, await, pin and end them by id, with a log."""

import contextlib
import os
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec
import psutil

from baton.protocol.errors import NodeError
from baton.runtime.clock import monotonic
from baton.runtime.process import Child, Command

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


@contextlib.contextmanager
def running(
    commands: Sequence[ServerCommand], logs: Path, timeout_s: float
) -> Iterator[None]:
    """Start all servers, each within `timeout_s` of the one before; end all in any case.

    Raises `NodeError` with the last line of a server that ends or is late.
    """
    logs.mkdir(parents=True, exist_ok=True)
    children: list[Child] = []
    try:
        for one in commands:
            program, *words = one.argv
            file = logs / f"{one.name}.log"
            file.write_text("")
            command = Command(
                one.name, tuple(words), env=tuple(one.env.items()), program=program
            )
            children.append(Child(command, partial(_keep, file)))
        for child, one in zip(children, commands, strict=True):
            _wait_until_ready(child, one, monotonic() + timeout_s)
            if one.cpus:
                _pin(child, one.cpus)
        yield
    finally:
        for child in children:
            child.terminate()
        for child in children:
            child.stop(GRACE_S)


def _keep(file: Path, _name: str, line: str) -> None:
    with file.open("a") as log:
        log.write(line + "\n")


def _wait_until_ready(child: Child, command: ServerCommand, deadline_s: float) -> None:
    while command.ready_url and not _answers(command.ready_url):
        why = (
            "ended while starting"
            if child.poll() is not None
            else "is not ready in time"
        )
        if child.exit_code is not None or monotonic() > deadline_s:
            last = child.tail[-1][:300] if child.tail else "it wrote nothing"
            raise NodeError(f"{command.name} {why}: {last}")
        time.sleep(READY_POLL_S)


def _pin(child: Child, cpus: tuple[int, ...]) -> None:
    """Bind all threads of the group: a server's own settings bind only some of them."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):  # one of them ended meanwhile
            if os.getpgid(process.pid) == child.pid:
                for thread in process.threads():
                    os.sched_setaffinity(thread.id, cpus)


def free_ports(count: int) -> list[int]:
    """Return ports of this host on which no process listens now."""
    with contextlib.ExitStack() as stack:
        sockets = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            for _ in range(count)
        ]
        return [int(taken.getsockname()[1]) for taken in sockets]


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2.0) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False
