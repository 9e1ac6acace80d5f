"""Find out by which of several transports a rank reads a peer fastest.

The first one serves meanwhile. Once the others are connected and no read is under way, each reads
the same bytes in turn, into memory of no block, and the least median wins.
"""

import statistics
from collections.abc import Mapping, Sequence

from baton.kv_transfer.interfaces import AddPeer, PeerTransport
from baton.protocol.errors import TransferError
from baton.runtime.log import logger

ROUNDS = 7  # of trial reads, the first of which is not counted
# Another transport takes the first one's place if it needs at most this share of its time.
SHARE = 0.9
# A trial read that takes longer, as of a peer that stands still, is given up.
LIMIT_S = 1.0

log = logger("transfer")


class Trials:
    """The trials of one peer, made turn by turn while nothing else is read from it."""

    def __init__(
        self, command: AddPeer, first: PeerTransport, others: Sequence[PeerTransport]
    ) -> None:
        self.winner: PeerTransport | None = None  # until it is known
        self._command = command
        self._first = first
        self._others = others
        self._connecting: list[PeerTransport] = []
        self._connected = [first]
        self._begun_s: float | None = None
        self._posted: tuple[PeerTransport, int, float] | None = None
        self._times: dict[str, list[float]] = {first.name: []}

    def turn(self, now_s: float) -> bool:
        """Do what can be done now. Return True if the next turn should follow immediately."""
        if self._begun_s is None:
            self._begun_s = now_s
            self._begin()
        for transport in list(self._connecting):
            self._connect(now_s, transport, self._begun_s + transport.connect_s)
        if self._connecting:
            return False
        if self._posted is not None:
            return self._test(now_s, *self._posted)
        transport = min(self._connected, key=lambda one: len(self._times[one.name]))
        if len(self._connected) == 1 or len(self._times[transport.name]) == ROUNDS:
            self._end()
        else:
            self._post(now_s, transport)
        return True

    def leave(self) -> None:
        """Disconnect the peer from all transports but the winner, or the first one without it."""
        if self._posted is not None:
            transport, handle, _ = self._posted
            transport.cancel(handle)
            self._posted = None
        kept = self.winner or self._first
        for transport in (*self._connecting, *self._connected):
            if transport is not kept:
                transport.remove_peer(self._command.peer)

    def _begin(self) -> None:
        for transport in self._others:
            try:
                transport.add_peer(self._command)
            except TransferError as error:
                self._give_up(transport, error)
            else:
                self._connecting.append(transport)
                self._times[transport.name] = []

    def _connect(self, now_s: float, transport: PeerTransport, by_s: float) -> None:
        try:
            if transport.connected(self._command.peer):
                self._connecting.remove(transport)
                self._connected.append(transport)
            elif now_s >= by_s:
                raise TransferError(f"no connection within {transport.connect_s:g} s")
        except TransferError as error:
            self._connecting.remove(transport)
            self._give_up(transport, error)

    def _post(self, now_s: float, transport: PeerTransport) -> None:
        try:
            self._posted = transport, transport.trial(self._command.peer), now_s
        except TransferError as error:
            self._failed(transport, error)

    def _test(
        self, now_s: float, transport: PeerTransport, handle: int, posted_s: float
    ) -> bool:
        try:
            has_ended = transport.test(handle)
        except TransferError as error:
            self._posted = None
            self._failed(transport, error)
            return True
        if has_ended:
            self._posted = None
            self._times[transport.name].append(now_s - posted_s)
        elif now_s - posted_s > LIMIT_S:
            self._posted = None
            transport.cancel(handle)
            text = f"a trial read took longer than {LIMIT_S:g} s"
            self._failed(transport, TransferError(text))
            return True
        return has_ended

    def _failed(self, transport: PeerTransport, error: TransferError) -> None:
        """Go on without a transport. The first one's reads will tell what it lacks."""
        if transport is self._first:
            self.winner = self._first
        else:
            self._connected.remove(transport)
            self._give_up(transport, error)

    def _give_up(self, transport: PeerTransport, error: TransferError) -> None:
        transport.remove_peer(self._command.peer)
        log.warning(
            f"{transport.name} cannot read a peer, {self._first.name} does",
            peer=self._command.peer.epoch,
            reason=error.message,
        )

    def _end(self) -> None:
        found = {one.name: self._times[one.name][1:] for one in self._connected}
        name = self._first.name
        if len(found) > 1:
            name = fastest(found, name)
            shown = {
                one: f"{1e6 * _median(times):.0f} us" for one, times in found.items()
            }
            log.info(f"{name} reads a peer", peer=self._command.peer.epoch, **shown)
        self.winner = next(one for one in self._connected if one.name == name)


def fastest(times: Mapping[str, Sequence[float]], first: str) -> str:
    """Return the transport with the least median; the first one unless that is clearly less."""
    best = min(times, key=lambda name: _median(times[name]))
    is_clear = _median(times[best]) <= SHARE * _median(times[first])
    return best if is_clear else first


def _median(times: Sequence[float]) -> float:
    return statistics.median(times)
