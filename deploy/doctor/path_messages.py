"""The messages between the two ends of a measured path, over a channel with the cluster's key.

The end that listens acts as a decode node: it reads the pool of the end that dials, which acts as a
prefill node. `path_ends` sends these.
"""

import msgspec

from baton.protocol.codec import Codec
from baton.protocol.errors import Failure
from baton.protocol.ids import Epoch
from baton.protocol.messages import RankAddress


class PathMessage(msgspec.Struct, frozen=True, tag=True):
    """The root of these messages. New fields have defaults."""


class PoolOffered(PathMessage, frozen=True):
    """Sent by the owner: its pool, and the checksums of its blocks."""

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
    """Sent by the reader at once, before it begins to read."""

    version: str
    protocol: int
    now_s: float  # since 1970


class PathMeasured(PathMessage, frozen=True):
    """Sent by the reader: how fast it read the pool, or why it could not."""

    transport: str = ""
    lane: str = ""  # the part of the transport that was used, if it is known
    num_bytes: int = 0
    read_s: float = 0.0  # the median of some reads of the whole pool
    block_s: float = 0.0  # the median of some reads of one block
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
