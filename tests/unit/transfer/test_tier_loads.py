"""Tiers of a node with two ranks, as its connector sees them."""

import pytest

from baton.kv_transfer.connector import NodeConnector
from baton.kv_transfer.interfaces import (
    TIER_TIMEOUT,
    Abandon,
    AgentEvent,
    BlocksCopied,
    BlocksDrained,
    BlocksSaved,
    CancelRead,
    ClearTier,
    Effects,
    FromRank,
    KVReceived,
    LoadPrefix,
    Read,
    ReadDrained,
    ReadEnded,
    ReceiveBroken,
    ReceiveEnded,
    SaveBlocks,
    SlotsHeld,
    TierOpened,
    TierPart,
    ToRank,
    tier_peer,
)
from baton.kv_transfer.receive import SHUTDOWN_TIMEOUT_S
from baton.protocol.blocks import NO_HASH, block_hashes, pack_hashes
from baton.protocol.config import TransferConfig
from tests.support.connectors import FAILURE, key, node

HASHES = block_hashes(range(8), 1)
PARTS = (
    TierPart("memory", (3,), pack_hashes(HASHES[:1]), (10,)),
    TierPart("folder", (5, 6), pack_hashes(HASHES[1:3]), (11, 12)),
)
LOAD = LoadPrefix(key(), PARTS, 0.5)
TICKETS = (1, 2, 3, 4)  # of both ranks and both tiers
SAVE = SaveBlocks(7, "folder", (1, 2), (3, 4), pack_hashes(HASHES[:2]))


@pytest.fixture
def connector() -> NodeConnector:
    return NodeConnector(node("p", "prefill", num_ranks=2), TransferConfig())


def commands(step: Effects) -> list[tuple[int, object]]:
    return [(one.rank, one.command) for one in step.commands if isinstance(one, ToRank)]


def from_ranks(event: AgentEvent, ranks: tuple[int, ...] = (0, 1)) -> list[FromRank]:
    return [FromRank(rank, event) for rank in ranks]


def ended(ticket: int, *, failed: bool = False, quiesced: bool = True) -> FromRank:
    failure = FAILURE if failed else None
    rank = (ticket - 1) % 2
    return FromRank(rank, ReadEnded(ticket, 1.0, 1.25, 64, failure, quiesced))


def test_every_rank_reads_its_part_of_each_tier(connector):
    step = connector.step(1.0, [LOAD])
    reads = [
        (rank, read.ticket, read.peer, read.remote, read.local, read.hashes)
        for rank, read in commands(step)
        if isinstance(read, Read)
    ]
    memory = (tier_peer("memory"), (3,), (10,), PARTS[0].hashes)
    folder = (tier_peer("folder"), (5, 6), (11, 12), PARTS[1].hashes)
    assert reads == [(0, 1, *memory), (1, 2, *memory), (0, 3, *folder), (1, 4, *folder)]
    for ticket in TICKETS[:3]:
        assert connector.reads_tier(ticket)
        assert connector.step(1.1, [ended(ticket)]).reports == []
    assert connector.step(1.1, [ended(4)]).reports == [
        KVReceived(key(), (), 256, 0.25, 0.25)
    ]
    assert not connector.reads_tier(4)
    assert connector.step(9.0, [LOAD]).commands, "the key may be read again"


def test_a_read_that_fails_ends_the_others_and_then_the_load(connector):
    connector.step(1.0, [LOAD])
    step = connector.step(1.1, [ended(2, failed=True)])
    assert step.reports == [ReceiveBroken(key())]
    assert commands(step) == [
        (0, CancelRead(1)),
        (0, CancelRead(3)),
        (1, CancelRead(4)),
    ]
    assert connector.step(1.2, [ended(1), ended(3, failed=True)]).reports == []
    assert connector.step(1.3, [ended(4)]).reports == [ReceiveEnded(key(), FAILURE)]


def test_a_load_takes_no_longer_than_it_may(connector):
    assert connector.step(1.0, [LOAD]).wake_at_s == 1.5
    step = connector.step(1.5, [])
    assert step.reports == [ReceiveBroken(key())]
    events = [ended(ticket, failed=True) for ticket in TICKETS]
    [report] = connector.step(2.0, events).reports
    assert (report.failure.code, report.quarantined) == (TIER_TIMEOUT, ())


