"""Loads over client processes: every planned request comes back, answered or not."""

import asyncio
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable

import pytest

from baton.bench.client.load import Load, Progress, run_load
from baton.bench.records import LoadResult, Outcome, Planned
from baton.bench.settings import Target
from baton.protocol.errors import BatonError, ConfigError
from tests.support.scripted_server import (
    MODEL,
    Call,
    Play,
    ScriptedServer,
    answer_all,
    answer_ids,
    error,
    token,
)

Watch = Callable[[Progress], None]


def requests(
    num: int, rate: float | None = 100.0, num_warm_up: int = 0
) -> list[Planned]:
    """Warm-up comes first, before zero."""
    return [
        Planned(
            index=place,
            at_s=None if rate is None else number / rate,
            output_tokens=2,
            prompt_ids=(place + 1,),
            warm_up=number < 0,
        )
        for place, number in enumerate(range(-num_warm_up, num))
    ]


def run(
    script: Play,
    planned: list[Planned],
    *,
    watch: Watch = lambda _: None,
    stop: threading.Event | None = None,
    **more: object,
) -> LoadResult:
    with ScriptedServer(script) as server:
        load = Load(Target(server.url, MODEL), planned, **more)
        return run_load(load, on_progress=watch, stop=stop)


def outcomes(result: LoadResult) -> Counter[Outcome]:
    return Counter(record.outcome for record in result.records)


async def hang(call: Call) -> None:
    await call.write(token())
    await asyncio.sleep(60.0)


async def first_or_hang(call: Call) -> None:
    await (answer_all(call) if call.prompt == [1] else hang(call))


async def refuse_one(call: Call) -> None:
    await (call.reply(503, error("full")) if call.prompt == [9] else answer_all(call))


@pytest.mark.parametrize("processes", [1, 2])
def test_an_open_loop_keeps_its_schedule_over_processes(processes):
    seen: list[Progress] = []
    planned = requests(20, num_warm_up=4)
    with ScriptedServer(refuse_one) as server:
        load = Load(Target(server.url, MODEL), planned, processes=processes)
        result = run_load(load, on_progress=seen.append)
    assert outcomes(result) == {Outcome.ANSWERED: 23, Outcome.REFUSED: 1}
    assert result.records[8].status == 503
    assert [record.index for record in result.records] == list(range(24))
    for request, record in zip(planned, result.records, strict=True):
        assert record.intended_s == pytest.approx(request.at_s)
        assert record.intended_s <= record.sent_s <= record.end_s
        assert record.warm_up == request.warm_up
        # Every token is counted as it was written.
        if record.outcome is Outcome.ANSWERED:
            assert record.token_ids == answer_ids(request.prompt_ids[0], 2)
            assert record.num_tokens == record.output_tokens == 2
    assert len({client.pid for client in result.clients}) == processes
    assert sum(client.num_requests for client in result.clients) == 24
    assert sum(client.num_tokens for client in result.clients) == 46
    assert all(client.cpu_s > 0 for client in result.clients)
    assert result.wall_s == pytest.approx(
        max(record.end_s for record in result.records)
    )
    assert seen[-1] == Progress(sent=24, ended=24, failed=1, tokens=46, ready=processes)


def test_a_closed_loop_has_no_more_under_way_than_it_may():
    running: list[int] = [0]

    async def script(call: Call) -> None:
        running.append(running[-1] + 1)
        await answer_all(call)
        running.append(running[-1] - 1)

    planned = requests(30, rate=None, num_warm_up=3)
    result = run(script, planned, concurrency=3, processes=2)
    assert outcomes(result) == {Outcome.ANSWERED: 33}
    assert max(running) <= 3
    warm_up = result.records[:3]
    measured = result.records[3:]
    assert all(record.warm_up and record.end_s < 0 for record in warm_up)
    assert all(record.intended_s == record.sent_s >= 0 for record in measured)
    assert sum(client.num_requests for client in result.clients) == 30


def test_clients_of_a_closed_loop_leave_a_server_alone_that_is_not_there():
    with ScriptedServer() as server:
        target = Target(server.url, MODEL)
    result = run_load(Load(target, requests(10_000, None), 2, stop_after_s=3.0))
    # Each of the two after 0, 0.5, 1, 1.5, 2 and 2.5 s at the earliest.
    assert set(outcomes(result)) == {Outcome.UNREACHABLE}
    assert 2 <= len(result.records) <= 12


def test_a_stop_brings_back_what_there_is():
    stop = threading.Event()

    def watch(progress: Progress) -> None:
        if progress.ended == 1 and progress.sent - progress.ended == 2:
            stop.set()

    planned = [
        *requests(3),
        Planned(index=9, at_s=60.0, output_tokens=2, prompt_ids=(9,)),
    ]
    result = run(first_or_hang, planned, watch=watch, stop=stop, processes=2)
    assert outcomes(result) == {Outcome.ANSWERED: 1, Outcome.STOPPED: 2}
    assert [record.num_tokens for record in result.records[1:]] == [1, 1]


def _children() -> list[str]:
    with open(f"/proc/{os.getpid()}/task/{threading.get_native_id()}/children") as file:
        return file.read().split()


def test_a_client_process_that_dies_is_an_error():
    def kill(progress: Progress) -> None:
        if progress.sent - progress.ended == 2:
            os.kill(int(_children()[-1]), signal.SIGKILL)

    with pytest.raises(
        BatonError, match=r"client process client-\d failed .*exit code -9"
    ):
        run(hang, requests(2), watch=kill, processes=2)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"requests": []}, "no request"),
        ({"requests": requests(2, None)}, "needs an arrival time"),
        ({"target": Target("http://a", MODEL, api="chat")}, "chat API takes none"),
        (
            {
                "target": Target(
                    "https://127.0.0.1:1", MODEL, ca_file="no-such-file.pem"
                )
            },
            "no-such-file.pem",
        ),
    ],
)
def test_a_load_that_cannot_be_is_refused_before_it_starts(more, words):
    fields: dict[str, object] = {
        "target": Target("http://a", MODEL),
        "requests": requests(2),
    }
    with pytest.raises(ConfigError, match=words):
        run_load(Load(**{**fields, **more}))
