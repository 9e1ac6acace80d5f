"""The order in which a node serves requests: which gets blocks next, and which gives way."""

from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Mapping

from baton.node.scheduling.request import Request, Sequence
from baton.protocol.config import SchedulingPolicy

Order = Callable[[Request], tuple[float, ...]]

# By these keys, lower ones first. Of requests with equal keys, the one that came first is first.
ORDERS: Mapping[SchedulingPolicy, Order] = {
    "fcfs": lambda _: (),
    "priority": lambda request: (request.sampling.priority, request.arrived_s),
}


class WaitingLine:
    """The requests that wait for blocks, in the order in which they should get them."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._order = ORDERS[policy]
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def add(self, now_s: float, request: Request) -> None:
        request.queued_s = now_s
        insort(self._requests, request, key=self._order)

    def discard(self, request: Request) -> None:
        """Remove a request, if it waits."""
        if request in self._requests:
            self._requests.remove(request)

    def last_of(self, running: Iterable[Sequence]) -> Sequence:
        """Return which of these sequences, in order of joining, gives its blocks up for others."""
        latest_first = reversed(list(running))
        return max(latest_first, key=lambda sequence: self._order(sequence.request))
