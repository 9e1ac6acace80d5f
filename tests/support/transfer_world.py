"""Connectors in one test: a network, ranks with checkable bytes, both schedulers, a virtual clock.

Messages pass through the real codecs. Channels are FIFO, and break without telling both ends at
once; reads copy block by block, whenever the test says so, and may fail, freeze, or write after
their end. The contract is checked while it runs: every report comes once, no node writes into a
block of another, and what has landed is what was computed.
"""

from collections import deque
from dataclasses import dataclass, field

from baton.kv_transfer.connector import NodeConnector
from baton.kv_transfer.interfaces import (
    Abandon,
    AddPeer,
    BeginReceive,
    BlocksDrained,
    BlockSlice,
    CancelRead,
    ConnectorCommand,
    ConnectorEvent,
    ConnectorReport,
    DialPeer,
    DropPeer,
    Expect,
    FromPeer,
    FromRank,
    KVReceived,
    Offer,
    OfferBroken,
    PeerDown,
    PeerLost,
    PeerName,
    PeerRank,
    PeersChanged,
    PeerUp,
    Read,
    ReadDrained,
    ReadEnded,
    ReceiveEnded,
    Released,
    RemovePeer,
    ToPeer,
    ToRank,
)
from baton.protocol.codec import to_decode_codec, to_prefill_codec
from baton.protocol.config import TransferConfig
from baton.protocol.errors import Failure
from baton.protocol.ids import Key, NodeId
from baton.protocol.messages import (
    BlockRange,
    End,
    FirstToken,
    NodeInfo,
    Offered,
    PeerHello,
    Withdrawn,
)
from tests.support.connectors import BLOCK_SIZE, FAILURE, heads_of

TO_DECODE, TO_PREFILL = to_decode_codec(), to_prefill_codec()
GARBAGE = ("garbage",)

Bytes = tuple[object, ...]  # what a block has of one KV head: (key, index in the prompt, head)


@dataclass(eq=False)
class Session:
    """A control channel: `up` flows to decode, `down` to prefill."""

    prefill: "Process"
    decode: "Process"
    up: deque[bytes] = field(default_factory=deque)
    down: deque[bytes] = field(default_factory=deque)
    is_broken: bool = False


@dataclass(eq=False)
class Reading:
    command: Read
    rank: int
    part: BlockSlice
    owner: "Prompt"
    posted_s: float
    copied: int = 0
    is_cancelled: bool = False
    is_frozen: bool = False  # never ends, but may write


@dataclass(eq=False)
class Prompt:
    """One handoff as one side's scheduler holds it."""

    key: Key
    num_blocks: int
    peer: NodeId
    blocks: list[int] = field(default_factory=list)
    num_announced: int = 0
    is_complete: bool = False
    is_offered: bool = False
    first_block: int = 0
    is_receiving: bool = False
    is_over: bool = False  # withdrawn or abandoned: the report is still to come


