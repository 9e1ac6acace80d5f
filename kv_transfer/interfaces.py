"""The vocabulary of this room: what a node, its connector, its agents and transports exchange.

A read is *stale* if it ended after its lease. The connector decides that; transports only report
when a read was posted and when it ended. All times are seconds since this host's boot (`boottime`).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import msgspec

from baton.protocol.errors import Failure
from baton.protocol.ids import Epoch, Key, NodeId
from baton.protocol.messages import (
    BlockRange,
    End,
    FirstToken,
    NodeInfo,
    Offered,
    PeerMessage,
    RankAddress,
    TierName,
    Withdrawn,
)

# One process: a node id with another epoch is another process.
PeerName = tuple[NodeId, Epoch]


class PeerRank(NamedTuple):
    """One rank of a peer's process, which owns one pool."""

    epoch: Epoch
    rank: int = 0


def tier_peer(name: TierName) -> PeerRank:
    """Return the name under which a rank reads from a tier of its own, like from a peer."""
    return PeerRank(Epoch(name))


class BlockSlice(msgspec.Struct, frozen=True):
    """The bytes of each block that one rank reads from another: a range of KV heads.

    Both blocks are whole numbers of such slices, and each offset is a multiple of `num_bytes`.
    """

    remote_offset: int
    local_offset: int
    num_bytes: int


CORRUPT_BLOCKS = "corrupt_blocks"  # the failure of a read whose checksums differ
# The failure of a read of a slot that does not hold that block.
BAD_RECORD = "bad_record"
# The failure of a load that took longer than computing takes.
TIER_TIMEOUT = "tier_timeout"
# The failure of a handoff that decode did not renew in time.
LEASE_EXPIRED = "lease_expired"

# --- a rank's agent, as its node sees it (travels to worker processes) --------------------------


class AgentMessage(msgspec.Struct, frozen=True, tag=True):
    """The root of an agent's commands and events."""


class AddPeer(AgentMessage, frozen=True):
    """Makes a rank's pool readable, in the background. PeerUp or PeerDown follows.

    `block_bytes` is the size of that pool's blocks. Every read copies `part` of each block. Once
    `transport` is up, it and `others` are tried, and the fastest makes all later reads.
    """

    peer: PeerRank
    transport: str
    address: RankAddress
    num_blocks: int
    block_bytes: int
    part: BlockSlice
    others: tuple[str, ...] = ()


class RemovePeer(AgentMessage, frozen=True):
    """Forgets that pool. Reads of it fail and end first."""

    peer: PeerRank


class Read(AgentMessage, frozen=True):
    """Copies a slice of the blocks `remote` of `peer` into `local`. Exactly one ReadEnded follows.

    `generations` are those that prefill announced; a transport that can read the peer's generation
    table (shm) compares them again after the copy. The slots after the prompt's last token hold
    arbitrary data of the peer, which attention masks.
    """

    ticket: int
    peer: PeerRank
    remote: tuple[int, ...]
    local: tuple[int, ...]
    generations: tuple[int, ...]
    # Of the slice in `local` after the read; empty if the read is not verified.
    checksums: tuple[int, ...] = ()
    hashes: bytes = b""  # of the blocks, if `remote` are slots of a tier


class SumBlocks(AgentMessage, frozen=True):
    """Asks for checksums of each slice of blocks of the local pool. BlocksSummed follows."""

    ticket: int
    block_ids: tuple[int, ...]
    slice_bytes: int
    num_slices: int


class CancelRead(AgentMessage, frozen=True):
    """Stops that read as soon as it is safe. ReadEnded still follows."""

    ticket: int


class SaveBlocks(AgentMessage, frozen=True):
    """Saves settled blocks of the local pool in slots of a tier.

    BlocksCopied follows, after which they may change, and then BlocksSaved.
    """

    ticket: int
    tier: TierName
    block_ids: tuple[int, ...]
    slots: tuple[int, ...]
    hashes: bytes  # of the blocks


