"""The interfaces of this room.

`Transport` moves bytes, `TransferPort` is one rank's agent as its node sees it, and `Connector`
knows requests: it takes events and returns commands and reports. A read is *stale* if it ended
after its lease did. The connector decides that; transports only say when a read was posted and when
it ended. All times are seconds since this host's boot (`boottime`).
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec

from baton.protocol.errors import Failure
from baton.protocol.ids import Epoch, Key, NodeId
from baton.protocol.messages import (
    End,
    FirstToken,
    NodeInfo,
    Offered,
    RankAddress,
    Span,
    ToDecode,
    ToPrefill,
    Withdrawn,
)

PeerName = tuple[NodeId, Epoch]  # one process: the same node id with another epoch is another


class PeerRank(NamedTuple):
    """One rank of a peer's process, so the owner of one pool."""

    epoch: Epoch
    rank: int = 0


class BlockPiece(msgspec.Struct, frozen=True):
    """The bytes of each block that one rank reads of another: a range of KV heads.

    Both blocks are whole numbers of such pieces, and each offset is a multiple of `num_bytes`.
    """

    remote_offset: int
    local_offset: int
    num_bytes: int


CORRUPT_BLOCKS = "corrupt_blocks"  # code of a read whose checksums differ from those that were sent
LEASE_EXPIRED = "lease_expired"  # code of a handoff that decode did not renew in time

# --- a rank's agent, as its node sees it (travels to worker processes) --------------------------


class AgentMessage(msgspec.Struct, frozen=True, tag=True):
    """Root of the commands to a transfer agent and of its events."""


class AddPeer(AgentMessage, frozen=True):
    """Make a rank's pool readable, in the background. PeerUp or PeerDown follows.

    `block_bytes` is the size of its blocks. Every read copies `piece` of each block.
    """

    peer: PeerRank
    transport: str
    address: RankAddress
    num_blocks: int
    block_bytes: int
    piece: BlockPiece


class RemovePeer(AgentMessage, frozen=True):
    """Forget that pool. Reads of it fail and end first."""

    peer: PeerRank


class Read(AgentMessage, frozen=True):
    """Copy the piece of blocks `remote` of `peer` into `local`. Exactly one ReadEnded follows.

    `generations` are those that prefill announced; a transport that can read the peer's generation
    table (shm) compares them again after the copy. The slots behind the prompt's last token hold
    what the peer had there; attention masks them.
    """

    ticket: int
    peer: PeerRank
    remote: tuple[int, ...]
    local: tuple[int, ...]
    generations: tuple[int, ...]
    checksums: tuple[int, ...] = ()  # of the piece in `local` afterwards; empty: not checked


class SumBlocks(AgentMessage, frozen=True):
    """Return the checksums of each piece of blocks of the local pool. BlocksSummed follows."""

    ticket: int
    block_ids: tuple[int, ...]
    piece_bytes: int
    num_pieces: int


class CancelRead(AgentMessage, frozen=True):
    """Stop that read as soon as it is safe. ReadEnded still follows."""

    ticket: int


AgentCommand = AddPeer | RemovePeer | Read | CancelRead | SumBlocks


class PeerUp(AgentMessage, frozen=True):
    peer: PeerRank
    transport: str


class PeerDown(AgentMessage, frozen=True):
    peer: PeerRank
    failure: Failure


class ReadEnded(AgentMessage, frozen=True):
    """`quiet` False: bytes of it may still land in `local`, until ReadQuiet says otherwise."""

    ticket: int
    posted_s: float
    ended_s: float
    num_bytes: int
    failure: Failure | None = None
    quiet: bool = True


class ReadQuiet(AgentMessage, frozen=True):
    """No byte of a read that ended without being quiet can land any more: its peer went on, or the
    peer's process is gone."""

    ticket: int


class BlocksSummed(AgentMessage, frozen=True):
    """`checksums` has a row for each piece of a block, with a checksum for each block."""

    ticket: int
    checksums: tuple[tuple[int, ...], ...]


AgentEvent = PeerUp | PeerDown | ReadEnded | ReadQuiet | BlocksSummed


class TransferPort(Protocol):
    """One rank's transfer agent: commands in, events out, never blocking."""

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


class Transport(Protocol):
    """Reads blocks of peers into the local pool. Only the agent's thread calls it.

    Only `read` may block, while it copies one slice. `test` returns True when the read has ended
    and raises `TransferError` when it failed; both forget the handle. `cancel` returns True, and
    forgets the handle, when no byte of that read can land any more. False means that this is not
    certain: the handle stays, and `test` may still see the end.
    """

    name: str
    connect_s: float  # a peer that is not connected for so long is given up
    least_slice_bytes: int  # slices are not cut smaller than this; 0: as the agent likes
    progress_s: float | None  # `service` must be called this often, even when nothing is read

    def address(self) -> bytes:
        """Return opaque metadata with which a peer's `add_peer` can read the local pool."""
        ...

    def add_peer(
        self, peer: PeerRank, address: bytes, num_blocks: int, block_bytes: int, piece: BlockPiece
    ) -> None:
        """Begin to make that pool, with blocks of `block_bytes`, readable. Raises `TransferError`.

        Reads of it copy `piece` of each block and leave the rest of the local block alone: another
        rank's reads write there. Ranks of one process share its epoch, not its address.
        """
        ...

    def connected(self, peer: PeerRank) -> bool:
        """Return True once `read` works. Raises `TransferError` when it never will."""
        ...

    def remove_peer(self, peer: PeerRank) -> None:
        """Forget that pool; an unknown one is no error. Its reads have ended or been given up: one
        that could not be cancelled may land until `close`."""
        ...

    def read(
        self,
        peer: PeerRank,
        remote: Sequence[int],
        local: Sequence[int],
        generations: Sequence[int],
    ) -> int:
        """Post a read of one slice and return its handle. Raises `TransferError`."""
        ...

    def test(self, handle: int) -> bool: ...

    def cancel(self, handle: int) -> bool: ...

    def fileno(self) -> int:
        """Return a descriptor that is readable when `service` has work; -1 if it never has."""
        ...

    def service(self) -> list[PeerRank]:
        """Answer peers that connect, and return the peers whose processes are gone."""
        ...

    def close(self) -> None: ...


