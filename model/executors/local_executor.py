"""Run one rank in this process, with threads that launch its steps and collect them.

The loop's thread submits and polls, and an eventfd signals results to it. An error in one of the
other threads ends the node.
"""

import contextlib
import os
import threading
from collections import deque
from collections.abc import Sequence
from functools import partial

from baton.kv_transfer.interfaces import TransferPort
from baton.model.executors.profiler import StepProfiler
from baton.model.executors.step_threads import StepCpus, StepThreads
from baton.model.runner.rank import LoadedRank, load_rank
from baton.model.tensor_parallel import SingleRank
from baton.node.executor import AdapterLoad, AdapterOutcome, ExecutorInfo, Progress
from baton.node.scheduling.plan import StepPlan, StepResult
from baton.protocol.config import ClusterConfig
from baton.protocol.errors import NodeError
from baton.protocol.ids import Epoch

CLOSE_S = 4.0  # out of the five seconds that a close may take; the rest is for the port


class InProcessExecutor:
    def __init__(self, config: ClusterConfig, epoch: Epoch) -> None:
        self._config = config
        self._epoch = epoch
        self._rank: LoadedRank | None = None
        self._threads: StepThreads | None = None
        self._results: deque[StepResult] = deque()
        self._adapters: deque[AdapterOutcome] = deque()
        self._error: NodeError | None = None
        self._event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # `close` does not wait for a thread that reads an adapter.
        self._signaling = threading.Lock()

    def start(self, progress: Progress) -> ExecutorInfo:
        profiler = StepProfiler(self._config, self._epoch)
        self._threads = StepThreads(StepCpus(self._config.engine), self._take, profiler)
        load = partial(load_rank, self._config, self._epoch, SingleRank())
        self._rank = self._threads.start(load, progress)
        return self._rank.info

    def submit(self, plan: StepPlan) -> None:
        assert self._threads is not None, "plans come after start"
        self._threads.submit(plan)

    def profile(self, name: str) -> None:
        assert self._threads is not None, "profiles come after start"
        self._threads.submit(name)

    def load_adapter(self, load: AdapterLoad) -> None:
        assert self._threads is not None, "adapters come after start"
        self._threads.load_adapter(load)

    def poll_adapter(self) -> AdapterOutcome | None:
        return self._adapters.popleft() if self._adapters else None

    def poll(self) -> StepResult | None:
        if not self._results:
            # Clear the flag, then look again, because a result may have arrived in between.
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._event_fd)
        # Read it first, so that `_results` has every result from before the error.
        error = self._error
        if self._results:
            if error is not None:
                # The flag of the error may have been cleared.
                os.eventfd_write(self._event_fd, 1)
            return self._results.popleft()
        if error is not None:
            raise error
        return None

    def fileno(self) -> int:
        return self._event_fd

    @property
    def ports(self) -> Sequence[TransferPort]:
        assert self._rank is not None, "ports are there after start"
        return (self._rank.port,)

    def close(self) -> None:
        if self._threads is not None:
            if not self._threads.close(CLOSE_S):
                return  # they may still store into the pool and write to the eventfd
            self._threads = None
        if self._rank is not None:
            self._rank.close()
            self._rank = None
        with self._signaling:
            if self._event_fd >= 0:
                os.close(self._event_fd)
                self._event_fd = -1

    def _take(self, outcome: StepResult | NodeError | AdapterOutcome) -> None:
        if isinstance(outcome, NodeError):
            self._error = outcome
        elif isinstance(outcome, AdapterOutcome):
            self._adapters.append(outcome)
        else:
            self._results.append(outcome)
        with self._signaling:
            if self._event_fd >= 0:
                os.eventfd_write(self._event_fd, 1)
