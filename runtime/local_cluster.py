"""Start, supervise and end the engine processes of one host.

Nodes meet each other and their router over sockets in a folder that only this user can enter. A
node that dies is restarted, after a longer delay each time; a node that was told to end (exit code
0) is not. Nothing here sends a message to a node: the router that the nodes dial knows their state.
"""

import shutil
import tempfile
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from baton.protocol.config import ClusterConfig
from baton.protocol.errors import ConfigError
from baton.runtime.channels.endpoint import MAX_IPC_PATH_BYTES
from baton.runtime.host import VISIBLE_GPUS, gpus_of, nodes_on_gpu, threads_per_rank
from baton.runtime.log import logger
from baton.runtime.process import Command, Exit, RelayLine, Supervisor, to_stderr
from baton.runtime.settings import to_yaml

# Nodes end within this time, by themselves or by force, so a Ctrl-C is over in five seconds.
NODE_GRACE_S = 2.5
# The longest name of a socket in a private folder.
LONGEST_NAME = "/peers-decode-9999"

log = logger("nodes")


class LocalCluster:
    """`config.prefill` and `config.decode` nodes that dial the routers."""

    def __init__(
        self,
        config: ClusterConfig,
        control_endpoint: str,
        relay: RelayLine = to_stderr,
        more_endpoints: tuple[str, ...] = (),
    ) -> None:
        """Start nothing yet. Reader threads will call `relay` with each line that a node prints.

        The nodes dial the router at `control_endpoint` and those at `more_endpoints`.
        """
        # Only routers check the keys of clients, so no other process is given them.
        router = msgspec.structs.replace(config.router, api_keys=(), api_key_file="")
        self._config = msgspec.structs.replace(config, router=router)
        self._routers = (control_endpoint, *more_endpoints)
        counts = (("prefill", config.prefill), ("decode", config.decode))
        self.names = tuple(
            f"{role}-{index}" for role, count in counts for index in range(count)
        )
        self._folder = private_folder()
        try:
            self.commands = tuple(
                self._command(name, nth) for nth, name in enumerate(self.names)
            )
        except BaseException:  # such as a full disk
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        self._supervisor = Supervisor(self.commands, relay=relay, may_leave=True)

    def start(self) -> None:
        """Spawn all nodes and return. Raises `NodeError` if the system cannot start one."""
        try:
            self._supervisor.start()
        except BaseException:
            self.stop()
            raise

    def poll(self) -> Sequence[Exit]:
        """Restart the nodes that are due; return the exits since the last call. Never blocks."""
        return self._supervisor.poll()

    def stop(self, grace_s: float = NODE_GRACE_S) -> None:
        """End every node, by force after `grace_s`. A second call does nothing.

        The nodes' router has ended before, so they have nothing to drain.
        """
        self._supervisor.stop(grace_s, is_hurried=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    def kill(self) -> None:
        """End every node by force without waiting. A signal handler may call it."""
        self._supervisor.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _command(self, name: str, number: int) -> Command:
        """Return the command of a node, whose settings are in a file of the private folder."""
        node = msgspec.structs.replace(
            self._config.node,
            id=name,
            routers=self._routers,
            bind=f"ipc://{self._folder}/peers-{name}",
            http=_counted_up(self._config.node.http, number),
        )
        settings = self._folder / f"{name}.yaml"
        # The nodes share this host's CPUs, GPUs and memory: each would otherwise take them all.
        num_nodes = self._config.prefill + self._config.decode
        threads = threads_per_rank(self._config.engine, num_nodes)
        engine = msgspec.structs.replace(self._config.engine, threads=threads)
        if not self._config.engine.threads and engine.tensor_parallel_size == 1:
            engine = msgspec.structs.replace(
                engine, shared_cpus=str(self._folder / "cpus")
            )
        degree = engine.tensor_parallel_size
        gpus = () if engine.device == "cpu" else gpus_of(number * degree)
        on_gpu = nodes_on_gpu(number, num_nodes, len(gpus), degree) if gpus else 1
        # A node that cannot use its GPU computes on the CPU, so it also needs its share of the
        # host.
        cache = msgspec.structs.replace(
            self._config.cache, shared_by=num_nodes, gpu_shared_by=on_gpu
        )
        config = msgspec.structs.replace(
            self._config, node=node, engine=engine, cache=cache
        )
        settings.write_text(to_yaml(config), encoding="utf-8")
        if on_gpu > 1:
            log.info(
                "this node shares its GPU with other nodes",
                node=name,
                gpu=gpus[0],
                nodes=on_gpu,
            )
        env = ((VISIBLE_GPUS, ",".join(gpus)),) if gpus else ()
        role = name.rpartition("-")[0]
        return Command(name, (role, "--config", str(settings)), env=env)


def fitted_to_gpus(config: ClusterConfig) -> ClusterConfig:
    """Return `config` with aggregated nodes alone if this host has fewer GPUs than its ranks.

    Two copies of the weights on one GPU would take turns and gain nothing. `local_prefill=never`
    keeps the nodes as they are.
    """
    engine = config.engine
    router = config.router
    num_nodes = config.prefill + config.decode
    num_gpus = 0 if engine.device == "cpu" or _has_cpu_torch() else len(gpus_of(0))
    is_enough = not num_gpus or num_gpus >= num_nodes * engine.tensor_parallel_size
    is_split = config.prefill and config.decode
    if is_enough or not is_split or router.local_prefill == "never":
        return config
    num_decode = max(1, num_gpus // engine.tensor_parallel_size)
    log.warning(
        "there are fewer GPUs than nodes, so aggregated nodes compute prompts and tokens; "
        "--local-prefill never lets prefill and decode nodes share GPUs",
        gpus=num_gpus,
        nodes=num_nodes,
        decode=num_decode,
    )
    router = msgspec.structs.replace(router, local_prefill="always")
    return msgspec.structs.replace(config, prefill=0, decode=num_decode, router=router)


def _has_cpu_torch() -> bool:
    """Return whether the build's version says that torch knows no GPUs, without importing it."""
    try:
        return version("torch").endswith("+cpu")
    except PackageNotFoundError:
        return False


def _counted_up(address: str, number: int) -> str:
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + number}" if port.isdecimal() and int(port) else address


def private_folder() -> Path:
    """Return a new folder of mode 0700 whose path is short enough for sockets in it."""
    folder = Path(tempfile.mkdtemp(prefix="baton-"))
    if len(bytes(folder)) + len(LONGEST_NAME) <= MAX_IPC_PATH_BYTES:
        return folder
    folder.rmdir()
    try:
        return Path(tempfile.mkdtemp(prefix="baton-", dir="/tmp"))
    except OSError as error:
        raise ConfigError(
            f"{folder.parent} is too long for sockets: set TMPDIR"
        ) from error
