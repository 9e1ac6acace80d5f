"""One rank's transfer agent reads peers' blocks into the local pool and never blocks its node.

`AgentTurns` decides, one turn at a time and on the clock that it is given; `TransferAgent` is the
thread that calls it. A read is cut into chunks, of which two per peer are in flight. It ends
exactly once: when all of it has arrived, when it has failed and is quiesced (no more bytes can
land), or when that is still uncertain after `quiesce_s`.
"""

import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import assert_never

import msgspec

from baton.kv_transfer.interfaces import (
    CORRUPT_BLOCKS,
    AddPeer,
    AgentCommand,
    AgentEvent,
    BlockSlice,
    BlocksSummed,
    CancelRead,
    ClearTier,
    PeerDown,
    PeerRank,
    PeerTransport,
    PeerUp,
    Read,
    ReadDrained,
    ReadEnded,
    RemovePeer,
    SaveBlocks,
    SumBlocks,
    TierTransport,
    Transport,
)
from baton.kv_transfer.pools import DevicePool, HostPool
from baton.kv_transfer.transports import make_transports
from baton.kv_transfer.trials import Trials
from baton.protocol.blocks import HASH_BYTES
from baton.protocol.config import TransferConfig
from baton.protocol.errors import Cancelled, Failure, InvariantBroken, TransferError
from baton.protocol.ids import Epoch
from baton.protocol.messages import RankAddress
from baton.runtime.clock import Clock, boottime
from baton.runtime.log import logger

MIN_WAIT_S = 0.0001
MAX_WAIT_S = 0.005
QUIESCE_POLL_S = 0.25
# Chunks of one peer: the second one is queued while the first one moves.
MAX_IN_FLIGHT = 2

log = logger("transfer")

# Called with blocks of the local pool, an offset in each block and a number of bytes.
Checksums = Callable[[Sequence[int], int, int], tuple[int, ...]]


class AgentLimits(msgspec.Struct, frozen=True):
    """A read fails if it has not ended `read_s` after its command. A failed read whose chunks are
    not quiesced after `quiesce_s` ends as not quiesced."""

    chunk_bytes: int = 16 << 20
    read_s: float = 30.0
    quiesce_s: float = 30.0


def make_port(
    pool: HostPool | DevicePool,
    epoch: Epoch,
    config: TransferConfig,
    tiers: Sequence[TierTransport] = (),
) -> "TransferAgent":
    """Start the agent of the rank that owns `pool` and `tiers`, in the process lifetime `epoch`.

    Publish `.address()` as this rank's `RankAddress`, and call `.close()` before closing the pool.
    Raises `ConfigError` if the configured transport cannot work here.
    """
    transports = make_transports(pool, epoch, config)
    enter = None if isinstance(pool, HostPool) else pool.peers.enter
    checksums = pool.checksums if config.verify_kv else None
    limits = AgentLimits(read_s=config.lease_s)
    return TransferAgent(transports, limits, checksums, enter, tiers)


class TransferAgent:
    """A `TransferPort` over `transports` and `tiers`, which it owns from then on."""

    def __init__(
        self,
        transports: Sequence[PeerTransport],
        limits: AgentLimits | None = None,
        checksums: Checksums | None = None,
        enter: Callable[[], None] | None = None,
        tiers: Sequence[TierTransport] = (),
    ) -> None:
        """Start the thread, which calls `enter` first to make its GPU current."""
        self._enter = enter
        self._transports: tuple[Transport, ...] = (*transports, *tiers)
        self._turns = AgentTurns(
            transports, limits or AgentLimits(), boottime, checksums, tiers
        )
        self._address = RankAddress({t.name: t.address() for t in transports})
        self._commands: deque[AgentCommand] = deque()
        self._events: deque[AgentEvent] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._ready = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing = False
        self._error: Exception | None = None
        self._thread = threading.Thread(
            target=self._run, name="transfer agent", daemon=True
        )
        self._thread.start()

    def address(self) -> RankAddress:
        """Return how peers can read the local pool."""
        return self._address

    def send(self, command: AgentCommand) -> None:
        """Queue a command. After `close`, commands are dropped."""
        if self._closing:
            return
        self._commands.append(command)
        os.eventfd_write(self._wake, 1)

    def poll(self) -> list[AgentEvent]:
        """Return new events. Raises `InvariantBroken` when a bug has ended the agent's thread."""
        if self._closing:
            return []
        _drain(self._ready)
        events = [self._events.popleft() for _ in range(len(self._events))]
        if self._error is not None and not events:
            raise InvariantBroken(
                f"the transfer agent ended: {self._error!r}"
            ) from self._error
        return events

    def fileno(self) -> int:
        return self._ready

    def close(self) -> None:
        """End the thread and every transport, so that nothing lands any more. Idempotent."""
        if self._closing:
            return
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)
        os.close(self._ready)

    def _run(self) -> None:
        try:
            if self._enter is not None:
                self._enter()
            self._work()
        except Exception as error:  # noqa: BLE001  `poll` raises it in the node
            self._error = error
            os.eventfd_write(self._ready, 1)
        finally:
            for transport in self._transports:
                transport.close()

    def _work(self) -> None:
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        for transport in self._transports:
            if transport.fileno() >= 0:
                poller.register(transport.fileno(), select.POLLIN)
        moved_s = boottime()
        while not self._closing:
            while self._commands:
                self._turns.handle(self._commands.popleft())
            moved = self._turns.turn()
            if events := self._turns.take_events():
                self._events.extend(events)
                os.eventfd_write(self._ready, 1)
            if moved or self._commands:
                moved_s = boottime()
                continue
            # The pause grows with the time that chunks take, so an end is seen late by an eighth of
            # it at most.
            self._wait(
                poller, min(max(MIN_WAIT_S, (boottime() - moved_s) / 8), MAX_WAIT_S)
            )
            _drain(self._wake)

    def _wait(self, poller: select.poll, poll_s: float) -> None:
        """Wait for a command, a connection or a deadline."""
        wake_at_s = self._turns.wake_at_s(poll_s)
        if wake_at_s is None:
            poller.poll()
            return
        left_s = max(0.0, wake_at_s - boottime())
        if left_s >= 0.001:
            poller.poll(left_s * 1e3)
        elif not poller.poll(0):
            time.sleep(left_s)  # `poll` would round it up to a whole millisecond


