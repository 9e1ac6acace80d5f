"""What the two ends of a measured path say to each other, over a channel with the cluster's key.

The end that listens is in a decode node's place: it reads the pool of the end that dials, which is
in a prefill node's. `reader` and `owner` send these.
"""

import msgspec

from baton.protocol.codec import Codec
from baton.protocol.errors import Failure
from baton.protocol.ids import Epoch
from baton.protocol.messages import RankAddress


class PathMessage(msgspec.Struct, frozen=True, tag=True):
    """Root of these messages. New fields have defaults."""


class PoolOffered(PathMessage, frozen=True):
    """From the owner: its pool, and the checksums that its blocks have."""

    version: str
    protocol: int
    host: str  # the address from which it dials
    epoch: Epoch
    rank: RankAddress
    num_blocks: int
    block_bytes: int
    checksums: tuple[int, ...]
    tcp_ports: tuple[int, ...] = ()  # on which its process listens; UCX picks them


class OfferTaken(PathMessage, frozen=True):
    """From the reader, at once: it begins to read."""

    version: str
    protocol: int
    now_s: float  # since 1970


class PathMeasured(PathMessage, frozen=True):
    """From the reader: how fast the pool was read, or why it could not be."""

    transport: str = ""
    lane: str = ""  # which part of the transport carried it, as far as that is known
    num_bytes: int = 0
    read_s: float = 0.0  # of all of the pool, the median of some reads
    block_s: float = 0.0  # of a single block, likewise
    block_bytes: int = 0
    failure: Failure | None = None

    @property
    def gb_per_s(self) -> float:
        return self.num_bytes / self.read_s / 1e9 if self.read_s else 0.0

    def __str__(self) -> str:
        if self.failure is not None:
            return self.failure.message
        return (
            f"{self.gb_per_s:.2f} GB/s, {1e3 * self.block_s:.2f} ms for a block of "
            f"{self.block_bytes >> 10} KiB, by {self.transport}: {self.lane or 'lane not known'}"
        )


def to_reader_codec() -> Codec[PoolOffered]:
    return Codec[PoolOffered](PoolOffered)


def to_owner_codec() -> Codec[OfferTaken | PathMeasured]:
    return Codec[OfferTaken | PathMeasured](OfferTaken | PathMeasured)  # type: ignore[arg-type]
