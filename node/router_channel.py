"""A node's channel to each of its routers, and a log of routers that cannot be found."""

import math
from collections.abc import Iterator
from typing import Literal

import msgspec

from baton.protocol.codec import Unreadable
from baton.protocol.messages import Hello, Peers, Ready, Refused, ToNode, ToRouter
from baton.runtime.channels.dialer import Dialer, Disconnected
from baton.runtime.clock import Clock
from baton.runtime.log import logger
from baton.runtime.process import Backoff

FIRST_S = 5.0
LONGEST_S = 600.0
# How long a node that was refused waits before it asks again.
FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 10.0
# How long a ready node waits for a router's answer before it introduces itself again.
JOINING_S = 2.0

log = logger("node")

# The channels of heartbeats and of requests read different messages.
RouterDialer = Dialer[ToRouter, ToNode] | Dialer[ToRouter, ToNode | Unreadable]


class RouterWatch:
    def __init__(self) -> None:
        # When each absent router is logged (again), and how long after the last time that is.
        self._absent: dict[str, tuple[float, float]] = {}

    def look(self, now_s: float, router: RouterDialer) -> None:
        """Note whether a router answers. Log its absence after 5 s, then at growing intervals."""
        if router.connected:
            _, wait_s = self._absent.pop(router.endpoint, (now_s, FIRST_S))
            if wait_s > FIRST_S:
                log.info("found the router", router=router.endpoint)
            return
        later = (now_s + FIRST_S, FIRST_S)
        log_at_s, wait_s = self._absent.setdefault(router.endpoint, later)
        if now_s < log_at_s or router.refusals:  # the node's channel reports refusals
            return
        wait_s = min(wait_s * 4, LONGEST_S)
        self._absent[router.endpoint] = (now_s + wait_s, wait_s)
        reason = (
            "nothing answers there" if router.is_resolved else "name does not resolve"
        )
        log.warning(f"waiting for router {router.endpoint}: {reason}")


# The number of failed handshakes in a row after which a node reports that a router refuses its key.
# A single one may fail because a router ends.
REFUSALS_TO_LOG = 3

RegistrationState = Literal[
    "absent", "joining", "in service", "out of service", "refused"
]


class RouterStanding(msgspec.Struct, frozen=True):
    """A node's standing at one router. A silent router is `absent`, or `joining` if connected."""

    router: str  # its endpoint
    state: RegistrationState
    reason: str = ""


class RouterChannel:
    """A node's channel to one router. The node introduces itself in every new session.

    It does so again while the router gives no answer. If the router refuses the node, which may be
    over when nodes or routers change, the node asks again after growing pauses.
    """

    def __init__(
        self, dialer: Dialer[ToRouter, ToNode | Unreadable], hello: Hello, clock: Clock
    ) -> None:
        self.dialer = dialer
        self._hello = hello
        self._clock = clock
        self._ready: Ready | None = None
        # The answer in this session. It is frozen: replacing it is atomic, and one thread writes.
        self._answer: RouterStanding | None = None
        self._backoff: Backoff | None = None  # while the router refuses the node
        self._ask_at_s = math.inf
        self._has_logged = False  # that the router refuses the node's key
        dialer.send(hello)

    def ready(self, ready: Ready) -> None:
        self._ready = ready
        self.dialer.send(ready)
        self._ask_at_s = self._clock() + JOINING_S

    def receive(self) -> Iterator[ToNode | Unreadable | Disconnected]:
        while (message := self.dialer.receive()) is not None:
            self._note(message)
            yield message
        if self.dialer.connected:
            self._has_logged = False
        elif self._is_key_refused and not self._has_logged:
            self._has_logged = True
            log.error(
                "the router refused this node's key, or the node has no key",
                router=self.dialer.endpoint,
                hint="keys.file must name a copy of the router's key, or neither side may have one",
            )
        if self._clock() >= self._ask_at_s:
            self._ask_again()

    def standing(self) -> RouterStanding:
        """Return what the router makes of this node. Any thread may call this."""
        router = self.dialer.endpoint
        if self.dialer.connected:
            return self._answer or RouterStanding(router, "joining")
        is_refused = self._is_key_refused
        reason = "it refuses this node's key" if is_refused else "it cannot be reached"
        return RouterStanding(router, "absent", reason)

    @property
    def _is_key_refused(self) -> bool:
        return self.dialer.refusals >= REFUSALS_TO_LOG

    def _introduce(self) -> None:
        self.dialer.send(self._hello)
        self._ask_at_s = math.inf  # a router answers a node that is ready
        if self._ready is not None:
            self.ready(self._ready)

    def _ask_again(self) -> None:
        if self.dialer.connected:
            self._introduce()
        else:  # the last introduction still waits for the router
            self._ask_at_s = self._clock() + JOINING_S

    def _note(self, message: ToNode | Unreadable | Disconnected) -> None:
        router = self.dialer.endpoint
        if isinstance(message, Disconnected):
            self._answer = None
            self._introduce()
        elif isinstance(message, Refused) and self._ready is not None:
            reason = message.failure.message
            self._answer = RouterStanding(router, "refused", reason)
            if self._backoff is None:
                self._backoff = Backoff(FIRST_WAIT_S, LONGEST_WAIT_S)
                log.warning(
                    "the router refused this node, which asks again from time to time",
                    router=router,
                    reason=reason,
                )
            self._ask_at_s = self._clock() + self._backoff.after(0.0)
        elif isinstance(message, Peers):
            state: RegistrationState = (
                "out of service" if message.out_of_service else "in service"
            )
            self._answer = RouterStanding(router, state, message.out_of_service)
            self._ask_at_s = math.inf
            if self._backoff is not None:
                self._backoff = None
                log.info("the router took this node in", router=router)
