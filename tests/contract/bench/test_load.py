"""Loads over client processes: every planned request comes back, answered or not."""

import asyncio
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise

import msgspec
import pytest

from baton.bench.client.load import Load, Progress, run_load
from baton.bench.client.target import Target
from baton.bench.records import LoadResult, Message, Outcome, Planned
from baton.bench.selftest.answers import DONE, error, token, usage
from baton.bench.selftest.scripted_server import MODEL, Call, Play, ScriptedServer, Stage
from baton.bench.selftest.scripts import answer_ids
from baton.bench.verify import MismatchKind, compare_outputs, reference
from baton.protocol.errors import BatonError, ConfigError
from baton.runtime.clock import monotonic

WAIT_S = 20.0
answer = Stage().play


def requests(num: int, rate: float | None = 100.0, num_warm_up: int = 0) -> list[Planned]:
    """Warm-up comes first, before zero."""
    first = -num_warm_up
    return [
        Planned(
            index=place,
            at_s=None if rate is None else number / rate,
            output_tokens=2,
            prompt_ids=(place + 1,),
            warm_up=number < 0,
        )
        for place, number in enumerate(range(first, num))
    ]


def outcomes(result: LoadResult) -> Counter[Outcome]:
    return Counter(record.outcome for record in result.records)


async def hang(call: Call) -> None:
    await call.write(token())
    await asyncio.sleep(60.0)


async def slow(call: Call) -> None:
    await asyncio.sleep(0.1)
    await answer(call)


async def first_or_hang(call: Call) -> None:
    await (answer(call) if call.prompt == [1] else hang(call))


def refuses(is_refused: Callable[[Call], bool], **fields: str) -> Play:
    """Answers the others."""

    async def script(call: Call) -> None:
        await (call.reply(503, error("full"), **fields) if is_refused(call) else answer(call))

    return script


@pytest.mark.parametrize("processes", [1, 2])
def test_an_open_loop_keeps_its_schedule_over_processes(processes: int) -> None:
    seen: list[Progress] = []
    starts: list[float] = []
    planned = requests(20, num_warm_up=4)
    with ScriptedServer() as server:
        load = Load(Target(server.url, MODEL), planned, processes=processes)
        before_s = monotonic()
        result = run_load(load, on_progress=seen.append, on_start=starts.append)
    assert outcomes(result) == {Outcome.ANSWERED: 24}
    assert [record.index for record in result.records] == list(range(24))
    for request, record in zip(planned, result.records, strict=True):
        assert record.intended_s == pytest.approx(request.at_s)
        assert record.intended_s <= record.sent_s <= record.end_s
        assert record.warm_up == request.warm_up
        assert record.text is None
    assert len({client.pid for client in result.clients}) == processes
    assert sum(client.num_requests for client in result.clients) == 24
    assert sum(client.num_tokens for client in result.clients) == 48
    assert all(client.cpu_s > 0 for client in result.clients)
    assert result.wall_s == pytest.approx(max(record.end_s for record in result.records))
    assert (seen[-1].sent, seen[-1].ended, seen[-1].tokens, seen[-1].in_flight) == (24, 24, 48, 0)
    (start_s,) = starts
    assert before_s < start_s < before_s + WAIT_S


def test_a_closed_loop_has_no_more_under_way_than_it_may() -> None:
    running: list[int] = [0]

    async def script(call: Call) -> None:
        running.append(running[-1] + 1)
        await answer(call)
        running.append(running[-1] - 1)

    planned = requests(30, rate=None, num_warm_up=3)
    with ScriptedServer(script) as server:
        load = Load(Target(server.url, MODEL), planned, 3, closed=True, processes=2)
        result = run_load(load)
    assert outcomes(result) == {Outcome.ANSWERED: 33}
    assert max(running) <= 3
    warm_up = [record for record in result.records if record.warm_up]
    assert len(warm_up) == 3
    assert all(record.end_s < 0 for record in warm_up)
    measured = result.records[3:]
    assert all(record.intended_s == record.sent_s >= 0 for record in measured)
    assert sum(client.num_requests for client in result.clients) == 30


