"""Slices of a kernel's work run at once, and every one of them has ended when `run` returns."""

import threading

import pytest

from baton.kernels.cpu_threads import CpuThreads


@pytest.mark.parametrize("failing", [0.0, 1.0, 2.0])
def test_an_error_is_raised_after_every_slice_has_ended(failing: float) -> None:
    threads, ended = CpuThreads(), []

    def work(number: float) -> None:
        if number == failing:
            raise ValueError(f"slice {number}")
        threading.Event().wait(0.05)
        ended.append(number)

    slices = [(0.0,), (1.0,), (2.0,)]
    for _ in range(2):  # the threads live on
        ended.clear()
        with pytest.raises(ValueError, match=f"slice {failing}"):
            threads.run(work, slices)
        assert sorted(ended) == [number for (number,) in slices if number != failing]
