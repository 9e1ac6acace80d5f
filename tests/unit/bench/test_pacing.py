"""Waits end at their moment and not before, all of them end together, and a late loop shows."""

import asyncio
import time
from collections.abc import Coroutine
from typing import TypeVar

from baton.bench.client.pacing import (
    COARSE_S,
    CPU_SPAN_S,
    TICK_S,
    CpuShare,
    LoopLag,
    Waits,
    new_loop,
)

T = TypeVar("T")


def run(main: Coroutine[object, object, T]) -> T:
    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(main)


def test_a_wait_is_never_over_too_early() -> None:
    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        waits, early = Waits(loop), []
        for wait_s in (-1.0, 0.0, 1e-5, 7e-4, COARSE_S, 2 * COARSE_S):
            due_s = loop.time() + wait_s
            assert await waits.until(due_s)
            early.append(due_s - loop.time())
        return early

    assert max(run(main())) <= 0


def test_many_waits_end_in_their_order() -> None:
    async def main() -> list[int]:
        loop = asyncio.get_running_loop()
        waits, start_s = Waits(loop), loop.time() + 0.2
        order: list[int] = []

        async def wait(place: int) -> None:
            await waits.until(start_s + place * 1e-3)
            order.append(place)

        await asyncio.gather(*map(wait, reversed(range(20))))
        return order

    assert run(main()) == list(range(20))


def test_all_waits_can_be_ended() -> None:
    async def main() -> list[bool]:
        loop = asyncio.get_running_loop()
        waits = Waits(loop)
        waiting = [asyncio.ensure_future(waits.until(loop.time() + 60.0)) for _ in range(3)]
        loop.call_soon(waits.end)
        found = await asyncio.gather(*waiting)
        return [*found, await waits.until(loop.time() - 1.0), await waits.until(1e9)]

    assert run(main()) == [False] * 5


def test_a_loop_that_was_blocked_was_late() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        lag, waits = LoopLag(loop), Waits(loop)
        lag.start()
        time.sleep(5 * TICK_S)  # noqa: ASYNC251  blocking is what is tested
        await waits.until(loop.time() + TICK_S)
        lag.stop()
        return lag.max_lag_s

    assert run(main()) >= 4 * TICK_S


def test_the_busiest_seconds_are_found_among_idle_ones() -> None:
    share, cpu_s = CpuShare(), 0.0
    for second in range(60):
        share.sample(float(second), cpu_s)
        cpu_s += 0.9 if 20 <= second < 20 + CPU_SPAN_S else 0.1
    assert round(share.busiest, 6) == 0.9


def test_less_than_a_span_has_no_busiest_seconds() -> None:
    share = CpuShare()
    share.sample(0.0, 0.0)
    share.sample(CPU_SPAN_S - 0.1, 4.0)
    assert share.busiest == 0.0
