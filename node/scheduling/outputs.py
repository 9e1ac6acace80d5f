"""The messages of a scheduler to routers and to the connector, until the loop takes them.

`origin` is opaque to schedulers: it is the loop's number of the router that sent a request.
"""

from dataclasses import dataclass, field

from baton.kv_transfer.interfaces import ConnectorEvent
from baton.protocol.messages import TokenEntry, Tokens, ToRouter

Origin = int
# Stands for a router that is gone; messages to it are dropped.
NO_ROUTER: Origin = -1


@dataclass(slots=True)
class Outputs:
    to_routers: list[tuple[Origin, ToRouter]] = field(default_factory=list)
    to_connector: list[ConnectorEvent] = field(default_factory=list)
    _entries: dict[Origin, list[TokenEntry]] = field(default_factory=dict)

    def send(self, origin: Origin, message: ToRouter) -> None:
        if origin != NO_ROUTER:
            self.flush(origin)
            self.to_routers.append((origin, message))

    def emit(self, origin: Origin, entry: TokenEntry) -> None:
        """Add tokens. All tokens of one step for one router leave in one message."""
        if origin != NO_ROUTER:
            self._entries.setdefault(origin, []).append(entry)

    def flush(self, origin: Origin) -> None:
        if entries := self._entries.pop(origin, None):
            self.to_routers.append((origin, Tokens(entries)))

    def drop(self, origin: Origin) -> None:
        """Forget what is queued for a router whose session ended; the next one must not get it."""
        self._entries.pop(origin, None)
        self.to_routers = [queued for queued in self.to_routers if queued[0] != origin]

    def take_router_messages(self) -> list[tuple[Origin, ToRouter]]:
        for origin in list(self._entries):
            self.flush(origin)
        taken = self.to_routers
        self.to_routers = []
        return taken

    def take_connector_events(self) -> list[ConnectorEvent]:
        taken = self.to_connector
        self.to_connector = []
        return taken
