"""The choices that a request asks for, which of them are still wanted, and an index by request.

A request has few items at a time: its attempts that have not ended, and the sequences of the
attempt that runs. The index saves a scan of all requests for every message.
"""

from dataclasses import dataclass
from typing import Generic, TypeVar

from baton.protocol.ids import Key, RequestId
from baton.protocol.messages import Decode, Prefill


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
        return self._is_same_try(other.key) and not set(self.every).isdisjoint(other.every)

    def cancel(self, keys: tuple[Key, ...]) -> bool:
        """Remove the choices that `keys` name. Return True if that removed the last one."""
        return self._strike({key.choice for key in keys if self._is_same_try(key)})

    def supersede(self, newer: "Choices") -> bool:
        """Remove choices that have a higher attempt. Return True if that removed the last."""
        if newer.key.request_id != self.key.request_id or newer.key.attempt <= self.key.attempt:
            return False
        return self._strike(set(newer.every))

    def _is_same_try(self, key: Key) -> bool:
        return key.request_id == self.key.request_id and key.attempt == self.key.attempt

    def _strike(self, choices: set[int]) -> bool:
        if not choices & self.live:
            return False
        self.live -= choices
        return not self.live


T = TypeVar("T")


class ByRequest(Generic[T]):
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
