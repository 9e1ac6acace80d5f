"""A node's standing at each of its routers: whether that router gives the node work.

`EngineSockets` writes it when routers send messages; the node's HTTP side reads it on its own
thread.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec

from baton.engine.outputs import Origin
from baton.engine.router_watch import RouterLink
from baton.protocol.messages import Peers, Refused

# The number of failed handshakes in a row after which a node reports that a router refuses its key.
# A single one may fail because a router ends.
REFUSALS_TO_TELL = 3

Standing = Literal["absent", "joining", "in service", "out of service", "refused"]


class RouterStanding(msgspec.Struct, frozen=True):
    """A node's standing at one router. A silent router is `absent`, or `joining` if connected."""

    router: str  # its endpoint
    state: Standing
    reason: str = ""


class Standings:
    """The latest standing at each router since its channel began."""

    def __init__(self, dialers: Sequence[RouterLink]) -> None:
        self._dialers = dialers
        # Each value is frozen: replacing it is atomic, and only one thread writes.
        self._words: list[RouterStanding | None] = [None] * len(dialers)

    def heard(self, origin: Origin, message: object) -> None:
        router = self._dialers[origin].endpoint
        if isinstance(message, Refused):
            self._words[origin] = RouterStanding(router, "refused", message.failure.message)
        elif isinstance(message, Peers):
            state: Standing = "out of service" if message.out_of_service else "in service"
            self._words[origin] = RouterStanding(router, state, message.out_of_service)

    def lost(self, origin: Origin) -> None:
        self._words[origin] = None

    def read(self) -> tuple[RouterStanding, ...]:
        """Return the standing at every router. Any thread may call this."""
        return tuple(map(self._read, self._dialers, self._words))

    def _read(self, dialer: RouterLink, word: RouterStanding | None) -> RouterStanding:
        if dialer.connected:
            return word or RouterStanding(dialer.endpoint, "joining")
        is_refused = dialer.refusals >= REFUSALS_TO_TELL
        reason = "it refuses this node's key" if is_refused else "it cannot be reached"
        return RouterStanding(dialer.endpoint, "absent", reason)
