"""The router without text, which takes token ids and returns the tokens of every choice.

The core connects the pure parts (the requests, the registry, the queue) with the link
to the nodes and the callers' streams, on one event loop. It never blocks, and lets no error of one
request end another.
"""

import asyncio
import math
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from typing import assert_never

import msgspec

from baton.protocol.blocks import BlockKey
from baton.protocol.config import ClusterConfig
from baton.protocol.errors import (
    BatonError,
    Failure,
    Overloaded,
    RequestError,
    from_failure,
)
from baton.protocol.ids import Epoch, Key, NodeId, RequestId
from baton.protocol.messages import (
    Accepted,
    AdapterLoaded,
    AdaptersHeld,
    CacheChanges,
    Cancel,
    CancelDone,
    Crashed,
    DrainNode,
    Failed,
    FirstTokens,
    HandOver,
    Heartbeat,
    Hello,
    InProgress,
    Pooled,
    Prefetched,
    PromptLogprobs,
    Ready,
    Starting,
    TokenEntry,
    Tokens,
    ToNode,
    ToRouter,
    WatchCache,
)
from baton.protocol.pooling import ModelTasks, Pooling
from baton.protocol.sampling import Sampling
from baton.router.core.adapters import ClusterAdapters
from baton.router.core.admission import Admission, Limits
from baton.router.core.health import Health, can_serve, health_of, limits_of
from baton.router.core.lifecycle import NO_NODE, Request
from baton.router.core.node_link import Heard, NodeLink, NodeNotifier
from baton.router.core.policy import CheapestPair
from baton.router.core.prefetches import Prefetches
from baton.router.core.registry import Change, Entered, Left, Registry
from baton.router.core.request import (
    ANYONE,
    DRAINING,
    Begun,
    CallerGone,
    CancelSelection,
    ChoiceStopped,
    Closed,
    Deliver,
    DeliverPooled,
    DeliverPrompt,
    HandoffEnded,
    NodeLost,
    NodeMessage,
    NodesNotSelected,
    NodesSelected,
    Outcome,
    Release,
    RequestCommand,
    RequestEvent,
    SelectNodes,
    Send,
    Tenant,
    Tick,
)
from baton.router.core.stream import RequestStream
from baton.runtime.channels.keys import Keys, load_keys
from baton.runtime.channels.listener import Channels
from baton.runtime.clock import Clock, monotonic
from baton.runtime.log import logger

TICK_S = 0.25
STALL_TO_LOG_S = 1.0
ROUND_S = 2.0  # each request is looked at once in this time
LEAST_LOOKS = 64  # requests in a tick

log = logger("router")


