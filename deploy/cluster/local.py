"""`--on local`: the processes of this machine, kept running by one keeper.

With hosts in the description, the same file is started on each of them, and each runs its own
processes. The keeper is a child of `baton up`, or with `--detach` a process of its own that
`baton down` finds by its id and start time.
"""

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import msgspec

from baton.deploy.cluster.description import Description
from baton.deploy.cluster.hosts import (
    check_machine,
    chosen,
    on_this_machine,
    places_by_name,
    routers_urls,
)
from baton.deploy.cluster.keeper import ORDERS, STATUS, Orders
from baton.deploy.cluster.platform import PlatformOptions, ProcessState, ProcessStatus
from baton.deploy.cluster.processes import ClusterPlan, ProcessPlaces, ProcessSpec
from baton.deploy.cluster.running import ProcessId, write_private
from baton.protocol.errors import NodeError
from baton.runtime.process import Child, Command
from baton.runtime.settings import VARIABLE_PREFIX

KEEPER, KEEPER_LOG, SHARED_CPUS = "keeper.json", "keeper.log", "cpus"
MODULE = "baton.deploy.cluster.keeper"
# The time that the keeper itself takes beyond the grace of its processes.
EXTRA_STOP_S = 10.0


class LocalPlatform:
    """Implements `Platform`."""

    def __init__(self, options: PlatformOptions) -> None:
        self._options = options
        # The keeper that this process has started, held so that it is reaped.
        self._keeper: Child | subprocess.Popen[bytes] | None = None

    def places(self, description: Description) -> ProcessPlaces:
        return places_by_name(description)

    def own(self, plan: ClusterPlan) -> tuple[ProcessSpec, ...]:
        return chosen(plan, self._options.hosts)

    def render(self, plan: ClusterPlan, folder: Path) -> list[Path]:
        """Write a shell script per process, which only this user can read."""
        files = []
        for spec in plan.processes:
            path = folder / f"{spec.name}.sh"
            write_private(path, _script(spec).encode())
            path.chmod(0o700)
            files.append(path)
        return files

    def start(self, plan: ClusterPlan, folder: Path) -> None:
        specs = self.own(plan)
        check_machine(plan, specs)
        specs = on_this_machine(specs, str(folder / SHARED_CPUS))
        logs = plan.description.logs or str(folder / "logs")
        write_private(folder / ORDERS, msgspec.json.encode(Orders(specs, logs)))
        (folder / STATUS).unlink(missing_ok=True)
        if self._options.is_tied:
            command = Command("keeper", (str(folder),), module=MODULE)
            self._keeper = Child(command, lambda _, line: print(line, flush=True))
        else:
            self._keeper = _detached(folder)
        write_private(folder / KEEPER, msgspec.json.encode(ProcessId.of(self._keeper.pid)))

    def stop(self, folder: Path, *, is_hurried: bool = False) -> None:
        keeper = _keeper_of(folder)
        number = signal.SIGINT if is_hurried else signal.SIGTERM
        if keeper is not None and keeper.signal(number):
            orders = msgspec.json.decode((folder / ORDERS).read_bytes(), type=Orders)
            longest_s = 2 * max(spec.grace_s for spec in orders.processes) + EXTRA_STOP_S
            if not keeper.wait(longest_s):
                # Its processes end with it.
                keeper.signal(signal.SIGKILL)
                keeper.wait(EXTRA_STOP_S)
        if isinstance(self._keeper, Child):
            self._keeper.poll()
        for name in (ORDERS, STATUS, KEEPER, SHARED_CPUS):
            (folder / name).unlink(missing_ok=True)

    def status(self, folder: Path) -> list[ProcessStatus]:
        keeper = _keeper_of(folder)
        if keeper is not None and keeper.is_alive and (folder / STATUS).exists():
            return msgspec.json.decode((folder / STATUS).read_bytes(), type=list[ProcessStatus])
        if not (folder / ORDERS).exists():
            return []
        state: ProcessState = "waiting"
        last_end = ""
        if keeper is None or not keeper.is_alive:
            state, last_end = "ended", f"its keeper has ended: see {folder / KEEPER_LOG}"
        orders = msgspec.json.decode((folder / ORDERS).read_bytes(), type=Orders)
        return [
            ProcessStatus(spec.name, spec.role, spec.host, state, "", last_end)
            for spec in orders.processes
        ]

    def urls(self, plan: ClusterPlan, folder: Path) -> tuple[str, ...]:
        return routers_urls(plan)


def _detached(folder: Path) -> "subprocess.Popen[bytes]":
    """Start a keeper that outlives this process."""
    env = {k: text for k, text in os.environ.items() if not k.startswith(VARIABLE_PREFIX)}
    try:
        return subprocess.Popen(
            [sys.executable, "-m", MODULE, str(folder)],
            env={**env, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=(folder / KEEPER_LOG).open("wb"),
            start_new_session=True,
        )
    except OSError as error:
        raise NodeError(f"cannot start the keeper: {error}") from error


def _keeper_of(folder: Path) -> ProcessId | None:
    try:
        return msgspec.json.decode((folder / KEEPER).read_bytes(), type=ProcessId)
    except FileNotFoundError:
        return None


def _script(spec: ProcessSpec) -> str:
    exports = [
        f"export {name}={shlex.quote(text)}" for name, text in (spec.env | spec.secret_env).items()
    ]
    return "\n".join(
        [
            "#!/bin/sh",
            f"# {spec.name} on {spec.host}",
            *exports,
            f"exec {shlex.join(spec.argv)}",
            "",
        ]
    )
