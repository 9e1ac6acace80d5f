"""How many threads a step computes with: this node's share of the host, or more while others idle.

The compute thread of a rank on a CPU enters it around each step. The number cannot change a bit:
kernels never share a sum between threads, and row rules hold for every number that is used.
"""

from pathlib import Path
from types import TracebackType

import torch

from baton.protocol.config import EngineConfig
from baton.runtime.cpus import thread_counts
from baton.runtime.shared_cpus import SharedCpus


class StepCpus:
    """A context around each step. Make it in the thread that computes."""

    def __init__(self, engine: EngineConfig) -> None:
        """Set the threads of this thread; raises `ConfigError` for a file that cannot be used."""
        share, *more = thread_counts(engine)
        self._shared = SharedCpus(Path(engine.shared_cpus), share, more[0]) if more else None
        torch.set_num_threads(share)  # each thread of a process has its own number

    def __enter__(self) -> None:
        if self._shared is not None:
            torch.set_num_threads(self._shared.take())

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._shared is not None:
            self._shared.give_back()
