"""Decide which attempts at a request count after a router has taken it over from another one.

This file is pure; only the decode scheduler and `Detached` call it. A router that was away may come
back and continue a stream that another router has taken over. Its attempts have lower numbers than
those of the other router, so the node refuses them and the router stops. The number of known
requests is bounded.
"""

from collections.abc import Iterable

from baton.protocol.ids import ATTEMPTS_PER_ROUTER, Key, RequestId

MAX_KNOWN = 16_384


class Owners:
    def __init__(self) -> None:
        # The first attempt of the last router, for requests that were taken over; the oldest first.
        self._first: dict[RequestId, int] = {}

    def pass_on(self, request_id: RequestId, attempts: Iterable[int]) -> int:
        """Give a request with these attempts to another router; return its first attempt."""
        latest = max([self._first.get(request_id, 0), *attempts])
        first = latest - latest % ATTEMPTS_PER_ROUTER + ATTEMPTS_PER_ROUTER
        self._note(request_id, first)
        return first

    def hear(self, key: Key) -> bool:
        """Return whether this attempt counts, because no later router has the request."""
        known = self._first.get(key.request_id, 0)
        # Its router took the request over at another node.
        if key.attempt >= known + ATTEMPTS_PER_ROUTER:
            self._note(key.request_id, key.attempt - key.nth_attempt)
        return key.attempt >= known

    def _note(self, request_id: RequestId, first: int) -> None:
        self._first.pop(request_id, None)
        self._first[request_id] = first
        if len(self._first) > MAX_KNOWN:
            del self._first[next(iter(self._first))]
