"""Start the nodes of an `AsyncLLM` on its own host, and react if one of them ends.

If a node ends before any node was ever ready, the router fails too, because a restart would not
help. Later, the launcher restarts a node that has ended. Nothing here sends messages to a node.
"""

import asyncio
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from baton.protocol.config import ClusterConfig
from baton.protocol.errors import NodeError
from baton.router.text_router import TextRouter
from baton.runtime.local_cluster import private_folder
from baton.runtime.log import logger
from baton.runtime.process import Exit

WATCH_S = 0.2

log = logger("router")


class LocalNodes(Protocol):
    """Node processes on this host, such as a `LocalCluster`."""

    def start(self) -> None: ...

    def poll(self) -> Sequence[Exit]:
        """Return the processes that have ended since the last call, without blocking."""
        ...

    def stop(self) -> None: ...


Launcher = Callable[[ClusterConfig, str], LocalNodes]


class StartedNodes:
    """The nodes. Call `start` on the event loop of their router, and `stop` at the end."""

    def __init__(self, config: ClusterConfig, router: TextRouter, launcher: Launcher) -> None:
        """`launcher` starts the nodes of `config`, which dial the endpoint that is passed to it."""
        self._config = config
        self._router = router
        self._launcher = launcher
        self._nodes: LocalNodes | None = None
        self._folder: Path | None = None
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Open the router's endpoint and start the nodes, without waiting for them."""
        endpoint = self._router.start(self._config.router.control or self._private_endpoint())
        self._nodes = self._launcher(self._config, endpoint)
        self._nodes.start()
        self._watch()

    async def stop(self) -> None:
        """End the nodes. It may be called again."""
        if self._timer is not None:
            self._timer.cancel()
        nodes, self._nodes = self._nodes, None
        if nodes is not None:
            try:
                await asyncio.to_thread(nodes.stop)
            except RuntimeError:  # the interpreter is ending and no longer starts threads
                nodes.stop()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _private_endpoint(self) -> str:
        self._folder = private_folder()
        return f"ipc://{self._folder}/control"

    def _watch(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(WATCH_S, self._watch)
        assert self._nodes is not None
        for exit_ in self._nodes.poll():
            log.warning("node process ended", node=exit_.name, code=exit_.code)
            if not self._router.was_ever_ready:
                tail = "\n".join(exit_.tail)
                text = f"{exit_.name} ended with code {exit_.code} while it started:\n{tail}"
                self._router.fail(NodeError(text, code="start_failed").to_failure())