def _drain(descriptor: int) -> None:
    try:
        os.eventfd_read(descriptor)
    except BlockingIOError:
        return


@dataclass(slots=True, eq=False)
class _Reading:
    """A `Read` under way. `stop_at_s` is its deadline, or after a failure, that to be quiesced."""

    command: Read
    transport: Transport
    stop_at_s: float
    next_block: int = 0
    num_bytes: int = 0
    posted_s: float | None = None
    failure: Failure | None = None
    in_flight: dict[int, int] = field(default_factory=dict)  # handle -> bytes

    @property
    def has_unposted(self) -> bool:
        return self.failure is None and self.next_block < len(self.command.remote)

    def cancel(self) -> None:
        """Forget the chunks of which no byte can land any more."""
        for handle in list(self.in_flight):
            if self.transport.cancel(handle):
                del self.in_flight[handle]


@dataclass(slots=True, eq=False)
class _ReadablePeer:
    command: AddPeer
    transport: Transport
    connect_by_s: float
    up: bool = False
    removed: bool = False
    # A command that waits until the removed peer has no reads left, because the same process may be
    # added again.
    next_command: AddPeer | None = None
    reads: deque[_Reading] = field(default_factory=deque)
    trials: Trials | None = None  # until its fastest transport is known

    @property
    def num_in_flight(self) -> int:
        return sum(len(reading.in_flight) for reading in self.reads)