class ClearTier(AgentMessage, frozen=True):
    """Empties all slots of a tier. BlocksSaved follows."""

    ticket: int
    tier: TierName


AgentCommand = (
    AddPeer | RemovePeer | Read | CancelRead | SumBlocks | SaveBlocks | ClearTier
)


class PeerUp(AgentMessage, frozen=True):
    peer: PeerRank
    transport: str


class PeerDown(AgentMessage, frozen=True):
    peer: PeerRank
    failure: Failure


class ReadEnded(AgentMessage, frozen=True):
    """A read has ended. Unless it is `quiesced`, bytes may still land until ReadDrained comes."""

    ticket: int
    posted_s: float
    ended_s: float
    num_bytes: int
    failure: Failure | None = None
    quiesced: bool = True


class ReadDrained(AgentMessage, frozen=True):
    """That read is quiesced now: no byte of it can land any more."""

    ticket: int


class BlocksSummed(AgentMessage, frozen=True):
    """`checksums` has a row for each slice of a block, with a checksum for each block."""

    ticket: int
    checksums: tuple[tuple[int, ...], ...]


class SlotsHeld(AgentMessage, frozen=True):
    """What slots from `first_slot` on of a tier held at its start: hashes, zero for an empty one.

    A tier begins with these, up to its last slot.
    """

    tier: TierName
    num_slots: int
    first_slot: int
    hashes: bytes


class BlocksCopied(AgentMessage, frozen=True):
    ticket: int


class BlocksSaved(AgentMessage, frozen=True):
    """If it failed, it is not known which of the slots hold their blocks."""

    ticket: int
    failure: Failure | None = None


AgentEvent = (
    PeerUp
    | PeerDown
    | ReadEnded
    | ReadDrained
    | BlocksSummed
    | SlotsHeld
    | BlocksCopied
    | BlocksSaved
)


class TransferPort(Protocol):
    """One rank's transfer agent. It takes commands and returns events, and never blocks."""

    def send(self, command: AgentCommand) -> None: ...

    def poll(self) -> list[AgentEvent]: ...

    def fileno(self) -> int:
        """Return a descriptor that is readable when `poll` may return something."""
        ...


# --- what moves bytes ---------------------------------------------------------------------------


class PoolMemory(msgspec.Struct, frozen=True):
    """A registered pool: `num_blocks` blocks of `block_bytes` at `address` on `device`.

    `num_spare` more blocks follow them. No sequence owns those: reads that only try a connection
    land there.
    """

    address: int
    num_blocks: int
    block_bytes: int
    device: str = "cpu"
    num_spare: int = 0


TRIAL_BLOCKS = 8  # those of a short prompt


class Transport(Protocol):
    """Reads peers' blocks into the local pool, in the agent's thread.

    Only `read` may block, while it copies one chunk. `test` returns True, and forgets the handle,
    when the read has ended, and raises `TransferError` when it failed. `cancel` returns True, and
    forgets the handle, when no byte of that read can land any more, as for a handle that is
    forgotten. False means that this is not certain: the handle stays.
    """

    name: str
    connect_s: float  # the agent gives up a peer that is not connected after this time
    min_chunk_bytes: int  # the least size of a chunk; 0 leaves it to the agent
    # `service` must be called this often, even if nothing is read.
    progress_s: float | None
    tells_ends: bool  # `fileno` is readable when a read has ended, too

    def address(self) -> bytes:
        """Return opaque metadata with which a peer's `add_peer` can read the local pool."""
        ...

    def add_peer(self, command: AddPeer) -> None:
        """Begin to make a pool readable, whose address has this transport. Raises `TransferError`.

        Reads copy `part` of each block and never touch the rest of the local block, where other
        reads write. The ranks of one process share its epoch, but not its address.
        """
        ...

    def connected(self, peer: PeerRank) -> bool:
        """Return True once `read` works. Raises `TransferError` if it never will."""
        ...

    def remove_peer(self, peer: PeerRank) -> None:
        """Forget a pool whose reads have ended or been given up. It may be unknown."""
        ...

    def read(self, command: Read) -> int:
        """Post a read, one chunk of a whole one, and return its handle. Raises `TransferError`."""
        ...

    def test(self, handle: int) -> bool: ...

    def cancel(self, handle: int) -> bool: ...

    def fileno(self) -> int:
        """Return a descriptor that is readable when `service` has work; -1 if it never has."""
        ...

    def service(self) -> list[PeerRank]:
        """Serve peers that connect, and return the peers whose processes are gone."""
        ...

    def close(self) -> None: ...


