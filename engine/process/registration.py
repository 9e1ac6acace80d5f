"""Whether each router gives this node work, and a log of routers that cannot be found.

Names are looked up in a separate thread, because a slow name server must not delay heartbeats.
"""

import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from baton.engine.scheduling.outputs import Origin
from baton.protocol.codec import Unreadable
from baton.protocol.errors import ConfigError
from baton.protocol.messages import Peers, Refused, ToNode, ToRouter
from baton.runtime.channels.dialer import Dialer
from baton.runtime.channels.endpoint import bindable
from baton.runtime.log import logger

FIRST_S = 5.0
LONGEST_S = 600.0

log = logger("node")

# The channels of heartbeats and of requests read different messages.
RouterDialer = Dialer[ToRouter, ToNode] | Dialer[ToRouter, ToNode | Unreadable]


@dataclass(slots=True)
class _Absence:
    """Since when a router has been missing, and when that is logged (again)."""

    tell_at_s: float
    wait_s: float = FIRST_S
    was_told: bool = False


class RouterWatch:
    def __init__(self) -> None:
        self._absences: dict[str, _Absence] = {}

    def look(self, now_s: float, router: RouterDialer) -> None:
        """Note whether a router answers. Log its absence after 5 s, then at growing intervals."""
        absence = self._absences.get(router.endpoint)
        if router.connected:
            if absence is not None:
                del self._absences[router.endpoint]
                if absence.was_told:
                    log.info("found the router", router=router.endpoint)
            return
        if absence is None:
            self._absences[router.endpoint] = _Absence(now_s + FIRST_S)
            return
        if now_s < absence.tell_at_s or router.refusals:  # the node's channel reports refusals
            return
        absence.was_told = True
        absence.wait_s = min(absence.wait_s * 4, LONGEST_S)
        absence.tell_at_s = now_s + absence.wait_s
        threading.Thread(target=tell, args=(router.endpoint,), name="lookup", daemon=True).start()


def tell(endpoint: str) -> None:
    """Log that a router does not answer, and why, if this host can find out."""
    reason = "nothing answers there"
    try:
        address = bindable(endpoint)
        if address.host:
            socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except ConfigError as error:
        reason = error.message
    except OSError:
        reason = "name does not resolve"
    log.warning(f"waiting for router {endpoint}: {reason}")


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