def test_a_closed_loop_may_end_by_time() -> None:
    with ScriptedServer(slow) as server:
        load = Load(
            Target(server.url, MODEL), requests(500, None), 1, closed=True, stop_after_s=1.5
        )
        result = run_load(load)
    assert 0 < len(result.records) < 500
    assert all(record.sent_s < 1.5 for record in result.records)
    assert set(outcomes(result)) == {Outcome.ANSWERED}


def test_clients_of_a_closed_loop_leave_a_server_alone_that_is_not_there() -> None:
    with ScriptedServer() as server:
        url = server.url
    load = Load(Target(url, MODEL), requests(10_000, None), 2, closed=True, stop_after_s=3.0)
    result = run_load(load)
    # Each of the two after 0, 0.1, 0.3, 0.7, 1.5 and 2.5 s.
    assert set(outcomes(result)) == {Outcome.UNREACHABLE}
    assert 2 <= len(result.records) <= 12


@pytest.mark.parametrize("num_turns", [1, 3])
def test_a_client_asks_again_when_the_server_said(num_turns: int) -> None:
    planned = conversation(2, messages=lambda turn: (Message("user", f"q{turn}"),))
    planned = [request for request in planned if request.turn < num_turns]
    script = refuses(lambda call: call is server.calls[0], Retry_After="1")
    with ScriptedServer(script) as server:
        result = run_load(Load(Target(server.url, MODEL, api="chat"), planned, 1, closed=True))
    assert outcomes(result) == {Outcome.REFUSED: num_turns, Outcome.ANSWERED: num_turns}
    assert result.records[num_turns].sent_s >= result.records[0].end_s + 1.0


@pytest.mark.parametrize(
    ("num", "stop_after_s", "is_stopped"), [(9, None, True), (9, 2.0, False), (1, None, False)]
)
def test_a_pause_ends_with_the_load(num: int, stop_after_s: float, is_stopped: bool) -> None:
    stop = threading.Event()

    def watch(progress: Progress) -> None:
        if progress.ended and is_stopped:
            stop.set()

    with ScriptedServer(refuses(lambda _: True, Retry_After="10")) as server:
        load = Load(
            Target(server.url, MODEL), requests(num, None), 1, closed=True,
            stop_after_s=stop_after_s,
        )  # fmt: skip
        result = run_load(load, on_progress=watch, stop=stop)
    assert outcomes(result) == {Outcome.REFUSED: 1}
    assert result.clients[0].wall_s < 8


def test_waiting_for_room_counts_from_the_intended_arrival() -> None:
    with ScriptedServer(slow) as server:
        result = run_load(Load(Target(server.url, MODEL), requests(4), concurrency=1))
    assert outcomes(result) == {Outcome.ANSWERED: 4}
    ordered = sorted(result.records, key=lambda record: record.sent_s)
    assert [record.index for record in ordered] == [0, 1, 2, 3]
    for before, after in pairwise(ordered):
        assert after.sent_s >= before.end_s
        assert after.intended_s < before.end_s


def test_failures_are_records_too() -> None:
    script = refuses(lambda call: call.prompt == [3], Retry_After="1")
    with ScriptedServer(script) as server:
        seen: list[Progress] = []
        load = Load(Target(server.url, MODEL), requests(5), processes=2)
        result = run_load(load, on_progress=seen.append)
    assert outcomes(result) == {Outcome.ANSWERED: 4, Outcome.REFUSED: 1}
    assert (result.records[2].status, result.records[2].retry_after_s) == (503, 1.0)
    assert seen[-1].failed == 1


def conversation(count: int, **more: object) -> list[Planned]:
    return [
        Planned(
            index=number * 3 + turn,
            at_s=number * 0.05 if turn == 0 else None,
            output_tokens=2,
            conversation=number,
            turn=turn,
            think_s=0.02 if turn else 0.0,
            **{name: make(turn) for name, make in more.items()},  # type: ignore[operator]
        )
        for number in range(count)
        for turn in range(3)
    ]


