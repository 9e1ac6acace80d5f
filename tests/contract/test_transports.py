"""Every transport keeps its contract, with a process at either end.

nixl with CMA, over TCP alone, and polled, as it runs on GPUs; cuda_ipc on memfds.
"""

import contextlib
import itertools
import os
import random
import select
import socket
from contextlib import ExitStack, closing

import msgspec
import pytest

from baton.kv_transfer.agent import AgentLimits
from baton.kv_transfer.interfaces import (
    BlockSlice,
    CancelRead,
    PeerDown,
    PeerRank,
    PeerUp,
    Read,
    ReadDrained,
    ReadEnded,
    RemovePeer,
)
from baton.kv_transfer.transports.addresses import ShmAddress
from baton.kv_transfer.transports.nixl_binding import is_installed
from baton.kv_transfer.transports.shm import MAX_UNPROVEN, unix_socket
from baton.protocol.config import TransportChoice
from baton.protocol.ids import Epoch
from baton.protocol.messages import RankAddress
from tests.support.transfer_peer import PeerOptions, TransferPeer, wrong_addresses
from tests.support.waiting import until

LIMITS = AgentLimits(chunk_bytes=256 << 10)
NUM_BLOCKS = 64

needs_nixl = pytest.mark.skipif(
    not is_installed(), reason="the NIXL wheel is not installed"
)
NIXL = ("nixl", "nixl-tcp", "nixl-polled-tcp")  # polled: as it runs on GPUs
MODES = ["shm", "cuda_ipc", *(pytest.param(mode, marks=needs_nixl) for mode in NIXL)]
one_of_each = pytest.mark.parametrize("peers", MODES[:3], indirect=True)
over_tcp = pytest.mark.parametrize("peers", MODES[3:4], indirect=True)
over_shm = pytest.mark.parametrize("peers", MODES[:1], indirect=True)
on_this_host = pytest.mark.parametrize("peers", MODES[:2], indirect=True)
dying = pytest.mark.parametrize("peers", [*MODES[:2], MODES[3]], indirect=True)
_epochs = itertools.count()
_tickets = itertools.count()


class Peers:
    """Children of one mode; `close` ends those that are left."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self._stack = ExitStack()

    def start(
        self, limits: AgentLimits = LIMITS, block_bytes: int = 64 << 10
    ) -> TransferPeer:
        found = [name for name in ("nixl", "cuda_ipc") if name in self.mode]
        transport: TransportChoice = found[0] if found else "shm"
        epoch = Epoch(f"{self.mode}-{next(_epochs)}")
        return self._start(
            PeerOptions(
                epoch,
                transport,
                NUM_BLOCKS,
                block_bytes,
                limits,
                is_polled="polled" in self.mode,
            )
        )

    def _start(self, options: PeerOptions) -> TransferPeer:
        peer = TransferPeer(
            options, {"UCX_TLS": "tcp"} if self.mode.endswith("tcp") else {}
        )
        self._stack.callback(peer.close)
        return peer

    def ranks(self, block_bytes: int) -> list[TransferPeer]:
        """Two ranks of one process lifetime."""
        first = self.start(block_bytes=block_bytes)
        return [first, self._start(msgspec.structs.replace(first.options, rank=1))]

    def pair(
        self, limits: AgentLimits = LIMITS, block_bytes: int = 64 << 10
    ) -> list[TransferPeer]:
        """A reader, and an owner that it is connected to."""
        reader = self.start(limits, block_bytes)
        owner = self.start(limits, block_bytes)
        connect(reader, owner)
        return [reader, owner]

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def peers(request):
    """Children of the test's own, which it may kill."""
    found = Peers(request.param)
    yield found
    found.close()


@pytest.fixture(scope="module", params=MODES)
def pair(request):
    """A reader and an owner that tests share, so they must leave both connected and alive."""
    found = Peers(request.param)
    yield found.pair()
    found.close()


def connect(
    reader: TransferPeer, owner: TransferPeer, part: BlockSlice | None = None
) -> None:
    reader.send(reader.add(owner, part))
    (event,) = reader.wait(1)
    assert event == PeerUp(owner.name, *owner.address.metadata)


