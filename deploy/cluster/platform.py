"""The interface of platforms for `baton up`, `down`, `status` and `render`.

A platform is this host, systemd, Slurm, Ray or Kubernetes. It runs the processes of a `ClusterPlan`
unchanged: it may prefix a command with the program's path, but adds no setting except one that only
the machine knows, such as a share of its CPUs. `folder` is the state folder of one deployment,
which only its user can enter; a platform keeps there what `stop` and `status` need. `platforms`
chooses one by its name.
"""

from pathlib import Path
from typing import Literal, Protocol

import msgspec

from baton.deploy.cluster.description import Description
from baton.deploy.cluster.processes import ClusterPlan, ProcessPlaces, ProcessRole, ProcessSpec

ProcessState = Literal["waiting", "running", "ended", "unknown"]


class ProcessStatus(msgspec.Struct, frozen=True):
    """A process's state at its platform. Only its routers know whether a node is ready."""

    name: str
    role: ProcessRole
    host: str
    state: ProcessState
    note: str = ""  # its pid or its pod
    last_end: str = ""  # why it ended the last time, in one line, even if it runs again


class PlatformOptions(msgspec.Struct, frozen=True):
    """The options that the command line passes to a platform."""

    # Hosts whose processes are handled; empty means those of this machine.
    hosts: tuple[str, ...] = ()
    is_tied: bool = False  # everything ends with this process, which shows what the others print
    address: str = ""  # of the Ray cluster to join
    may_wait: bool = False  # for resources that are not there yet


class Platform(Protocol):
    def own(self, plan: ClusterPlan) -> tuple[ProcessSpec, ...]:
        """Return the processes that `start` starts: all of them, or those of the chosen hosts."""

    def places(self, description: Description) -> ProcessPlaces:
        """Return what the platform knows about the machines. Raises `ConfigError`."""

    def render(self, plan: ClusterPlan, folder: Path) -> list[Path]:
        """Write the files that run `plan` into `folder` and return them. Start nothing."""

    def start(self, plan: ClusterPlan, folder: Path) -> None:
        """Start every process and return without waiting for nodes to be ready.

        Raises `ConfigError` if the plan cannot work, and `NodeError` if starting failed.
        """

    def stop(self, folder: Path, *, is_hurried: bool = False) -> None:
        """End every process, each with its `grace_s`, and return when all are gone. Idempotent.

        If the platform supports it, hurried processes do not wait for their requests.
        """

    def status(self, folder: Path) -> list[ProcessStatus]:
        """Return the state of every process, with a reason if it has ended."""

    def urls(self, plan: ClusterPlan, folder: Path) -> tuple[str, ...]:
        """Return the routers' base URLs that can be reached from here; there may be none."""
