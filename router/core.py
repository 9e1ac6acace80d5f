"""The router without text, which takes token ids and returns the tokens of every choice.

`TextRouter` calls it on one event loop. The core connects the pure parts (a `Lifecycle` per
request, `registry`, `policy`, `admission`) with the socket of the nodes and the streams of the
callers. It leaves all decisions to those parts, never blocks, and lets no error of one request end
another.
"""

import asyncio
import math
import secrets
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import assert_never

import msgspec

from baton.protocol.blocks import BlockKey
from baton.protocol.config import ClusterConfig
from baton.protocol.errors import BatonError, Failure, Overloaded, from_failure
from baton.protocol.ids import Epoch, Key, NodeId, RequestId
from baton.protocol.messages import (
    Accepted,
    Attached,
    Beat,
    CacheChanges,
    Cancel,
    CancelDone,
    Crashed,
    Decode,
    DrainNode,
    Failed,
    FirstTokens,
    Hello,
    Kept,
    NotAttached,
    Prefill,
    Ready,
    Starting,
    TokenEntry,
    Tokens,
    ToNode,
    ToRouter,
    WatchCache,
)
from baton.protocol.sampling import SEED_BITS
from baton.router.health import Health, can_serve, health_of, limits_of
from baton.router.lifecycle import NO_NODE, Lifecycle
from baton.router.node_link import Announcer, NodeListener
from baton.router.pairs import Pairs
from baton.router.policy import CheapestPair, Decision
from baton.router.queue import Admission, Limits, Placing, fit, sampling_of
from baton.router.reattach import (
    Accept,
    Claim,
    DecodeNodes,
    Early,
    FoundRequest,
    Reattaching,
    adopted,
    in_use,
    place_of,
)
from baton.router.registry import Change, Entered, Left, Registry
from baton.router.request import (
    DRAINING,
    Adopted,
    AdoptedChoice,
    Begun,
    CallerGone,
    ChoiceStopped,
    Closed,
    Deliver,
    HandoffEnded,
    NodeLost,
    NodeMessage,
    NotPlaced,
    Outcome,
    Place,
    Release,
    Request,
    RequestCommand,
    RequestEvent,
    Send,
    Tick,
    Timed,
    TriedAgain,
    Unplace,
)
from baton.router.stream import RequestStream
from baton.runtime.channels.keys import load_keys
from baton.runtime.clock import Clock, monotonic
from baton.runtime.log import logger


@dataclass(slots=True, eq=False)
class Active:
    """A request from `submit` until no node has work left or a confirmation to send for it."""

    request_id: RequestId
    lifecycle: Lifecycle
    stream: RequestStream
    began_s: float
    is_broken: bool = False

    def asks(self, now_s: float, place: Place) -> None:
        """Record that an attempt began to wait for nodes."""
        self.stream.metrics.begin_attempt(place.key, place.num_choices, now_s - self.began_s)

    def placed(self, now_s: float, key: Key, decision: Decision) -> None:
        """Record the nodes of an attempt."""
        metrics, waited_s = self.stream.metrics, now_s - self.began_s
        if (attempt := metrics.attempt_of(key)) is not None:
            attempt.placed_at_s = waited_s
            attempt.prefill_node = decision.placed.prefill_node
            attempt.decode_node = decision.placed.decode_node
        if metrics.num_attempts == 0:
            metrics.router_queue_s = waited_s
        metrics.num_attempts = max(metrics.num_attempts, key.nth_attempt + 1)
        metrics.num_predicted_tokens = decision.num_cached_tokens
        metrics.path = decision.path
        metrics.local_fallback = decision.is_fallback

    def timed(self, now_s: float, timed: Timed, pairs: Pairs) -> None:
        """Record what a node measured and, for its pair, what a handoff moved."""
        times, metrics = timed.times, self.stream.metrics
        metrics.add_stages(times, of_prompt=timed.of_prompt)
        if (attempt := metrics.attempt_of(timed.key)) is None:
            return
        attempt.timed(now_s - self.began_s, times, of_prompt=timed.of_prompt)
        if times.transfer_bytes and attempt.prefill_node and attempt.decode_node:
            pairs.moved(
                attempt.prefill_node, attempt.decode_node, times.transfer_bytes, times.transfer_s
            )

    def tries_again(self, now_s: float, again: TriedAgain) -> None:
        """Record that an attempt was lost and another follows."""
        metrics = self.stream.metrics
        metrics.try_again(again.failure, is_resume=again.is_resume)
        if (attempt := metrics.attempt_of(again.key)) is not None:
            attempt.lost_at_s, attempt.failure = now_s - self.began_s, again.failure.code


