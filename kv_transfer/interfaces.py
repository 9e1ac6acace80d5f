"""The interfaces of this room: `Transport` moves bytes, `TransferPort` is one rank's agent as its
node sees it, and `Connector` knows requests: events in, commands and reports out.

A read is *stale* if its lease ended before it did; the connector decides that, transports only say
when a read was posted and when it ended. All times are seconds on this host's monotonic clock.
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from baton.protocol.errors import Failure
from baton.protocol.ids import Epoch, Key, NodeId
from baton.protocol.messages import FirstToken, NodeInfo, RankAddress, ToDecode, ToPrefill

# --- a rank's agent, as its node sees it (travels to worker processes) --------------------------


class AgentMessage(msgspec.Struct, frozen=True, tag=True):
    """Root of commands to and events from a transfer agent."""


class AddPeer(AgentMessage, frozen=True):
    """Make the pool of that rank readable, in the background. Answered by PeerUp or PeerDown."""

    peer: Epoch
    transport: str
    address: RankAddress
    num_blocks: int
    block_bytes: int


class RemovePeer(AgentMessage, frozen=True):
    """Forget that pool; its reads end as failed first."""

    peer: Epoch


class Read(AgentMessage, frozen=True):
    """Copy blocks `remote` of `peer` into `local`; one ReadEnded follows, whatever happens.

    `generations`: what prefill announced; a transport that can read the peer's generation table
    (shm) compares it again after the copy. Slots beyond `valid_tokens` of the last block hold
    whatever the peer had there; attention masks them.
    """

    ticket: int
    peer: Epoch
    remote: tuple[int, ...]
    local: tuple[int, ...]
    generations: tuple[int, ...]


class CancelRead(AgentMessage, frozen=True):
    """Stop that read as soon as it is safe. ReadEnded still follows."""

    ticket: int


AgentCommand = AddPeer | RemovePeer | Read | CancelRead


class PeerUp(AgentMessage, frozen=True):
    peer: Epoch
    transport: str


class PeerDown(AgentMessage, frozen=True):
    peer: Epoch
    failure: Failure


class ReadEnded(AgentMessage, frozen=True):
    """`quiet` False: bytes of this read may still land in `local` at any time (quarantine)."""

    ticket: int
    posted_s: float
    ended_s: float
    num_bytes: int
    failure: Failure | None = None
    quiet: bool = True


AgentEvent = PeerUp | PeerDown | ReadEnded


class TransferPort(Protocol):
    """One rank's transfer agent: commands in, events out, never blocking."""

    def send(self, command: AgentCommand) -> None: ...

    def poll(self) -> list[AgentEvent]: ...

    def fileno(self) -> int:
        """Readable when `poll` may return something."""
        ...


# --- what moves bytes ---------------------------------------------------------------------------


class PoolMemory(msgspec.Struct, frozen=True):
    """A registered pool: `num_blocks` blocks of `block_bytes` at `address` on `device`."""

    address: int
    num_blocks: int
    block_bytes: int
    device: str = "cpu"


class Transport(Protocol):
    """Reads blocks of peers into the local pool. Called from one thread, the agent's.

    Only `read` may block, while it copies, for one slice at most. `test` returns True when the read
    has ended and raises `TransferError` when it failed; either forgets the handle, as does `cancel`
    returning True. After `cancel` returns True no byte of that read can land any more; False means
    that nobody knows: the handle stays, and `test` may still see its end.
    """

    name: str

    def address(self) -> bytes:
        """Opaque metadata with which a peer's `add_peer` can read the local pool."""
        ...

    def add_peer(self, peer: Epoch, address: bytes, num_blocks: int, block_bytes: int) -> None:
        """Begin to make that pool readable. Raises `TransferError`."""
        ...

    def connected(self, peer: Epoch) -> bool:
        """True once `read` will work; `TransferError` when it never will."""
        ...

    def remove_peer(self, peer: Epoch) -> None:
        """Forget that pool; an unknown one is no error. Its reads must have ended or been given up:
        what could not be cancelled may land until `close`."""
        ...

    def read(
        self, peer: Epoch, remote: Sequence[int], local: Sequence[int], generations: Sequence[int]
    ) -> int:
        """Post a read of one slice; returns its handle. Raises `TransferError`."""
        ...

    def test(self, handle: int) -> bool: ...

    def cancel(self, handle: int) -> bool: ...

    def fileno(self) -> int:
        """Readable when `service` has something to do; -1: never."""
        ...

    def service(self) -> list[Epoch]:
        """Answer peers that connect; returns the peers that were found to be gone."""
        ...

    def close(self) -> None: ...


