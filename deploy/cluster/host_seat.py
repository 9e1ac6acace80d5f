"""A host of a cluster, and how `baton doctor` runs a command there."""

import shlex
from collections.abc import Sequence

import msgspec

from baton.deploy.cluster.processes import ProcessSpec


class HostSeat(msgspec.Struct, frozen=True):
    """A host, and the processes that run or would run there, with addresses filled in."""

    host: str
    specs: tuple[ProcessSpec, ...]
    program: tuple[str, ...]  # what runs baton there
    # The words before a command; None if the host cannot be reached.
    launcher: tuple[str, ...] | None
    has_shell: bool = False  # the launcher hands the words to a shell, as ssh does

    @property
    def nodes(self) -> list[ProcessSpec]:
        return [spec for spec in self.specs if spec.role != "router"]

    def command(self, words: Sequence[str]) -> list[str]:
        """Return the command that runs baton there with these words, in a node's environment."""
        assert self.launcher is not None
        env = (self.nodes or self.specs)[0].env
        # Settings are in the words; other variables of a node, such as UCX_TLS, matter here too.
        given = [f"{name}={text}" for name, text in env.items() if not name.startswith("BATON_")]
        inner = [*(["env", *given] if given else []), *self.program, *words]
        return [*self.launcher, *(map(shlex.quote, inner) if self.has_shell else inner)]
