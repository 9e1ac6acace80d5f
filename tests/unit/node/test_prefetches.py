"""Cached blocks that nodes read without a request, and what a node that drains names to others."""

import msgspec
import pytest

from baton.kv_transfer.interfaces import (
    Abandon,
    BeginReceive,
    FetchPrefix,
    KVReceived,
    Offer,
    PrefixWanted,
    ReceiveEnded,
    RefusePrefix,
    Released,
)
from baton.node.hand_over import MAX_UNANSWERED, CacheHandOver
from baton.node.scheduling import prefetches
from baton.node.scheduling.block_pool import BlockPool
from baton.node.scheduling.plan import Outputs
from baton.node.scheduling.tiers import Tiers
from baton.protocol.blocks import BlockHash, block_hashes, pack_hashes, unpack_hashes
from baton.protocol.errors import Failure
from baton.protocol.ids import NodeId
from baton.protocol.messages import (
    BlockRange,
    Failed,
    HandedOver,
    Load,
    Prefetch,
    Prefetched,
)
from tests.support.drive import (
    BLOCK_SIZE,
    Drive,
    decode_drive,
    key,
    local,
    offered,
    prefill,
    prefill_drive,
)

HASHES = block_hashes(range(8 * BLOCK_SIZE), BLOCK_SIZE)
SOURCE = NodeId("leaves")
WATCHER = 3
FAILED = Failure("node_lost", "gone", retryable=True)
IDLE = Load()
BUSY = Load(num_running=1)


def asks(drive: Drive, hashes: list[BlockHash] = HASHES, idle_s: float = 1.0) -> None:
    message = Prefetch(key("p"), SOURCE, pack_hashes(hashes), idle_s, 5.0)
    drive.scheduler.prefetches.add(drive.now_s, 0, message)
    drive._collect()


def fetched(drive: Drive) -> list[list[BlockHash]]:
    return [
        unpack_hashes(event.hashes)
        for event in drive.asked
        if isinstance(event, FetchPrefix)
    ]


def begins(drive: Drive, num_blocks: int) -> tuple[int, ...]:
    drive.scheduler.on_report(
        drive.now_s, offered("p", num_blocks * BLOCK_SIZE, num_blocks)
    )
    drive._collect()
    begin = drive.asked[-1]
    assert isinstance(begin, BeginReceive)
    return begin.block_ids


def replies(drive: Drive) -> list[int]:
    drive._collect()
    return [
        message.num_blocks for message in drive.said if isinstance(message, Prefetched)
    ]


@pytest.mark.parametrize("kind", [prefill_drive, decode_drive])
def test_a_node_reads_what_it_lacks_and_then_has_it_cached(kind):
    drive = kind()
    asks(drive)
    assert fetched(drive) == [HASHES]
    blocks = begins(drive, 6)
    assert drive.pool.num_owned == 6
    drive.scheduler.on_report(0.0, KVReceived(key("p"), (), 0, 0.0, 0.0))
    assert drive.pool.cache.lookup(HASHES) == list(blocks)
    assert drive.pool.num_owned == 0
    assert replies(drive) == [6]
    assert drive.pool.counts.prefetched_tokens == 6 * BLOCK_SIZE
    asks(drive)
    assert fetched(drive)[1:] == [HASHES[6:]]


def test_nothing_that_was_used_more_recently_makes_room():
    drive = prefill_drive(num_blocks=8)
    pool = drive.pool
    cache = pool.cache
    held = block_hashes(range(100, 100 + 8 * BLOCK_SIZE), BLOCK_SIZE)
    for at_s, block_hash in enumerate(held):
        cache.tick(float(at_s))
        [block] = pool.allocate(1)
        pool.store([block_hash], [block])
        pool.release([block])
    cache.tick(8.0)
    asks(drive, idle_s=8.0)
    assert (fetched(drive), replies(drive)) == ([], [0]), (
        "all that it holds was used later"
    )
    asks(drive, idle_s=6.5)
    assert [len(hashes) for hashes in fetched(drive)] == [1], (
        "a part of the pool at a time"
    )
    begins(drive, 1)
    drive.scheduler.on_report(0.0, KVReceived(key("p"), (), 0, 0.0, 0.0))
    assert not cache.has(held[0])
    assert all(map(cache.has, (*held[1:], HASHES[0])))


def test_a_read_without_an_end_leaves_no_block_behind():
    for fails in (False, True):
        drive = decode_drive()
        asks(drive)
        blocks = begins(drive, 4)
        if fails:
            drive.scheduler.on_report(0.0, ReceiveEnded(key("p"), FAILED, blocks[:1]))
        else:
            drive.scheduler.prefetches.clear()
            drive._collect()
            assert isinstance(drive.asked[-1], Abandon)
            drive.scheduler.on_report(0.0, ReceiveEnded(key("p"), FAILED))
        assert replies(drive) == [0]
        assert (drive.pool.num_owned, drive.pool.num_quarantined) == (0, int(fails))
        assert not drive.pool.cache.lookup(HASHES)


def test_a_request_that_lacks_blocks_ends_a_read():
    drive = prefill_drive(num_blocks=16)
    asks(drive)
    begins(drive, 2)
    drive.scheduler.add(0.0, 0, prefill("r", list(range(200, 200 + 15 * BLOCK_SIZE))))
    assert drive.launch() is None
    assert Abandon in map(type, drive.asked)
    drive.scheduler.on_report(0.0, ReceiveEnded(key("p"), FAILED))
    assert drive.launch() is not None


