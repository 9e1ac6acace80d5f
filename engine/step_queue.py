"""The interface by which a runner launches the work of steps and collects it in the same order.

A CPU computes a step when it is collected. A GPU computes it when it is launched, and collecting
waits for it. One thread launches, and another may collect.
"""

from collections import deque
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

StepWork = Callable[[], Tensor]  # returns the sampled ids, [num_draws] int64, on the device


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