class RouterCore:
    """Call `start`, then `submit` as often as needed, then `close`."""

    def __init__(
        self,
        config: ClusterConfig,
        clock: Clock = monotonic,
        open_channels: Callable[[Keys, float], Channels] = Channels,
    ) -> None:
        self.epoch = Epoch(secrets.token_hex(8))
        self.registry = Registry(config.router.heartbeat_timeout_s)
        self._config = config.router
        self._keys = config.keys
        self._open_channels = open_channels
        self._clock = clock
        is_cache_aware = config.router.routing == "cache-aware"
        self.notifier = NodeNotifier(
            self.registry, self._send, watches_caches=is_cache_aware
        )
        self._allows_loading = config.model.allow_runtime_lora_updating
        self.adapters = ClusterAdapters(self.registry, self._send, self.epoch)
        self._prefetches = Prefetches(self.registry, self._send, self.new_id)
        self._policy = CheapestPair(
            config.router.local_prefill, config.router.local_prefill_tokens
        )
        self._queue = Admission(config.router, self.registry, self._policy)
        # A request is here from its first event until no node has to confirm anything.
        self._requests: dict[RequestId, Request] = {}
        self._streams: dict[RequestId, RequestStream] = {}  # the same
        # Events that were caused while another one is handled, or by callers.
        self._events: deque[tuple[Request, RequestEvent, NodeId]] = deque()
        # Requests that this round has yet to look at.
        self._round: deque[RequestId] = deque()
        self._next_round_s = 0.0
        self._numbers = count(1)
        self._now_s = clock()
        self._failure: Failure | None = None
        # Every request needs these, so they are cached until the state of a node changes.
        self._limits: Limits | None = None
        self._limits_at = 0
        self._link: NodeLink | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()

    # --- its caller -----------------------------------------------------------------------------

    def start(self, endpoint: str) -> str:
        """Open the endpoint that nodes dial, and return its address. Raises `ConfigError`."""
        channels = self._open_channels(
            load_keys(self._keys), self._config.heartbeat_timeout_s
        )
        self._link = NodeLink(endpoint, channels, self._read, self.notifier.drain)
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)
        return self._link.endpoint

    def submit(
        self,
        request_id: RequestId,
        stream: RequestStream,
        sampling: Sampling,
        block_keys: tuple[BlockKey, ...] = (),
        tenant: Tenant = ANYONE,
    ) -> None:
        """Accept a request. Raises `RequestError` or `Overloaded`, without any other effect.

        `request_id` comes from `new_id`. `block_keys` are those of the prompt.
        """
        prompt = stream.prompt_token_ids
        is_pooled = sampling.pooling is not None
        self._check_task(sampling.pooling)
        could_serve = can_serve(
            self.registry, self._config.local_prefill, is_pooled=is_pooled
        )
        pushed_out = self._queue.check_room(
            self._clock(), len(prompt), tenant, could_serve=could_serve
        )
        request = Request(
            request_id,
            prompt,
            sampling,
            stream.params.n,
            self._config.max_attempts,
            block_keys,
            tenant,
            stream.metrics,
        )
        self._refuse(pushed_out)
        self._begin(request, stream)

    def new_id(self) -> RequestId:
        """Return a name for a request that no other one of any router has."""
        return RequestId(f"{self.epoch}-{next(self._numbers):x}")

    def _check_task(self, pooling: Pooling | None) -> None:
        """Raise `RequestError` for what the model cannot make, or `Overloaded`."""
        model = self.registry.model
        tasks = ModelTasks() if model is None else model.facts.tasks
        if not tasks.can(pooling):
            what = "tokens" if pooling is None else "this"
            text = f"the model cannot be asked for {what}: {tasks.described}"
            raise RequestError(text, code="unsupported", param="model")
        # A cluster that pools may have no decode nodes at all, and to wait for one is in vain.
        if pooling is None and tasks.pools and not self.registry.has_met("decode"):
            text = (
                "no decode node has joined this cluster, so no tokens can be generated"
            )
            raise Overloaded(text, code="no_nodes", retry_after_s=1.0)

    def give_up(self, request_id: RequestId) -> None:
        """Let a request end soon, unless it is unknown or has ended. A sink may call this."""
        request = self._requests.get(request_id)
        if request is not None:
            self._events.append((request, CallerGone(), NO_NODE))
            asyncio.get_running_loop().call_soon(self._handle_posted)

    def _handle_posted(self) -> None:
        if self._events:
            self._now_s = self._clock()
            self._handle_events()
            self._select_waiting()

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

    def health(self) -> Health:
        mode = self._config.local_prefill
        queue = self._queue
        now_s = self._clock()
        heard_s = (request.heard_s for request in self._requests.values())
        oldest_s = min((at_s for at_s in heard_s if at_s is not None), default=now_s)
        health = health_of(now_s, self.registry, mode, queue, now_s - oldest_s)
        if self._failure is None:
            return health
        return msgspec.structs.replace(
            health, status="failed", message=self._failure.message
        )

    async def wait_for(self, num_prefill: int, num_decode: int) -> None:
        """Wait until that many nodes are in service. Raises the router's error if it has failed."""
        while True:
            if self._failure is not None:
                raise from_failure(self._failure)
            num = (
                len(self.registry.in_service("prefill")),
                len(self.registry.in_service("decode")),
            )
            if num[0] >= num_prefill and num[1] >= num_decode:
                return
            self._changed.clear()
            await self._changed.wait()

    @property
    def num_active(self) -> int:
        """Return the number of requests whose end not all nodes have confirmed."""
        return len(self._requests)

    @property
    def has_failed(self) -> bool:
        return self._failure is not None

    def fail(self, failure: Failure) -> None:
        """Stop serving: every running request and every new one fails with this reason."""
        self._failure = failure
        self._changed.set()
        for stream in list(self._streams.values()):
            stream.finish(from_failure(failure))
        # One request may end another one, whose caller has left.
        for request in list(self._requests.values()):
            self._feed(request, CallerGone(failure.code))

    def close(self) -> None:
        """End every request and the connections to all nodes. A second call does nothing."""
        if self._failure is None:
            text = "the router is shutting down"
            self.fail(Overloaded(text, code="shutting_down").to_failure())
        if self._timer is not None:
            self._timer.cancel()
        if self._link is not None:
            self._link.close()

    # --- nodes ----------------------------------------------------------------------------------

    def _send(self, node: NodeId, message: ToNode) -> None:
        assert self._link is not None
        self._link.send(node, message)

    def _read(self, heard: Heard) -> None:
        for node, message in heard:
            self._now_s = self._clock()
            if message is None:
                self._apply(self.registry.gone(node))
            else:
                self._on_message(node, message)
        self._select_waiting()

    def _on_message(self, node: NodeId, message: ToRouter) -> None:
        match message:
            case Tokens(entries=entries):
                self._on_tokens(node, entries)
            case Accepted() | FirstTokens() | PromptLogprobs() | Pooled() | Failed():
                if isinstance(message, Failed) and message.failure.code == DRAINING:
                    # The node's next heartbeat will report it too.
                    self.registry.drains(node)
                self._on_request_message(node, message.key.request_id, message)
            case InProgress(keys=keys):
                for key in keys:
                    self._on_request_message(node, key.request_id, InProgress((key,)))
            case CancelDone(keys=keys) | Crashed(keys=keys):
                for request_id in dict.fromkeys(key.request_id for key in keys):
                    self._on_request_message(node, request_id, message)
                if isinstance(message, Crashed):
                    self._apply(self.registry.gone(node, message.failure.message))
                    self._send(node, Cancel(keys, "crashed"))
            case Heartbeat(node_id=node_id):
                if node_id == node:
                    self._apply(self.registry.heartbeat(self._now_s, message))
            case CacheChanges():
                if not self.registry.hears_cache(node, message):
                    self._send(node, WatchCache())
            case Starting(node_id=node_id):
                if node_id == node:
                    self.registry.starting(self._now_s, message)
            case Hello():
                self._apply(self.registry.hello(self._now_s, node, message))
            case Ready():
                self._apply(self.registry.ready(self._now_s, node, message))
            case AdapterLoaded():
                self.adapters.loaded(node, message)
            case AdaptersHeld():
                self.adapters.held(node, message)
            case HandOver():
                self._prefetches.hand_over(self._now_s, node, message)
            case Prefetched():
                self._prefetches.answered(node, message)
            case DrainNode():  # an operator's command, and not a node's
                pass
            case _:
                assert_never(message)

    def _on_tokens(self, node: NodeId, entries: Sequence[TokenEntry]) -> None:
        """Deliver the tokens of a step. This is the hot path: a turn for each sequence and step."""
        requests = self._requests
        streams = self._streams
        now_s = self._now_s
        for entry in entries:
            key = entry.key
            request = requests.get(key.request_id)
            if request is None or not request.continues(now_s, node, entry):
                self._on_request_message(node, key.request_id, entry)
                continue
            try:
                if streams[key.request_id].push(key.choice, entry.token_ids, None):
                    self._events.append((request, ChoiceStopped(key.choice), NO_NODE))
            except Exception:  # noqa: BLE001  a bug ends only its own request
                self._broke(request, entry)
            if self._events:
                self._handle_events()

    def _on_request_message(
        self, node: NodeId, request_id: RequestId, message: NodeMessage
    ) -> None:
        request = self._requests.get(request_id)
        if request is not None:
            self._feed(request, message, node)
        elif isinstance(message, Accepted | FirstTokens | TokenEntry):
            # The node still works for a request that has ended.
            self._send(node, Cancel((message.key,), "ended"))

    def _apply(self, changes: list[Change]) -> None:
        for change in changes:
            self.notifier.announce(change)
            if isinstance(change, Entered):
                assert self._link is not None
                self.adapters.entered(change.info, is_allowed=self._allows_loading)
                self._link.send_kept_cancels((change.info.node_id, change.info.epoch))
            elif isinstance(change, Left):
                self._prefetches.left(change.node)
                self.adapters.left(change.node)
                for request in list(self._requests.values()):
                    self._feed(request, NodeLost(change.node, change.failure))
        self._changed.set()

    # --- requests -------------------------------------------------------------------------------

    def _begin(self, request: Request, stream: RequestStream) -> None:
        self._now_s = self._clock()
        self._requests[request.request_id] = request
        self._streams[request.request_id] = stream
        self._feed(request, Begun())
        self._select_waiting()

    def _feed(
        self, request: Request, event: RequestEvent, node: NodeId = NO_NODE
    ) -> None:
        """Handle an event, then the events that it causes, such as a caller's leaving."""
        self._step(request, event, node)
        self._handle_events()

    def _handle_events(self) -> None:
        while self._events:
            self._step(*self._events.popleft())

    def _step(self, request: Request, event: RequestEvent, node: NodeId) -> None:
        request_id = request.request_id
        if request_id not in self._requests:
            return  # it has ended, so it must not join the queue again
        try:
            for command in request.step(self._now_s, event, node):
                self._carry_out(request, command)
        except Exception:  # noqa: BLE001  a bug ends only its own request
            self._broke(request, event)

    def _broke(self, request: Request, event: RequestEvent) -> None:
        """End the request whose handling of `event` has raised the current exception."""
        request_id = request.request_id
        log.exception("unhandled error", request=request_id, at=type(event).__name__)
        self._streams[request_id].finish(
            BatonError("the router failed to handle this request")
        )
        if isinstance(event, CallerGone):
            self._forget(request_id)
        else:  # its nodes must not go on
            self._events.append((request, CallerGone("router error"), NO_NODE))

    def _forget(self, request_id: RequestId) -> None:
        """Drop a request. A node that still works for it is told to stop at its next message."""
        del self._requests[request_id]
        del self._streams[request_id]
        self.registry.forget(request_id)
        self._queue.forget(request_id)

    def _carry_out(self, request: Request, command: RequestCommand) -> None:
        request_id = request.request_id
        stream = self._streams[request_id]
        match command:
            case Deliver(choice=choice, token_ids=token_ids, finish_reason=reason):
                if stream.push(choice, token_ids, reason, command.logprobs):
                    self._events.append((request, ChoiceStopped(choice), NO_NODE))
            case DeliverPrompt(rows=rows):
                stream.push_prompt(rows)
            case DeliverPooled(numbers=numbers):
                stream.push_pooled(numbers)
            case Send(node=node, message=message):
                self._send(node, message)
            case SelectNodes(attempt=attempt):
                self._queue.wait(self._now_s, attempt)
            case CancelSelection(key=key):
                self._queue.leave(key)
            case Release(node=node, key=key):
                self.registry.release(node, key)
            case HandoffEnded():
                self.notifier.judge(self._now_s, command)
                if command.times is not None:
                    prefill, decode = command.prefill[0], command.decode[0]
                    self.registry.pairs.moved(prefill, decode, command.times)
            case Outcome(failure=failure):
                is_whole = failure is None and not stream.metrics.num_received_tokens
                if is_whole and request.sampling.pooling is None:
                    self._policy.learn(stream.tokens_per_choice)
                stream.finish(None if failure is None else from_failure(failure))
            case Closed():
                del self._requests[request_id]
                del self._streams[request_id]
                self._queue.ended(request_id)
            case _:
                assert_never(command)

    # --- placing and time -----------------------------------------------------------------------

    def _select_waiting(self) -> None:
        for selected in self._queue.take(self._now_s):
            self._queue.selected(selected.key)
            self.registry.reserve(selected)
            self.registry.note_pair(selected)
            self._now_s = self._clock()
            request = self._requests[selected.key.request_id]
            self._feed(request, NodesSelected(selected))
            self._prefetches.placed(self._now_s, selected, request)

    def _tick(self) -> None:
        assert self._link is not None
        assert self._timer is not None
        loop = asyncio.get_running_loop()
        late_s = loop.time() - self._timer.when()
        self._timer = loop.call_later(TICK_S, self._tick)
        # If this loop was delayed, heartbeats are waiting in the socket, so it is read first.
        self._link.read()
        self._now_s = now_s = self._clock()
        self._apply(self.registry.tick(now_s, self._deaf_s(late_s)))
        self._prefetches.tick(now_s)
        self._refuse(self._queue.take_overdue(now_s))
        for request in self._to_look_at(now_s):
            self._feed(request, Tick())
        self._select_waiting()

    def _refuse(self, attempts: list[tuple[Key, Failure]]) -> None:
        """End the requests of attempts that left the queue. A request may have several of them."""
        for key, failure in attempts:
            if (request := self._requests.get(key.request_id)) is not None:
                self._feed(request, NodesNotSelected(key, failure))

    def _deaf_s(self, late_s: float) -> float:
        """Return for how long since the last tick no node could make itself heard here."""
        assert self._link is not None
        if self._link.has_backlog:  # heartbeats may be in it
            return TICK_S + late_s
        if late_s > STALL_TO_LOG_S:
            log.warning(
                "this router stood still, so its nodes may be silent longer",
                seconds=round(late_s, 1),
            )
        return late_s if late_s > TICK_S else 0.0

    def _to_look_at(self, now_s: float) -> list[Request]:
        """Return the requests whose turn it is to look whether their time has run out.

        All take turns over a round, because looking at all at once would delay the event loop.
        """
        if not self._round and now_s >= self._next_round_s:
            self._next_round_s = now_s + ROUND_S
            self._round = deque(self._requests)
        num = max(LEAST_LOOKS, math.ceil(len(self._requests) * TICK_S / ROUND_S))
        ids = [self._round.popleft() for _ in range(min(num, len(self._round)))]
        return [
            self._requests[request_id]
            for request_id in ids
            if request_id in self._requests
        ]
