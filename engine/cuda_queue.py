"""The queue of a GPU's steps: one stream, pinned memory for ids, and an event for each step.

The rank's loader makes it if the rank computes on CUDA. One thread launches everything, owns the
library handles and captures the graphs; the thread that collects only waits for events.
"""

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from baton.engine.step_queue import StepWork


class CudaQueue:
    """The queue of one device."""

    overlaps = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._has_begun = False
        self._pool = torch.cuda.graph_pool_handle()
        self._launched: deque[tuple[Tensor, torch.cuda.Event]] = deque()

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

    def collect(self) -> list[int]:
        on_host, done = self._launched.popleft()
        done.synchronize()
        ids: list[int] = on_host.tolist()
        return ids

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
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
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
