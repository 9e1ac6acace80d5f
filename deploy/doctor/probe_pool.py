"""A separate pool with a transfer agent, at one end of a measured path.

The owner lends one pool, and the reader reads it into another. The agent, the transports and the
choice between them are those of nodes (`kv_transfer`); a pool that serves is never touched.
"""

import os
import secrets
import select
from statistics import median

import msgspec

from baton.kv_transfer.agent import make_port
from baton.kv_transfer.interfaces import (
    AddPeer,
    AgentEvent,
    BlockSlice,
    PeerDown,
    PeerRank,
    PeerUp,
    Read,
    ReadEnded,
    RemovePeer,
)
from baton.kv_transfer.pools import HostPool
from baton.kv_transfer.transports.addresses import choose_transport
from baton.protocol.config import TransferConfig
from baton.protocol.errors import Failure, TransferError
from baton.protocol.ids import Epoch
from baton.protocol.messages import RankAddress
from baton.runtime.clock import monotonic

NUM_BLOCKS, BLOCK_BYTES = 1024, 64 << 10
NUM_SINGLE = 50  # reads of one block
NUM_WHOLE = 5  # reads of all blocks, fewer where they would take longer than
WHOLE_S = 3.0
WHOLE_BLOCK = BlockSlice(0, 0, BLOCK_BYTES)


class PoolOffered(msgspec.Struct, frozen=True):
    """Sent by the owner of a pool: its address, and the checksums of its blocks."""

    host: str  # the address from which it dials
    epoch: Epoch
    rank: RankAddress
    num_blocks: int
    block_bytes: int
    checksums: tuple[int, ...]
    tcp_ports: tuple[int, ...] = ()  # on which its process listens; UCX picks them


class PathMeasured(msgspec.Struct, frozen=True):
    """Sent by the reader: how fast it read the pool, or why it could not."""

    transport: str = ""
    lane: str = ""  # the part of the transport that was used, if it is known
    num_bytes: int = 0
    read_s: float = 0.0  # the median of some reads of the whole pool
    block_s: float = 0.0  # the median of some reads of one block
    block_bytes: int = 0
    failure: Failure | None = None

    def __str__(self) -> str:
        if self.failure is not None:
            return self.failure.message
        return (
            f"{self.num_bytes / self.read_s / 1e9:.2f} GB/s, {1e3 * self.block_s:.2f} ms for a "
            f"block of {self.block_bytes >> 10} KiB, by {self.transport}"
            + (f": {self.lane}" if self.lane else "")
        )


class ProbePool:
    """`NUM_BLOCKS` blocks of host memory. Raises `ConfigError` if `config` cannot work."""

    def __init__(self, config: TransferConfig) -> None:
        self.epoch = Epoch(secrets.token_hex(8))
        self._config = config
        self._pool = HostPool(NUM_BLOCKS, BLOCK_BYTES)
        self._agent = make_port(self._pool, self.epoch, config)
        self._ticket = 0

    def offer(self, host: str, tcp_ports: tuple[int, ...]) -> PoolOffered:
        """Fill the pool with unique bytes, and return what its reader needs."""
        self._pool.buffer[:] = os.urandom(self._pool.shape.pool_bytes)
        checksums = self._pool.checksums(range(NUM_BLOCKS), 0, BLOCK_BYTES)
        return PoolOffered(
            host, self.epoch, self._agent.address(), NUM_BLOCKS, BLOCK_BYTES, checksums, tcp_ports
        )

    def measure(self, offer: PoolOffered, timeout_s: float) -> PathMeasured:
        """Read the offered pool some times. A problem becomes the `failure` of the answer."""
        try:
            if (offer.num_blocks, offer.block_bytes) != (NUM_BLOCKS, BLOCK_BYTES):
                raise TransferError(
                    "the other end measures with blocks of another size: use the same release on "
                    "both hosts"
                )
            name = self._connect(offer, monotonic() + timeout_s)
            return self._read(offer, name, timeout_s)
        except TransferError as error:
            return PathMeasured(failure=error.to_failure())
        finally:
            self._agent.send(RemovePeer(PeerRank(offer.epoch)))

    def close(self) -> None:
        self._agent.close()
        self._pool.close()

    def _connect(self, offer: PoolOffered, deadline_s: float) -> str:
        """Try the transports in the order in which nodes do; return the one that connected."""
        failed: dict[str, str] = {}
        while True:
            name = self._choose(offer, failed)
            owner, size = PeerRank(offer.epoch), offer.block_bytes
            add = AddPeer(owner, name, offer.rank, offer.num_blocks, size, WHOLE_BLOCK)
            self._agent.send(add)
            event = self._next(deadline_s, f"{name} at {_where(offer)}")
            if isinstance(event, PeerUp):
                return name
            assert isinstance(event, PeerDown)
            failed[name] = event.failure.message

    def _choose(self, offer: PoolOffered, failed: dict[str, str]) -> str:
        forced = self._config.transport
        try:
            return choose_transport(offer.rank, self._agent.address(), forced, failed.keys())
        except TransferError as error:
            tried = "".join(f"; {name} was tried: {why}" for name, why in failed.items())
            raise TransferError(error.message + tried, code=error.code) from error

    def _read(self, offer: PoolOffered, name: str, timeout_s: float) -> PathMeasured:
        singles = [
            self._timed(offer, (block,), timeout_s)
            for block in range(0, NUM_BLOCKS, NUM_BLOCKS // NUM_SINGLE)
        ]
        wholes: list[float] = []
        while len(wholes) < NUM_WHOLE and sum(wholes) < WHOLE_S:
            wholes.append(self._timed(offer, tuple(range(NUM_BLOCKS)), timeout_s))
        if self._pool.checksums(range(NUM_BLOCKS), 0, BLOCK_BYTES) != offer.checksums:
            raise TransferError("the bytes that were read differ from those of the other end")
        size = NUM_BLOCKS * BLOCK_BYTES
        return PathMeasured(name, "", size, median(wholes), median(singles), BLOCK_BYTES)

    def _timed(self, offer: PoolOffered, blocks: tuple[int, ...], timeout_s: float) -> float:
        """Read some blocks and return how long that took, in seconds."""
        self._ticket += 1
        self._agent.send(
            Read(self._ticket, PeerRank(offer.epoch), blocks, blocks, (0,) * len(blocks))
        )
        event = self._next(monotonic() + timeout_s, "a read")
        if isinstance(event, PeerDown):
            raise TransferError(event.failure.message)
        assert isinstance(event, ReadEnded)
        if event.failure is not None:
            raise TransferError(event.failure.message, code=event.failure.code)
        return event.ended_s - event.posted_s

    def _next(self, deadline_s: float, what: str) -> AgentEvent:
        """Return the agent's next event. Raises `TransferError` if none comes in time."""
        while True:
            for event in self._agent.poll():
                return event
            left_s = deadline_s - monotonic()
            if left_s <= 0:
                raise TransferError(f"no answer in time from {what}", code="path_timed_out")
            select.select([self._agent.fileno()], [], [], left_s)


def _where(offer: PoolOffered) -> str:
    """Return the host of the other end, and the ports at which its UCX may be listening."""
    return f"{offer.host}, TCP port {' or '.join(map(str, offer.tcp_ports)) or 'unknown'}"
