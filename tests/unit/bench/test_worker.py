"""A client process waits on time, notices when it was late, and follows what belongs together."""

import asyncio
import time
from collections.abc import Coroutine
from typing import TypeVar

import pytest

from baton.bench.client.http import Session
from baton.bench.client.worker import COARSE_S, CPU_SPAN_S, Strain, new_loop
from baton.bench.settings import Target

T = TypeVar("T")


def run(main: Coroutine[object, object, T]) -> T:
    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(main)


def test_a_wait_is_never_over_too_early_and_many_end_in_their_order() -> None:
    moments = (-1.0, 0.0, 1e-5, 7e-4, COARSE_S, 2 * COARSE_S, *(0.1 + 1e-3 * n for n in range(20)))

    async def main() -> list[float]:
        loop, session, ended = asyncio.get_running_loop(), Session(Target()), []
        start_s = loop.time()

        async def wait(at_s: float) -> None:
            assert await session.until(start_s + at_s)
            assert loop.time() >= start_s + at_s
            ended.append(at_s)

        await asyncio.gather(*map(wait, moments))
        return ended

    assert run(main()) == sorted(moments)


@pytest.mark.parametrize(("num_s", "busiest"), [(60, 0.9), (CPU_SPAN_S, 0.0)])
def test_the_busiest_seconds_are_found_among_idle_ones(num_s: int, busiest: float) -> None:
    async def main() -> Strain:
        strain = Strain(asyncio.get_running_loop())
        strain.stop()
        return strain

    strain, cpu_s, start_s = run(main()), time.process_time(), time.monotonic()
    for second in range(int(num_s)):
        strain.sample(start_s + second, cpu_s)
        cpu_s += 0.9 if 20 <= second < 20 + CPU_SPAN_S else 0.1
    assert strain.busiest_cpu == pytest.approx(busiest, abs=0.01)
