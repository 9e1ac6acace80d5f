"""Take times for the GPU sections.

A kernel is timed inside a CUDA graph, as a model would launch it: calls over different data follow
each other on the device, so neither Python's launch cost nor a warm cache is in the figure. Work
that ends on the host is timed by the wall clock. On a CPU all work is, for tests of the sections
and never for figures.
"""

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from tools.gpu.floors import Floors
from tools.gpu.rows import Timing

Call = Callable[[], object]
MAX_REPEATS = 50


class Stopwatch:
    """The timer of calls on one device; medians are taken over `rounds`."""

    def __init__(
        self, device: torch.device, rounds: int = 15, round_s: float = 0.004
    ) -> None:
        self.device = device
        self.rounds = rounds
        self.round_s = round_s

    def kernels(self, calls: Sequence[Call]) -> Timing:
        """Return the time per call. The calls have data of their own that should exceed the L2."""
        if self.device.type != "cuda":
            return self.wall(lambda: [call() for call in calls], calls=len(calls))
        for call in calls:
            call()  # compile before the capture
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        for call in calls:
            call()
        host_s = (time.perf_counter() - start_s) / len(calls)
        torch.cuda.synchronize()  # the capture must not meet running work
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        repeats = max(1, min(MAX_REPEATS, round(self.round_s / replay_s(graph, 1))))
        took = [
            replay_s(graph, repeats) / (repeats * len(calls))
            for _ in range(self.rounds)
        ]
        return _timing(took, host_s)

    def wall(self, call: Call, calls: int = 1) -> Timing:
        """Return the time per call of `calls` from an idle device until it is idle again."""
        took = []
        for number in range(self.rounds + 2):
            self.synchronize()
            start_s = time.perf_counter()
            call()
            self.synchronize()  # the launched work belongs to the call
            if number >= 2:
                took.append((time.perf_counter() - start_s) / calls)
        return _timing(took)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def free_bytes(self) -> int:
        """Return the free device memory, including the memory that torch has reserved."""
        if self.device.type != "cuda":
            return 1 << 30
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.device)[0]


def timing_of(seconds: Sequence[float]) -> Timing:
    """Return the timing of times that were taken elsewhere."""
    return _timing(list(seconds))


def _timing(took: list[float], host_s: float | None = None) -> Timing:
    return Timing(statistics.median(took), min(took), max(took), len(took), host_s)


def replay_s(graph: torch.cuda.CUDAGraph, times: int) -> float:
    """Return the seconds of all `times` replays, on the device."""
    begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    # This uploads the graph, and keeps the device busy while the host queues the timed replays.
    graph.replay()
    begin.record()
    for _ in range(times):
        graph.replay()
    end.record()
    torch.cuda.synchronize()  # the events are read
    return 1e-3 * float(begin.elapsed_time(end))


def measure_floors(watch: Stopwatch, copy_bytes: int, gemm_size: int) -> Floors:
    """Measure the best rates of a copy and a bf16 matrix product here, on random data.

    Zeros would be faster: a product of zeros takes less power and runs at a higher clock.
    """
    copied_s = _copy_s(watch, copy_bytes)
    a, b = (
        torch.randn(gemm_size, gemm_size, device=watch.device, dtype=torch.bfloat16)
        for _ in range(2)
    )
    multiplied = watch.kernels([lambda: torch.mm(a, b)])
    return Floors(
        copy_tb_per_s=2 * copy_bytes / copied_s / 1e12,
        gemm_tflop_per_s=2 * gemm_size**3 / multiplied.median_s / 1e12,
    )


def _copy_s(watch: Stopwatch, copy_bytes: int) -> float:
    part = torch.randn(copy_bytes // 16, device=watch.device).to(torch.bfloat16)
    source = part.repeat(8)
    target = torch.empty_like(source)
    return watch.kernels(
        [lambda: target.copy_(source), lambda: source.copy_(target)]
    ).median_s
