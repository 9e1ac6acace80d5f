"""Choose the requests to check at a tick for deadlines that have passed.

This file is pure; `active_requests` calls it at each tick. Requests whose nodes have cancels to
confirm are checked every time. All others take turns over a longer round, because their deadlines
are minutes, and checking all at once would delay the event loop.
"""

import math
from collections import deque

from baton.protocol.ids import RequestId
from baton.router.request.active import Active

TICK_S = 0.25
ROUND_S = 10.0
LEAST_LOOKS = 64  # requests in a tick


class Rounds:
    def __init__(self) -> None:
        self._next_round_s = 0.0
        # Requests whose turns are yet to come in this round.
        self._waiting: deque[RequestId] = deque()
        self._unconfirmed: dict[RequestId, Active] = {}

    def cancelled(self, active: Active) -> None:
        """Note that nodes of this request may have a cancel to confirm."""
        self._unconfirmed[active.request_id] = active

    def take(self, now_s: float, all_active: dict[RequestId, Active]) -> list[Active]:
        """Return the active requests to check now."""
        self._unconfirmed = {
            request_id: active
            for request_id, active in self._unconfirmed.items()
            if request_id in all_active and active.lifecycle.awaits_confirmation
        }
        if not self._waiting and now_s >= self._next_round_s:
            self._next_round_s = now_s + ROUND_S
            self._waiting = deque(all_active)
        num = max(LEAST_LOOKS, math.ceil(len(all_active) * TICK_S / ROUND_S))
        ids = [self._waiting.popleft() for _ in range(min(num, len(self._waiting)))]
        found = [all_active[request_id] for request_id in ids if request_id in all_active]
        return [*self._unconfirmed.values(), *found]