log = logger("router")


Order = Callable[[NodeId, Prefill | Decode | Cancel], None]


TICK_S = 0.25


ROUND_S = 10.0


LEAST_LOOKS = 64  # requests in a tick


class Rounds:
    def __init__(self) -> None:
        self._next_round_s = 0.0
        # Requests whose turns are yet to come in this round.
        self._waiting: deque[RequestId] = deque()
        self._unconfirmed: dict[RequestId, Active] = {}

    def cancelled(self, active: Active) -> None:
        """Note that nodes of this request may have a cancel to confirm."""
        self._unconfirmed[active.request_id] = active

    def take(self, now_s: float, all_active: dict[RequestId, Active]) -> list[Active]:
        """Return the active requests to check now."""
        self._unconfirmed = {
            request_id: active
            for request_id, active in self._unconfirmed.items()
            if request_id in all_active and active.lifecycle.awaits_confirmation
        }
        if not self._waiting and now_s >= self._next_round_s:
            self._next_round_s = now_s + ROUND_S
            self._waiting = deque(all_active)
        num = max(LEAST_LOOKS, math.ceil(len(all_active) * TICK_S / ROUND_S))
        ids = [self._waiting.popleft() for _ in range(min(num, len(self._waiting)))]
        found = [all_active[request_id] for request_id in ids if request_id in all_active]
        return [*self._unconfirmed.values(), *found]


class ActiveRequests:
    """`by_id` holds a request from its first event until no node has to confirm anything."""

    def __init__(
        self,
        registry: Registry,
        admission: Admission,
        policy: CheapestPair,
        announcer: Announcer,
        send: Order,
    ) -> None:
        self.by_id: dict[RequestId, Active] = {}
        self.is_feeding = False
        self._registry, self._admission = registry, admission
        self._policy, self._announcer = policy, announcer
        self._send = send
        self._rounds = Rounds()
        self._events: deque[tuple[Active, RequestEvent, NodeId]] = deque()
        self._now_s = 0.0

    def feed(
        self, now_s: float, active: Active, event: RequestEvent, node: NodeId = NO_NODE
    ) -> None:
        """Handle an event, then the events that it causes, such as a caller's leaving."""
        self._now_s = now_s
        if self.is_feeding:
            self._events.append((active, event, node))
            return
        self.is_feeding = True
        try:
            self._step(active, event, node)
            while self._events:
                self._step(*self._events.popleft())
        finally:
            self.is_feeding = False

    def to_look_at(self, now_s: float) -> list[Active]:
        """Return the requests whose time may have run out at this tick."""
        return self._rounds.take(now_s, self.by_id)

    def _step(self, active: Active, event: RequestEvent, node: NodeId) -> None:
        if self.by_id.get(active.request_id) is not active:
            return  # it has ended, so it must not join the line again
        commands: Iterator[RequestCommand] = iter(())
        try:
            commands = iter(active.lifecycle.step(self._now_s, event, node))
            for command in commands:
                self._carry_out(active, command)
        except Exception:
            log.exception("a request broke", request=active.request_id, at=type(event).__name__)
            self._contain(active, commands)

    def _contain(self, active: Active, commands: Iterator[RequestCommand]) -> None:
        """End, with an error, a request that met a bug. The others go on."""
        active.stream.finish(BatonError("the router failed to handle this request"))
        if not active.is_broken:
            active.is_broken = True
            self._events.append((active, CallerGone("router error"), NO_NODE))
            for command in commands:
                self._carry_out(active, command)
        elif self.by_id.pop(active.request_id, None) is not None:
            # A node that still works for it will be told to stop when it next sends a message about
            # it.
            self._registry.forget(active.request_id)
            self._admission.forget(active.request_id)

    def _carry_out(self, active: Active, command: RequestCommand) -> None:
        match command:
            case Deliver(choice=choice, token_ids=token_ids, finish_reason=reason):
                if active.stream.push(choice, token_ids, reason):
                    self.feed(self._now_s, active, ChoiceStopped(choice))
            case Send(node=node, message=message):
                self._send(node, message)
                if isinstance(message, Cancel):
                    self._rounds.cancelled(active)
            case Place():
                self._admission.wait(self._now_s, command)
                active.asks(self._now_s, command)
            case Unplace(key=key):
                self._admission.leave(key)
            case Release(node=node, key=key):
                self._registry.release(node, key)
            case Timed():
                active.timed(self._now_s, command, self._registry.pairs)
            case HandoffEnded():
                self._announcer.judge(self._now_s, command)
            case TriedAgain():
                active.tries_again(self._now_s, command)
            case Outcome(failure=failure):
                if failure is None:
                    self._policy.learn(active.stream.tokens_per_choice)
                active.stream.finish(None if failure is None else from_failure(failure))
            case Closed():
                del self.by_id[active.request_id]
                self._admission.ended(active.request_id)
            case _:
                assert_never(command)


