"""Jobs of clients run in processes of their own, and none of them hurts another."""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import psutil
import pytest
from llguidance import LLMatcher, LLTokenizer

from baton.protocol.errors import BatonError, Overloaded, RequestError
from baton.protocol.sampling import StructuredOutputsParams
from baton.router import worker
from baton.router.text.grammars import MAX_KEPT, Forms, checked_grammar
from baton.router.worker import Lane, TooMuchWork, Worker
from tests.support.async_tests import on_a_loop
from tests.support.refusals import raises

WAIT_S = 20.0


# Children that other tests have left for later ones.
_others: set[psutil.Process] = set()


@pytest.fixture(autouse=True)
def _remember_others():
    _others.clear()
    _others.update(psutil.Process().children())


def spawned() -> list[psutil.Process]:
    """The processes that the test has started."""
    return [one for one in psutil.Process().children() if one not in _others]


@asynccontextmanager
async def a_worker() -> AsyncIterator[Worker[str, object]]:
    made = Worker[str, object](
        "tests.support.worker_jobs", (), msgspec.msgpack.Decoder(object)
    )
    try:
        async with asyncio.timeout(WAIT_S * 2):
            yield made
    finally:
        made.close()
        assert spawned() == []


def wide(at_once: int = 8, cpu_s: float = 5.0, wall_s: float = WAIT_S) -> Lane:
    return Lane(at_once, cpu_s=cpu_s, memory_mib=64, wall_s=wall_s)


def job_processes() -> list[psutil.Process]:
    """The processes that work on jobs now."""
    return [job for one in spawned() for job in one.children()]


async def num_jobs_is(number: int) -> list[psutil.Process]:
    while len(jobs := job_processes()) != number:  # noqa: ASYNC110 - no event tells
        await asyncio.sleep(0.005)
    return jobs


@on_a_loop
async def test_the_process_starts_with_the_first_job_and_each_job_has_one_of_its_own():
    async with a_worker() as made:
        assert spawned() == []
        pids = [await made.run("pid", wide()) for _ in range(3)]
        assert len({os.getpid(), *pids}) == 4
        large = "x" * (4 << 20)
        assert await made.run(large, wide()) == large


@pytest.mark.parametrize("job", ["burn", "hoard", "crash"])
@on_a_loop
async def test_a_job_that_takes_too_much_is_refused_and_no_other_one_notices(job):
    async with a_worker() as made:
        lane = wide(cpu_s=0.3)
        waiting = [asyncio.create_task(made.run(job, lane)) for _ in range(2)]
        for _ in range(10):
            assert await made.run("hello", lane) == "hello"
        for task in waiting:
            with pytest.raises(TooMuchWork):
                await task
        assert await made.run("hello", lane) == "hello"


@on_a_loop
async def test_clients_take_turns_so_that_one_with_many_jobs_holds_up_no_other():
    lane = wide(at_once=1)
    order: list[str] = []

    async def take_a_turn(client: str) -> None:
        await lane.turns.acquire(client)
        order.append(client)

    await lane.turns.acquire("greedy")
    waiting = [asyncio.create_task(take_a_turn("greedy")) for _ in range(4)]
    await asyncio.sleep(0)
    waiting += [
        asyncio.create_task(take_a_turn(client)) for client in ("one", "other", "one")
    ]
    await asyncio.sleep(0)
    waiting.pop(1).cancel()  # its client leaves
    for _ in range(2):
        lane.turns.release()
    waiting.pop(3).cancel()  # its turn has just come
    for _ in range(3):
        await asyncio.sleep(0)
        lane.turns.release()
    await asyncio.gather(*waiting)
    assert order == ["greedy", "other", "greedy", "one", "greedy"]
    lane.turns.release()
    await lane.turns.acquire("one")  # every turn was given back


@on_a_loop
async def test_errors_of_a_job_are_those_of_its_caller(caplog):
    async with a_worker() as made:
        with raises(RequestError, "invalid_request", "prompt"):
            await made.run("refuse", wide())
        with pytest.raises(BatonError) as broken:
            await made.run("bug", wide())
        assert broken.value.code == "internal_error"
        assert "unhandled error in a job" in caplog.text


@on_a_loop
async def test_a_job_ends_with_its_client_and_with_its_time():
    async with a_worker() as made:
        leaving = asyncio.create_task(made.run("burn", wide(cpu_s=WAIT_S)))
        (job,) = await num_jobs_is(1)
        leaving.cancel()
        await num_jobs_is(0)
        assert not job.is_running()
        with pytest.raises(Overloaded) as late:
            await made.run("sleep", wide(wall_s=0.2))
        assert late.value.code == "worker_timeout"
        await num_jobs_is(0)


