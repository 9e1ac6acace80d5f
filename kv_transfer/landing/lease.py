"""The time until which a reader may rely on what it reads, on the reader's own clock.

Each landing holds a lease. A renewal counts from when it was *sent*, and only once the source has
confirmed it: an unconfirmed renewal may have arrived after the blocks were given away. Channels are
FIFO, so confirmations come in the order of the renewals and need no numbers.
"""

from collections import deque

RENEWALS_PER_LEASE = 3
MIN_INTERVAL_S = 0.02


class ReaderLease:
    """The lease of one handoff, as its reader counts it."""

    def __init__(self, now_s: float, lease_s: float) -> None:
        self.lease_s = lease_s
        self.until_s: float | None = None  # proven by a confirmation
        # Nothing is proven yet. If the source confirms nothing within a lease, it counts as gone.
        self._patience_s = now_s + lease_s
        self._interval_s = max(lease_s / RENEWALS_PER_LEASE, MIN_INTERVAL_S)
        self._unconfirmed: deque[float] = deque()
        self._last_s = now_s

    @property
    def renew_at_s(self) -> float:
        return self._last_s + self._interval_s

    @property
    def limit_s(self) -> float:
        """Return the time at which to give up."""
        return self._patience_s if self.until_s is None else self.until_s

    def renewed(self, now_s: float) -> None:
        """Note that a renewal was sent."""
        self._unconfirmed.append(now_s)
        self._last_s = now_s

    def confirmed(self) -> bool:
        """Note a confirmation by the source. Return False when there was nothing to confirm."""
        if not self._unconfirmed:
            return False
        self.until_s = self._unconfirmed.popleft() + self.lease_s
        return True

    def covers(self, at_s: float) -> bool:
        """Return whether confirmations prove that the source held the blocks until `at_s`."""
        return self.until_s is not None and at_s <= self.until_s

    def may_cover(self, at_s: float) -> bool:
        """Return whether the confirmations that are still to come would prove it."""
        return bool(self._unconfirmed) and at_s <= self._unconfirmed[-1] + self.lease_s