def read(
    owner: TransferPeer, remote: range | list[int], local: range | list[int]
) -> Read:
    return Read(
        next(_tickets), owner.name, tuple(remote), tuple(local), (0,) * len(remote)
    )


def run(reader: TransferPeer, *reads: Read) -> list[ReadEnded]:
    """The ends of these reads, in the order of `reads`."""
    reader.send(*reads)
    ends = {}
    for event in reader.wait(len(reads)):
        assert isinstance(event, ReadEnded)
        ends[event.ticket] = event
    return [ends[read.ticket] for read in reads]


def test_reads_bring_exactly_the_blocks_they_name(pair):
    reader, owner = pair
    owner.ask(fill=1)
    reader.ask(fill=2)
    everything = tuple(range(NUM_BLOCKS))
    expected = list(reader.digests(everything))
    remote, local = (random.Random(seed).sample(everything, 40) for seed in (1, 2))
    for to, digest in zip(local, owner.digests(tuple(remote)), strict=True):
        expected[to] = digest
    singles = zip(remote[30:], local[30:], strict=True)
    reads = [read(owner, remote[:30], local[:30])]
    reads += [read(owner, [frm], [to]) for frm, to in singles]
    ends = run(reader, *reads)
    assert all((end.failure, end.quiesced) == (None, True) for end in ends)
    assert ends[0].num_bytes == 30 * (64 << 10)
    assert ends[0].posted_s < ends[0].ended_s
    assert list(reader.digests(everything)) == expected


def test_a_peer_that_is_removed_and_added_again_leaves_nothing_open(pair):
    reader, owner = pair
    shared = sorted(os.listdir("/dev/shm"))
    files = [peer.ask().open_files for peer in pair]
    for block in range(5):
        reader.send(RemovePeer(owner.name))
        connect(reader, owner)
        (end,) = run(reader, read(owner, [block], [block]))
        assert end.failure is None
    after = [peer.ask().open_files for peer in pair]
    assert all(b - a <= 2 for a, b in zip(files, after, strict=True)), (files, after)
    assert sorted(os.listdir("/dev/shm")) == shared


def test_nothing_lands_after_a_cancelled_read_has_ended(pair):
    reader, owner = pair
    owner.ask(fill=6)
    whole = read(owner, range(32), range(32))
    reader.send(whole, CancelRead(whole.ticket))
    (end,) = reader.wait(1)
    assert isinstance(end, ReadEnded)
    assert end.quiesced
    reader.ask(fill=7)
    before = reader.digests(tuple(range(32)))
    (other,) = run(reader, read(owner, range(32), range(32, 64)))
    assert other.failure is None
    assert reader.digests(tuple(range(32))) == before


def test_block_ids_outside_of_either_pool_are_refused(pair):
    reader, owner = pair
    wrong = (([NUM_BLOCKS], [0]), ([0], [NUM_BLOCKS]), ([-1], [0]), ([0], [-1]))
    for end in run(reader, *(read(owner, *blocks) for blocks in wrong)):
        assert end.failure is not None
        assert (end.num_bytes, end.quiesced) == (0, True)


