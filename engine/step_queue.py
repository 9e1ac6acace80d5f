"""How a device takes the work of steps: the runner launches, and collects in the same order.

A CPU computes a step when it is collected. A GPU takes the work when it is launched; collecting
waits for it. One thread launches, another may collect.
"""

from collections import deque
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

StepWork = Callable[[], Tensor]  # returns the sampled ids, [num_draws] int64, on the device


class StepQueue(Protocol):
    """One device's work, in order. An error of the work is raised by `launch` or by `collect`."""

    @property
    def device(self) -> torch.device: ...

    @property
    def overlaps(self) -> bool:
        """Return whether the device works while Python goes on."""
        ...

    def allocate(self, num_words: int) -> Tensor:
        """Return int64 memory on the host from which the device copies without a wait."""
        ...

    def launch(self, work: StepWork) -> None:
        """Take the work of a step in; only its Python code may have run on return."""
        ...

    def collect(self) -> list[int]:
        """Return the ids of the oldest step when all that it stores is visible to transports."""
        ...


@runtime_checkable
class GraphQueue(StepQueue, Protocol):
    """The queue of a device that can repeat work without Python."""

    def capture(self, work: StepWork) -> StepWork:
        """Return what repeats the work on the same memory, without running its Python code.

        Runs the work itself first. Called where `launch` is called.
        """
        ...


class HostQueue:
    """Work of a CPU, done by the thread that collects it."""

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