class RouterCore:
    """Call `start`, then `submit` as often as needed, then `close`."""

    def __init__(self, config: ClusterConfig, clock: Clock = monotonic) -> None:
        self.epoch = Epoch(secrets.token_hex(8))
        self.registry = Registry()
        self._config = config.router
        self._keys = config.keys
        self._detached_s = config.node.detached_s
        self._clock = clock
        is_cache_aware = config.router.routing == "cache-aware"
        self._announcer = Announcer(self.registry, self._send, watches_caches=is_cache_aware)
        self._policy = CheapestPair(config.router.local_prefill, config.router.local_prefill_tokens)
        self._admission = Admission(config.router)
        self._placing = Placing(self.registry, self._policy, self._admission)
        self._requests = ActiveRequests(
            self.registry, self._admission, self._policy, self._announcer, self._send
        )
        self._reattaching = Reattaching(clock(), self._send, self._adopt)
        self._num_requests = 0
        self._now_s = clock()
        self._failure: Failure | None = None
        # Every request needs these, so they are cached until the state of a node changes.
        self._limits: Limits | None = None
        self._limits_at = 0
        self._sockets: NodeListener | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()

    # --- its caller -----------------------------------------------------------------------------

    def start(self, endpoint: str) -> str:
        """Open the endpoint that nodes dial, and return its address. Raises `ConfigError`."""
        keys = load_keys(self._keys)
        self._sockets = NodeListener(endpoint, keys, self._heard, self._gone, self._place_waiting)
        self._sockets.drain_asked = self._announcer.drain
        self._sockets.unsent = self._announcer.unsent
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)
        return self._sockets.endpoint

    def submit(
        self,
        stream: RequestStream,
        kept: Kept | None = None,
        block_keys: tuple[BlockKey, ...] = (),
    ) -> RequestId:
        """Accept a request. Raises `RequestError` or `Overloaded`, without any other effect.

        With `kept`, a client can resume the stream at any router, by the stream's own id, which
        must be unique and impossible to guess. `block_keys` are those of the prompt.
        """
        limits = self.limits()
        prompt, params = stream.prompt_token_ids, stream.params
        max_tokens, stream.metrics.max_tokens_clamped = fit(len(prompt), params, limits)
        could_place = can_serve(self.registry, self._config.local_prefill)
        self._admission.check_room(len(prompt), could_place=could_place)
        self._num_requests += 1
        minted = f"{self.epoch}-{self._num_requests:x}"
        request_id = RequestId(minted if kept is None else stream.request_id)
        seed = secrets.randbits(SEED_BITS) if params.seed is None else params.seed
        sampling = sampling_of(params, seed, max_tokens)
        request = Request(
            request_id, list(prompt), sampling, params.n, self._config.max_attempts, kept,
            block_keys,
        )  # fmt: skip
        self._begin(request, stream, Begun())
        return request_id

    def _begin(self, request: Request, stream: RequestStream, event: Begun | Adopted) -> None:
        self._now_s = self._clock()
        active = Active(request.request_id, Lifecycle(request), stream, self._now_s)
        self._requests.by_id[active.request_id] = active
        stream.on_close(partial(self.cancel, active.request_id))
        self._requests.feed(self._now_s, active, event)
        self._place_waiting()

    async def reattach(self, claim: Claim, accept: Accept) -> RequestStream:
        """Take over a request whose router is gone. Return the stream that `accept` makes.

        Raises `RequestError` if no node holds it or another router has it.
        """
        if self._failure is not None:
            raise from_failure(self._failure)
        if claim.request_id in self._requests.by_id:
            raise in_use()
        now_s = self._clock()
        missing = [
            node.node_id
            for node in self.registry.lost_nodes(now_s)
            if node.role == "decode" and node.lost_s < self._detached_s
        ]
        nodes = DecodeNodes(self.registry.joined("decode"), missing)
        return await self._reattaching.take(now_s, claim, nodes, accept)

    def _adopt(
        self, claim: Claim, stream: RequestStream, found: FoundRequest, early: Early
    ) -> None:
        attached, choices = found.attached, adopted(claim, found, stream, self.registry)
        kept = Kept(attached.form, claim.owner, attached.num_choices)
        request = Request(
            claim.request_id, attached.prompt_token_ids, attached.sampling, attached.num_choices,
            self._config.max_attempts, kept,
        )  # fmt: skip
        for choice in choices:
            if choice.process is not None and not choice.has_ended:
                self._charge_adopted(choice.process[0], request, choice)
        self._begin(request, stream, Adopted(choices, found.first_attempt))
        for node, message in early:
            self._said(node, claim.request_id, message)

    def _charge_adopted(self, name: NodeId, request: Request, choice: AdoptedChoice) -> None:
        """Charge a sequence that another router has placed, to the node that runs it."""
        node = self.registry.node(name)
        assert node is not None
        charge = self._policy.charge_of(node, place_of(request, choice))
        self.registry.charge(name, choice.key, charge)
        self._admission.placed(self._now_s, choice.key)
        self._announcer.keeps(name, choice.key)

    def cancel(self, request_id: RequestId, reason: str = "client") -> None:
        """End a request with `Cancelled`, unless it is unknown or has ended."""
        active = self._requests.by_id.get(request_id)
        if active is not None:
            self._now_s = self._clock()
            self._requests.feed(self._now_s, active, CallerGone(reason))
            self._place_waiting()

    def health(self) -> Health:
        mode, line = self._config.local_prefill, self._admission
        health = health_of(self._clock(), self.registry, mode, line)
        if self._failure is None:
            return health
        return msgspec.structs.replace(health, status="failed", message=self._failure.message)

    async def wait_for(self, num_prefill: int, num_decode: int) -> None:
        """Wait until that many nodes are in service. Raises the router's error if it has failed."""
        while True:
            if self._failure is not None:
                raise from_failure(self._failure)
            num = len(self.registry.in_service("prefill")), len(self.registry.in_service("decode"))
            if num[0] >= num_prefill and num[1] >= num_decode:
                return
            self._changed.clear()
            await self._changed.wait()

    def fail(self, failure: Failure) -> None:
        """Stop serving: every running request and every new one fails with this reason."""
        self._failure = failure
        self._changed.set()
        self._reattaching.end(failure)
        self._end_all(failure)

    def _end_all(self, failure: Failure) -> None:
        for active in list(self._requests.by_id.values()):
            active.stream.finish(from_failure(failure))
            self._requests.feed(self._now_s, active, CallerGone(failure.code))

    def _detach_all(self) -> None:
        """Leave the streams that another router can resume to their nodes."""
        text = "the router is shutting down: go on at any router, with the header Last-Event-ID"
        for active in list(self._requests.by_id.values()):
            has_begun = active.stream.metrics.time_to_first_token_s is not None
            if has_begun and active.lifecycle.request.kept is not None:
                active.stream.finish(Overloaded(text, code="shutting_down"))
                del self._requests.by_id[active.request_id]

    @property
    def num_active(self) -> int:
        """Return the number of requests whose end not all nodes have confirmed."""
        return len(self._requests.by_id)

    @property
    def has_failed(self) -> bool:
        return self._failure is not None

    def close(self) -> None:
        """End every request and the connections to all nodes. A second call does nothing."""
        if self._failure is None:
            self._detach_all()
            text = "the router is shutting down"
            self.fail(Overloaded(text, code="shutting_down").to_failure())
        if self._timer is not None:
            self._timer.cancel()
        if self._sockets is not None:
            self._sockets.close()

    # --- nodes ----------------------------------------------------------------------------------

    def _heard(self, node: NodeId, message: ToRouter) -> None:
        self._now_s = now_s = self._clock()
        match message:
            case Tokens(entries=entries):
                for entry in entries:
                    self._said(node, entry.key.request_id, entry)
            case Accepted() | FirstTokens() | Failed():
                if isinstance(message, Failed) and message.failure.code == DRAINING:
                    self.registry.drains(node)  # the node's next beat will report it too
                self._said(node, message.key.request_id, message)
            case CancelDone(keys=keys) | Crashed(keys=keys):
                for request_id in dict.fromkeys(key.request_id for key in keys):
                    self._said(node, request_id, message)
                if isinstance(message, Crashed):
                    self._apply(self.registry.gone(node, message.failure.message))
                    self._send(node, Cancel(keys, "crashed"))
            case Beat(node_id=node_id):
                if node_id == node:
                    self._apply(self.registry.beat(now_s, message))
            case CacheChanges():
                if not self.registry.hears_cache(node, message):
                    self._send(node, WatchCache())
            case Starting(node_id=node_id):
                if node_id == node:
                    self.registry.starting(now_s, message)
            case Hello():
                self._apply(self.registry.hello(now_s, node, message))
            case Ready():
                self._apply(self.registry.ready(now_s, node, message))
            case Attached() | NotAttached():
                self._reattaching.heard(now_s, node, message)
            case DrainNode():  # an operator's command, and not a node
                pass
            case _:
                assert_never(message)

    def _said(self, node: NodeId, request_id: RequestId, message: NodeMessage) -> None:
        active = self._requests.by_id.get(request_id)
        if active is not None:
            self._requests.feed(self._now_s, active, message, node)
        elif self._reattaching.holds_back(node, request_id, message):
            pass
        elif isinstance(message, Accepted | FirstTokens | TokenEntry):
            # The node still works for a request that has ended.
            self._send(node, Cancel((message.key,), "ended"))

    def _gone(self, node: NodeId) -> None:
        self._now_s = self._clock()
        self._apply(self.registry.gone(node))

    def _apply(self, changes: list[Change]) -> None:
        for change in changes:
            self._announcer.announce(change)
            if isinstance(change, Entered) and change.info.role == "decode":
                self._reattaching.entered(change.info.node_id)
            elif isinstance(change, Left):
                self._reattaching.left(change.node)
                for active in list(self._requests.by_id.values()):
                    self._requests.feed(self._now_s, active, NodeLost(change.node, change.failure))
        self._changed.set()

    def _send(self, node: NodeId, message: ToNode) -> None:
        assert self._sockets is not None
        self._sockets.send(node, message)

    # --- requests -------------------------------------------------------------------------------

    def limits(self) -> Limits:
        """Return the limits of a request. Raises `Overloaded` if no request can be served."""
        if self._failure is not None:
            raise from_failure(self._failure)
        return self.known_limits()

    def known_limits(self) -> Limits:
        """Return the nodes' limits. Raises `Overloaded` until one has been ready."""
        if self._limits is None or self._limits_at != self.registry.version:
            self._limits_at = self.registry.version
            self._limits = limits_of(self.registry, self._config.local_prefill)
        return self._limits

    # --- placing and time -----------------------------------------------------------------------

    def _place_waiting(self) -> None:
        if self._requests.is_feeding:
            return  # a request that is about to end may be in line; `feed` places legs afterwards
        for place, found in self._placing.take(self._now_s):
            if isinstance(found, Failure):
                self._turn_away(place.key, found)
            else:
                self._place(place, found)

    def _turn_away(self, key: Key, failure: Failure) -> None:
        self._requests.feed(
            self._now_s, self._requests.by_id[key.request_id], NotPlaced(key, failure)
        )

    def _place(self, place: Place, decision: Decision) -> None:
        active = self._requests.by_id[place.key.request_id]
        self._admission.placed(self._now_s, place.key)
        for node, charge in decision.charges:
            self.registry.charge(node, place.key, charge)
        self.registry.note_pair(decision.placed)
        active.placed(self._clock(), place.key, decision)
        self._requests.feed(self._now_s, active, decision.placed)

    def _tick(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)
        assert self._sockets is not None
        # If this loop was delayed, beats are waiting in the socket, so it is read first.
        self._sockets.drain()
        self._now_s = now_s = self._clock()
        self._apply(self.registry.tick(now_s))
        self._reattaching.tick(now_s)
        for key, failure in self._admission.take_overdue(now_s):
            if key.request_id in self._requests.by_id:
                self._turn_away(key, failure)
        for active in self._requests.to_look_at(now_s):
            self._requests.feed(self._now_s, active, Tick())
        self._place_waiting()
