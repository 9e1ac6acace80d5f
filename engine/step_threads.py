"""The two threads of a rank's runner: one launches plans, the other collects their results.

Executors and workers make it; only these threads touch the runner after `start`. On a CPU the
second thread computes, while the first packs the next plan. On a GPU the first launches the next
step while the second waits. Results and errors come in the order of the plans; an error ends both.
"""

import queue
import threading
from collections.abc import Callable

import torch

from baton.engine.plan import StepPlan, StepResult
from baton.engine.runner import Runner
from baton.protocol.errors import NodeError

Hear = Callable[[StepResult | NodeError], None]


class StepThreads:
    """`hear` is called by the second thread, with nothing more after an error."""

    def __init__(self, runner: Runner, num_threads: int, hear: Hear) -> None:
        self._runner = runner
        self._num_threads = num_threads
        self._hear = hear
        self._plans: queue.SimpleQueue[StepPlan | None] = queue.SimpleQueue()
        self._launched: queue.SimpleQueue[int | NodeError | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=work, name=name, daemon=True)
            for name, work in (("launch", self._launch), ("collect", self._collect))
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def submit(self, plan: StepPlan) -> None:
        self._plans.put(plan)

    def close(self, wait_s: float) -> bool:
        """End after the steps that were submitted; return whether both ended in time."""
        self._plans.put(None)
        for thread in self._threads:
            thread.join(wait_s)
        return not any(thread.is_alive() for thread in self._threads)

    def _launch(self) -> None:
        torch.set_num_threads(self._num_threads)  # each thread of a process has its own
        while (plan := self._plans.get()) is not None:
            try:
                self._runner.launch(plan)
            except Exception as error:  # noqa: BLE001  (the thread's top: it ends the node)
                self._launched.put(_failure(plan.step_id, error))
                return
            self._launched.put(plan.step_id)
        self._launched.put(None)

    def _collect(self) -> None:
        torch.set_num_threads(self._num_threads)
        while (step := self._launched.get()) is not None:
            if isinstance(step, NodeError):
                self._hear(step)
                return
            try:
                result = self._runner.collect()
            except Exception as error:  # noqa: BLE001  (the thread's top: it ends the node)
                self._hear(_failure(step, error))
                return
            self._hear(result)


def _failure(step_id: int, error: Exception) -> NodeError:
    failure = NodeError(f"step {step_id} failed: {error!r}")
    failure.__cause__ = error
    return failure
