"""A host of a cluster, and how `baton doctor` runs a command there.

Platforms that have chosen the hosts themselves, and can run a command beside a process that they
have started, implement `Reaching`. Hosts by name are reached by `baton doctor` without a platform.
"""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import msgspec

from baton.deploy.cluster.processes import ClusterPlan, ProcessSpec


class HostSeat(msgspec.Struct, frozen=True):
    """A host, and the processes that run or would run there, with addresses filled in."""

    host: str
    specs: tuple[ProcessSpec, ...]
    program: tuple[str, ...]  # what runs baton there
    launcher: tuple[str, ...] | None  # the words before a command; None: it cannot be reached
    has_shell: bool = False  # the launcher hands the words to a shell, as ssh does

    @property
    def nodes(self) -> list[ProcessSpec]:
        return [spec for spec in self.specs if spec.role != "router"]

    def command(self, words: Sequence[str]) -> list[str]:
        """Return what runs baton there with these words, in the environment of a node."""
        assert self.launcher is not None
        env = (self.nodes or self.specs)[0].env
        # Settings are in the words; what else a node is told, such as UCX_TLS, counts here too.
        given = [f"{name}={text}" for name, text in env.items() if not name.startswith("BATON_")]
        inner = [*(["env", *given] if given else []), *self.program, *words]
        return [*self.launcher, *(map(shlex.quote, inner) if self.has_shell else inner)]


@runtime_checkable
class Reaching(Protocol):
    """A platform that can run a command on the hosts of a deployment that is up."""

    def seats(self, plan: ClusterPlan, folder: Path) -> list[HostSeat]:
        """Return the hosts of a deployment that have a process by now.

        `folder` is its state folder.
        """
