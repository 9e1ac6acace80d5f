"""The loop of an engine process: receive, settle, connect, plan, launch, send.

The loop is plain code on non-blocking parts. Executors compute, so it renews leases and answers
cancels while a step runs. It never asks which node it is in.
"""

import math
from collections import deque
from collections.abc import Callable
from typing import assert_never

from baton.kv_transfer.connector import NodeConnector
from baton.kv_transfer.interfaces import (
    ConnectorEvent,
    DialPeers,
    FromPeer,
    FromRank,
    PeerLost,
    PeersChanged,
    ReadEnded,
    ToRank,
)
from baton.node.adapters import AdapterSlots
from baton.node.executor import RANK_KILLED, Executor
from baton.node.hand_over import CacheHandOver
from baton.node.records import Draining, EventRing, NodeObserver, Turned
from baton.node.scheduling.plan import NO_ROUTER, Origin, StepPlan, StepResult
from baton.node.scheduling.scheduler import Scheduler
from baton.node.sockets import EngineSockets, FromRouter, LinkEvent, RouterLost
from baton.protocol.codec import Unreadable
from baton.protocol.errors import Failure, InvariantBroken, NodeError
from baton.protocol.messages import (
    Cancel,
    Decode,
    Drain,
    DrainState,
    Failed,
    HandedOver,
    InProgress,
    ListAdapters,
    LoadAdapter,
    Peers,
    Prefetch,
    Prefetched,
    Prefill,
    Profile,
    Refused,
    ResetPrefixCache,
    ToNode,
    WatchCache,
)
from baton.runtime.log import logger

log = logger("node")

# Plans at the executor: one runs, and the next one is ready when it ends.
MAX_LAUNCHED = 2
MAX_WAIT_S = 0.25
PROGRESS_S = 10.0  # between two reports of the sequences in progress
RING_EVENTS = 2_000
QUARANTINE_SHARE = 0.05
# The first step may load, map and compile. A router considers a node stuck after eight times this.
COLD_STEP_S = 15.0
DRAINING = Failure(
    "draining",
    "this node is ending and takes no more requests",
    retryable=True,
    http_status=503,
)
FORECAST_WEIGHT = 0.1  # the share of the newest step if it was quicker than predicted


class StepForecast:
    """Predicts the seconds of a step from recent steps with about as many tokens.

    The prediction rises at once and falls slowly, because a router that mistakes a long step for a
    hanging one ends every stream of the node.
    """

    def __init__(self) -> None:
        # By the number of tokens, rounded to powers of two.
        self._seconds: dict[int, float] = {}

    def predict(self, plan: StepPlan) -> float:
        size = _size(plan)
        known = self._seconds
        if size in known:
            return known[size]
        smaller = max((other for other in known if other < size), default=None)
        if smaller is None:
            return max([COLD_STEP_S, *known.values()])
        return max(
            known[smaller], min(COLD_STEP_S, known[smaller] * (1 << (size - smaller)))
        )

    def learn(self, plan: StepPlan, result: StepResult) -> None:
        if not plan.slices:
            return
        took_s = result.ended_s - result.started_s
        size = _size(plan)
        known_s = self._seconds.get(size, took_s)
        self._seconds[size] = max(
            took_s, known_s + FORECAST_WEIGHT * (took_s - known_s)
        )


def _size(plan: StepPlan) -> int:
    return sum(part.length for part in plan.slices).bit_length()