class PeerTransport(Transport, Protocol):
    """A transport that may be tried beside others."""

    def trial(self, peer: PeerRank) -> int:
        """Post a read of the first `TRIAL_BLOCKS` blocks of a connected peer, or of all.

        Return its handle. The bytes land in memory of no block. Raises `TransferError`.
        """
        ...


class TierTransport(Transport, Protocol):
    """A tier of the rank's own, which is read like a peer, `tier_peer(name)`. No call may block."""

    @property
    def add_peer_command(self) -> AddPeer: ...

    def save(self, command: SaveBlocks) -> None: ...

    def clear(self, ticket: int) -> None: ...

    def take_events(self) -> list[AgentEvent]:
        """Return what happened to slots and saves since the last call."""
        ...


# --- the connector: events in -------------------------------------------------------------------


class PeersChanged(msgspec.Struct, frozen=True):
    """The router listed every ready node of the other role."""

    nodes: tuple[NodeInfo, ...]


class DialPeers(msgspec.Struct, frozen=True):
    """A prefill node is to dial every listed peer, so that each can read from it."""


class PeerLost(msgspec.Struct, frozen=True):
    """The control channel to this process broke, or the router declared it dead."""

    node: NodeId
    epoch: Epoch


class FromPeer(msgspec.Struct, frozen=True):
    node: NodeId
    epoch: Epoch
    message: PeerMessage


class FromRank(msgspec.Struct, frozen=True):
    rank: int
    event: AgentEvent


class Offer(msgspec.Struct, frozen=True):
    """All blocks of this prompt, or of a cached prefix of it, are reserved for `reader`.

    The scheduler's BlockRange, End and Withdrawn for this key follow.
    """

    key: Key
    reader: NodeId
    num_tokens: int
    num_blocks: int


class Expect(msgspec.Struct, frozen=True):
    """On decode: `source` computes a request's prompt. Offered or ReceiveEnded follows."""

    key: Key
    source: NodeId


class FetchPrefix(msgspec.Struct, frozen=True):
    """`source` probably has blocks of a prompt's first tokens. Offered or ReceiveEnded follows.

    After `timeout_s` computing them is quicker, and the receive ends.
    """

    key: Key
    source: NodeId
    hashes: bytes  # of the prompt's blocks
    num_held_blocks: int  # that are here already
    timeout_s: float


class RefusePrefix(msgspec.Struct, frozen=True):
    """This node has no blocks for a `PrefixWanted`."""

    key: Key
    reader: NodeId
    failure: Failure


class BeginReceive(msgspec.Struct, frozen=True):
    """The offered blocks from `first_block` on are to be read into `block_ids`."""

    key: Key
    first_block: int
    block_ids: tuple[int, ...]


class TierPart(msgspec.Struct, frozen=True):
    """Blocks to read from slots of a tier."""

    tier: TierName
    slots: tuple[int, ...]
    hashes: bytes
    block_ids: tuple[int, ...]


class LoadPrefix(msgspec.Struct, frozen=True):
    """Tiers of this node have blocks of a prompt. KVReceived or ReceiveEnded follows.

    After `timeout_s` computing them is quicker, and the load ends.
    """

    key: Key
    parts: tuple[TierPart, ...]
    timeout_s: float