class AgentTurns:
    """The peers, tiers and reads of one rank. The owner calls `handle` and `turn`."""

    def __init__(
        self,
        transports: Sequence[PeerTransport],
        limits: AgentLimits,
        clock: Clock,
        checksums: Checksums | None = None,
        tiers: Sequence[TierTransport] = (),
    ) -> None:
        """`checksums` computes those of local blocks. Without it, reads are not verified."""
        self._limits = limits
        self._clock = clock
        self._checksums = checksums
        self._tiers: dict[str, TierTransport] = {tier.name: tier for tier in tiers}
        self._of_peers = {transport.name: transport for transport in transports}
        self._transports: dict[str, Transport] = {
            transport.name: transport for transport in (*transports, *tiers)
        }
        self._peers: dict[PeerRank, _ReadablePeer] = {}
        self._draining: list[_Reading] = []  # have ended without being quiesced
        self._events: list[AgentEvent] = []
        for tier in tiers:
            self._add(clock(), tier.add_peer_command)

    def handle(self, command: AgentCommand) -> None:
        now_s = self._clock()
        match command:
            case AddPeer():
                self._add(now_s, command)
            case RemovePeer(peer=owner):
                if owner in self._peers:
                    self._remove(
                        now_s, self._peers[owner], TransferError("the peer was removed")
                    )
            case Read():
                self._start(now_s, command)
            case SumBlocks():
                self._events.append(self._summed(command))
            case SaveBlocks(tier=tier):
                self._tiers[tier].save(command)
            case ClearTier(ticket=ticket, tier=tier):
                self._tiers[tier].clear(ticket)
            case CancelRead(ticket=ticket):
                for peer in self._peers.values():
                    for reading in peer.reads:
                        if reading.command.ticket == ticket:
                            self._fail(
                                now_s, reading, Cancelled("the read was cancelled")
                            )
            case _:
                assert_never(command)

    def turn(self) -> bool:
        """Do what can be done now. Return True if the next turn should follow immediately."""
        now_s = self._clock()
        for transport in self._transports.values():
            for owner in transport.service():
                self._lose(now_s, owner, TransferError("the peer's process is gone"))
        moved = False
        for peer in list(self._peers.values()):
            if not peer.up and not peer.removed:
                self._connect(now_s, peer)
            moved |= self._end_chunks(now_s, peer)
            if peer.up and not peer.removed:
                moved |= self._post_chunk(peer)
                moved |= self._try_others(now_s, peer)
            if peer.removed and not peer.reads:
                self._forget(now_s, peer)
        self._end_draining()
        for tier in self._tiers.values():
            self._events += tier.take_events()
        return moved

    def take_events(self) -> list[AgentEvent]:
        events = self._events
        self._events = []
        return events

    def wake_at_s(self, poll_s: float) -> float | None:
        """Return when the next turn is due if no command comes, or None.

        It is due at a deadline, after `poll_s` if something is under way that has no descriptor, or
        when a transport without a thread of its own needs its next call. Where a transport tells
        ends, one that it could not tell is found after `MAX_WAIT_S`.
        """
        times = [
            reading.stop_at_s for peer in self._peers.values() for reading in peer.reads
        ]
        for transport in self._transports.values():
            if transport.progress_s is not None:
                times.append(self._clock() + transport.progress_s)
        for peer in self._peers.values():
            connecting = not peer.up and not peer.removed
            if connecting:
                times.append(peer.connect_by_s)
            if peer.num_in_flight:
                is_told = peer.transport.tells_ends
                times.append(self._clock() + (MAX_WAIT_S if is_told else poll_s))
            elif peer.trials is not None or (
                connecting and peer.transport.fileno() < 0
            ):
                times.append(self._clock() + poll_s)
        if self._draining:
            times.append(self._clock() + max(poll_s, QUIESCE_POLL_S))
        return min(times, default=None)

    def _add(self, now_s: float, command: AddPeer) -> None:
        known = self._peers.get(command.peer)
        if known is not None:
            if known.removed:
                known.next_command = command
            elif known.up:
                self._events.append(PeerUp(command.peer, known.transport.name))
            return
        try:
            transport = self._transports.get(command.transport)
            if transport is None or command.transport not in command.address.metadata:
                raise TransferError(f"{command.transport} is not offered by both ranks")
            transport.add_peer(command)
        except TransferError as error:
            note_failure(command, error)
            self._events.append(PeerDown(command.peer, error.to_failure()))
            return
        by_s = now_s + transport.connect_s
        self._peers[command.peer] = _ReadablePeer(command, transport, by_s)

    def _connect(self, now_s: float, peer: _ReadablePeer) -> None:
        try:
            peer.up = peer.transport.connected(peer.command.peer)
            if not peer.up and now_s >= peer.connect_by_s:
                raise TransferError(
                    f"no connection within {peer.transport.connect_s:g} s"
                )
        except TransferError as error:
            note_failure(peer.command, error)
            self._lose(now_s, peer.command.peer, error)
        if peer.up:
            self._events.append(PeerUp(peer.command.peer, peer.transport.name))
            peer.trials = self._trials_of(peer.command)

    def _trials_of(self, command: AddPeer) -> Trials | None:
        """Return the trials of a peer; None if one transport alone can read it."""
        others = [
            self._of_peers[name] for name in command.others if name in self._of_peers
        ]
        if not others:
            return None
        return Trials(command, self._of_peers[command.transport], others)

    def _try_others(self, now_s: float, peer: _ReadablePeer) -> bool:
        if peer.trials is None or peer.reads:
            return False
        moved = peer.trials.turn(now_s)
        if peer.trials.winner is not None:
            peer.transport = peer.trials.winner
            peer.trials.leave()
            peer.trials = None
        return moved

    def _lose(self, now_s: float, owner: PeerRank, error: TransferError) -> None:
        peer = self._peers.get(owner)
        if peer is not None and not peer.removed:
            self._remove(now_s, peer, error)
            self._events.append(PeerDown(owner, error.to_failure()))

    def _remove(self, now_s: float, peer: _ReadablePeer, error: TransferError) -> None:
        peer.removed = True
        peer.next_command = None
        for reading in peer.reads:
            self._fail(now_s, reading, error)
        self._end_chunks(now_s, peer)

    def _forget(self, now_s: float, peer: _ReadablePeer) -> None:
        if peer.trials is not None:
            peer.trials.leave()
        peer.transport.remove_peer(peer.command.peer)
        del self._peers[peer.command.peer]
        if peer.next_command is not None:
            self._add(now_s, peer.next_command)

    def _start(self, now_s: float, command: Read) -> None:
        peer = self._peers.get(command.peer)
        if peer is None or peer.removed:
            failure = TransferError("that peer is not connected").to_failure()
            self._events.append(ReadEnded(command.ticket, now_s, now_s, 0, failure))
            return
        peer.reads.append(
            _Reading(command, peer.transport, now_s + self._limits.read_s)
        )

    def _post_chunk(self, peer: _ReadablePeer) -> bool:
        """Post one chunk of the oldest read that has chunks left. shm copies it in this call."""
        reading = next((one for one in peer.reads if one.has_unposted), None)
        if reading is None or peer.num_in_flight >= MAX_IN_FLIGHT:
            return False
        command = reading.command
        now_s = self._clock()
        if reading.posted_s is None:
            reading.posted_s = now_s
        slice_bytes = peer.command.part.num_bytes
        chunk_bytes = max(self._limits.chunk_bytes, peer.transport.min_chunk_bytes)
        begin = reading.next_block
        end = begin + max(1, chunk_bytes // slice_bytes)
        chunk = msgspec.structs.replace(
            command,
            hashes=command.hashes[begin * HASH_BYTES : end * HASH_BYTES],
            remote=command.remote[begin:end],
            local=command.local[begin:end],
            generations=command.generations[begin:end],
        )
        try:
            handle = peer.transport.read(chunk)
        except TransferError as error:
            self._fail(now_s, reading, error)
        else:
            reading.next_block = end
            reading.in_flight[handle] = len(chunk.remote) * slice_bytes
        return True

    def _end_chunks(self, now_s: float, peer: _ReadablePeer) -> bool:
        """Test every chunk in flight, and end the reads that are complete."""
        moved = False
        for reading in list(peer.reads):
            for handle in list(reading.in_flight):
                if handle not in reading.in_flight:
                    continue  # cancelled because the chunk before it failed
                try:
                    ended = peer.transport.test(handle)
                except TransferError as error:
                    self._fail(now_s, reading, error)
                else:
                    if ended:
                        reading.num_bytes += reading.in_flight.pop(handle)
                        moved = True
            if reading.failure is None and now_s >= reading.stop_at_s:
                self._fail(now_s, reading, TransferError("the read took too long"))
            is_through = not reading.in_flight and not reading.has_unposted
            if is_through or (
                reading.failure is not None and now_s >= reading.stop_at_s
            ):
                self._end(peer, reading)
                moved = True
        return moved

    def _fail(
        self, now_s: float, reading: _Reading, error: TransferError | Cancelled
    ) -> None:
        """Post no more chunks, and end the read when those in flight are quiesced, or in time."""
        if reading.failure is None:
            reading.failure = error.to_failure()
            reading.stop_at_s = now_s + self._limits.quiesce_s
        reading.cancel()

    def _end(self, peer: _ReadablePeer, reading: _Reading) -> None:
        ended_s = self._clock()
        if reading.failure is None and self._is_corrupt(
            reading.command, peer.command.part
        ):
            epoch, rank = reading.command.peer
            text = f"blocks from rank {rank} of {epoch} arrived with other bytes than were sent"
            reading.failure = TransferError(text, code=CORRUPT_BLOCKS).to_failure()
        posted_s = ended_s if reading.posted_s is None else reading.posted_s
        ticket = reading.command.ticket
        is_quiesced = not reading.in_flight
        if not is_quiesced:
            self._draining.append(reading)
        peer.reads.remove(reading)
        self._events.append(
            ReadEnded(
                ticket,
                posted_s,
                ended_s,
                reading.num_bytes,
                reading.failure,
                is_quiesced,
            )
        )

    def _end_draining(self) -> None:
        for reading in list(self._draining):
            reading.cancel()
            if not reading.in_flight:
                self._draining.remove(reading)
                self._events.append(ReadDrained(reading.command.ticket))

    def _is_corrupt(self, command: Read, part: BlockSlice) -> bool:
        if self._checksums is None or not command.checksums:
            return False
        found = self._checksums(command.local, part.local_offset, part.num_bytes)
        return found != command.checksums

    def _summed(self, command: SumBlocks) -> BlocksSummed:
        assert self._checksums is not None, (
            "only nodes with transfer.verify_kv ask for checksums"
        )
        offsets = range(
            0, command.num_slices * command.slice_bytes, command.slice_bytes
        )
        rows = (
            self._checksums(command.block_ids, at, command.slice_bytes)
            for at in offsets
        )
        return BlocksSummed(command.ticket, tuple(rows))


def note_failure(command: AddPeer, error: TransferError) -> None:
    """Say in one line of the log that a transport does not connect; the next one may."""
    log.warning(
        f"{command.transport} cannot read a peer",
        peer=command.peer.epoch,
        reason=error.message,
    )