def test_a_load_that_nobody_wants_ends_when_its_reads_have(connector):
    connector.step(1.0, [LOAD])
    assert len(commands(connector.step(1.1, [Abandon(key(), FAILURE)]))) == 4
    assert connector.step(1.2, [Abandon(key(), FAILURE)]).commands == []
    events = [ended(ticket, failed=True) for ticket in TICKETS]
    assert connector.step(1.3, events).reports == [ReceiveEnded(key(), FAILURE)]
    assert connector.step(1.4, [Abandon(key(), FAILURE)]).reports == []


def test_blocks_in_which_bytes_may_still_land_are_out_of_use_until_they_have(connector):
    connector.step(1.0, [LOAD])
    connector.step(1.1, [ended(3, failed=True, quiesced=False)])
    connector.step(1.1, [ended(4, failed=True, quiesced=False)])
    [report] = connector.step(1.2, [ended(1), ended(2)]).reports
    assert report.quarantined == (11, 12)
    assert connector.step(2.0, [FromRank(0, ReadDrained(3))]).reports == [], (
        "rank 1 still writes"
    )
    step = connector.step(2.1, [FromRank(1, ReadDrained(4))])
    assert step.reports == [BlocksDrained((11, 12))]


def test_a_read_that_drains_before_its_load_ends_quarantines_nothing(connector):
    connector.step(1.0, [LOAD])
    connector.step(1.1, [ended(1, failed=True, quiesced=False)])
    assert connector.step(1.2, [FromRank(0, ReadDrained(1))]).reports == []
    assert connector.step(1.3, [ended(2), ended(3), ended(4)]).reports == [
        ReceiveEnded(key(), FAILURE)
    ]


def test_reads_that_never_end_are_given_up(connector):
    connector.step(1.0, [LOAD])
    connector.step(1.5, [])
    connector.step(1.6, [ended(1), ended(2), ended(3)])
    [report] = connector.step(1.5 + SHUTDOWN_TIMEOUT_S, []).reports
    assert report.quarantined == (11, 12)
    assert connector.step(99.0, [ended(4)]).reports == [BlocksDrained((11, 12))]


def test_a_save_has_ended_when_it_has_on_every_rank(connector):
    assert commands(connector.step(1.0, [SAVE])) == [(0, SAVE), (1, SAVE)]
    copied = from_ranks(BlocksCopied(7))
    assert connector.step(1.1, copied[:1]).reports == []
    assert connector.step(1.2, copied[1:]).reports == [BlocksCopied(7)]
    events = [FromRank(0, BlocksSaved(7, FAILURE)), FromRank(1, BlocksSaved(7))]
    assert connector.step(1.3, events).reports == [BlocksSaved(7, FAILURE)]
    clear = ClearTier(8, "folder")
    assert commands(connector.step(2.0, [clear])) == [(0, clear), (1, clear)]
    assert connector.step(2.1, from_ranks(BlocksSaved(8))).reports == [BlocksSaved(8)]


def test_a_slot_holds_what_all_ranks_have_in_it(connector):
    first = pack_hashes([HASHES[0], HASHES[1], HASHES[2]])
    second = pack_hashes([HASHES[0], HASHES[3], NO_HASH])
    assert (
        connector.step(1.0, from_ranks(SlotsHeld("folder", 3, 0, first), (0,))).reports
        == []
    )
    half = len(NO_HASH)
    events = [
        FromRank(1, SlotsHeld("folder", 3, 0, second[:half])),
        FromRank(1, SlotsHeld("folder", 3, 1, second[half:])),
    ]
    held = HASHES[0] + NO_HASH + NO_HASH
    assert connector.step(1.1, events).reports == [TierOpened("folder", 3, held)]
    empty = from_ranks(SlotsHeld("memory", 0, 0, b""))
    assert connector.step(1.2, empty).reports == [TierOpened("memory", 0, b"")]
