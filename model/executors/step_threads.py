"""The threads of a rank's runner, and how many CPUs each step computes on.

One thread loads the runner and launches plans; on a GPU, another collects results meanwhile.
Results and errors come in the order of the plans; an error ends the threads.

Nodes of one host lend each other idle CPUs a step at a time: each writes the number of its
computing threads to a file that all of them map. The number of threads cannot change a bit. A wrong
number in the file, such as that of a killed process, costs time but cannot change a result.
"""

import fcntl
import mmap
import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch

from baton.model.executors.profiler import StepProfiler
from baton.model.loading.adapters import PreparedAdapter
from baton.model.runner.rank import LoadedRank
from baton.model.runner.runner import Runner
from baton.node.executor import AdapterLoad, AdapterOutcome, Progress
from baton.node.scheduling.plan import StepPlan, StepResult
from baton.protocol.config import EngineConfig
from baton.protocol.errors import ConfigError, NodeError
from baton.runtime.clock import monotonic
from baton.runtime.host import thread_counts

NUM_SLOTS = 64
# A slot is two numbers: the process that owns it, and the number of threads with which that process
# computes now.
_PID = 0
_THREADS = 1
_WIDTH = 2
_BYTES = NUM_SLOTS * _WIDTH * 4


class SharedCpus:
    """The slot of one process in the file. Only one thread may call it."""

    def __init__(self, path: Path, share: int, total: int) -> None:
        """Take a free slot of the file, which is created if necessary. Raises `ConfigError`."""
        self._share = share
        self._total = total
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            with open(descriptor, "r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                os.ftruncate(descriptor, _BYTES)
                self._numbers = memoryview(mmap.mmap(descriptor, _BYTES)).cast("i")
                try:
                    self._own = self._free_slot()
                finally:
                    # The mapping keeps the file open, and with it a lock that this process never
                    # releases.
                    fcntl.flock(file, fcntl.LOCK_UN)
        except OSError as error:
            raise ConfigError(
                f"cannot use {path} (engine.shared_cpus): {error.strerror}"
            ) from error

    def take(self, *, may_borrow: bool = True) -> int:
        """Return how many threads the next step may use, and note that number in the file."""
        self._numbers[self._own + _THREADS] = 0
        is_alone = may_borrow and not any(self._numbers[_THREADS::_WIDTH])
        threads = self._total if is_alone else self._share
        self._numbers[self._own + _THREADS] = threads
        return threads

    def give_back(self) -> None:
        """Note in the file that the step has ended and its threads are idle."""
        self._numbers[self._own + _THREADS] = 0

    def _free_slot(self) -> int:
        for slot in range(0, NUM_SLOTS * _WIDTH, _WIDTH):
            pid = self._numbers[slot + _PID]
            if not pid or not Path(f"/proc/{pid}").exists():
                self._numbers[slot + _PID] = os.getpid()
                self._numbers[slot + _THREADS] = 0
                return slot
        raise ConfigError(
            f"more than {NUM_SLOTS} nodes share their CPUs (engine.shared_cpus)"
        )


# One thread computes fewer tokens just as fast, and leaves the other CPUs to the router.
MIN_TOKENS = 64


class StepCpus:
    def __init__(self, engine: EngineConfig) -> None:
        """Raises `ConfigError` if the file (`engine.shared_cpus`) cannot be used."""
        self.share, *more = thread_counts(engine)
        self._shared = (
            SharedCpus(Path(engine.shared_cpus), self.share, more[0]) if more else None
        )

    def begin(self, num_tokens: int) -> None:
        """Set the calling thread's number of threads for a step of `num_tokens`."""
        if self._shared is not None:
            torch.set_num_threads(
                self._shared.take(may_borrow=num_tokens >= MIN_TOKENS)
            )

    def end(self) -> None:
        if self._shared is not None:
            self._shared.give_back()


READING_NICENESS = 10  # of a thread that reads an adapter beside the steps
# Without a plan for so long, a node is idle, and may capture a step, which takes about as long.
IDLE_S = 0.05
REPORT_S = 0.5  # progress is reported at least once a second

TakeOutcome = Callable[[StepResult | NodeError | AdapterOutcome], None]
MakeRank = Callable[[Progress], LoadedRank]
Report = tuple[str, int, int]
T = TypeVar("T")


class _ReadAdapter(NamedTuple):
    """An adapter that takes effect before the next plan."""

    prepared: PreparedAdapter
    outcome: AdapterOutcome


class StepThreads:
    """The threads. The one that collects calls `take` with results, and last with an error."""

    def __init__(
        self, cpus: StepCpus, take: TakeOutcome, profiler: StepProfiler
    ) -> None:
        self._cpus = cpus
        self._profiler = profiler
        self._take = take
        self._loading: queue.SimpleQueue[Report | LoadedRank | BaseException] = (
            queue.SimpleQueue()
        )
        self._plans: queue.SimpleQueue[StepPlan | str | _ReadAdapter | None] = (
            queue.SimpleQueue()
        )
        self._launched: queue.SimpleQueue[int | NodeError | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._rank: LoadedRank | None = None

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
                self._rank = found
                if found.runner.overlaps:
                    self._begin("collect", self._collect, found.runner)
                return found
            last = found
            progress(*last)

    def submit(self, plan: StepPlan | str) -> None:
        """Queue a step, or the name of a profile to record from here on, which is empty to end."""
        self._plans.put(plan)

    def load_adapter(self, load: AdapterLoad) -> None:
        """Read an adapter on a thread of its own; between two steps, it takes effect."""
        threading.Thread(
            target=self._read_adapter, args=(load,), name="adapter", daemon=True
        ).start()

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

    def _read_adapter(self, load: AdapterLoad) -> None:
        torch.set_num_threads(1)  # steps need the CPUs
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), READING_NICENESS)
        assert self._rank is not None, "adapters come after start"
        try:
            prepared, digest = self._rank.prepare_adapter(load)
        except ConfigError as error:
            self._take(AdapterOutcome(load, problem=error.message))
        except Exception as error:  # noqa: BLE001  (the thread's top: steps go on)
            self._take(AdapterOutcome(load, problem=f"it cannot be read: {error!r}"))
        else:
            self._plans.put(_ReadAdapter(prepared, AdapterOutcome(load, digest)))

    def _next_plan(self, runner: Runner) -> StepPlan | None:
        """Return the next plan, after what happens between two of them.

        A profile begins and ends here, because it is of one thread.
        """
        while not isinstance(found := self._next(runner), StepPlan | None):
            if isinstance(found, str):
                self._profiler.turn(found)
            else:
                self._take(_put(runner, found))
        return found

    def _next(self, runner: Runner) -> StepPlan | str | _ReadAdapter | None:
        """Return what was submitted next. While nothing is, the runner captures steps."""
        while runner.has_uncaptured:
            try:
                return self._plans.get(timeout=IDLE_S)
            except queue.Empty:
                runner.capture_next()
        return self._plans.get()

    def _execute(self, runner: Runner) -> None:
        while (plan := self._next_plan(runner)) is not None:
            try:
                self._cpus.begin(sum(part.length for part in plan.slices))
                with self._profiler.step(plan):
                    result = runner.execute(plan)
            except Exception as error:  # noqa: BLE001  (the thread's top: it ends the node)
                self._take(_failure(plan.step_id, error))
                return
            finally:
                self._cpus.end()
            self._take(result)

    def _launch(self, runner: Runner) -> None:
        while (plan := self._next_plan(runner)) is not None:
            try:
                with self._profiler.step(plan):
                    runner.launch(plan)
            except Exception as error:  # noqa: BLE001  (the thread's top: it ends the node)
                self._launched.put(_failure(plan.step_id, error))
                return
            self._launched.put(plan.step_id)
        self._launched.put(None)

    def _collect(self, runner: Runner) -> None:
        while (step := self._launched.get()) is not None:
            if isinstance(step, NodeError):
                self._take(step)
                return
            try:
                result = runner.collect()
            except Exception as error:  # noqa: BLE001  (the thread's top: it ends the node)
                self._take(_failure(step, error))
                return
            self._take(result)


def _put(runner: Runner, read: _ReadAdapter) -> AdapterOutcome:
    try:
        runner.put_adapter(read.prepared)
    except Exception as error:  # noqa: BLE001  (if the device is broken, the next step fails)
        return AdapterOutcome(
            read.outcome.load, problem=f"it cannot be used: {error!r}"
        )
    return read.outcome


def _failure(step_id: int, error: Exception) -> NodeError:
    failure = NodeError(f"step {step_id} failed: {error!r}")
    failure.__cause__ = error
    return failure
