"""The tiers of a node as its connector sees them: what all ranks of the node do with their parts.

A load reads a prompt's blocks from slots on every rank. The scheduler keeps the slots as they are
until the load has ended, so there is no lease. As for a handoff, blocks in which bytes may still
land are given back, or quarantined, when the last read has ended.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from baton.kv_transfer.interfaces import (
    TIER_TIMEOUT,
    BlocksCopied,
    BlocksDrained,
    BlocksSaved,
    CancelRead,
    ClearTier,
    Effects,
    KVReceived,
    LoadPrefix,
    Read,
    ReadEnded,
    ReceiveBroken,
    ReceiveEnded,
    SaveBlocks,
    SlotsHeld,
    TierOpened,
    tier_peer,
)
from baton.kv_transfer.receive import SHUTDOWN_TIMEOUT_S
from baton.protocol.blocks import NO_HASH, unpack_hashes
from baton.protocol.errors import Failure, InvariantBroken, TransferError
from baton.protocol.ids import Key
from baton.protocol.messages import TierName


@dataclass(slots=True)
class _Load:
    key: Key
    deadline_s: float
    reads: dict[int, tuple[int, tuple[int, ...]]]  # ticket -> rank, blocks
    began_s: float
    num_bytes: int = 0
    ended_s: float = 0.0
    failure: Failure | None = None
    quarantined: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Save:
    """A command that every rank has got, and how many have not answered."""

    num_copying: int
    num_saving: int
    failure: Failure | None = None


class TierLoads:
    def __init__(self, num_ranks: int, next_ticket: Callable[[], int]) -> None:
        self._num_ranks = num_ranks
        self._next_ticket = next_ticket
        self._loads: dict[Key, _Load] = {}
        self._of_ticket: dict[int, _Load] = {}
        self._draining: dict[int, tuple[_Load, tuple[int, ...]]] = {}  # by ticket
        self._saves: dict[int, _Save] = {}
        self._held: dict[TierName, dict[int, list[bytes]]] = {}  # hashes of slots, by rank

    def has(self, key: Key) -> bool:
        return key in self._loads

    def reads(self, ticket: int) -> bool:
        return ticket in self._of_ticket or ticket in self._draining

    def load(self, event: LoadPrefix, out: Effects) -> None:
        if event.key in self._loads:
            raise InvariantBroken(f"{event.key} is loaded twice")
        load = _Load(event.key, out.now_s + event.timeout_s, {}, out.now_s)
        self._loads[event.key] = load
        for part in event.parts:
            for rank in range(self._num_ranks):
                ticket = self._next_ticket()
                load.reads[ticket] = rank, part.block_ids
                self._of_ticket[ticket] = load
                peer = tier_peer(part.tier)
                generations = (0,) * len(part.slots)
                read = Read(
                    ticket, peer, part.slots, part.block_ids, generations, hashes=part.hashes
                )
                out.command(rank, read)

    def abandon(self, key: Key, failure: Failure, out: Effects) -> None:
        self._fail(self._loads[key], failure, out)

    def read_ended(self, event: ReadEnded, out: Effects) -> None:
        ticket = event.ticket
        load = self._of_ticket.pop(ticket, None)
        if load is None:
            if event.quiesced:
                self.read_drained(ticket, out)
            return
        _, blocks = load.reads.pop(ticket)
        load.num_bytes += event.num_bytes
        load.ended_s = max(load.ended_s, event.ended_s)
        if not event.quiesced:
            load.quarantined.update(blocks)
            self._draining[ticket] = load, blocks
        if event.failure is not None or not event.quiesced:
            failure = event.failure or TransferError("a tier's read is not quiet").to_failure()
            self._fail(load, failure, out)
        else:
            self._end_if_complete(load, out)

    def read_drained(self, ticket: int, out: Effects) -> None:
        """Give back the blocks of a read that has drained, unless another read names them."""
        drained = self._draining.pop(ticket, None)
        if drained is None:
            return
        load, blocks = drained
        named = {*blocks}
        for _, others in self._draining.values():
            named -= {*others}
        if self._loads.get(load.key) is load:
            load.quarantined -= named
        elif named:
            out.reports.append(BlocksDrained(tuple(sorted(named))))

    def end_waits(self, out: Effects) -> None:
        for load in list(self._loads.values()):
            if load.deadline_s > out.now_s:
                continue
            if load.failure is None:
                text = "a tier kept a prompt waiting too long"
                failure = TransferError(text, code=TIER_TIMEOUT).to_failure()
                self._fail(load, failure, out)
            else:
                self._give_up(load, out)

    def deadlines(self) -> Iterable[float]:
        return (load.deadline_s for load in self._loads.values())

    def save(self, event: SaveBlocks | ClearTier, out: Effects) -> None:
        num_copying = self._num_ranks if isinstance(event, SaveBlocks) else 0
        self._saves[event.ticket] = _Save(num_copying, self._num_ranks)
        for rank in range(self._num_ranks):
            out.command(rank, event)

    def copied(self, event: BlocksCopied, out: Effects) -> None:
        save = self._saves[event.ticket]
        save.num_copying -= 1
        if save.num_copying == 0:
            out.reports.append(event)

    def saved(self, event: BlocksSaved, out: Effects) -> None:
        save = self._saves[event.ticket]
        save.num_saving -= 1
        save.failure = save.failure or event.failure
        if save.num_saving == 0:
            del self._saves[event.ticket]
            out.reports.append(BlocksSaved(event.ticket, save.failure))

    def held(self, rank: int, event: SlotsHeld, out: Effects) -> None:
        ranks = self._held.setdefault(event.tier, {})
        ranks.setdefault(rank, []).extend(unpack_hashes(event.hashes))
        is_whole = all(len(hashes) == event.num_slots for hashes in ranks.values())
        if is_whole and len(ranks) == self._num_ranks:
            alike = zip(*ranks.values(), strict=True)
            common = [one[0] if len(set(one)) == 1 else NO_HASH for one in alike]
            out.reports.append(TierOpened(event.tier, event.num_slots, b"".join(common)))
            del self._held[event.tier]

    def _fail(self, load: _Load, failure: Failure, out: Effects) -> None:
        if load.failure is None:
            load.failure = failure
            load.deadline_s = out.now_s + SHUTDOWN_TIMEOUT_S
            if load.reads:
                out.reports.append(ReceiveBroken(load.key))
            for ticket, (rank, _) in load.reads.items():
                out.command(rank, CancelRead(ticket))
        self._end_if_complete(load, out)

    def _give_up(self, load: _Load, out: Effects) -> None:
        """Quarantine the blocks of every read that has not ended, because it may still write."""
        for ticket, (_, blocks) in load.reads.items():
            load.quarantined.update(blocks)
            self._draining[ticket] = load, blocks
            del self._of_ticket[ticket]
        load.reads.clear()
        self._end_if_complete(load, out)

    def _end_if_complete(self, load: _Load, out: Effects) -> None:
        if load.reads:
            return
        del self._loads[load.key]
        if load.failure is None:
            took_s = max(0.0, load.ended_s - load.began_s)
            out.reports.append(KVReceived(load.key, (), load.num_bytes, took_s, took_s))
        else:
            blocks = tuple(sorted(load.quarantined))
            out.reports.append(ReceiveEnded(load.key, load.failure, blocks))