def test_metadata_that_is_damaged_or_not_the_peers_is_refused(pair):
    reader, owner = pair
    good = reader.add(owner)
    (name, data), dice = next(iter(owner.address.metadata.items())), random.Random(0)
    other = PeerRank(Epoch("someone-else"))
    damaged = [b"", data[:-1], data[: len(data) // 2], data + b"x", dice.randbytes(300)]
    damaged += wrong_addresses(name, data, other.epoch)
    for _ in range(8):
        wrong = bytearray(data)
        wrong[dice.randrange(8, 16)] ^= 1 << dice.randrange(8)
        damaged.append(bytes(wrong))
    addresses = [RankAddress({name: data}) for data in damaged]
    bad = [
        msgspec.structs.replace(good, peer=other, address=address)
        for address in addresses
    ]
    bad.append(msgspec.structs.replace(good, peer=other))
    bad.append(msgspec.structs.replace(good, peer=other, block_bytes=4096))
    bad.append(msgspec.structs.replace(good, peer=other, transport="pigeon"))
    reasons = []
    for command in bad:
        reader.send(command)
        (event,) = reader.wait(1)
        assert isinstance(event, PeerDown), command
        reasons.append(event.failure.message)
    assert ("the pool is on another host" in reasons) == (name != "nixl")
    (end,) = run(reader, read(owner, [4], [4]))
    assert end.failure is None


@one_of_each
def test_slices_of_two_ranks_land_side_by_side_and_are_read_apart(peers):
    half = 32 << 10
    remote = [5, 6, 7, 20, 9, 8, 40]
    local = [10, 11, 12, 13, 30, 29, 0]
    sources = peers.ranks(half)
    parts = peers.ranks(half)
    whole = peers.start(block_bytes=2 * half)
    for number, source in enumerate(sources):
        source.ask(fill=20 + number)
        connect(whole, source, BlockSlice(0, number * half, half))
    for end in run(whole, *(read(source, remote, local) for source in sources)):
        assert (end.failure, end.num_bytes) == (None, len(remote) * half)
    for number, (part, source) in enumerate(zip(parts, sources, strict=True)):
        connect(part, whole, BlockSlice(number * half, 0, half))
        (end,) = run(part, read(whole, local, remote))
        assert (end.failure, end.num_bytes) == (None, len(remote) * half)
        assert part.digests(tuple(remote)) == source.digests(tuple(remote))


def test_a_slice_that_is_not_one_of_equal_parts_of_a_block_is_refused(pair):
    reader, owner = pair
    good = reader.add(owner)
    size = good.block_bytes
    wrong = [(size, 0, size), (0, -size, size), (0, 0, size // 3), (0, 0, 0)]
    for part in [
        BlockSlice(size // 4, 0, size // 2),
        *(BlockSlice(*one) for one in wrong),
    ]:
        other = PeerRank(owner.name.epoch, 1)
        reader.send(msgspec.structs.replace(good, peer=other, part=part))
        (event,) = reader.wait(1)
        assert isinstance(event, PeerDown), part


@dying
def test_reads_of_a_killed_peer_all_end_and_its_successor_is_read(peers):
    reader, owner = peers.pair(block_bytes=1 << 20)
    # Stopped first, so that reads are on their way when it dies.
    owner.stop()
    reads = [read(owner, range(NUM_BLOCKS), range(NUM_BLOCKS)) for _ in range(3)]
    reader.send(*reads)
    owner.kill()
    ends = [event for event in reader.wait(3) if isinstance(event, ReadEnded)]
    after = read(owner, [0], [0])
    reader.send(after)
    while len(ends) < 4:
        ends += [event for event in reader.wait(1) if isinstance(event, ReadEnded)]
    assert sorted(end.ticket for end in ends) == [r.ticket for r in [*reads, after]]
    assert all(end.quiesced for end in ends)
    assert ends[-1].failure is not None
    successor = peers.start(block_bytes=1 << 20)
    successor.ask(fill=8)
    reader.send(reader.add(successor))
    while not any(isinstance(event, PeerUp) for event in reader.wait(1)):
        pass
    (end,) = run(reader, read(successor, [3, 4], [7, 2]))
    assert end.failure is None
    assert reader.digests((7, 2)) == successor.digests((3, 4))


@over_tcp
def test_a_read_has_a_deadline_and_is_quiesced_when_its_peer_goes_on_or_is_gone(peers):
    """Nothing is copied while the owner is stopped, and what was asked for may still come."""
    limits = AgentLimits(chunk_bytes=256 << 10, read_s=0.3, quiesce_s=0.3)
    reader, owner = peers.pair(limits, block_bytes=1 << 20)
    owner.ask(fill=10)
    for is_last in (False, True):
        owner.stop()
        (end,) = run(reader, read(owner, range(32), range(32)))
        assert end.failure is not None
        assert not end.quiesced
        if is_last:
            owner.kill()
        else:
            owner.resume()
        events = reader.wait(1)
        # That the peer is down is reported too.
        while ReadDrained(end.ticket) not in events:
            events += reader.wait(1)
        # Its deadline holds for each read, and this machine may be slow: some read is in time.
        while (
            not is_last and run(reader, read(owner, [7], [40]))[0].failure is not None
        ):
            pass
        assert is_last or reader.digests((40,)) == owner.digests((7,))


@on_this_host
def test_a_block_with_a_new_owner_is_a_failed_read(peers):
    reader, owner = peers.pair()
    owner.ask(bump=(5,))
    stale, fresh = run(reader, read(owner, [4, 5, 6], [0, 1, 2]), read(owner, [4], [3]))
    assert stale.failure.code == "stale_block"
    assert stale.quiesced
    assert fresh.failure is None
    now = Read(next(_tickets), owner.name, (5,), (1,), (1,))
    assert run(reader, now)[0].failure is None


# --- the socket over which shm lends pools ------------------------------------------------------


def connect_idle(
    owner: TransferPeer, count: int, stack: ExitStack
) -> list[socket.socket]:
    """Connections to the owner's socket that say nothing, made as fast as it takes them."""
    name = "\0" + ShmAddress.decode(owner.address.metadata["shm"]).socket
    links = []
    for _ in range(count):
        link = stack.enter_context(unix_socket())
        while True:
            with contextlib.suppress(BlockingIOError):  # its queue is full for a moment
                link.connect(name)
                break
        links.append(link)
    return links


@over_shm
def test_idle_connections_keep_no_reader_out(peers):
    """Any process of this user can make them. Once, 1,024 stopped all transfers for good."""
    reader = peers.start()
    owner = peers.start()
    files = owner.ask().open_files
    with ExitStack() as stack:
        connect_idle(owner, 2000, stack)
        connect(reader, owner)
        assert owner.ask().open_files < files + MAX_UNPROVEN + 3
        assert run(reader, read(owner, [1], [1]))[0].failure is None


@over_shm
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_users_process_gets_no_pool_even_with_the_nonce(peers):
    owner = peers.start()
    nonce = ShmAddress.decode(owner.address.metadata["shm"]).nonce
    with ExitStack() as stack:
        stack.callback(os.seteuid, 0)
        for user, found in ((0, 1), (65534, 0)):
            os.seteuid(user)
            (link,) = connect_idle(owner, 1, stack)
            with contextlib.suppress(OSError):
                link.send(nonce)
            os.seteuid(0)
            assert select.select([link], [], [], 30.0)[0]
            descriptors: list[int] = []
            # Closed without a look at the nonce.
            with contextlib.suppress(ConnectionResetError):
                _, descriptors, _, _ = socket.recv_fds(link, 16, 1)
            for descriptor in descriptors:
                os.close(descriptor)
            assert len(descriptors) == found


@needs_nixl
def test_a_peer_that_two_transports_read_is_read_by_the_one_that_wins_the_trials():
    """By either of them a read brings the owner's bytes, and trials touch no block."""
    with ExitStack() as stack:
        reader, owner = (
            stack.enter_context(closing(TransferPeer(options)))
            for options in (
                PeerOptions(Epoch(name), "auto", limits=LIMITS, network_device="lo")
                for name in ("trial-reader", "trial-owner")
            )
        )
        assert {*owner.address.metadata} == {"shm", "nixl"}
        reader.ask(fill=1)
        owner.ask(fill=2)
        blocks = tuple(range(NUM_BLOCKS))
        before = reader.digests(blocks)
        reader.send(reader.add(owner))
        assert reader.wait(1) == [PeerUp(owner.name, "shm")]
        (end,) = run(reader, read(owner, [5], [9]))
        assert end.failure is None
        until(lambda: owner.options.epoch in reader.ask().read_by)
        after = reader.digests(blocks)
        assert [n for n in blocks if before[n] != after[n]] == [9]
        (end,) = run(reader, read(owner, range(20), range(20)))
        assert end.failure is None
        assert reader.digests(blocks[:20]) == owner.digests(blocks[:20])
        open_files = set()
        for _ in range(4):
            reader.send(RemovePeer(owner.name))
            until(lambda: not reader.ask().read_by)
            reader.send(reader.add(owner))
            assert reader.wait(1) == [PeerUp(owner.name, "shm")]
            until(lambda: owner.options.epoch in reader.ask().read_by)
            open_files.add(reader.ask().open_files)
        assert max(open_files) - min(open_files) <= 2, open_files