def test_a_chat_goes_on_with_what_the_server_said() -> None:
    planned = conversation(2, messages=lambda turn: (Message("user", f"q{turn}"),))
    with ScriptedServer() as server:
        target = Target(server.url, MODEL, api="chat")
        result = run_load(Load(target, planned, processes=2, keep_text=True))
        messages = [call.body["messages"] for call in server.calls]
    longest = max((found for found in messages if isinstance(found, list)), key=len)
    said = [(message["role"], message["content"]) for message in longest]
    text = "".join(f" t{one}" for one in answer_ids(0, 2))
    own = ("assistant", text)
    assert said == [("user", "q0"), own, ("user", "q1"), own, ("user", "q2")]
    assert outcomes(result) == {Outcome.ANSWERED: 6}
    first, second, third = result.records[:3]
    assert second.intended_s == pytest.approx(first.end_s + 0.02)
    assert third.intended_s == pytest.approx(second.end_s + 0.02)
    assert first.text == text


@pytest.mark.parametrize("closed", [False, True])
def test_token_ids_of_answers_are_appended_to_the_prompt(closed: bool) -> None:
    planned = conversation(1, prompt_ids=lambda turn: (10 + turn,))
    with ScriptedServer() as server:
        target = Target(server.url, MODEL)
        result = run_load(Load(target, planned, 1 if closed else None, closed=closed))
        prompts = [call.prompt for call in server.calls]
    assert outcomes(result) == {Outcome.ANSWERED: 3}
    said = answer_ids(0, 2)
    assert prompts == [[10], [10, *said, 11], [10, *said, 11, *said, 12]]


def test_turns_that_a_failure_took_away_count_as_failed() -> None:
    planned = conversation(1, messages=lambda turn: (Message("user", f"q{turn}"),))
    with ScriptedServer(refuses(lambda call: call is not server.calls[0])) as server:
        result = run_load(Load(Target(server.url, MODEL, api="chat"), planned))
        assert len(server.calls) == 2
    assert outcomes(result) == {Outcome.ANSWERED: 1, Outcome.REFUSED: 2}
    assert result.records[2].detail == "not sent: turn 1 of the conversation failed"


def test_a_stop_brings_back_what_there_is() -> None:
    stop = threading.Event()

    def watch(progress: Progress) -> None:
        if progress.ended == 1 and progress.in_flight == 2:
            stop.set()

    planned = [*requests(3), Planned(index=9, at_s=60.0, output_tokens=2, prompt_ids=(9,))]
    with ScriptedServer(first_or_hang) as server:
        load = Load(Target(server.url, MODEL), planned, processes=2)
        result = run_load(load, on_progress=watch, stop=stop)
    assert outcomes(result) == {Outcome.ANSWERED: 1, Outcome.STOPPED: 2}
    assert [record.num_tokens for record in result.records[1:]] == [1, 1]


def test_a_stop_after_a_client_process_has_ended_loses_nothing() -> None:
    stop = threading.Event()
    shown: list[Progress] = []

    def watch(progress: Progress) -> None:
        shown.append(progress)
        states = [_state(int(pid)) for pid in _children()]
        if progress.ended == 1 and "Z" in states:
            stop.set()

    with ScriptedServer(first_or_hang) as server:
        load = Load(Target(server.url, MODEL, timeout_s=15.0), requests(2), processes=2)
        result = run_load(load, on_progress=watch, stop=stop)
    assert stop.is_set()
    assert outcomes(result) == {Outcome.ANSWERED: 1, Outcome.STOPPED: 1}


def _children() -> list[str]:
    with open(f"/proc/{os.getpid()}/task/{threading.get_native_id()}/children") as file:
        return file.read().split()


def _state(pid: int) -> str:
    """Z once it has ended."""
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