class Process:
    """One life of a node: its connector, scheduler, pool, agents and ends of channels."""

    def __init__(self, info: NodeInfo, config: TransferConfig, offset_s: float) -> None:
        self.info = info
        self.name: PeerName = (info.node_id, info.epoch)
        self.connector = NodeConnector(info, config)
        self.offset_s = offset_s
        self.inbox: list[ConnectorEvent] = []
        self.wake_s: float | None = None
        self.sessions: dict[PeerName, Session] = {}
        self.prompts: dict[Key, Prompt] = {}
        self.reports: list[ConnectorReport] = []
        self.free = list(range(info.num_blocks))
        self.owner: dict[int, Prompt | str] = {}
        self.content: dict[tuple[int, int], list[Bytes]] = {}  # (rank, block), by head
        self.links: dict[tuple[int, PeerRank], str] = {}  # (rank, peer) -> adding, up
        self.slices: dict[tuple[int, PeerRank], BlockSlice] = {}
        self.readings: dict[int, Reading] = {}

    @property
    def ranks(self) -> range:
        return range(len(self.info.ranks))

    def heads(self, rank: int) -> list[int]:
        """The KV heads of that rank; an older node does not say, and its ranks count as heads."""
        return heads_of(self.info.layout.kv_heads or len(self.ranks), len(self.ranks), rank)

    def computed(self, prompt: Prompt, index: int, rank: int) -> list[Bytes]:
        return [(prompt.key, index, head) for head in self.heads(rank)]

    def held(self, rank: int, block: int) -> list[Bytes]:
        return self.content.setdefault((rank, block), [GARBAGE] * len(self.heads(rank)))

    def heads_in(self, rank: int, offset: int, num_bytes: int) -> slice:
        head_bytes = self.info.layout.block_bytes // len(self.heads(rank))
        assert offset % head_bytes == num_bytes % head_bytes == 0
        return slice(offset // head_bytes, (offset + num_bytes) // head_bytes)

    def take(self, prompt: Prompt, count: int) -> list[int]:
        taken, self.free = self.free[:count], self.free[count:]
        for block in taken:
            self.owner[block] = prompt
        return taken

    def give_back(self, blocks: list[int], quarantined: tuple[int, ...] = ()) -> None:
        """Free blocks are overwritten at once, and are the first to be taken again."""
        assert set(quarantined) <= set(blocks)
        for block in blocks:
            self.owner[block] = "quarantined" if block in quarantined else "free"
            for rank in self.ranks:
                self.content[rank, block] = [GARBAGE] * len(self.heads(rank))
        self.free = [b for b in blocks if b not in quarantined] + self.free


class World:
    def __init__(self, config: TransferConfig | None = None) -> None:
        self.config = config or TransferConfig()
        self.now_s = 1000.0
        self.processes: dict[NodeId, Process] = {}  # the living
        self.everybody: dict[PeerName, Process] = {}  # the dead, too
        self.sessions: list[Session] = []
        self.strays: list[tuple[Process, Reading]] = []  # ended, but not quiesced

    def start(self, info: NodeInfo, offset_s: float = 0.0) -> Process:
        """A new process; what was there under that node id dies."""
        old = self.processes.pop(info.node_id, None)
        for session in list(self.sessions):
            if old in (session.prefill, session.decode):
                self.cut(session)
        process = Process(info, self.config, offset_s)
        self.processes[info.node_id] = self.everybody[process.name] = process
        return process

    def list_peers(self, process: Process, nodes: list[NodeInfo] | None = None) -> None:
        others = [p.info for p in self.processes.values() if p.info.role != process.info.role]
        process.inbox.append(PeersChanged(tuple(others if nodes is None else nodes)))

    def local_s(self, process: Process) -> float:
        return self.now_s + process.offset_s

    def run(self, process: Process) -> None:
        """One step with everything that has come."""
        events, process.inbox = process.inbox, []
        now_s = self.local_s(process)
        step = process.connector.step(now_s, events)
        process.wake_s = step.wake_at_s
        assert step.wake_at_s is None or step.wake_at_s > now_s, "it would spin"
        for command in step.commands:
            self._command(process, command)
        for report in step.reports:
            process.reports.append(report)
            self._report(process, report)
        is_waiting = any(p.is_offered for p in process.prompts.values())
        assert step.wake_at_s is not None or not is_waiting, "a state without a deadline"

    # --- the schedulers ------------------------------------------------------------------------

    def offer(self, process: Process, at: Key, num_blocks: int, decode: NodeId) -> Prompt:
        prompt = Prompt(at, num_blocks, decode, is_offered=True)
        prompt.blocks = process.take(prompt, num_blocks)
        process.prompts[at] = prompt
        process.inbox.append(Offer(at, decode, num_blocks * BLOCK_SIZE, num_blocks))
        return prompt

    def announce(self, process: Process, prompt: Prompt, count: int) -> None:
        """Compute the next `count` blocks and announce them."""
        first = prompt.num_announced
        blocks = tuple(prompt.blocks[first : first + count])
        for index, block in enumerate(blocks, first):
            for rank in process.ranks:
                process.content[rank, block] = process.computed(prompt, index, rank)
        prompt.num_announced += len(blocks)
        process.inbox.append(BlockRange(prompt.key, first, blocks, (1,) * len(blocks)))

    def complete(self, process: Process, prompt: Prompt) -> None:
        prompt.is_complete = True
        process.inbox.append(End(prompt.key, (FirstToken(prompt.num_blocks),)))

    def withdraw(self, process: Process, prompt: Prompt) -> None:
        prompt.is_over = True
        process.inbox.append(Withdrawn(prompt.key, FAILURE))

    def expect(self, process: Process, at: Key, prefill: NodeId) -> Prompt:
        prompt = process.prompts[at] = Prompt(at, 0, prefill, is_offered=True)
        process.inbox.append(Expect(at, prefill))
        return prompt

    def land(self, process: Process, prompt: Prompt, first_block: int) -> None:
        prompt.first_block, prompt.is_receiving = first_block, True
        prompt.blocks = process.take(prompt, prompt.num_blocks - first_block)
        process.inbox.append(BeginReceive(prompt.key, first_block, tuple(prompt.blocks)))

    def abandon(self, process: Process, prompt: Prompt) -> None:
        prompt.is_over = True
        process.inbox.append(Abandon(prompt.key, FAILURE))

    def _report(self, process: Process, report: ConnectorReport) -> None:
        if isinstance(report, Offered):
            prompt = process.prompts[report.key]
            assert prompt.num_blocks == 0, "offered twice"
            prompt.num_blocks = report.num_blocks
            return
        if isinstance(report, BlocksDrained):
            assert all(process.owner[block] == "quarantined" for block in report.block_ids)
            process.give_back(list(report.block_ids))
            return
        if isinstance(report, OfferBroken):
            process.prompts[report.key].is_over = True
            return
        prompt = process.prompts.pop(report.key)  # a second last report is a KeyError here
        match report:
            case Released():
                assert process.info.role == "prefill"
                process.give_back(prompt.blocks)
            case KVReceived(tokens=tokens, num_bytes=num_bytes):
                for rank in process.ranks:
                    for index, block in enumerate(prompt.blocks, prompt.first_block):
                        assert process.content[rank, block] == process.computed(prompt, index, rank)
                assert tokens == (FirstToken(prompt.num_blocks),)
                num_reads = len(prompt.blocks) * len(process.ranks)
                assert num_bytes == num_reads * process.info.layout.block_bytes
                assert not self._reads_of(process, prompt), "landed, and still being read"
                process.give_back(prompt.blocks)
            case ReceiveEnded(quarantined=quarantined):
                process.give_back(prompt.blocks, quarantined)

    # --- channels ------------------------------------------------------------------------------

    def _command(self, process: Process, command: ConnectorCommand) -> None:
        match command:
            case DialPeer(node=info):
                assert (info.node_id, info.epoch) not in process.sessions, "dialled twice"
                decode = self.everybody[info.node_id, info.epoch]
                is_dead = decode is not self.processes[info.node_id]
                session = Session(process, decode, is_broken=is_dead)
                process.sessions[info.node_id, info.epoch] = session
                self.sessions.append(session)
            case DropPeer(node=name, epoch=epoch):
                session_or_none = process.sessions.pop((name, epoch), None)
                if session_or_none is not None and process is session_or_none.prefill:
                    self.cut(session_or_none)
            case ToPeer(node=name, epoch=epoch, message=message):
                session_or_none = process.sessions.get((name, epoch))
                if session_or_none is not None and not session_or_none.is_broken:
                    if process is session_or_none.prefill:
                        session_or_none.up.append(TO_DECODE.encode(message))  # type: ignore[arg-type]
                    else:
                        session_or_none.down.append(TO_PREFILL.encode(message))  # type: ignore[arg-type]
            case ToRank(rank, order):
                self._order(process, rank, order)

    def deliver_up(self, session: Session) -> None:
        message = TO_DECODE.decode(session.up.popleft())
        prefill, decode = session.prefill, session.decode
        if isinstance(message, PeerHello):
            decode.sessions[prefill.name] = session
        if decode.sessions.get(prefill.name) is session:
            decode.inbox.append(FromPeer(*prefill.name, message))

    def deliver_down(self, session: Session) -> None:
        message = TO_PREFILL.decode(session.down.popleft())
        if session.prefill.sessions.get(session.decode.name) is session:
            session.prefill.inbox.append(FromPeer(*session.decode.name, message))

    def cut(self, session: Session) -> None:
        """What is under way may still arrive, as a prefix; nothing new does."""
        session.is_broken = True

    def tell_loss(self, session: Session, process: Process) -> None:
        """That end notices that the channel is broken; what had not arrived never will."""
        peer = session.decode if process is session.prefill else session.prefill
        (session.down if process is session.prefill else session.up).clear()
        if process.sessions.get(peer.name) is session:
            del process.sessions[peer.name]
            process.inbox.append(PeerLost(*peer.name))
        knowing = [
            session.prefill.sessions.get(session.decode.name) is session,
            session.decode.sessions.get(session.prefill.name) is session,
        ]
        if not any(knowing) and not session.up and not session.down:
            self.sessions.remove(session)

    # --- ranks ---------------------------------------------------------------------------------

    def _order(self, process: Process, rank: int, order: object) -> None:
        match order:
            case AddPeer(peer=peer, part=part):
                assert (rank, peer) not in process.links, "added twice"
                process.links[rank, peer] = "adding"
                process.slices[rank, peer] = part
            case RemovePeer(peer=peer):
                process.links.pop((rank, peer), None)
                for reading in list(process.readings.values()):
                    if (reading.rank, reading.command.peer) == (rank, peer):
                        reading.is_cancelled = True
            case Read(ticket=ticket, local=local):
                owners = {id(process.owner[block]): process.owner[block] for block in local}
                assert len(owners) == 1, "a read into blocks of several owners"
                owner = next(iter(owners.values()))
                assert isinstance(owner, Prompt), "a read into a free block"
                part = process.slices[rank, order.peer]
                reading = Reading(order, rank, part, owner, self.local_s(process))
                process.readings[ticket] = reading
                if process.links.get((rank, order.peer)) != "up":
                    self.end_read(process, reading, FAILURE)
            case CancelRead(ticket=ticket):
                if ticket in process.readings:
                    process.readings[ticket].is_cancelled = True

    def connect(self, process: Process, rank: int, peer: PeerRank) -> None:
        if any(p.info.epoch == peer.epoch for p in self.processes.values()):
            process.links[rank, peer] = "up"
            process.inbox.append(FromRank(rank, PeerUp(peer, "shm")))
        else:
            self.disconnect(process, rank, peer)

    def disconnect(self, process: Process, rank: int, peer: PeerRank) -> None:
        del process.links[rank, peer]
        process.inbox.append(FromRank(rank, PeerDown(peer, FAILURE)))
        for reading in list(process.readings.values()):
            if (reading.rank, reading.command.peer) == (rank, peer):
                self.end_read(process, reading, FAILURE)

    def copy_block(self, process: Process, reading: Reading) -> None:
        """What the source has there now, right or wrong, goes to wherever the read points."""
        source, target = reading.command.remote, reading.command.local
        at, reading.copied = reading.copied % len(source), reading.copied + 1
        owner = process.owner[target[at]]
        assert owner is reading.owner or owner == "quarantined", "a write into another's block"
        epoch, rank = reading.command.peer
        peer = next(p for p in self.everybody.values() if p.info.epoch == epoch)
        theirs = peer.heads_in(rank, reading.part.remote_offset, reading.part.num_bytes)
        ours = process.heads_in(reading.rank, reading.part.local_offset, reading.part.num_bytes)
        found = peer.held(rank, source[at])[theirs]  # memory outlives a process
        process.held(reading.rank, target[at])[ours] = found

    def end_read(
        self, process: Process, reading: Reading, failure: Failure | None, *, quiesced: bool = True
    ) -> None:
        while failure is None and reading.copied < len(reading.command.remote):
            self.copy_block(process, reading)
        del process.readings[reading.command.ticket]
        num_bytes = 0 if failure else len(reading.command.local) * reading.part.num_bytes
        now_s = self.local_s(process)
        ended = ReadEnded(
            reading.command.ticket, reading.posted_s, now_s, num_bytes, failure, quiesced
        )
        process.inbox.append(FromRank(reading.rank, ended))
        if not quiesced:
            self.strays.append((process, reading))

    def quiesce(self, process: Process, reading: Reading) -> None:
        """Nothing of this stray can land any more."""
        self.strays.remove((process, reading))
        process.inbox.append(FromRank(reading.rank, ReadDrained(reading.command.ticket)))

    def _reads_of(self, process: Process, prompt: Prompt) -> list[Reading]:
        return [reading for reading in process.readings.values() if reading.owner is prompt]
