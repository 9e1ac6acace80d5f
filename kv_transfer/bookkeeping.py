"""What a handoff's two ends remember: the reader's lease, the keys that ended, early messages.

Everything is bounded: the oldest tombstone is dropped first (its key is then treated like an
unknown one), and a message that cannot be parked is refused at once.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from baton.kv_transfer.interfaces import PeerName
from baton.protocol.errors import Cancelled, Failure
from baton.protocol.ids import Key, RequestId
from baton.protocol.messages import BlockRange, End, Offered

MAX_TOMBSTONES = 4096
MAX_PARKED_MESSAGES = 8192
PARKED_S = 5.0

Answered = TypeVar("Answered")
EarlyMessage = Offered | BlockRange | End


class Tombstones(Generic[Answered]):
    """Keys that have ended, each with its answer to late messages, and the newest attempts."""

    def __init__(self, max_keys: int = MAX_TOMBSTONES) -> None:
        self._max_keys = max_keys
        self._answers: dict[Key, Answered] = {}
        self._newest: dict[tuple[RequestId, int], int] = {}

    def bury(self, key: Key, answer: Answered) -> None:
        self._answers.pop(key, None)
        self._answers[key] = answer
        if len(self._answers) > self._max_keys:
            del self._answers[next(iter(self._answers))]

    def answer(self, key: Key) -> Answered | None:
        return self._answers.get(key)

    def note_attempt(self, key: Key) -> None:
        place = (key.request_id, key.choice)
        self._newest[place] = max(key.attempt, self._newest.pop(place, 0))
        if len(self._newest) > self._max_keys:
            del self._newest[next(iter(self._newest))]

    def is_superseded(self, key: Key) -> bool:
        return key.attempt < self._newest.get((key.request_id, key.choice), 0)


@dataclass(slots=True)
class Parked:
    """Messages of one key, in order, all from one peer."""

    peer: PeerName
    until_s: float
    messages: list[EarlyMessage] = field(default_factory=list)


class Parking:
    """Announcements that came before the request did."""

    def __init__(self, max_messages: int = MAX_PARKED_MESSAGES) -> None:
        self._max_messages = max_messages
        self._num_messages = 0
        # The oldest first, which is also the first to expire.
        self._parked: dict[Key, Parked] = {}

    @property
    def deadline_s(self) -> float | None:
        return next((parked.until_s for parked in self._parked.values()), None)

    def park(self, now_s: float, peer: PeerName, message: EarlyMessage) -> bool:
        """Park a message. Return False if there is no room, or no parked Offered before it."""
        parked = self._parked.get(message.key)
        if parked is None:
            parked = Parked(peer, now_s + PARKED_S)
            if not isinstance(message, Offered):
                return False
        if parked.peer != peer or self._num_messages == self._max_messages:
            return False
        self._parked[message.key] = parked
        parked.messages.append(message)
        self._num_messages += 1
        return True

    def take(self, key: Key) -> Parked | None:
        parked = self._parked.pop(key, None)
        if parked is not None:
            self._num_messages -= len(parked.messages)
        return parked

    def take_expired(self, now_s: float) -> list[tuple[Key, Parked]]:
        keys = [key for key, parked in self._parked.items() if parked.until_s <= now_s]
        return [(key, parked) for key in keys if (parked := self.take(key)) is not None]

    def forget_peer(self, peer: PeerName) -> None:
        for key in [key for key, parked in self._parked.items() if parked.peer == peer]:
            self.take(key)

    def peers(self) -> set[PeerName]:
        return {parked.peer for parked in self._parked.values()}


def superseded() -> Failure:
    return Cancelled("a newer attempt of this request has begun").to_failure()


RENEWALS_PER_LEASE = 3
MIN_INTERVAL_S = 0.02


class ReaderLease:
    """Until when a reader may rely on what it reads, on its own clock.

    A renewal counts from when it was *sent*, and only once the source has confirmed it: an
    unconfirmed one may have arrived after the blocks were given away. Channels are FIFO, so
    confirmations come in the order of the renewals and need no numbers.
    """

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
