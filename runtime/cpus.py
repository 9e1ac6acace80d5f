"""How many threads compute a rank: the CPUs that this process may use, divided fairly.

The launcher divides them among the nodes that it starts on this host, a node among its ranks. A
number in the settings is taken as it is. Nothing is bound to a CPU.
"""

import os

from baton.protocol.config import EngineConfig


def threads_per_rank(engine: EngineConfig, num_nodes: int = 1) -> int:
    """Return `engine.threads`, or each rank's share if `num_nodes` nodes share this host."""
    if engine.threads:
        return engine.threads
    return max(1, _num_cpus() // (num_nodes * engine.tensor_parallel))


def _num_cpus() -> int:
    """Return how many CPUs the affinity of this process leaves it."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # macOS knows no affinity
