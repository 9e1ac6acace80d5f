"""`baton up` on this machine: its processes of a description, below one supervisor.

With hosts in the description, the same file is started on each of them, and each runs its own
processes. The supervisor is a child of `baton up`, or with `--detach` a process of its own that
`baton down` finds by its id and start time.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from baton.deploy.cluster.hosts import check_machine, chosen, on_this_machine
from baton.deploy.cluster.processes import ROUTERS, ClusterPlan, ProcessSpec
from baton.deploy.cluster.state import (
    ProcessId,
    ProcessState,
    ProcessStatus,
    open_private,
    write_private,
)
from baton.deploy.cluster.supervision import JOB, RESTARTS, STATUS, HostJob
from baton.deploy.startup import url_of
from baton.protocol.errors import ConfigError, NodeError
from baton.runtime.process import Child, Command
from baton.runtime.settings import VARIABLE_PREFIX

SUPERVISOR = "supervisor.json"
SUPERVISOR_LOG = "supervisor.log"
SHARED_CPUS = "cpus"
NODES = "nodes.json"  # the states of nodes that run elsewhere, beside routers here
MODULE = "baton.deploy.cluster.supervision"
# The time that the supervisor itself takes beyond the grace of its processes.
EXTRA_STOP_S = 10.0


class LocalPlatform:
    """Implements `Platform`."""

    def __init__(self, hosts: Sequence[str] = (), *, is_tied: bool = False) -> None:
        """Take the hosts whose processes are handled; without any, those of this machine.

        If the processes are tied, they end with this one, which shows what they print.
        """
        self._hosts = hosts
        self._is_tied = is_tied
        # Held so that it is reaped.
        self._supervisor: Child | subprocess.Popen[bytes] | None = None

    def own(self, plan: ClusterPlan) -> tuple[ProcessSpec, ...]:
        return chosen(plan, self._hosts)

    def start(self, plan: ClusterPlan, folder: Path) -> None:
        specs = self.own(plan)
        check_machine(plan, specs)
        specs = on_this_machine(specs, str(folder / SHARED_CPUS))
        logs = plan.description.logs or str(folder / "logs")
        write_private(folder / JOB, msgspec.json.encode(HostJob(specs, logs)))
        (folder / STATUS).unlink(missing_ok=True)
        if self._is_tied:
            command = Command("supervisor", (str(folder),), module=MODULE)
            self._supervisor = Child(command, lambda _, line: print(line, flush=True))
        else:
            self._supervisor = _detached(folder)
        write_private(
            folder / SUPERVISOR, msgspec.json.encode(ProcessId.of(self._supervisor.pid))
        )

    def stop(self, folder: Path, *, is_hurried: bool = False) -> None:
        supervisor = _supervisor_of(folder)
        number = signal.SIGINT if is_hurried else signal.SIGTERM
        if supervisor is not None and supervisor.signal(number):
            job = msgspec.json.decode((folder / JOB).read_bytes(), type=HostJob)
            longest_s = 2 * max(spec.grace_s for spec in job.processes) + EXTRA_STOP_S
            if not supervisor.wait(longest_s):
                # Its processes end with it.
                supervisor.signal(signal.SIGKILL)
                supervisor.wait(EXTRA_STOP_S)
        if isinstance(self._supervisor, Child):
            self._supervisor.poll()
        for name in (JOB, STATUS, NODES, SUPERVISOR, SHARED_CPUS):
            (folder / name).unlink(missing_ok=True)
        shutil.rmtree(folder / RESTARTS, ignore_errors=True)

    def restart(self, folder: Path, name: str) -> None:
        """Ask the supervisor to let a process drain and start again. Raises `ConfigError`."""
        supervisor = _supervisor_of(folder)
        if supervisor is None or supervisor.process() is None:
            raise ConfigError(
                f"the supervisor of {folder} does not run: use `baton up`"
            )
        restarts = folder / RESTARTS
        restarts.mkdir(mode=0o700, exist_ok=True)
        (restarts / name).touch()

    def status(self, folder: Path) -> list[ProcessStatus]:
        supervisor = _supervisor_of(folder)
        if (
            supervisor is not None
            and supervisor.process()
            and (folder / STATUS).exists()
        ):
            return _statuses_in(folder / STATUS) + _statuses_in(folder / NODES)
        if not (folder / JOB).exists():
            return []
        state: ProcessState = "waiting"
        last_end = ""
        if supervisor is None or not supervisor.process():
            state = "ended"
            last_end = f"its supervisor has ended: see {folder / SUPERVISOR_LOG}"
        job = msgspec.json.decode((folder / JOB).read_bytes(), type=HostJob)
        return [
            ProcessStatus(spec.name, spec.role, spec.host, state, "", last_end)
            for spec in job.processes
        ]

    def urls(self, plan: ClusterPlan, folder: Path) -> tuple[str, ...]:
        # A description for Ray names no hosts.
        hosts = {status.name: status.host for status in self.status(folder)}
        routers = [
            (spec, spec.host or hosts.get(spec.name)) for spec in plan.pool(ROUTERS)
        ]
        return tuple(
            url_of(host, spec.ports[0].port, is_tls=spec.is_tls)
            for spec, host in routers
            if host
        )


def _statuses_in(file: Path) -> list[ProcessStatus]:
    try:
        return msgspec.json.decode(file.read_bytes(), type=list[ProcessStatus])
    except FileNotFoundError:
        return []


def _detached(folder: Path) -> "subprocess.Popen[bytes]":
    """Start a supervisor that outlives this process."""
    env = {
        k: text for k, text in os.environ.items() if not k.startswith(VARIABLE_PREFIX)
    }
    try:
        return subprocess.Popen(
            [sys.executable, "-m", MODULE, str(folder)],
            env={**env, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=open_private(folder / SUPERVISOR_LOG, os.O_TRUNC),
            start_new_session=True,
        )
    except OSError as error:
        raise NodeError(f"cannot start the supervisor: {error}") from error


def _supervisor_of(folder: Path) -> ProcessId | None:
    file = folder / SUPERVISOR
    try:
        return msgspec.json.decode(file.read_bytes(), type=ProcessId)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"{file} is of another version of baton: end that process: {error}"
        ) from None
