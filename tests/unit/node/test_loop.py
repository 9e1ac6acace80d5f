"""The engine loop: two steps in flight, replies in order, and what ends the process."""

from collections import deque
from types import SimpleNamespace

import pytest

from baton.decode_node.scheduler import DecodeScheduler
from baton.kv_transfer.connector import NodeConnector
from baton.kv_transfer.interfaces import (
    DialPeer,
    DropPeer,
    FromPeer,
    OfferBroken,
    ReadEnded,
    ReceiveEnded,
    Released,
    ToPeer,
)
from baton.node.executor import RANK_KILLED
from baton.node.heartbeat import Vitals
from baton.node.loop import (
    COLD_STEP_S,
    DRAINING,
    MAX_LAUNCHED,
    PROGRESS_S,
    EngineLoop,
    StepForecast,
)
from baton.node.records import NodeObserver
from baton.node.scheduling.block_pool import BlockPool
from baton.node.scheduling.plan import Origin, Slice, StepPlan, StepResult
from baton.node.scheduling.scheduler import NodeLimits
from baton.node.sockets import FromRouter, LinkEvent, RouterLost
from baton.protocol.config import LogConfig, TransferConfig
from baton.protocol.errors import Cancelled, Failure, NodeError, TransferError
from baton.protocol.ids import NodeId
from baton.protocol.messages import (
    BlockRange,
    Done,
    End,
    Failed,
    FirstToken,
    InProgress,
    Offered,
    PeerHello,
    Peers,
    Refused,
    Tokens,
    ToRouter,
)
from tests.support.connectors import node
from tests.support.drive import (
    continuation,
    handed,
    key,
    local,
    result_of,
    sampling,
    toy_model,
)

NUM_BLOCKS = 40
BLOCK = 4
PROMPT = [5, 6, 7, 8, 9]


class StepByStep:
    """The toy model as an executor that finishes a step when told, with one rank that is idle."""

    def __init__(self) -> None:
        self.toy = toy_model(NUM_BLOCKS)
        self.submitted: deque[StepPlan] = deque()
        self.finished: deque[StepResult] = deque()
        self.ports = (SimpleNamespace(poll=list, fileno=self.fileno, send=repr),)

    def submit(self, plan: StepPlan) -> None:
        self.submitted.append(plan)

    def finish(self) -> None:
        self.finished.append(result_of(self.toy, self.submitted.popleft()))

    def poll(self) -> StepResult | None:
        return self.finished.popleft() if self.finished else None

    def fileno(self) -> int:
        return -1


class Wire:
    """Links whose other end is the test."""

    def __init__(self) -> None:
        self.coming: list[LinkEvent] = []
        self.said: list[ToRouter] = []
        self.origins: list[Origin] = []
        self.to_peers: list[ToPeer | DialPeer | DropPeer] = []

    def receive(self) -> list[LinkEvent]:
        coming = self.coming
        self.coming = []
        return coming

    def to_router(self, origin: Origin, message: ToRouter) -> None:
        self.said.append(message)
        self.origins.append(origin)

    def to_peer(self, command: ToPeer | DialPeer | DropPeer) -> None:
        self.to_peers.append(command)

    def watch(self, fileno: int) -> None:
        pass

    def wait(self, timeout_s: float) -> None:
        pass


class Bench:
    def __init__(self) -> None:
        self.executor, self.wire, self.now_s = StepByStep(), Wire(), 0.0
        self.pool = BlockPool(NUM_BLOCKS, BLOCK, cache_prefixes=True)
        limits = NodeLimits(
            max_num_batched_tokens=16, max_num_seqs=8, max_model_len=100
        )
        observer = NodeObserver(Vitals(), NodeId("d0"), LogConfig(stats_s=0.0))
        self.loop = EngineLoop(
            DecodeScheduler(self.pool, limits),
            self.executor,
            NodeConnector(node("d0", "decode"), TransferConfig()),
            self.wire,
            observer,
            lambda: self.now_s,
        )

    def hear(self, *events: LinkEvent) -> None:
        self.wire.coming.extend(events)
        self.loop.turn()

    def run(self) -> None:
        while self.executor.submitted:
            self.executor.finish()
            self.loop.turn()

    def tokens(self) -> list[int]:
        entries = [
            e for m in self.wire.said if isinstance(m, Tokens) for e in m.entries
        ]
        return [token for entry in entries for token in entry.token_ids]


def test_the_next_step_is_planned_while_one_runs():
    bench = Bench()
    bench.hear(FromRouter(0, local("r", PROMPT, max_tokens=6)))
    # Nothing to plan behind a prompt's last chunk.
    assert len(bench.executor.submitted) == 1
    bench.executor.finish()
    bench.loop.turn()
    assert len(bench.executor.submitted) == MAX_LAUNCHED
    assert bench.executor.submitted[1].slices[0].token_ids == ()  # not yet known here
    bench.run()
    assert bench.tokens() == continuation(PROMPT, 6)


@pytest.mark.parametrize(
    "event", [RouterLost(0), FromRouter(0, Refused(Failure("no", "wrong model")))]
)
def test_a_router_that_is_lost_or_refuses_the_node_takes_its_requests_with_it(event):
    bench = Bench()
    bench.hear(FromRouter(0, local("r", PROMPT, max_tokens=50)))
    bench.hear(event)
    bench.run()
    assert bench.pool.num_free == NUM_BLOCKS
    assert len(bench.tokens()) < 10


def test_messages_of_a_dead_session_are_not_sent_into_the_next_one():
    bench = Bench()
    bench.loop.drain()
    bench.hear(
        FromRouter(0, local("r", PROMPT)),
        FromRouter(1, local("s", PROMPT)),
        RouterLost(0),
    )
    assert bench.wire.origins == [1]