@on_a_loop
async def test_jobs_of_a_lane_wait_for_their_turn_and_not_longer_than_its_time():
    async with a_worker() as made:
        narrow = wide(at_once=1, wall_s=0.5)
        first = asyncio.create_task(made.run("sleep", narrow))
        await num_jobs_is(1)
        second = asyncio.create_task(made.run("sleep", wide(at_once=1, wall_s=0.5)))
        await num_jobs_is(2)
        for task in (first, second):
            with pytest.raises(Overloaded):
                await task
        assert await made.run("hello", narrow) == "hello"


@on_a_loop
async def test_the_loss_of_a_job_is_one_refusal_and_that_of_an_idle_process_is_none():
    async with a_worker() as made:
        await made.run("hello", wide())
        (process,) = spawned()
        for _ in range(20):  # some are killed before they can read anything
            lost = asyncio.create_task(made.run("sleep", wide()))
            await asyncio.sleep(0)
            (job,) = await num_jobs_is(1)
            job.kill()
            with pytest.raises(Overloaded) as refused:
                await lost
            assert refused.value.code == "worker_lost"
        assert spawned() == [process]
        process.kill()
        assert await made.run("hello", wide()) == "hello"


@on_a_loop
async def test_a_process_that_hangs_is_replaced_even_if_its_clients_leave_sooner(
    monkeypatch,
):
    async with a_worker() as made:
        await made.run("hello", wide())
        (process,) = spawned()
        process.suspend()
        waiting = asyncio.create_task(made.run("hello", wide()))
        await asyncio.sleep(0)
        waiting.cancel()
        began_s = time.monotonic()
        monkeypatch.setattr(worker, "monotonic", lambda: began_s + worker.START_S + 1.0)
        assert await made.run("hello", wide()) == "hello"
        assert await made.run("hello", wide()) == "hello"
        assert process not in spawned()


def bomb(number: int) -> StructuredOutputsParams:
    """A form of a kilobyte whose check would take many gigabytes."""
    patterns = [
        {"type": "string", "pattern": f".*{chr(97 + i)}.*"} for i in range(number)
    ]
    return StructuredOutputsParams(json={"allOf": patterns})


@on_a_loop
async def test_a_hostile_form_is_refused_and_others_do_not_wait_for_it():
    forms = Forms()
    try:
        hostile = [
            asyncio.create_task(forms.grammar_of(bomb(20 + i))) for i in range(3)
        ]
        for number in range(5):
            form = StructuredOutputsParams(regex=f"[ab]{{{number + 1}}}")
            assert "ab" in await forms.grammar_of(form)
        assert not all(task.done() for task in hostile)
        for task in hostile:
            with raises(RequestError, "invalid_request", "structured_outputs"):
                await task
    finally:
        forms.close()


@on_a_loop
async def test_the_largest_forms_pass_and_a_hostile_one_costs_less_than_a_second_of_a_core():
    forms = Forms()
    try:
        fields = {f"field_{number}": {"type": "string"} for number in range(2200)}
        schema = {"type": "object", "properties": fields}
        assert "field_2199" in await forms.grammar_of(
            StructuredOutputsParams(json=schema)
        )
        (process,) = spawned()
        before = process.cpu_times()
        with raises(RequestError, "invalid_request", "structured_outputs"):
            await forms.grammar_of(bomb(20))
        await num_jobs_is(0)
        after = process.cpu_times()
    finally:
        forms.close()
    used_s = after.children_user - before.children_user
    used_s += after.children_system - before.children_system
    assert 0.5 < used_s < 0.9


@on_a_loop
async def test_a_form_is_checked_once_and_not_kept_for_ever():
    forms = Forms()
    try:
        schema = StructuredOutputsParams(json={"type": "integer"})
        grammar = await forms.grammar_of(schema)
        (process,) = spawned()
        process.suspend()
        assert await forms.grammar_of(schema) == grammar
        process.resume()
        for number in range(MAX_KEPT):
            await forms.grammar_of(StructuredOutputsParams(regex=f"a{{{number + 1}}}"))
        process.suspend()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await forms.grammar_of(schema)
    finally:
        forms.close()


@pytest.mark.parametrize(
    ("regex", "text", "is_taken"),
    [
        (r"\d{2}", "42", True),
        (r"\d{2}", "٣٣", False),  # digits that are not ASCII
        (r"[_\d]{2}", "_٣", False),
        (r"[_\d]{2}", "_3", True),
        (r"\w+", "é", False),
        (r"[\W]", "é", True),
        (r"\\d", r"\d", True),
    ],
)
def test_classes_of_a_pattern_are_ascii(regex, text, is_taken):
    grammar = checked_grammar(StructuredOutputsParams(regex=regex))
    matcher = LLMatcher(LLTokenizer("byte"), grammar)
    taken = matcher.try_consume_tokens(list(text.encode()))
    assert (taken == len(text.encode()) and matcher.is_accepting()) is is_taken