# --- the connector: events in -------------------------------------------------------------------


class ConnectorMessage(msgspec.Struct, frozen=True, tag=True):
    """Root of what goes into and comes out of a `Connector`. It can be recorded and replayed."""


class PeersChanged(ConnectorMessage, frozen=True):
    """The router listed every ready node of the other role."""

    nodes: tuple[NodeInfo, ...]


class PeerLost(ConnectorMessage, frozen=True):
    """The control channel to this process broke, or the router declared it dead."""

    node: NodeId
    epoch: Epoch


class FromPeer(ConnectorMessage, frozen=True):
    node: NodeId
    epoch: Epoch
    message: ToDecode | ToPrefill


class FromRank(ConnectorMessage, frozen=True):
    rank: int
    event: AgentEvent


class Offer(ConnectorMessage, frozen=True):
    """Prefill: all blocks of this prompt are reserved; offer them to `decode_node`.

    The scheduler's Span, End and Withdrawn for this key follow, and travel as they are.
    """

    key: Key
    decode_node: NodeId
    num_tokens: int
    num_blocks: int


class Expect(ConnectorMessage, frozen=True):
    """Decode: `prefill_node` computes the prompt of a request. Offered or LandingEnded follows."""

    key: Key
    prefill_node: NodeId


class Land(ConnectorMessage, frozen=True):
    """Decode: read the offered blocks from `first_block` on into `block_ids`."""

    key: Key
    first_block: int
    block_ids: tuple[int, ...]


class Abandon(ConnectorMessage, frozen=True):
    """Decode: the request is cancelled or refused. LandingEnded follows when its reads end."""

    key: Key
    failure: Failure


ConnectorEvent = (
    PeersChanged | PeerLost | FromPeer | FromRank
    | Offer | Span | End | Withdrawn
    | Expect | Land | Abandon
)  # fmt: skip

# --- the connector: commands out (to the shell) and reports (to the scheduler) -------------------


class ToPeer(ConnectorMessage, frozen=True):
    node: NodeId
    epoch: Epoch
    message: ToDecode | ToPrefill


class ToRank(ConnectorMessage, frozen=True):
    rank: int
    command: AgentCommand


class DialPeer(ConnectorMessage, frozen=True):
    """Open a control channel to this node. Prefill dials decode."""

    node: NodeInfo


class DropPeer(ConnectorMessage, frozen=True):
    node: NodeId
    epoch: Epoch


ConnectorCommand = ToPeer | ToRank | DialPeer | DropPeer


class Released(ConnectorMessage, frozen=True):
    """Prefill: no reader needs these blocks any more. `failure` None: decode has all of them.

    Exactly one per Offer.
    """

    key: Key
    failure: Failure | None = None


class Landed(ConnectorMessage, frozen=True):
    """Decode: every block is here and End has come. The last report of its key."""

    key: Key
    tokens: tuple[FirstToken, ...]
    num_bytes: int
    transfer_s: float  # from the first post to the last end
    exposed_s: float  # from End's arrival (or the last post before it) to the last end


class LandingEnded(ConnectorMessage, frozen=True):
    """Decode: the landing failed or was abandoned. The last report of its key.

    Its blocks may be reused, except those in `quarantined`, into which bytes may still land.
    """

    key: Key
    failure: Failure
    quarantined: tuple[int, ...] = ()


class BlocksQuiet(ConnectorMessage, frozen=True):
    """Decode: these blocks were quarantined, and nothing can land in them any more."""

    block_ids: tuple[int, ...]


ConnectorReport = Released | Offered | Landed | LandingEnded | BlocksQuiet


class ConnectorStep(msgspec.Struct, frozen=True):
    """What one step of the connector wants done. Call again by `wake_at_s`, if it is set."""

    commands: list[ConnectorCommand]
    reports: list[ConnectorReport]
    wake_at_s: float | None


class Connector(Protocol):
    """One per node, for both roles. It is pure: it has no clock and no I/O, and keys break ties.

    Exactly one Released follows each Offer, and exactly one Landed or LandingEnded each Expect.
    Every state that is not final has a deadline. Messages of keys that have ended are answered from
    tombstones; messages of keys that are not yet expected are parked for 5 s, a bounded number.
    """

    def step(self, now_s: float, events: Sequence[ConnectorEvent]) -> ConnectorStep: ...
