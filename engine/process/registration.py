"""Whether each router gives this node work, and a log of routers that cannot be found."""

from collections.abc import Sequence
from typing import Literal

import msgspec

from baton.engine.scheduling.outputs import Origin
from baton.protocol.codec import Unreadable
from baton.protocol.messages import Peers, Refused, ToNode, ToRouter
from baton.runtime.channels.dialer import Dialer
from baton.runtime.log import logger

FIRST_S = 5.0
LONGEST_S = 600.0

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
        tell_at_s, wait_s = self._absent.setdefault(router.endpoint, later)
        if now_s < tell_at_s or router.refusals:  # the node's channel reports refusals
            return
        wait_s = min(wait_s * 4, LONGEST_S)
        self._absent[router.endpoint] = (now_s + wait_s, wait_s)
        reason = "nothing answers there" if router.is_resolved else "name does not resolve"
        log.warning(f"waiting for router {router.endpoint}: {reason}")


# The number of failed handshakes in a row after which a node reports that a router refuses its key.
# A single one may fail because a router ends.
REFUSALS_TO_TELL = 3

RegistrationState = Literal["absent", "joining", "in service", "out of service", "refused"]


class RouterStanding(msgspec.Struct, frozen=True):
    """A node's standing at one router. A silent router is `absent`, or `joining` if connected."""

    router: str  # its endpoint
    state: RegistrationState
    reason: str = ""


class Registrations:
    """The latest standing at each router since its channel began."""

    def __init__(self, dialers: Sequence[RouterDialer]) -> None:
        self._dialers = dialers
        # Each value is frozen: replacing it is atomic, and only one thread writes.
        self._words: list[RouterStanding | None] = [None] * len(dialers)

    def heard(self, origin: Origin, message: object) -> None:
        router = self._dialers[origin].endpoint
        if isinstance(message, Refused):
            self._words[origin] = RouterStanding(router, "refused", message.failure.message)
        elif isinstance(message, Peers):
            state: RegistrationState = "out of service" if message.out_of_service else "in service"
            self._words[origin] = RouterStanding(router, state, message.out_of_service)

    def lost(self, origin: Origin) -> None:
        self._words[origin] = None

    def read(self) -> tuple[RouterStanding, ...]:
        """Return the standing at every router. Any thread may call this."""
        return tuple(map(self._read, self._dialers, self._words))

    def _read(self, dialer: RouterDialer, word: RouterStanding | None) -> RouterStanding:
        if dialer.connected:
            return word or RouterStanding(dialer.endpoint, "joining")
        is_refused = dialer.refusals >= REFUSALS_TO_TELL
        reason = "it refuses this node's key" if is_refused else "it cannot be reached"
        return RouterStanding(dialer.endpoint, "absent", reason)
