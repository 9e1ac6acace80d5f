"""The order in which a node serves requests: which prompt gets blocks next, and which gives way."""

from collections.abc import Iterable, Iterator

from baton.node.scheduling.request import Request, Sequence


class WaitingLine:
    """The requests that wait for blocks, in the order in which they should get them."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def add(self, now_s: float, request: Request) -> None:
        request.queued_s = now_s
        self._requests.append(request)

    def discard(self, request: Request) -> None:
        """Remove a request, if it waits."""
        if request in self._requests:
            self._requests.remove(request)

    def last_of(self, running: Iterable[Sequence]) -> Sequence:
        """Return which of these sequences, in order of joining, gives its blocks up for others."""
        *_, last = running
        return last
