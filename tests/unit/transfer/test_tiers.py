"""A rank's tiers under a real agent: blocks go to a store and come back, for both kinds of pool."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import msgspec
import pytest

from baton.kv_transfer.agent import AgentLimits, TransferAgent
from baton.kv_transfer.interfaces import (
    BAD_RECORD,
    AgentEvent,
    BlocksCopied,
    BlocksSaved,
    CancelRead,
    ClearTier,
    Read,
    ReadDrained,
    ReadEnded,
    SaveBlocks,
    SlotsHeld,
    tier_peer,
)
from baton.kv_transfer.pools import DevicePool, HostPool
from baton.kv_transfer.stores import MemoryStore
from baton.kv_transfer.tiers import Tier, make_tiers
from baton.protocol.blocks import HASH_BYTES, block_hashes, pack_hashes
from baton.protocol.config import CacheConfig
from baton.protocol.errors import ConfigError
from tests.support.memfd_memory import device_pool

BLOCK_BYTES = 4096
NUM_BLOCKS = 16
NUM_SLOTS = 8
HASHES = block_hashes(range(NUM_BLOCKS), 1)
MIB = 1 / 1024


class Rank:
    """An agent whose tier has been opened."""

    def __init__(self, pool: HostPool | DevicePool, host: HostPool, tier: Tier) -> None:
        self.host = host
        enter = pool.peers.enter if isinstance(pool, DevicePool) else None
        limits = AgentLimits(chunk_bytes=2 * BLOCK_BYTES, read_s=0.3, quiesce_s=0.3)
        self.agent = TransferAgent([], limits, enter=enter, tiers=[tier])
        self.name = tier.name
        self.events: list[AgentEvent] = []

    def close(self) -> None:
        self.agent.close()

    def waits(self, kind: type, count: int = 1) -> list:
        by_s = time.monotonic() + 10.0
        while time.monotonic() < by_s:
            self.events += self.agent.poll()
            found = [event for event in self.events if type(event) is kind]
            if len(found) >= count:
                return found
            time.sleep(0.001)
        raise AssertionError(f"{kind.__name__} does not come: {self.events}")

    def write(self, block: int, number: int) -> None:
        content = bytes([number]) * BLOCK_BYTES
        self.host.fill(block, lambda into: into.__setitem__(slice(None), content))

    def content(self, block: int) -> int:
        [number] = set(bytes(self.host.copies([block])[0]))
        return number

    def save(
        self, ticket: int, blocks: tuple[int, ...], slots: tuple[int, ...]
    ) -> None:
        hashes = pack_hashes(HASHES[block] for block in blocks)
        self.agent.send(SaveBlocks(ticket, self.name, blocks, slots, hashes))

    def read(
        self, ticket: int, slots: tuple[int, ...], blocks: tuple[int, ...], of: int
    ) -> None:
        """Read the blocks that were saved from `of` on."""
        hashes = pack_hashes(HASHES[of : of + len(slots)])
        peer = tier_peer(self.name)
        generations = (0,) * len(slots)
        self.agent.send(Read(ticket, peer, slots, blocks, generations, hashes=hashes))


@pytest.fixture(params=["host", "gpu"])
def pools(request) -> tuple[HostPool | DevicePool, HostPool]:
    host = HostPool(NUM_BLOCKS, BLOCK_BYTES)
    return (host if request.param == "host" else device_pool(host)), host


@pytest.fixture(params=["memory", "folder"])
def rank(request, pools, tmp_path) -> Iterator[Rank]:
    pool, host = pools
    cache = CacheConfig(folder=str(tmp_path), folder_size=MIB / 16)
    if request.param == "memory":
        cache = CacheConfig(kv_offloading_size=MIB / 16)
    [tier] = make_tiers(cache, pool, 0, 1, "maker")
    with closing(Rank(pool, host, tier)) as rank:
        yield rank


def test_blocks_come_back_as_they_were_when_they_were_copied(rank):
    [held] = rank.waits(SlotsHeld)
    assert (held.tier, held.first_slot, held.hashes) == (
        rank.name,
        0,
        bytes(held.num_slots * HASH_BYTES),
    )
    for block in range(3):
        rank.write(block, block + 1)
    rank.save(1, (0, 1, 2), (5, 6, 7))
    assert rank.waits(BlocksCopied) == [BlocksCopied(1)]
    for block in range(3):
        rank.write(block, 99)
    assert rank.waits(BlocksSaved) == [BlocksSaved(1)]
    rank.read(2, (5, 6, 7), (10, 11, 12), of=0)
    [ended] = rank.waits(ReadEnded)
    assert (ended.failure, ended.quiesced, ended.num_bytes) == (
        None,
        True,
        3 * BLOCK_BYTES,
    )
    assert [rank.content(block) for block in (10, 11, 12)] == [1, 2, 3]


def test_a_slot_with_another_block_is_a_failed_read(rank):
    rank.save(1, (0, 1), (0, 1))
    rank.waits(BlocksSaved)
    rank.read(2, (1, 0), (10, 11), of=0)
    [ended] = rank.waits(ReadEnded)
    assert ended.failure.code == BAD_RECORD
    rank.agent.send(ClearTier(3, rank.name))
    rank.waits(BlocksSaved, 2)
    rank.read(4, (0, 1), (10, 11), of=0)
    assert rank.waits(ReadEnded, 2)[-1].failure.code == BAD_RECORD


class StuckStore(MemoryStore):
    """One whose calls end when a test says so."""

    def __init__(self) -> None:
        super().__init__(NUM_SLOTS * BLOCK_BYTES, BLOCK_BYTES)
        self.goes_on = threading.Event()

    def write(self, slot: int, block_hash: bytes, block: memoryview) -> None:
        self.goes_on.wait()
        super().write(slot, block_hash, block)

    def read(self, slot: int, block_hash: bytes, into: memoryview) -> None:
        self.goes_on.wait()
        super().read(slot, block_hash, into)


class FullStore(MemoryStore):
    def write(self, slot: int, block_hash: bytes, block: memoryview) -> None:
        raise OSError(28, "No space left on device")

    def read(self, slot: int, block_hash: bytes, into: memoryview) -> None:
        raise OSError(5, "Input/output error")


def over(store: MemoryStore) -> Rank:
    host = HostPool(NUM_BLOCKS, BLOCK_BYTES)
    return Rank(host, host, Tier("memory", store, host))


def test_a_store_that_is_stuck_holds_up_no_block_and_no_agent():
    store = StuckStore()
    with closing(over(store)) as rank:
        rank.save(1, (0, 1), (0, 1))
        rank.waits(BlocksCopied)
        rank.read(2, (0, 1, 2, 3, 4), (8, 9, 10, 11, 12), of=0)
        [ended] = rank.waits(ReadEnded)
        assert not ended.quiesced
        assert not [
            event
            for event in rank.events
            if isinstance(event, ReadDrained | BlocksSaved)
        ]
        store.goes_on.set()
        rank.waits(ReadDrained)
        assert rank.waits(BlocksSaved) == [BlocksSaved(1)]


def test_a_cancelled_read_ends_when_nothing_of_it_can_land():
    store = StuckStore()
    with closing(over(store)) as rank:
        rank.read(2, (0,), (8,), of=0)
        time.sleep(0.05)
        rank.agent.send(CancelRead(2))
        time.sleep(0.05)
        assert not [
            event for event in rank.agent.poll() if isinstance(event, ReadEnded)
        ]
        store.goes_on.set()
        [ended] = rank.waits(ReadEnded)
        assert ended.quiesced
        assert ended.failure is not None


def test_a_disk_that_fails_is_a_failure_of_its_own():
    with closing(over(FullStore(NUM_SLOTS * BLOCK_BYTES, BLOCK_BYTES))) as rank:
        rank.save(1, (0,), (0,))
        [saved] = rank.waits(BlocksSaved)
        assert (
            saved.failure.message
            == "cannot write to the memory tier: No space left on device"
        )
        rank.read(2, (0,), (8,), of=0)
        [ended] = rank.waits(ReadEnded)
        assert (
            ended.failure.message == "cannot read the memory tier: Input/output error"
        )


@pytest.mark.parametrize("does", ["read", "write"])
def test_an_agent_closes_while_a_store_is_stuck(does):
    store = StuckStore()
    rank = over(store)
    act: Callable[[], None] = {
        "read": lambda: rank.read(2, (0,), (8,), of=0),
        "write": lambda: rank.save(1, (0,), (0,)),
    }[does]
    act()
    time.sleep(0.05)
    began_s = time.monotonic()
    rank.close()
    assert time.monotonic() - began_s < 4.0
    store.goes_on.set()


def test_ranks_share_the_bytes_of_their_node(tmp_path):
    cache = CacheConfig(folder=str(tmp_path), folder_size=MIB, kv_offloading_size=MIB)
    host = HostPool(NUM_BLOCKS, BLOCK_BYTES)
    held = []
    for rank in range(2):
        for tier in make_tiers(cache, host, rank, 2, "maker"):
            held += [event.num_slots for event in tier.take_events()]
            tier.close()
    assert held == [128, 127] * 2
    assert sorted(path.name for path in tmp_path.glob("*.index")) == [
        "rank0.index",
        "rank1.index",
    ]


def test_more_memory_than_the_host_has_is_refused():
    host = HostPool(NUM_BLOCKS, BLOCK_BYTES)
    with pytest.raises(ConfigError, match=r"lower cache\.kv_offloading_size"):
        make_tiers(CacheConfig(kv_offloading_size=1e6), host, 0, 1, "maker")


def test_what_a_folder_held_comes_in_messages_that_are_not_too_long(monkeypatch):
    monkeypatch.setattr("baton.kv_transfer.tiers.SLOTS_PER_MESSAGE", 3)
    host = HostPool(NUM_BLOCKS, BLOCK_BYTES)
    tier = Tier("memory", MemoryStore(NUM_SLOTS * BLOCK_BYTES, BLOCK_BYTES), host)
    events = tier.take_events()
    assert [
        (event.first_slot, len(event.hashes) // HASH_BYTES) for event in events
    ] == [
        (0, 3),
        (3, 3),
        (6, 2),
    ]
    assert (
        msgspec.msgpack.decode(msgspec.msgpack.encode(events[0]), type=SlotsHeld)
        == events[0]
    )
    tier.close()
