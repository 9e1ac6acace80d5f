"""A client process waits on time, notices when it was late, and follows what belongs together."""

import asyncio
import time
from collections.abc import Coroutine
from typing import TypeVar

import msgspec
import pytest

from baton.bench.client.http import Session
from baton.bench.client.worker import COARSE_S, CPU_SPAN_S, TICK_S, Strain, new_loop, pause_s
from baton.bench.records import Arrival, Record
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


def test_a_stop_ends_all_waits() -> None:
    async def main() -> list[bool]:
        loop, session = asyncio.get_running_loop(), Session(Target())
        waiting = [asyncio.ensure_future(session.until(loop.time() + 60.0)) for _ in range(3)]
        loop.call_soon(session.stop)
        found = await asyncio.gather(*waiting)
        return [*found, await session.until(loop.time() - 1.0), await session.until(1e9)]

    assert run(main()) == [False] * 5


def test_a_loop_that_was_blocked_was_late() -> None:
    async def main() -> float:
        strain = Strain(asyncio.get_running_loop())
        time.sleep(5 * TICK_S)  # noqa: ASYNC251  blocking is what is tested
        await asyncio.sleep(TICK_S)
        strain.stop()
        return strain.max_lag_s

    assert run(main()) >= 4 * TICK_S


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


def answer(outcome: str = "answered", **more: object) -> Record:
    fields = {"index": 0, "intended_s": 0.0, "sent_s": 0.0, "end_s": 3.0, "outcome": outcome}
    return msgspec.convert({**fields, **more}, Record)


@pytest.mark.parametrize(
    ("last", "waits_s"),
    [
        *((answer(one), 0.5) for one in
          ("unreachable", "no_socket", "refused", "server_error", "truncated")),
        # What the server says is kept within bounds.
        *((answer("refused", retry_after_s=told_s), waits_s) for told_s, waits_s in
          ((0.0, 0.1), (2.5, 2.5), (3600.0, 10.0))),
        # These were not turned away.
        *((answer(one), 0.0) for one in ("answered", "client_error", "timed_out")),
        (answer("truncated", arrivals=[Arrival(0.05, 1)]), 0.0),
    ],
)  # fmt: skip
def test_a_client_pauses_when_it_was_turned_away(last: Record, waits_s: float) -> None:
    assert pause_s(last) == waits_s
