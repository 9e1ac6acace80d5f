"""The threads of a rank's runner: one loads it and launches plans, another collects results.

Executors and workers make it; only these threads touch the runner. On a GPU the first thread
launches the next step while the second one waits. On a CPU, where two threads would only take
turns, one thread computes each step in a single call. Results and errors come in the order of the
plans; an error ends the threads.
"""

import queue
import threading
from collections.abc import Callable
from typing import TypeVar

import torch

from baton.engine.executor import Progress
from baton.engine.plan import StepPlan, StepResult
from baton.engine.rank import LoadedRank
from baton.engine.runner import Runner
from baton.engine.step_cpus import StepCpus
from baton.protocol.errors import NodeError
from baton.runtime.clock import monotonic

REPORT_S = 0.5  # progress is reported at least once a second

Hear = Callable[[StepResult | NodeError], None]
MakeRank = Callable[[Progress], LoadedRank]
Report = tuple[str, int, int]
T = TypeVar("T")


class StepThreads:
    """The threads. The one that collects calls `hear` with results, and last with an error."""

    def __init__(self, cpus: StepCpus, hear: Hear) -> None:
        self._cpus = cpus
        self._hear = hear
        self._loading: queue.SimpleQueue[Report | LoadedRank | BaseException] = queue.SimpleQueue()
        self._plans: queue.SimpleQueue[StepPlan | None] = queue.SimpleQueue()
        self._launched: queue.SimpleQueue[int | NodeError | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def start(self, load: MakeRank, progress: Progress) -> LoadedRank:
        """Load on the thread that will launch, and call `progress` on the caller's thread."""
        self._begin("launch", self._load_and_launch, load)
        last: Report = ("start", 0, 1)
        while True:
            try:
                found = self._loading.get(timeout=REPORT_S)
            except queue.Empty:
                found = last
            if isinstance(found, BaseException):
                raise found
            if isinstance(found, LoadedRank):
                if found.runner.overlaps:
                    self._begin("collect", self._collect, found.runner)
                return found
            last = found
            progress(*last)

    def submit(self, plan: StepPlan) -> None:
        self._plans.put(plan)

    def close(self, wait_s: float) -> bool:
        """End after the submitted steps, and return whether all threads ended in time."""
        self._plans.put(None)
        deadline_s = monotonic() + wait_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _begin(self, name: str, work: Callable[[T], None], argument: T) -> None:
        thread = threading.Thread(target=work, args=(argument,), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _load_and_launch(self, load: MakeRank) -> None:
        torch.set_num_threads(self._cpus.share)  # each thread has a number of its own
        try:
            rank = load(lambda *report: self._loading.put(report))
        except BaseException as error:  # noqa: BLE001  (`start` raises it)
            self._loading.put(error)
            return
        self._loading.put(rank)
        if rank.runner.overlaps:
            self._launch(rank.runner)
        else:
            self._execute(rank.runner)

    def _execute(self, runner: Runner) -> None:
        while (plan := self._plans.get()) is not None:
            try:
                self._cpus.begin(sum(part.length for part in plan.slices))
                result = runner.execute(plan)
            except Exception as error:  # noqa: BLE001  (the thread's top: it ends the node)
                self._hear(_failure(plan.step_id, error))
                return
            finally:
                self._cpus.end()
            self._hear(result)

    def _launch(self, runner: Runner) -> None:
        while (plan := self._plans.get()) is not None:
            try:
                runner.launch(plan)
            except Exception as error:  # noqa: BLE001  (the thread's top: it ends the node)
                self._launched.put(_failure(plan.step_id, error))
                return
            self._launched.put(plan.step_id)
        self._launched.put(None)

    def _collect(self, runner: Runner) -> None:
        while (step := self._launched.get()) is not None:
            if isinstance(step, NodeError):
                self._hear(step)
                return
            try:
                result = runner.collect()
            except Exception as error:  # noqa: BLE001  (the thread's top: it ends the node)
                self._hear(_failure(step, error))
                return
            self._hear(result)


def _failure(step_id: int, error: Exception) -> NodeError:
    failure = NodeError(f"step {step_id} failed: {error!r}")
    failure.__cause__ = error
    return failure
