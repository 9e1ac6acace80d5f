"""The active requests of a router: feed them events, and carry out the commands that follow.

`core` adds requests and feeds events. A request's `Lifecycle` answers an event with commands, which
this file carries out by calling other parts of the router. An error of one request ends that
request and no other.
"""

from collections import deque
from collections.abc import Callable, Iterator
from typing import assert_never

from baton.protocol.errors import BatonError, from_failure
from baton.protocol.ids import NodeId, RequestId
from baton.protocol.messages import Cancel, Decode, Prefill
from baton.router.admission import Admission
from baton.router.announcer import Announcer
from baton.router.policy import CheapestPair
from baton.router.registry import Registry
from baton.router.request.active import Active
from baton.router.request.events import (
    CallerGone,
    ChoiceStopped,
    Closed,
    Deliver,
    HandoffEnded,
    Outcome,
    Place,
    Release,
    RequestCommand,
    RequestEvent,
    Send,
    Timed,
    TriedAgain,
    Unplace,
)
from baton.router.request.lifecycle import NO_NODE
from baton.router.rounds import Rounds
from baton.runtime.log import logger

Order = Callable[[NodeId, Prefill | Decode | Cancel], None]

log = logger("router")


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