def test_a_loop_that_drains_finishes_what_it_has_and_takes_nothing_new():
    bench = Bench()
    bench.hear(FromRouter(0, local("r", PROMPT, max_tokens=6)))
    bench.loop.drain()
    assert not bench.loop.is_idle
    bench.hear(FromRouter(0, local("late", PROMPT)))
    assert bench.wire.said[-1] == Failed(key("late"), DRAINING)
    bench.run()
    assert bench.tokens() == continuation(PROMPT, 6)
    assert bench.loop.is_idle


def test_routers_hear_what_is_in_progress_here_and_not_what_waits_for_another_node():
    bench = Bench()
    for request in (local("r", PROMPT), handed("other", PROMPT)):
        bench.hear(FromRouter(1, request))
    bench.now_s += PROGRESS_S
    bench.loop.turn()
    assert bench.wire.said[-1] == InProgress((key("r"),))


def test_what_lands_at_once_takes_the_next_step_without_waiting():
    """Nothing is missing here and everything was announced: no event will come to wake the loop."""
    bench = Bench()
    prompt = [5, 6, 7, 8]
    bench.hear(FromRouter(0, local("warm", prompt, max_tokens=2)))
    bench.run()
    info = node("p0", "prefill")
    greeting = PeerHello(
        1, info.node_id, info.epoch, info.model, info.layout.fingerprint
    )
    first = FirstToken(continuation(prompt, 1)[0])
    bench.hear(
        FromRouter(0, Peers((info,))),
        FromRouter(0, handed("a", prompt, max_tokens=3)),
        *(
            FromPeer(info.node_id, info.epoch, message)
            for message in (
                greeting,
                Offered(key("a"), 4, 1, 30.0),
                BlockRange(key("a"), 0, (9,), (1,)),
                End(key("a"), (first,)),
            )
        ),
    )
    assert [part.key for plan in bench.executor.submitted for part in plan.slices] == [
        key("a")
    ] * 2
    assert [m for m in bench.wire.to_peers if isinstance(m, ToPeer)][
        -1
    ].message == Done(key("a"))


def step(num_tokens: int, took_s: float) -> tuple[StepPlan, StepResult]:
    slices = (Slice(key("r"), 0, num_tokens, (), (), (), sampling(4), num_tokens),)
    return StepPlan(1, slices), StepResult(1, ((),), 100.0, 100.0 + took_s)


def test_a_forecast_follows_what_steps_of_that_size_take():
    forecast = StepForecast()
    for _ in range(3):
        forecast.learn(*step(1, 0.05))
    assert forecast.predict(step(1, 0)[0]) == pytest.approx(0.05)
    assert forecast.predict(step(512, 0)[0]) == COLD_STEP_S  # nothing like it was seen
    forecast.learn(*step(512, 0.4))
    assert forecast.predict(step(600, 0)[0]) == pytest.approx(0.4)
    forecast.learn(*step(512, 4.0))
    assert forecast.predict(step(512, 0)[0]) == pytest.approx(4.0)
    forecast.learn(*step(512, 0.4))
    assert 3.0 < forecast.predict(step(512, 0)[0]) < 4.0
    assert forecast.predict(step(1, 0)[0]) == pytest.approx(0.05)


def test_a_rank_that_was_killed_from_outside_is_no_fault_of_its_step(monkeypatch):
    bench = Bench()
    bench.hear(FromRouter(0, local("r", PROMPT, max_tokens=50)))

    def killed() -> None:
        raise NodeError("rank 1 ended with exit code -9", code=RANK_KILLED)

    monkeypatch.setattr(bench.executor, "poll", killed)
    with pytest.raises(NodeError):
        bench.loop.turn()
    assert bench.loop.crashed_in is None


def test_a_pool_with_many_quarantined_blocks_ends_the_process():
    bench = Bench()
    bench.hear(FromRouter(0, local("r", PROMPT)))
    bench.pool.quarantine(bench.pool.allocate(3))
    with pytest.raises(NodeError):
        bench.loop.turn()
    assert bench.loop.crashed_in is None, "no request is to blame"


def test_a_full_disk_under_the_records_ends_no_step(tmp_path, caplog):
    (tmp_path / "d0.jsonl").symlink_to("/dev/full")
    settings = LogConfig(stats_s=0.0, records=str(tmp_path))
    observer = NodeObserver(Vitals(), NodeId("d0"), settings)
    for _ in range(3):
        observer.read_ended(0, ReadEnded(1, 0.0, 1.0, 4096, None))
    observer.close()
    assert observer.counters.reads == 3
    assert [record.message for record in caplog.records] == [
        "records are lost: their file cannot be written"
    ]


def test_a_handoff_that_fails_is_logged_with_its_request(caplog):
    observer = NodeObserver(Vitals(), NodeId("d0"), LogConfig(stats_s=0.0))
    lost = TransferError("the channel to node p0 broke", code="node_lost").to_failure()
    observer.reported(
        ReceiveEnded(key("gone"), Cancelled("by its client").to_failure())
    )
    assert caplog.messages == []
    observer.reported(OfferBroken(key("a"), lost))
    observer.reported(Released(key("b"), lost))
    observer.reported(ReceiveEnded(key("c"), lost))
    found = [
        (record.message, vars(record)["fields"]["request"]) for record in caplog.records
    ]
    broken = "a handoff broke off"
    failed = "a handoff failed"
    assert found == [(broken, "a"), (failed, "b"), (failed, "c")]
    assert vars(caplog.records[0])["fields"]["code"] == "node_lost"