class Abandon(msgspec.Struct, frozen=True):
    """The request is cancelled or refused. ReceiveEnded follows when its reads end."""

    key: Key
    failure: Failure


ConnectorEvent = (
    PeersChanged
    | DialPeers
    | PeerLost
    | FromPeer
    | FromRank
    | Offer
    | BlockRange
    | End
    | Withdrawn
    | RefusePrefix
    | Expect
    | FetchPrefix
    | BeginReceive
    | Abandon
    | LoadPrefix
    | SaveBlocks
    | ClearTier
)

# --- the connector: commands out (to the shell) and reports (to the scheduler) -------------------


class ToPeer(msgspec.Struct, frozen=True):
    node: NodeId
    epoch: Epoch
    message: PeerMessage


class ToRank(msgspec.Struct, frozen=True):
    rank: int
    command: AgentCommand


class DialPeer(msgspec.Struct, frozen=True):
    """Opens a control channel to this node. Prefill dials decode."""

    node: NodeInfo


class DropPeer(msgspec.Struct, frozen=True):
    node: NodeId
    epoch: Epoch


ConnectorCommand = ToPeer | ToRank | DialPeer | DropPeer


class Released(msgspec.Struct, frozen=True):
    """No reader needs these blocks now. If `failure` is None, the reader has all of them.

    Exactly one follows each Offer.
    """

    key: Key
    failure: Failure | None = None


class OfferBroken(msgspec.Struct, frozen=True):
    """The reader will not get these blocks, but may still read some until Released."""

    key: Key
    failure: Failure


class KVReceived(msgspec.Struct, frozen=True):
    """All blocks and End have arrived. This is the last report of its receive."""

    key: Key
    tokens: tuple[FirstToken, ...]
    num_bytes: int
    transfer_s: float  # from the first post to the last read's end
    # From End's arrival (or the last post before it) to the last read's end.
    exposed_s: float
    num_cached_tokens: int = 0  # what End says


class ReceiveBroken(msgspec.Struct, frozen=True):
    """Not all blocks of a prefix will arrive. Bytes may still land in some until ReceiveEnded."""

    key: Key


class ReceiveEnded(msgspec.Struct, frozen=True):
    """The receive failed or was abandoned. This is the last report of it.

    Its blocks may be reused, except those in `quarantined`, in which bytes may still land.
    """

    key: Key
    failure: Failure
    quarantined: tuple[int, ...] = ()


class BlocksDrained(msgspec.Struct, frozen=True):
    """These blocks were quarantined, and nothing can land in them any more."""

    block_ids: tuple[int, ...]


class PrefixWanted(msgspec.Struct, frozen=True):
    """`reader` wants the cached blocks of these hashes. Offer or RefusePrefix follows."""

    key: Key
    reader: NodeId
    hashes: bytes
    num_held_blocks: int


class TierOpened(msgspec.Struct, frozen=True):
    """Every rank has opened a tier. `hashes` are of what all of them hold in each slot, or zero."""

    tier: TierName
    num_slots: int
    hashes: bytes


ConnectorReport = (
    TierOpened
    | BlocksCopied
    | BlocksSaved
    | Released
    | OfferBroken
    | PrefixWanted
    | Offered
    | KVReceived
    | ReceiveBroken
    | ReceiveEnded
    | BlocksDrained
)


@dataclass(slots=True)
class Effects:
    """What one step at `now_s` does. A message to a peer without a channel is dropped.

    Call the connector again by `wake_at_s`, if that is set.
    """

    now_s: float
    has_channel: Callable[[PeerName], bool]
    commands: list[ConnectorCommand] = field(default_factory=list)
    reports: list[ConnectorReport] = field(default_factory=list)
    wake_at_s: float | None = None

    def send(self, peer: PeerName, message: PeerMessage) -> None:
        if self.has_channel(peer):
            self.commands.append(ToPeer(*peer, message))

    def command(self, rank: int, command: AgentCommand) -> None:
        self.commands.append(ToRank(rank, command))
