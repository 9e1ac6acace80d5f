"""The interface by which a runner launches steps and collects them in order, on CPU and GPU.

A CPU computes a step when it is collected. A GPU computes it when it is launched, on one stream
with pinned memory for ids and an event for each step, and collecting waits for the event. One
thread launches, owns the library handles and captures the graphs; another may collect.
"""

from collections import deque
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

# Returns the sampled ids, [num_samples] int64, on the device.
StepWork = Callable[[], Tensor]


class StepQueue(Protocol):
    """One device's work, in order. `launch` or `collect` raises an error of the work."""

    @property
    def device(self) -> torch.device: ...

    @property
    def overlaps(self) -> bool:
        """Return whether the device computes while Python continues."""
        ...

    def allocate(self, num_words: int) -> Tensor:
        """Return int64 memory on the host from which the device can copy asynchronously."""
        ...

    def launch(self, work: StepWork) -> None:
        """Queue the work of a step. On return, only its Python code may have run."""
        ...

    def collect(self) -> list[int]:
        """Return the oldest step's ids once transports can see all of its stores."""
        ...

    def wait(self) -> None:
        """Wait until the launched work has run. The thread that calls `launch` calls it."""
        ...


@runtime_checkable
class GraphQueue(StepQueue, Protocol):
    """The queue of a device that can repeat work without Python."""

    def capture(self, work: StepWork) -> StepWork:
        """Return a function that repeats the work on the same memory without its Python code.

        It runs the work once itself. The thread that calls `launch` calls it.
        """
        ...


class HostQueue:
    """The work of a CPU, which runs on the thread that collects it."""

    device = torch.device("cpu")
    overlaps = False

    def __init__(self) -> None:
        self._work: deque[StepWork] = deque()

    def allocate(self, num_words: int) -> Tensor:
        return torch.empty(num_words, dtype=torch.int64)

    def launch(self, work: StepWork) -> None:
        self._work.append(work)

    def collect(self) -> list[int]:
        with torch.inference_mode():
            ids: list[int] = self._work.popleft()().tolist()
        return ids

    def wait(self) -> None:
        assert not self._work, (
            "a step on a CPU is collected before the next one is packed"
        )


class CudaQueue:
    """The queue of one device."""

    overlaps = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # Steps come before copies of blocks, whose stream has the usual priority.
        self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._has_begun = False
        self._pool = torch.cuda.graph_pool_handle()
        self._launched: deque[tuple[Tensor, torch.cuda.Event]] = deque()
        self._last: torch.cuda.Event | None = None

    def allocate(self, num_words: int) -> Tensor:
        # The allocator reuses pinned memory only after the copies from it have run.
        return torch.empty(num_words, dtype=torch.int64, pin_memory=True)

    def launch(self, work: StepWork) -> None:
        torch.cuda.set_device(self.device)  # each thread has its own current device
        if not self._has_begun:
            self._wait_for_others()
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            ids = work()
            on_host = torch.empty(len(ids), dtype=torch.int64, pin_memory=True)
            on_host.copy_(ids, non_blocking=True)
            # A thread that spins takes a CPU from others.
            done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            done.record(self._stream)
        self._launched.append((on_host, done))
        self._last = done

    def collect(self) -> list[int]:
        on_host, done = self._launched.popleft()
        done.synchronize()
        ids: list[int] = on_host.tolist()
        return ids

    def wait(self) -> None:
        if self._last is not None:
            self._last.synchronize()  # a mask depends on the tokens of the step before

    def capture(self, work: StepWork) -> Callable[[], Tensor]:
        torch.cuda.set_device(self.device)
        self._wait_for_others()
        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            work()  # compile and load modules, which is not allowed during a capture
            self._stream.synchronize()
            # In this mode, CUDA calls of other threads, such as NCCL's watchdog, do not invalidate
            # a capture.
            with torch.cuda.graph(
                graph,
                pool=self._pool,
                stream=self._stream,
                capture_error_mode="thread_local",
            ):
                ids = work()

        def replay() -> Tensor:
            graph.replay()
            return ids

        return replay

    def _wait_for_others(self) -> None:
        """Let the stream wait for the earlier work of this thread's stream and the default stream.

        Weights, tables and the inputs of a graph are written on those streams.
        """
        self._stream.wait_stream(torch.cuda.default_stream(self.device))
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        self._has_begun = True