def test_a_stop_ends_the_warm_up_of_a_closed_loop() -> None:
    stop = threading.Event()
    with ScriptedServer(hang) as server:
        load = Load(Target(server.url, MODEL), requests(2, None, 1), 1, closed=True)
        watch = threading.Thread(target=lambda: (asyncio.run(server.asked()), stop.set()))
        watch.start()
        result = run_load(load, stop=stop)
        watch.join()
    assert outcomes(result) == {Outcome.STOPPED: 1}


@pytest.fixture
def _hears_ctrl_c() -> Iterator[None]:
    """A parent of the tests may have told them to ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_hears_ctrl_c")
def test_ctrl_c_ends_a_load_at_once_and_its_client_processes() -> None:
    pids: list[str] = []

    def interrupt(progress: Progress) -> None:
        if progress.in_flight == 2:
            pids.extend(_children())
            signal.raise_signal(signal.SIGINT)

    with ScriptedServer(hang) as server:
        load = Load(Target(server.url, MODEL), requests(2), processes=2)
        with pytest.raises(KeyboardInterrupt):
            run_load(load, on_progress=interrupt)
    assert len(pids) >= 2
    assert not set(pids) & set(_children())


def test_a_client_process_that_dies_is_an_error() -> None:
    def kill(progress: Progress) -> None:
        if progress.in_flight == 2:
            os.kill(int(_children()[-1]), signal.SIGKILL)

    with ScriptedServer(hang) as server:
        load = Load(Target(server.url, MODEL), requests(2), processes=2)
        with pytest.raises(BatonError, match=r"client process client-\d failed .*exit code -9"):
            run_load(load, on_progress=kill)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"requests": []}, "no request"),
        ({"processes": 0}, "at least one process"),
        ({"concurrency": 0}, "room for one"),
        ({"closed": True}, "needs a concurrency"),
        ({"requests": requests(2, None)}, "needs an arrival time"),
        ({"target": Target("http://a", MODEL, api="chat")}, "chat API takes none"),
    ],
)
def test_a_load_that_cannot_be_is_refused_before_it_starts(
    more: dict[str, object], words: str
) -> None:
    fields: dict[str, object] = {"target": Target("http://a", MODEL), "requests": requests(2)}
    with pytest.raises(ConfigError, match=words):
        run_load(Load(**{**fields, **more}))  # type: ignore[arg-type]


def test_certificates_that_cannot_be_read_are_a_mistake_of_the_user() -> None:
    target = Target("https://127.0.0.1:1", MODEL, ca_file="no-such-file.pem")
    with pytest.raises(ConfigError, match=r"cannot read certificates from 'no-such-file.pem'"):
        run_load(Load(target, requests(2)))


@pytest.mark.parametrize("by_ids", [True, False])
def test_tokens_that_were_damaged_under_load_are_named(by_ids: bool) -> None:
    whole = list(range(20))
    damages = {
        "right": whole,
        MismatchKind.REORDERED: [*whole[:9], 10, 9, *whole[11:]],
        MismatchKind.LOST: [*whole[:10], *whole[11:], 30],
        MismatchKind.DOUBLED: [*whole[:11], *whole[10:19]],
        MismatchKind.WRONG: [*whole[:10], 30, *whole[11:]],
    }
    asked: set[object] = set()

    async def script(call: Call) -> None:
        number = list(call.prompt)[0]
        sent = whole if number in asked else list(damages.values())[int(number) - 1]
        asked.add(number)
        ids = [[one] if by_ids else None for one in sent]
        chunks = (token(f" t{one}", shown) for one, shown in zip(sent, ids, strict=True))
        await call.send(*chunks, usage(len(sent)), DONE)

    planned = [
        msgspec.structs.replace(one, output_tokens=len(whole)) for one in requests(len(damages))
    ]
    with ScriptedServer(script) as server:
        target = Target(server.url, MODEL)
        records = run_load(Load(target, planned, keep_text=not by_ids)).records
        mismatches = compare_outputs(reference(target, planned), records)
    assert ["right", *(one.kind for one in mismatches)] == list(damages)
    assert [one.index for one in mismatches] == [1, 2, 3, 4]
