"""The supervised processes of one host, for `up` on this machine and for an actor of Ray.

A process that ends is restarted, after a longer delay each time. Run as a program with a state
folder, this is the supervisor of `baton up`: it reads its job from the folder and writes the state
of the processes there. When it ends, by SIGTERM or by force, its processes end too. It never sends
messages to a router or a node.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

import msgspec

from baton.deploy.cluster.processes import ProcessSpec
from baton.deploy.cluster.state import (
    ProcessState,
    ProcessStatus,
    open_private,
    write_private,
)
from baton.protocol.config import LogConfig
from baton.runtime.clock import monotonic
from baton.runtime.log import logger, relayed, setup
from baton.runtime.process import (
    Command,
    Exit,
    Interrupts,
    Supervisor,
    die_with_parent,
    log_exit,
)

WATCH_S = 0.1
HURRIED_S = 2.5
JOB = "job.json"
STATUS = "processes.json"
RESTARTS = "restarts"  # folder with an empty file for each process that is to restart

log = logger("supervisor")


class HostJob(msgspec.Struct, frozen=True):
    """The processes of one host. They hold secrets, so only the user may read their file."""

    processes: tuple[ProcessSpec, ...]
    logs: str  # folder; empty keeps no logs, because the output of this process is kept


class HostProcesses:
    """The processes of one host, from `start` to `stop`. `kill` is safe in a signal handler."""

    def __init__(self, job: HostJob) -> None:
        self._job = job
        self._files: dict[str, IO[bytes]] = {}
        self._failing: dict[str, str] = {}  # log that cannot be written -> reason
        self._ends: dict[str, str] = {}  # why a process ended the last time
        routers = tuple(
            _command(spec) for spec in job.processes if spec.role == "router"
        )
        nodes = tuple(_command(spec) for spec in job.processes if spec.role != "router")
        self._routers = Supervisor(routers, monotonic, self._relay)
        self._nodes = Supervisor(nodes, monotonic, self._relay, may_leave=True)

    def start(self) -> None:
        """Spawn every process."""
        if self._job.logs:
            logs = Path(self._job.logs)
            logs.mkdir(parents=True, exist_ok=True)
            for spec in self._job.processes:
                path = logs / f"{spec.name}.log"
                self._files[spec.name] = open_private(path, os.O_APPEND)
        self._routers.start()
        self._nodes.start()

    def poll(self) -> None:
        """Restart the processes that are due."""
        for ended in [*self._routers.poll(), *self._nodes.poll()]:
            self._ends[ended.name] = reason_of(ended)
            log_exit(log, ended)

    def restart(self, name: str) -> None:
        """Let a process drain and start again."""
        log.info("process is restarted", process=name)
        self._routers.restart(name)
        self._nodes.restart(name)

    def stop(self, *, is_hurried: bool) -> None:
        """End the routers, then the nodes, each with its `grace_s` unless it is hurried."""
        for supervisor, is_router in ((self._routers, True), (self._nodes, False)):
            specs = [
                one
                for one in self._job.processes
                if (one.role == "router") is is_router
            ]
            grace_s = max((spec.grace_s for spec in specs), default=0.0)
            supervisor.stop(HURRIED_S if is_hurried else grace_s, is_hurried=is_hurried)
        for file in self._files.values():
            file.close()

    def kill(self) -> None:
        self._routers.kill()
        self._nodes.kill()

    def statuses(self) -> list[ProcessStatus]:
        """Return the state of every process."""
        found = []
        for spec in self._job.processes:
            supervisor = self._routers if spec.role == "router" else self._nodes
            pid = supervisor.pid_of(spec.name)
            state: ProcessState = "running" if pid is not None else "ended"
            note = f"pid {pid}" if pid is not None else ""
            last_end = self._ends.get(spec.name, "")
            found.append(
                ProcessStatus(spec.name, spec.role, spec.host, state, note, last_end)
            )
        return found

    def _relay(self, name: str, line: str) -> None:
        """Pass on a line of a process."""
        text = relayed(name, line)
        # The file below may be on another disk.
        with contextlib.suppress(OSError):
            print(text, flush=True)
        if name not in self._files:
            return
        try:
            self._files[name].write(f"{text}\n".encode(errors="replace"))
        except OSError as error:
            reason = str(error.strerror)
            if self._failing.get(name) != reason:
                log.error(f"cannot write the log of {name}", reason=reason)
            self._failing[name] = reason
        else:
            self._failing.pop(name, None)


def reason_of(ended: Exit) -> str:
    """Return one line that says why a process ended, with the last line of one that failed."""
    if ended.code < 0:
        return f"killed by {signal.Signals(-ended.code).name}"
    last = next((line for line in reversed(ended.tail) if line.strip()), "")
    for start in (f" {ended.name}: ", "baton: "):
        last = last.partition(start)[2] or last
    return f"exit code {ended.code}" + (f": {last.strip()}" if last else "")


def _command(spec: ProcessSpec) -> Command:
    env = {**spec.env, **spec.secret_env}
    return Command(spec.name, spec.argv[1:], env=tuple(env.items()))


def supervise(
    job: HostJob,
    folder: Path | None = None,
    is_over: Callable[[], bool] = lambda: False,
) -> bool:
    """Supervise processes until SIGTERM, which lets them drain, or SIGINT.

    A second signal ends everything at once. `folder` gets the states of the processes, and has
    the names of those to restart. Return whether the processes were ended because they are over.
    """
    die_with_parent()
    setup(LogConfig(), "supervisor")
    processes = HostProcesses(job)
    with Interrupts(on_second=processes.kill) as interrupts:
        ended = False
        try:
            processes.start()
            while True:
                if folder is not None:
                    write_statuses(folder / STATUS, processes.statuses())
                    for name in _asked_to_restart(folder):
                        processes.restart(name)
                if ended or interrupts.wait(WATCH_S):
                    break
                processes.poll()
                ended = is_over()
        finally:
            processes.stop(is_hurried=ended or interrupts.is_hurried)
    return ended


def _asked_to_restart(folder: Path) -> list[str]:
    """Return the processes that `baton restart` has named since the last call."""
    names = []
    with contextlib.suppress(OSError):
        for file in (folder / RESTARTS).iterdir():
            file.unlink()
            names.append(file.name)
    return names


def write_statuses(path: Path, statuses: Sequence[ProcessStatus]) -> None:
    """Write the state of the processes if it has changed. A full disk leaves the old state."""
    content = msgspec.json.encode(statuses)
    with contextlib.suppress(OSError):
        if not path.exists() or path.read_bytes() != content:
            write_private(path, content)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    supervise(msgspec.json.decode((folder / JOB).read_bytes(), type=HostJob), folder)
