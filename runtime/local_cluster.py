"""The engine processes of one host: started, supervised, ended.

`serve` and `AsyncLLM` call it. Nodes meet each other and their router over sockets in a folder that
only this user can enter. A node that ends by itself is started again, later each time; whether that
is worth it while none was ever ready is for the caller to decide. It never speaks to a node: what
they are up to is known to the router they dial.
"""

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from baton.protocol.config import ClusterConfig
from baton.protocol.errors import ConfigError
from baton.protocol.messages import Role
from baton.runtime.channels.endpoint import MAX_IPC_PATH_BYTES
from baton.runtime.clock import monotonic
from baton.runtime.process import Command, Exit, Relay, Supervisor, to_stderr
from baton.runtime.settings import to_yaml

# Nodes end within this, by themselves or by force, so that a Ctrl-C is over in five seconds.
NODE_GRACE_S = 2.5
# The longest name of a socket in a private folder.
LONGEST_NAME = "/peers-decode-9999"


class LocalCluster:
    """`config.prefill` and `config.decode` nodes that dial the router at `control_endpoint`."""

    def __init__(
        self, config: ClusterConfig, control_endpoint: str, relay: Relay = to_stderr
    ) -> None:
        """Starts nothing yet. `relay` gets every line that a node prints, from threads."""
        self._config = config
        self._control = control_endpoint
        self._relay = relay
        self._folder: Path | None = None
        self._supervisor: Supervisor | None = None

    def start(self) -> None:
        """Spawns all nodes and returns; raises `NodeError` when the system refuses."""
        assert self._supervisor is None, "a LocalCluster starts once"
        self._folder = private_folder()
        self._supervisor = Supervisor(tuple(self._commands(self._folder)), monotonic, self._relay)
        try:
            self._supervisor.start()
        except BaseException:
            self.stop()
            raise

    def poll(self) -> Sequence[Exit]:
        """Nodes that ended since the last call; starts again those that are due. Never blocks."""
        return self._supervisor.poll() if self._supervisor is not None else ()

    def pid_of(self, name: str) -> int | None:
        """The process of `prefill-0`, `decode-1`, ...; None while it is down."""
        return self._supervisor.pid_of(name) if self._supervisor is not None else None

    def stop(self, grace_s: float = NODE_GRACE_S) -> None:
        """Ends every node, by force after `grace_s`. Idempotent."""
        if self._supervisor is not None:
            self._supervisor.stop(grace_s)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def kill(self) -> None:
        """Ends every node by force, without waiting; safe in a signal handler."""
        if self._supervisor is not None:
            self._supervisor.kill()

    def _commands(self, folder: Path) -> list[Command]:
        counts: tuple[tuple[Role, int], ...] = (
            ("prefill", self._config.prefill),
            ("decode", self._config.decode),
        )
        return [
            self._command(folder, role, index) for role, count in counts for index in range(count)
        ]

    def _command(self, folder: Path, role: Role, index: int) -> Command:
        name = f"{role}-{index}"
        node = msgspec.structs.replace(
            self._config.node,
            id=name,
            routers=(self._control,),
            bind=f"ipc://{folder}/peers-{name}",
        )
        settings = folder / f"{name}.yaml"
        settings.write_text(to_yaml(msgspec.structs.replace(self._config, node=node)))
        return Command(name, (role, "--config", str(settings)))


def private_folder() -> Path:
    """A new folder of mode 0700 whose path is short enough for sockets in it."""
    folder = Path(tempfile.mkdtemp(prefix="baton-"))
    if len(bytes(folder)) + len(LONGEST_NAME) <= MAX_IPC_PATH_BYTES:
        return folder
    folder.rmdir()
    try:
        return Path(tempfile.mkdtemp(prefix="baton-", dir="/tmp"))
    except OSError as error:
        raise ConfigError(f"{folder.parent} is too long for sockets: set TMPDIR") from error
