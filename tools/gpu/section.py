"""One section of the GPU benchmark, in a process of its own: its device, its time, and its sink.

Each section is a function of a `Desk`. It reports as it goes, so that a section that is cut short
keeps its results; one case that fails is a row with an error, and the next case runs. Every event
is written at once: the parent may end this process at any moment.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from baton.runtime.clock import Clock
from tools.gpu.rows import Check, Event, Measured, Unreached
from tools.gpu.timing import Stopwatch

Emit = Callable[[Event], None]


@dataclass(slots=True)
class Desk:
    watch: Stopwatch
    emit: Emit
    clock: Clock
    deadline_s: float

    @property
    def device(self) -> torch.device:
        return self.watch.device

    def left_s(self) -> float:
        return self.deadline_s - self.clock()

    def has_time(self, key: str, needs_s: float) -> bool:
        """Return whether `needs_s` is left; if not, report the key as not reached."""
        if self.left_s() >= needs_s:
            return True
        self.emit(Unreached(key))
        return False

    def measure(
        self, blank: Measured, work: Callable[[], Measured], needs_s: float = 5.0
    ) -> None:
        """Report the measurement of `work`, or its error, under the key of `blank`."""
        if not self.has_time(blank.key, needs_s):
            return
        try:
            self.emit(work())
        except Exception as error:  # noqa: BLE001  (a case's outcome: the others still run)
            self.emit(_with_error(blank, error))
            _refuse_a_broken_device(self.device)

    def check(self, key: str, work: Callable[[], Check], needs_s: float = 5.0) -> None:
        """Report the check of `work`, or its error as a failure."""
        if not self.has_time(key, needs_s):
            return
        try:
            self.emit(work())
        except Exception as error:  # noqa: BLE001  (a case's outcome: the others still run)
            self.emit(Check(key, False, _line(error)))
            _refuse_a_broken_device(self.device)


def _with_error(blank: Measured, error: Exception) -> Measured:
    return Measured(blank.key, blank.unit, blank.work, error=_line(error))


def _line(error: Exception) -> str:
    text = " ".join(str(error).split())[:200]
    return f"{type(error).__name__}: {text}"


def _refuse_a_broken_device(device: torch.device) -> None:
    """After an illegal access every later call fails too: end the section with the first cause."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
