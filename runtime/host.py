"""What this host offers a process: CPUs, GPUs, file descriptors and network devices.

A number in the settings takes precedence over what is found here. Nothing imports torch.
"""

import asyncio
import contextlib
import math
import os
import resource
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from baton.protocol.config import EngineConfig, NodeConfig
from baton.protocol.errors import ConfigError
from baton.runtime.channels.endpoint import Endpoint, parse_endpoint
from baton.runtime.log import logger

CGROUP = Path("/sys/fs/cgroup")  # a container has its own limit
DEVICES = Path("/dev")
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
RDMA_PORTS = Path("/sys/class/infiniband")
_ACTIVE = "4: ACTIVE"
_WARN_EVERY_S = 10.0
# Rounds of a busy loop, about 0.1 ms: longer than the pause between the small operations of a step.
SPINS = 5_000

log = logger("connections")


def threads_per_rank(engine: EngineConfig, num_nodes: int = 1) -> int:
    """Return `engine.threads`, or each rank's share if `num_nodes` nodes share this host."""
    if engine.threads:
        return engine.threads
    return max(1, _num_cpus() // (num_nodes * engine.tensor_parallel_size))


def thread_counts(engine: EngineConfig) -> tuple[int, ...]:
    """Return the numbers of threads that a step of this rank may use, in ascending order."""
    share = threads_per_rank(engine)
    most = _num_cpus() if engine.shared_cpus else share
    return (share, most) if most > share else (share,)


def spin_briefly() -> None:
    """Make idle threads of GNU OpenMP give up their CPUs soon. Call it before torch is imported.

    By default these threads spin for some milliseconds until the next matrix product, on CPUs that
    the other kernels of a step and the other processes of this host need. A value that the user has
    set in the environment is kept.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPINS))


def _num_cpus() -> int:
    """Return how many CPUs the affinity of this process and the quota of its container leave it."""
    count = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # macOS has none
        count = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):
        quota, period = (CGROUP / "cpu.max").read_text(encoding="utf-8").split()
        if quota != "max":
            count = min(count, math.ceil(int(quota) / int(period)))
    return count


def available_bytes() -> int:
    """Return how much memory is left on this host, or all that its container may have if less.

    What a container uses tells little, since most of it are pages of files.
    """
    available = psutil.virtual_memory().available
    # Without a limit, the file says "max".
    with contextlib.suppress(OSError, ValueError):
        available = min(
            available, int((CGROUP / "memory.max").read_text(encoding="utf-8"))
        )
    return available


def num_gpus(devices: Path = DEVICES) -> int:
    """Return how many NVIDIA GPUs this process could open."""
    return len(list(devices.glob("nvidia[0-9]*")))


def gpus_of(
    number: int, devices: Path = DEVICES, environment: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """Return the GPUs of this process, beginning with GPU `number` and wrapping around.

    The result is empty on a machine without GPUs.
    """
    given = (os.environ if environment is None else environment).get(VISIBLE_GPUS)
    if given is None:
        known = tuple(str(index) for index in range(num_gpus(devices)))
    else:
        known = tuple(name.strip() for name in given.split(",") if name.strip())
    if not known:
        return ()
    first = number % len(known)
    return known[first:] + known[:first]


def nodes_on_gpu(
    number: int, num_nodes: int, num_known: int, gpus_each: int = 1
) -> int:
    """Return how many of `num_nodes` nodes use a GPU of node `number`, that node included.

    Each node takes the next `gpus_each` GPUs, one for each of its ranks.
    """

    def taken(node: int) -> set[int]:
        return {(node * gpus_each + rank) % num_known for rank in range(gpus_each)}

    own = taken(number)
    return max(sum(gpu in taken(node) for node in range(num_nodes)) for gpu in own)


# With fewer, a router could not accept a probe beside its nodes and a flood of clients.
MIN_DESCRIPTORS = 128


def raise_descriptor_limit() -> None:
    """Raises `ConfigError` if this process may open too few files and connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < MIN_DESCRIPTORS:
        raise ConfigError(
            f"this process may open {hard} files, and needs {MIN_DESCRIPTORS}: raise `ulimit -n`"
        )
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class RareWarning:
    """Logs a warning at most every ten seconds, however often it is called."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last_s: float | None = None

    def __call__(self, text: str) -> None:
        now_s = self._clock()
        if self._last_s is None or now_s - self._last_s >= _WARN_EVERY_S:
            self._last_s = now_s
            log.warning(text)


class AcceptErrors:
    """An exception handler for the event loop that keeps failing accepts out of the log.

    asyncio reports each of them with a traceback, thousands per second when descriptors run out.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._warn = RareWarning(loop.time)

    def __call__(
        self, loop: asyncio.AbstractEventLoop, context: dict[str, object]
    ) -> None:
        if str(context.get("message", "")).startswith("socket.accept()"):
            self._warn(
                f"connections cannot be accepted: {context.get('exception')}; raise the limit of "
                f"open files (ulimit -n)"
            )
        else:
            loop.default_exception_handler(context)


def devices_for(node: NodeConfig, rdma_ports: Path = RDMA_PORTS) -> str:
    """Return UCX's list of devices, such as `mlx5_0:1,eth0`; empty for loopback alone.

    An address that does not resolve yet, or that this host cannot reach, counts as loopback.
    """
    names = (_interface_of(own_address(endpoint)) for endpoint in _outward(node))
    interface = next(filter(None, names), "")
    return ",".join([*active_ports(rdma_ports), interface]) if interface else ""


def reaches_out(node: NodeConfig) -> bool:
    """Return whether a node binds or dials an address beyond this host."""
    return bool(_outward(node))


def _outward(node: NodeConfig) -> list[Endpoint]:
    endpoints = map(parse_endpoint, (node.bind, *node.routers))
    return [
        one for one in endpoints if not (one.path or one.is_loopback or one.is_wildcard)
    ]


def own_address(endpoint: Endpoint) -> str:
    """Return the address from which this host would talk to `endpoint`; empty if it cannot."""
    try:
        found = socket.getaddrinfo(
            endpoint.host, endpoint.port or 1, type=socket.SOCK_DGRAM
        )
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # a datagram socket only looks up the route
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def _interface_of(address: str) -> str:
    for name, owned in psutil.net_if_addrs().items():
        if address in (one.address.partition("%")[0] for one in owned):
            return name
    return ""


def active_ports(folder: Path = RDMA_PORTS) -> list[str]:
    """Return the ports that are up, as `device:port`."""
    found = []
    for state in sorted(folder.glob("*/ports/*/state")):
        with contextlib.suppress(OSError):  # a port that is hidden from this process
            if state.read_text(encoding="utf-8").strip() == _ACTIVE:
                found.append(f"{state.parents[2].name}:{state.parent.name}")
    return found
