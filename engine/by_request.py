"""An index of a scheduler's items by request, so that no message takes a scan of all requests.

Both schedulers keep one beside their queues. A request has few items at a time: its attempts that
have not ended, and the sequences of the attempt that runs.
"""

from typing import Generic, TypeVar

from baton.protocol.ids import Key, RequestId

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
