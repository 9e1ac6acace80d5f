"""One rank in this process: a compute thread between two queues.

Only the compute thread touches the runner. The loop's thread submits and polls, and an eventfd
tells it of results. An error in the compute thread ends the node.
"""

import contextlib
import os
import queue
import threading
from collections import deque
from collections.abc import Sequence

from baton.engine.executor import ExecutorInfo, Progress
from baton.engine.plan import StepPlan, StepResult
from baton.engine.rank import LoadedRank, load_rank
from baton.engine.runner import Runner
from baton.engine.step_cpus import StepCpus
from baton.engine.tensor_parallel import SingleRank
from baton.kv_transfer.interfaces import TransferPort
from baton.protocol.config import ClusterConfig
from baton.protocol.errors import NodeError
from baton.protocol.ids import Epoch

CLOSE_S = 4.0  # of the five seconds a close may take; the rest is the port's


class InProcessExecutor:
    """The `Executor` of one rank. `start` loads in the caller's thread."""

    def __init__(self, config: ClusterConfig, epoch: Epoch) -> None:
        self._config = config
        self._epoch = epoch
        self._rank: LoadedRank | None = None
        self._thread: threading.Thread | None = None
        self._plans: queue.SimpleQueue[StepPlan | None] = queue.SimpleQueue()
        self._results: deque[StepResult] = deque()
        self._error: NodeError | None = None
        self._event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def start(self, progress: Progress) -> ExecutorInfo:
        self._rank = load_rank(self._config, self._epoch, SingleRank(), progress)
        self._thread = threading.Thread(
            target=self._work,
            args=(self._rank.runner,),
            name="compute",
            daemon=True,
        )
        self._thread.start()
        return self._rank.info

    def submit(self, plan: StepPlan) -> None:
        self._plans.put(plan)

    def poll(self) -> StepResult | None:
        if not self._results:
            # Lower the flag, then look again: a result may have come in between.
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._event_fd)
        error = self._error  # before `_results`: what came before the error is in there then
        if self._results:
            if error is not None:
                os.eventfd_write(self._event_fd, 1)  # the error's own may have been lowered
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
        if self._thread is not None:
            self._plans.put(None)
            self._thread.join(CLOSE_S)
            if self._thread.is_alive():
                return  # it may still store into the pool and write to the eventfd
            self._thread = None
        if self._rank is not None:
            self._rank.close()
            self._rank = None
        if self._event_fd >= 0:
            os.close(self._event_fd)
            self._event_fd = -1

    def _work(self, runner: Runner) -> None:
        """Run the compute thread until it is told to stop or a step fails."""
        cpus = StepCpus(self._config.engine)
        while (plan := self._plans.get()) is not None:
            try:
                with cpus:
                    self._results.append(runner.execute(plan))
            except Exception as error:  # noqa: BLE001  (the thread's top: it ends the node)
                self._error = NodeError(f"step {plan.step_id} failed: {error!r}")
                self._error.__cause__ = error
                break
            finally:
                os.eventfd_write(self._event_fd, 1)