def test_a_stream_is_not_preempted_for_a_read_that_will_end():
    drive = decode_drive(num_blocks=16)
    drive.scheduler.add(0.0, 0, local("r", list(range(200, 200 + 13 * BLOCK_SIZE)), 12))
    drive.settle(drive.launch())
    asks(drive)
    begins(drive, 1)
    drive.run(steps=8)
    drive.pool.allocate(drive.pool.num_free)
    drive.run(steps=8)
    assert Abandon in map(type, drive.asked)
    assert drive.pool.counts.preemptions == 0
    drive.now_s += 2 * prefetches.GIVE_WAY_S
    drive.run(steps=8)
    assert drive.pool.counts.preemptions == 1, (
        "it waits no longer for a read that is stuck"
    )


@pytest.mark.parametrize("kind", [prefill_drive, decode_drive])
def test_blocks_that_came_without_a_step_are_lent_after_one_that_computes_nothing(kind):
    drive = kind()
    asks(drive)
    blocks = begins(drive, 8)
    drive.scheduler.on_report(0.0, KVReceived(key("p"), (), 0, 0.0, 0.0))
    assert drive.launch() is None, "nobody wants them yet"
    drive.scheduler.on_report(
        0.0, PrefixWanted(key("w"), NodeId("reader"), pack_hashes(HASHES), 0)
    )
    plan = drive.launch()
    assert plan is not None
    assert not plan.slices
    assert {block for block, _ in plan.generations} == set(blocks)
    assert Offer not in map(type, drive.asked)
    drive.settle(plan)
    [block_range] = [event for event in drive.asked if isinstance(event, BlockRange)]
    assert set(zip(block_range.block_ids, block_range.generations, strict=True)) <= set(
        plan.generations
    )
    drive.scheduler.on_report(0.0, Released(key("w")))
    assert drive.pool.num_owned == 0
    assert drive.launch() is None


def test_a_key_under_which_a_node_lends_is_not_used_twice():
    drive = prefill_drive()
    asks(drive)
    begins(drive, 8)
    drive.scheduler.on_report(0.0, KVReceived(key("p"), (), 0, 0.0, 0.0))
    wanted = PrefixWanted(key("r"), NodeId("reader"), pack_hashes(HASHES), 0)
    for _ in range(2):
        drive.scheduler.on_report(0.0, wanted)
    assert drive.pool.num_owned == 8
    drive.scheduler.add(0.0, 0, prefill("r", [1, 2, 3]))
    drive._collect()
    assert isinstance(drive.said[-1], Failed)
    drive.scheduler.add(0.0, 0, prefill("q", [1, 2, 3]))
    drive.scheduler.on_report(0.0, msgspec.structs.replace(wanted, key=key("q")))
    drive._collect()
    assert isinstance(drive.asked[-1], RefusePrefix)
    assert drive.pool.num_owned == 8


def handing_over(pool: BlockPool) -> CacheHandOver:
    return CacheHandOver(pool, Tiers(pool, Outputs()))


def caching(hashes: list[BlockHash], num_blocks: int = 64) -> BlockPool:
    """A pool that has used these blocks, each a second after the one before."""
    pool = BlockPool(num_blocks, BLOCK_SIZE)
    use(pool, hashes)
    pool.cache.watch(WATCHER)
    return pool


def use(pool: BlockPool, hashes: list[BlockHash], first_s: float = 0.0) -> None:
    for number, block_hash in enumerate(hashes):
        pool.cache.tick(first_s + number)
        [block] = pool.allocate(1)
        pool.store([block_hash], [block])
        pool.release([block])


def test_a_node_that_drains_names_what_it_used_last_first():
    pool = caching(HASHES)
    hand_over = handing_over(pool)
    hand_over.begin(7.0, 5.0)
    named: list[BlockHash] = []
    for origin, message in hand_over.messages(7.0, BUSY):
        named += unpack_hashes(message.hashes)
        assert (origin, message.timeout_s) == (WATCHER, 5.0)
        assert message.idle_s == len(named) - 1
        hand_over.answered(HandedOver(message.number))
    assert named == HASHES[::-1]
    assert not hand_over.is_over(7.0), "a sequence still runs"
    new = block_hashes(range(500, 500 + BLOCK_SIZE), BLOCK_SIZE)
    use(pool, new, 8.0)
    [(_, last)] = hand_over.messages(8.0, IDLE)
    assert unpack_hashes(last.hashes) == new
    assert not hand_over.is_over(8.0)
    hand_over.answered(HandedOver(last.number))
    assert hand_over.is_over(8.0)


def test_a_node_that_drains_waits_no_longer_than_it_may():
    many = block_hashes(range(40 * BLOCK_SIZE), BLOCK_SIZE)
    hand_over = handing_over(caching(many, num_blocks=40))
    hand_over.begin(0.0, 5.0)
    assert len(list(hand_over.messages(0.0, IDLE))) == MAX_UNANSWERED
    assert not list(hand_over.messages(1.0, IDLE)), "no one answers"
    assert not hand_over.is_over(4.9)
    assert hand_over.is_over(5.0)
    hurried = handing_over(caching(many, num_blocks=40))
    hurried.begin(0.0, 0.0)
    assert hurried.is_over(0.0)
    left_alone = handing_over(caching(many, num_blocks=40))
    left_alone.begin(0.0, 5.0)
    left_alone.lost(WATCHER)
    assert left_alone.is_over(0.0)
    assert not list(left_alone.messages(0.0, IDLE))
