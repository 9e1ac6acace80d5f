"""The number of threads of a step: this node's share of the host, or more while others are idle.

The thread that computes on a CPU calls `begin` and `end` around each step. The number cannot change
a bit: kernels never share a sum between threads, and row rules hold for every number that is used.
"""

from pathlib import Path

import torch

from baton.engine.shared_cpus import SharedCpus
from baton.protocol.config import EngineConfig
from baton.runtime.host import thread_counts

# One thread computes fewer tokens just as fast, and leaves the other CPUs to the router.
MIN_TOKENS = 64


class StepCpus:
    def __init__(self, engine: EngineConfig) -> None:
        """Raises `ConfigError` if the file (`engine.shared_cpus`) cannot be used."""
        self.share, *more = thread_counts(engine)
        self._shared = SharedCpus(Path(engine.shared_cpus), self.share, more[0]) if more else None

    def begin(self, num_tokens: int) -> None:
        """Set the calling thread's number of threads for a step of `num_tokens`."""
        if self._shared is not None:
            torch.set_num_threads(self._shared.take(may_borrow=num_tokens >= MIN_TOKENS))

    def end(self) -> None:
        if self._shared is not None:
            self._shared.give_back()
