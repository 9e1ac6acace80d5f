"""The record of a deployment between two commands: its state folder, and the state of processes.

A process of this host is known by its id and the moment it started, so that a signal never reaches
another process that got the same id later.
"""

import contextlib
import os
import signal
import stat
import tempfile
import time
from pathlib import Path
from typing import IO, Literal, Protocol

import msgspec
import psutil

from baton.deploy.cluster.description import read_yaml
from baton.deploy.cluster.processes import ClusterPlan, ProcessRole, ProcessSpec
from baton.protocol.errors import ConfigError
from baton.runtime.clock import monotonic

DEPLOYMENT = "deployment.json"
STATE_VARIABLE = "XDG_STATE_HOME"
WATCH_S = 0.05

ProcessState = Literal["waiting", "running", "ended", "unknown"]


class ProcessStatus(msgspec.Struct, frozen=True):
    """A process's state where it runs. Only its routers know whether a node is ready."""

    name: str
    role: ProcessRole
    host: str
    state: ProcessState
    note: str = ""  # its pid, or why it waits
    last_end: str = ""  # why it ended the last time, in one line, even if it runs again


class Platform(Protocol):
    """Runs the processes of a `ClusterPlan`: on this machine, or on Ray.

    `folder` is the private state folder of one deployment, in which a platform keeps what other
    commands need.
    """

    def own(self, plan: ClusterPlan) -> tuple[ProcessSpec, ...]:
        """Return the processes that `start` starts: all of them, or those of the chosen hosts."""

    def start(self, plan: ClusterPlan, folder: Path) -> None:
        """Start every process and return without waiting for nodes to be ready.

        Raises `ConfigError` if the plan cannot work, and `NodeError` if starting failed.
        """

    def stop(self, folder: Path, *, is_hurried: bool = False) -> None:
        """End every process and return when all are gone. Idempotent.

        Each has its `grace_s` for running requests, unless it is hurried.
        """

    def status(self, folder: Path) -> list[ProcessStatus]:
        """Return the state of every process, with a reason if it has ended."""

    def urls(self, plan: ClusterPlan, folder: Path) -> tuple[str, ...]:
        """Return the routers' base URLs; before `start`, none where the platform chooses hosts."""


class ProcessId(msgspec.Struct, frozen=True):
    """A process of this host that need not be a child of ours.

    A later process with the same id has another start, and psutil signals only the one it found.
    """

    pid: int
    started_s: float  # since the boot

    @classmethod
    def of(cls, pid: int) -> "ProcessId":
        return cls(pid, _started_s(psutil.Process(pid)))

    def process(self) -> psutil.Process | None:
        """Return the process, or None if it has ended."""
        with contextlib.suppress(psutil.NoSuchProcess):
            found = psutil.Process(self.pid)
            is_zombie = found.status() == psutil.STATUS_ZOMBIE
            return (
                found if _started_s(found) == self.started_s and not is_zombie else None
            )
        return None

    def signal(self, number: signal.Signals) -> bool:
        """Send a signal, and return whether the process was still there."""
        with contextlib.suppress(psutil.NoSuchProcess):
            if (found := self.process()) is not None:
                found.send_signal(number)
                return True
        return False

    def wait(self, timeout_s: float) -> bool:
        """Return whether the process is gone within `timeout_s`."""
        end_s = monotonic() + timeout_s
        while self.process() is not None:
            if monotonic() >= end_s:
                return False
            time.sleep(WATCH_S)
        return True


class Deployment(msgspec.Struct, frozen=True):
    """What `up` records for later commands."""

    name: str
    platform: str
    file: str
    hosts: tuple[str, ...] = ()  # whose processes were started; empty means all of them
    # The command, if it stays in front and the cluster ends with it.
    up: ProcessId | None = None
    stop_timeout_s: float = 0.0  # the longest that it takes to end its processes


def state_folder(name: str, chosen: str = "") -> Path:
    """Return the folder of a deployment, whether or not it exists."""
    if chosen:
        return Path(chosen).absolute()
    home = os.environ.get(STATE_VARIABLE) or "~/.local/state"
    return Path(home).expanduser() / "baton" / name


def read_deployment(folder: Path) -> Deployment | None:
    """Return what `up` has noted in a state folder; None if it noted nothing."""
    try:
        return msgspec.json.decode((folder / DEPLOYMENT).read_bytes(), type=Deployment)
    except (FileNotFoundError, NotADirectoryError):
        return None


def deployment_of(file: str, chosen: str = "") -> tuple[Path, Deployment]:
    """Return the state folder of a cluster.yaml's deployment, and what `up` wrote there.

    Raises `ConfigError` if nothing is up.
    """
    # The file may have changed since, so only its name counts.
    folder = state_folder("" if chosen else _name_in(Path(file)), chosen)
    deployment = read_deployment(folder)
    if deployment is None:
        raise ConfigError(
            f"nothing is up in {folder}: this user has not run `baton up` on this machine, or ran "
            "it with another --state"
        )
    return folder, deployment


def _name_in(path: Path) -> str:
    content = read_yaml(path)
    name = content.get("name") if isinstance(content, dict) else None
    if not isinstance(name, str):
        raise ConfigError(f"{path}: the key name is missing")
    return name


def write_deployment(folder: Path, deployment: Deployment) -> None:
    write_private(folder / DEPLOYMENT, msgspec.json.encode(deployment))


def forget_deployment(folder: Path) -> None:
    """Remove what `up` has noted of a deployment that has ended; its logs stay."""
    (folder / DEPLOYMENT).unlink(missing_ok=True)


def make_private(folder: Path) -> None:
    """Make the folder, or check that only this user can enter it. Raises `ConfigError`."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        mode = folder.stat().st_mode
    except OSError as error:
        raise ConfigError(
            f"cannot use the folder {folder}: {error.strerror}; name another"
        ) from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(
            f"the folder {folder} is open to other users and will hold secrets: name another, or "
            f"run `chmod 700 {folder}`"
        )


def open_private(path: Path, flags: int) -> IO[bytes]:
    """Open a file for writing, which this user alone can read if it is new."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | flags, 0o600)
    return open(descriptor, "wb", buffering=0)


def write_private(path: Path, content: bytes) -> None:
    """Replace a file by a private one. A reader sees either the old or the new content."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
        Path(name).replace(path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise


def _started_s(process: psutil.Process) -> float:
    # In ticks of the kernel.
    return round(process.create_time() - psutil.boot_time(), 2)
