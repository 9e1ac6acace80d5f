"""Which attempts at a request count, after one router has taken the request over from another.

Pure; only the decode scheduler and `Detached` call it. A router that was away may come back and go
on with a stream that another router has taken over. Its attempts are lower than those of the other
router, so the node refuses them and the router stops. The number of known requests is bounded.
"""

from collections.abc import Iterable

from baton.protocol.ids import ATTEMPTS_PER_ROUTER, Key, RequestId

MAX_KNOWN = 16_384


class Owners:
    def __init__(self) -> None:
        # The first attempt of the last router, for requests that changed hands; the oldest first.
        self._first: dict[RequestId, int] = {}

    def pass_on(self, request_id: RequestId, attempts: Iterable[int]) -> int:
        """Give a request with these attempts to another router; return the first of its own."""
        latest = max([self._first.get(request_id, 0), *attempts])
        first = latest - latest % ATTEMPTS_PER_ROUTER + ATTEMPTS_PER_ROUTER
        self._note(request_id, first)
        return first

    def hear(self, key: Key) -> bool:
        """Return whether this attempt counts: no later router has the request."""
        known = self._first.get(key.request_id, 0)
        if key.attempt >= known + ATTEMPTS_PER_ROUTER:  # that router took it over at another node
            self._note(key.request_id, key.attempt - key.nth_attempt)
        return key.attempt >= known

    def _note(self, request_id: RequestId, first: int) -> None:
        self._first.pop(request_id, None)
        self._first[request_id] = first
        if len(self._first) > MAX_KNOWN:
            del self._first[next(iter(self._first))]
