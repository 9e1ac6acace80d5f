"""What schedulers keep by request: its choices that are still wanted, and messages to its router.

`origin` is opaque to schedulers: it is the loop's number of the router that sent a request.
"""

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from baton.kv_transfer.interfaces import ConnectorEvent
from baton.protocol.ids import Key, RequestId
from baton.protocol.messages import Decode, Prefill, TokenEntry, Tokens, ToRouter

Origin = int
# Stands for a router that is gone; messages to it are dropped.
NO_ROUTER: Origin = -1


@dataclass(slots=True)
class Choices:
    key: Key  # of the lowest choice
    every: tuple[int, ...]
    live: set[int]

    @classmethod
    def of(cls, message: Prefill | Decode) -> "Choices":
        first = message.key.choice
        every = tuple(range(first, first + message.num_choices))
        return cls(message.key, every, set(every))

    @property
    def keys(self) -> tuple[Key, ...]:
        return tuple(self.key.of_choice(choice) for choice in self.every)

    def overlaps(self, other: "Choices") -> bool:
        """Return whether both have a sequence with the same key, even an unwanted one."""
        return self._is_same_attempt(other.key) and not set(self.every).isdisjoint(other.every)

    def cancel(self, keys: tuple[Key, ...]) -> bool:
        """Remove the choices that `keys` name. Return True if that removed the last one."""
        return self._remove({key.choice for key in keys if self._is_same_attempt(key)})

    def supersede(self, newer: "Choices") -> bool:
        """Remove choices that have a higher attempt. Return True if that removed the last."""
        if newer.key.request_id != self.key.request_id or newer.key.attempt <= self.key.attempt:
            return False
        return self._remove(set(newer.every))

    def _is_same_attempt(self, key: Key) -> bool:
        return key.request_id == self.key.request_id and key.attempt == self.key.attempt

    def _remove(self, choices: set[int]) -> bool:
        if not choices & self.live:
            return False
        self.live -= choices
        return not self.live


T = TypeVar("T")


class ByRequest(Generic[T]):
    """An index, which saves a scan of all requests for every message.

    A request has few items at a time: its attempts that have not ended, and the sequences of the
    attempt that runs.
    """

    def __init__(self) -> None:
        self._items: dict[RequestId, dict[Key, T]] = {}

    def add(self, key: Key, item: T) -> None:
        self._items.setdefault(key.request_id, {})[key] = item

    def remove(self, key: Key) -> None:
        items = self._items[key.request_id]
        del items[key]
        if not items:
            del self._items[key.request_id]

    def of(self, request_id: RequestId) -> list[T]:
        """Return the items of a request in order of arrival, in a new list."""
        return list(self._items.get(request_id, {}).values())


@dataclass(slots=True)
class Outputs:
    """Messages to routers and to the connector until the loop takes them."""

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
