"""The number of threads that compute a rank: an equal share of the CPUs that this process may use.

The launcher divides them among the nodes that it starts on this host, and a node divides its part
among its ranks. A number in the settings takes precedence. No thread is bound to a CPU.
`spin_briefly` is for the threads that torch keeps.
"""

import contextlib
import math
import os
from pathlib import Path

from baton.protocol.config import EngineConfig

CGROUP = Path("/sys/fs/cgroup")  # a container has its own limit
# Rounds of a busy loop, about 0.1 ms: longer than the pause between the small operations of a step.
SPINS = 5_000


def threads_per_rank(engine: EngineConfig, num_nodes: int = 1) -> int:
    """Return `engine.threads`, or each rank's share if `num_nodes` nodes share this host."""
    if engine.threads:
        return engine.threads
    return max(1, _num_cpus() // (num_nodes * engine.tensor_parallel))


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
        quota, period = (CGROUP / "cpu.max").read_text().split()
        if quota != "max":
            count = min(count, math.ceil(int(quota) / int(period)))
    return count