class EngineLoop:
    """Drives one scheduler, one executor and one connector over `links`.

    An error ends the process, and its supervisor restarts it. `ring` holds the last events.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        connector: NodeConnector,
        links: EngineSockets,
        observer: NodeObserver,
        clock: Callable[[], float],
    ) -> None:
        self._hand_over = CacheHandOver(scheduler.pool, scheduler.tiers)
        self.scheduler = scheduler
        self.executor = executor
        self.connector = connector
        self.links = links
        self.observer = observer
        self.ring = EventRing(RING_EVENTS)
        self._clock = clock
        self._forecast = StepForecast()
        self._launched: deque[StepPlan] = deque()
        self._adapters = AdapterSlots(scheduler, executor)
        # The step whose error ends this process.
        self.crashed_in: StepPlan | None = None
        self._events: list[ConnectorEvent] = []
        self._wake_at_s: float | None = 0.0  # of the connector
        self._wake_s = math.inf
        self._is_idle = True  # after the last turn
        self._next_progress_s = 0.0
        self._is_draining = False
        self.is_asked_to_drain = False  # by a router
        links.watch(executor.fileno())
        for port in executor.ports:
            links.watch(port.fileno())

    def turn(self) -> None:
        """Do everything that can be done now, then wait for the next event."""
        events = self.links.receive()
        # The clock is read after the messages arrived; otherwise leases that they renew would end
        # early.
        now_s = self._clock()
        self.scheduler.pool.cache.tick(now_s)
        is_quiet = self._wake_s > now_s and self._is_idle
        self.ring.begin_turn()
        for event in events:
            self.ring.record(now_s, event)
            self._handle(now_s, event)
        self._settle(now_s)
        if self._adapters.has_work:
            self._load_adapters(now_s)
        self._connect(now_s)
        self._launch(now_s)
        if self._is_draining:
            self._hand_cache_over(now_s)
        self._send(now_s)
        if self.ring.is_turn_empty and not is_quiet:
            self.ring.record(now_s, Turned())
        load = self.scheduler.load()
        if load.quarantined_blocks > QUARANTINE_SHARE * load.total_blocks:
            raise NodeError(
                f"{load.quarantined_blocks} KV blocks are quarantined: starting afresh"
            )
        self.observer.turned(load, self.connector.unreachable)
        wake_at_s = (self._wake_at_s, self.scheduler.pool.cache.journal.wake_at_s)
        self._wake_s = min(
            (at_s for at_s in wake_at_s if at_s is not None), default=math.inf
        )
        self._is_idle = not (load.num_running or load.num_waiting)
        self.links.wait(min(max(self._wake_s - self._clock(), 0.0), MAX_WAIT_S))

    def drain(self, hand_over_s: float = 0.0) -> None:
        """Take no more requests; existing requests go on.

        Within `hand_over_s` seconds, other nodes are asked to read what is cached here.
        """
        now_s = self._clock()
        self.ring.record(now_s, Draining(hand_over_s))
        self._is_draining = True
        self._is_idle = False  # the next turn acts
        self._hand_over.begin(now_s, hand_over_s)
        self._events.append(DialPeers())

    @property
    def has_handed_over(self) -> bool:
        """Return whether a node that drains need not wait for those that read its cache."""
        return self._hand_over.is_over(self._clock())

    @property
    def is_idle(self) -> bool:
        """Return whether nothing runs or waits here, and no peer may come for more."""
        load = self.scheduler.load()
        has_all_blocks = load.free_blocks + load.quarantined_blocks == load.total_blocks
        is_busy = load.num_running or load.num_waiting or self._launched
        return has_all_blocks and not is_busy

    def _handle(self, now_s: float, event: LinkEvent) -> None:
        match event:
            case FromRouter(origin, message):
                self._handle_router(now_s, origin, message)
            case RouterLost(origin):
                self._forget(origin)
            case FromPeer():
                self._events.append(event)
            case PeerLost(node=node):
                log.info("the channel to a peer broke", node=node)
                self._events.append(event)
            case _:
                assert_never(event)

    def _handle_router(
        self, now_s: float, origin: Origin, message: ToNode | Unreadable
    ) -> None:
        match message:
            case Unreadable(key=key, failure=failure):
                self.scheduler.outputs.send(origin, Failed(key, failure))
            case Prefill(key=key) | Decode(key=key) if self._is_draining:
                self.scheduler.outputs.send(origin, Failed(key, DRAINING))
            case Prefetch(key=key) if self._is_draining:
                self.scheduler.outputs.send(origin, Prefetched(key))
            case Prefetch():
                self.scheduler.prefetches.add(now_s, origin, message)
            case HandedOver():
                self._hand_over.answered(message)
            case Prefill() | Decode():
                self.scheduler.add(now_s, origin, message)
            case Cancel(keys=keys):
                self.scheduler.cancel(origin, keys)
            case Peers(nodes=nodes):
                self._events.append(PeersChanged(nodes))
            case Drain():
                self.is_asked_to_drain = True
            case DrainState():  # routers alone get it
                pass
            case ResetPrefixCache():
                self.scheduler.pool.reset_prefix_cache()
                self.scheduler.prefetches.clear()
                self.scheduler.tiers.reset()
            case LoadAdapter():
                self._adapters.load(origin, message)
            case ListAdapters(entries=entries):
                self._adapters.take_list(origin, entries)
            case Profile(name=name):
                self.executor.profile(name)
            case WatchCache():
                self.scheduler.pool.cache.watch(origin)
                self.scheduler.tiers.watch(origin)
            case Refused():  # the links ask again
                self._forget(origin)
            case _:
                assert_never(message)

    def _load_adapters(self, now_s: float) -> None:
        if self._adapters.is_loading:
            outcome = self.executor.poll_adapter()
            if outcome is not None:
                self.ring.record(now_s, outcome)
                self._adapters.loaded(now_s, outcome)
        self._adapters.begin(now_s)
        for origin, message in self._adapters.take_replies():
            self.scheduler.outputs.send(origin, message)
        if (change := self._adapters.take_change()) is not None:
            self.links.broadcast(change)

    def _hand_cache_over(self, now_s: float) -> None:
        load = self.scheduler.load()
        for origin, message in self._hand_over.messages(now_s, load):
            self.scheduler.outputs.send(origin, message)

    def _forget(self, origin: Origin) -> None:
        self._hand_over.lost(origin)
        self._adapters.forget(origin)
        self.scheduler.forget(origin)
        self.scheduler.outputs.drop(origin)
        self.scheduler.pool.cache.journal.forget(origin)

    def _settle(self, now_s: float) -> None:
        while (result := self._settled(now_s)) is not None:
            plan = self._launched.popleft()
            self._forecast.learn(plan, result)
            self.observer.step_settled(plan, result)
            if self._launched:
                self.observer.step_started(
                    now_s, self._forecast.predict(self._launched[0])
                )

    def _settled(self, now_s: float) -> StepResult | None:
        """Settle the oldest step if it has ended. Its error is charged to its requests."""
        try:
            result = self.executor.poll()
            if result is None:
                return None
            self.ring.record(now_s, result)
            plan = self._launched[0]
            if plan.step_id != result.step_id:
                raise InvariantBroken(
                    f"step {result.step_id} settled before {plan.step_id}"
                )
            self.scheduler.settle(now_s, plan, result)
        except Exception as error:
            # If a rank was killed from outside, the step that it was computing is not at fault.
            if self._launched and not (
                isinstance(error, NodeError) and error.code == RANK_KILLED
            ):
                self.crashed_in = self._launched[0]
            raise
        return result

    def _connect(self, now_s: float) -> None:
        """Run the connector until it and the scheduler have no new events for each other."""
        for rank, port in enumerate(self.executor.ports):
            for event in port.poll():
                if isinstance(event, ReadEnded) and not self.connector.reads_tier(
                    event.ticket
                ):
                    self.observer.read_ended(rank, event)
                self.ring.record(now_s, event, rank)
                self._events.append(FromRank(rank, event))
        self._events.extend(self.scheduler.outputs.take_connector_events())
        due = self._wake_at_s is not None and now_s >= self._wake_at_s
        while self._events or due:
            due = False
            events = self._events
            self._events = []
            step = self.connector.step(now_s, events)
            self._wake_at_s = step.wake_at_s
            for command in step.commands:
                if isinstance(command, ToRank):
                    self.executor.ports[command.rank].send(command.command)
                else:
                    self.links.to_peer(command)
            for report in step.reports:
                self.observer.reported(report)
                self.scheduler.on_report(now_s, report)
            self._events.extend(self.scheduler.outputs.take_connector_events())

    def _launch(self, now_s: float) -> None:
        """Plan and submit steps while the executor can take them.

        Planning may admit prompts, which are then offered or received. A prompt that is
        received immediately is planned immediately, because no event will wake this loop for it.
        """
        while True:
            while len(self._launched) < MAX_LAUNCHED:
                plan = self.scheduler.plan(now_s)
                if plan is None:
                    break
                if not self._launched:
                    self.observer.step_started(now_s, self._forecast.predict(plan))
                self._launched.append(plan)
                self.executor.submit(plan)
            if not self.scheduler.outputs.to_connector:
                return
            self._connect(now_s)

    def _send(self, now_s: float) -> None:
        for origin, message in self.scheduler.outputs.take_router_messages():
            self.links.to_router(origin, message)
        if now_s >= self._next_progress_s:
            self._next_progress_s = now_s + PROGRESS_S
            for origin, keys in self.scheduler.in_progress().items():
                if origin != NO_ROUTER:
                    self.links.to_router(origin, InProgress(tuple(keys)))
        for origin, changes in self.scheduler.pool.cache.journal.take(now_s):
            self.links.to_router(origin, changes)
