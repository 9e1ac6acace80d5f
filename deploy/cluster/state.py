"""The record of a deployment between two commands: its state folder, and the state of processes.

A process of this host is known by its id and the moment it started, so that a signal never reaches
another process that got the same id later.
"""

import contextlib
import os
import select
import signal
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from baton.deploy.cluster.description import read_yaml
from baton.deploy.cluster.processes import ClusterPlan, ProcessRole, ProcessSpec
from baton.protocol.errors import ConfigError

DEPLOYMENT = "deployment.json"
STATE_VARIABLE = "XDG_STATE_HOME"

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

    `folder` is the private state folder of one deployment, in which a platform keeps what `stop`
    and `status` need.
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
        """Return the routers' base URLs; there are none while the platform chooses their hosts."""


class ProcessId(msgspec.Struct, frozen=True):
    """A process of this host that need not be a child of ours."""

    pid: int
    started: str  # the boot of the host, and the ticks from it to the start

    @classmethod
    def of(cls, pid: int) -> "ProcessId":
        return cls(pid, _started(pid))

    @property
    def is_alive(self) -> bool:
        return _started(self.pid) == self.started

    def signal(self, number: signal.Signals) -> bool:
        """Send a signal, and return whether the process was still there."""
        with self._open() as descriptor:
            if descriptor < 0:
                return False
            signal.pidfd_send_signal(descriptor, number)
            return True

    def wait(self, timeout_s: float) -> bool:
        """Return whether the process is gone within `timeout_s`."""
        with self._open() as descriptor:
            if descriptor < 0:
                return True
            return bool(select.select([descriptor], [], [], timeout_s)[0])

    @contextlib.contextmanager
    def _open(self) -> Iterator[int]:
        """Open a descriptor of exactly this process; -1 if it is gone."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            yield -1
            return
        try:
            # The id may have gone to another process before it was opened, but not after.
            yield descriptor if self.is_alive else -1
        finally:
            os.close(descriptor)


class Deployment(msgspec.Struct, frozen=True):
    """What `up` records for later commands."""

    name: str
    platform: str
    file: str
    hosts: tuple[str, ...] = ()  # whose processes were started; empty means all of them
    address: str = ""  # of the Ray cluster


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


def _started(pid: int) -> str:
    """Return when a process started; empty if it is gone or a zombie."""
    try:
        # The name of the process, in brackets, may hold spaces and brackets itself.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else f"{boot} {fields[19]}"