# --- the connector: events in -------------------------------------------------------------------


class ConnectorMessage(msgspec.Struct, frozen=True, tag=True):
    """Root of what goes into and comes out of a `Connector`; recordable, so replayable."""


class PeersChanged(ConnectorMessage, frozen=True):
    """From the router's `Peers`: every ready node of the other role."""

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
    """Source: all blocks of this prompt are reserved; tell decode."""

    key: Key
    decode_node: NodeId
    num_tokens: int
    num_blocks: int


class Publish(ConnectorMessage, frozen=True):
    """Source: these blocks are final (their step is settled)."""

    key: Key
    first_block: int
    block_ids: tuple[int, ...]
    generations: tuple[int, ...]
    valid_tokens: int


class Complete(ConnectorMessage, frozen=True):
    """Source: everything was published and the first tokens are known."""

    key: Key
    tokens: tuple[FirstToken, ...]


class Withdraw(ConnectorMessage, frozen=True):
    """Source: this handoff is cancelled or failed. `Released` follows."""

    key: Key
    failure: Failure


class Expect(ConnectorMessage, frozen=True):
    """Destination: a `Decode` that names a prefill node came. Offered or LandingEnded follows."""

    key: Key
    prefill_node: NodeId


class Land(ConnectorMessage, frozen=True):
    """Destination: the answer to Offered: read blocks [first_block, ...) into `block_ids`."""

    key: Key
    first_block: int
    block_ids: tuple[int, ...]


class Abandon(ConnectorMessage, frozen=True):
    """Destination: the request is cancelled or refused. `LandingEnded` follows when it is quiet."""

    key: Key
    failure: Failure


ConnectorEvent = (
    PeersChanged | PeerLost | FromPeer | FromRank
    | Offer | Publish | Complete | Withdraw
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
    """Open a control channel to this node (prefill dials decode)."""

    node: NodeInfo


class DropPeer(ConnectorMessage, frozen=True):
    node: NodeId
    epoch: Epoch


ConnectorCommand = ToPeer | ToRank | DialPeer | DropPeer


class Released(ConnectorMessage, frozen=True):
    """Source: nobody will read these blocks any more. `failure` None: decode has them all.

    Exactly one per Offer.
    """

    key: Key
    failure: Failure | None = None


class Offered(ConnectorMessage, frozen=True):
    """Destination: prefill holds the prompt; reserve the blocks and answer with Land or Abandon."""

    key: Key
    num_tokens: int
    num_blocks: int


class Landed(ConnectorMessage, frozen=True):
    """Destination: every block is here and End has come. The last report of its key."""

    key: Key
    tokens: tuple[FirstToken, ...]
    num_bytes: int
    transfer_s: float  # from the first post to the last end
    exposed_s: float  # from End's arrival (or the last post before it) to the last end


class LandingEnded(ConnectorMessage, frozen=True):
    """Destination: it failed or was abandoned, and is quiet. The last report of its key.

    All landing blocks may be reused but `quarantined`, into which bytes may still land.
    """

    key: Key
    failure: Failure
    quarantined: tuple[int, ...] = ()


ConnectorReport = Released | Offered | Landed | LandingEnded


class ConnectorStep(msgspec.Struct, frozen=True):
    """What one step of the connector wants done. `wake_at_s`: call again by then (None: never)."""

    commands: list[ConnectorCommand]
    reports: list[ConnectorReport]
    wake_at_s: float | None


class Connector(Protocol):
    """Per node, pure: no clock, no I/O, ties broken by key. Both roles in one object.

    Exactly one `Released` per Offer and exactly one `Landed` or `LandingEnded` per Expect; every
    state that is not final has a deadline. Replies to messages of keys that have ended are part of
    the contract (tombstones answer); messages of keys not yet expected are parked 5 s, bounded.
    """

    def step(self, now_s: float, events: Sequence[ConnectorEvent]) -> ConnectorStep: ...
