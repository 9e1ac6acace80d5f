"""Prefixes that a prefill node reads from a decode node, on schedulers with checked slots."""

import msgspec
import pytest

from baton.kv_transfer.interfaces import (
    Abandon,
    BeginReceive,
    BlocksDrained,
    FetchPrefix,
    KVReceived,
    Offer,
    PrefixWanted,
    ReceiveBroken,
    ReceiveEnded,
    RefusePrefix,
    Released,
)
from baton.node.scheduling import prefix_reads
from baton.node.scheduling.prefix_reads import FORGET_S, MIN_TIMEOUT_S, PrefixCosts
from baton.protocol.blocks import block_hashes, pack_hashes
from baton.protocol.errors import Failure
from baton.protocol.ids import NodeId
from baton.protocol.messages import BlockRange, End, Failed, FirstTokens
from tests.support.drive import (
    BLOCK_SIZE,
    Drive,
    continuation,
    decode_drive,
    key,
    local,
    offered,
    prefill,
    prefill_drive,
)

PROMPT = list(range(100, 121))  # five whole blocks, and a token
NUM_BLOCKS = 6
SOURCE = NodeId("d1")
LOST = Failure("node_lost", "gone", retryable=True)
REFUSED = Failure("no_prefix", "none", retryable=True)


@pytest.fixture(autouse=True)
def few_tokens_are_worth_it(monkeypatch):
    monkeypatch.setattr(prefix_reads, "MIN_READ_TOKENS", BLOCK_SIZE)


@pytest.fixture
def reader() -> Drive:
    return asking(prefill_drive())


def asking(drive: Drive, name: str = "r", prompt: list[int] = PROMPT) -> Drive:
    """One whose prompt has begun to be read."""
    message = msgspec.structs.replace(
        prefill(name, prompt), decode_node=None, prefix_node=SOURCE
    )
    drive.scheduler.add(drive.now_s, 0, message)
    assert drive.launch() is None
    assert isinstance(drive.asked[-1], FetchPrefix)
    return drive


def begins(drive: Drive, num_blocks: int, name: str = "r") -> tuple[int, ...]:
    """Let the source offer so many blocks, and return the blocks that they are read into."""
    drive.scheduler.on_report(
        drive.now_s, offered(name, num_blocks * BLOCK_SIZE, num_blocks)
    )
    drive.launch()
    begin = drive.asked[-1]
    assert isinstance(begin, BeginReceive)
    return begin.block_ids


def lands(
    drive: Drive, blocks: tuple[int, ...], prompt: list[int] = PROMPT, first: int = 0
) -> None:
    """Write what the source has into these blocks."""
    context = drive.model._root.extended(prompt[: first * BLOCK_SIZE])
    for index, block in enumerate(blocks):
        for offset in range(BLOCK_SIZE):
            context = context.then(prompt[(first + index) * BLOCK_SIZE + offset])
            drive.model.write(block, offset, context)


def received(name: str = "r") -> KVReceived:
    return KVReceived(key(name), (), 0, 0.0, 0.0)


def first_of(drive: Drive, name: str = "r") -> FirstTokens:
    drive.run()
    [said] = [
        m for m in drive.said if isinstance(m, FirstTokens) and m.key == key(name)
    ]
    return said


def computed(drive: Drive) -> list[tuple[int, int]]:
    return [(part.start, part.length) for plan in drive.plans for part in plan.slices]


def test_what_another_node_has_cached_is_read_and_not_computed(reader):
    lands(reader, begins(reader, 4))
    reader.scheduler.on_report(0.25, received())
    reader.now_s = 1.0
    said = first_of(reader)
    assert [token.token_id for token in said.tokens] == continuation(PROMPT, 1)
    assert computed(reader) == [(16, 5)]
    times = said.times
    assert (times.num_cached_tokens, times.num_read_tokens) == (16, 16)
    assert (times.prefix_read_s, times.prefill_s) == (0.25, 0.75)
    assert reader.pool.counts.prefix_read_tokens == 16
    assert (reader.pool.num_owned, len(reader.pool.cache)) == (0, 5), (
        "it has them now, too"
    )


def test_blocks_that_were_read_are_announced_when_a_step_has_published_their_generations():
    drive = prefill_drive()
    drive.scheduler.add(
        0.0, 0, msgspec.structs.replace(prefill("r", PROMPT), prefix_node=SOURCE)
    )
    drive.launch()
    lands(drive, begins(drive, 4))
    drive.scheduler.on_report(0.0, received())
    plan = drive.launch()
    assert plan is not None
    assert not [event for event in drive.asked if isinstance(event, BlockRange)]
    drive.settle(plan)
    [block_range] = [event for event in drive.asked if isinstance(event, BlockRange)]
    announced = zip(block_range.block_ids, block_range.generations, strict=True)
    assert set(announced) <= set(plan.generations)


def test_only_blocks_that_are_not_here_are_read():
    drive = prefill_drive()
    short = msgspec.structs.replace(prefill("before", PROMPT[:9]), decode_node=None)
    drive.scheduler.add(0.0, 0, short)
    drive.run()
    asking(drive)
    [fetch] = [event for event in drive.asked if isinstance(event, FetchPrefix)]
    assert fetch.num_held_blocks == 2
    assert fetch.hashes == pack_hashes(block_hashes(PROMPT, BLOCK_SIZE))
    lands(drive, begins(drive, 5), first=2)
    drive.scheduler.on_report(0.0, received())
    assert [token.token_id for token in first_of(drive).tokens] == continuation(
        PROMPT, 1
    )
    assert computed(drive)[-1] == (20, 1)


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_prefix_that_does_not_come_is_computed(reader, has_begun):
    if has_begun:
        begins(reader, 4)
    reader.scheduler.on_report(0.0, ReceiveEnded(key(), LOST if has_begun else REFUSED))
    said = first_of(reader)
    assert [token.token_id for token in said.tokens] == continuation(PROMPT, 1)
    assert (said.times.num_cached_tokens, said.times.num_read_tokens) == (0, 0)
    assert reader.pool.counts.failed_prefix_reads == 1
    assert reader.pool.num_owned == 0


def test_a_broken_read_may_still_write_while_its_prompt_is_computed(reader):
    blocks = begins(reader, 4)
    reader.scheduler.on_report(0.0, ReceiveBroken(key()))
    plan = reader.launch()
    assert plan is not None
    lands(reader, blocks, [7] * 16)
    reader.settle(plan)
    said = first_of(reader)
    assert [token.token_id for token in said.tokens] == continuation(PROMPT, 1)
    assert reader.pool.num_owned == 4, "until no byte can land in them"
    reader.scheduler.on_report(0.0, ReceiveEnded(key(), LOST, quarantined=blocks[:1]))
    assert (reader.pool.num_owned, reader.pool.num_quarantined) == (0, 1)
    reader.scheduler.on_report(0.0, BlocksDrained(blocks[:1]))
    assert reader.pool.num_free == reader.pool.num_blocks


def test_a_source_whose_read_was_late_is_not_asked_again_soon(reader):
    for _ in range(2):
        reader.scheduler.requests.reads.costs.computed(
            0.0, num_tokens=100, seconds=0.01
        )
    begins(reader, 4)
    reader.scheduler.on_report(0.5, ReceiveBroken(key()))
    assert reader.scheduler.requests.reads.costs.timeout_s(0.6, SOURCE, 1000) is None


def test_without_blocks_to_compute_into_a_broken_read_is_waited_for():
    drive = asking(prefill_drive(num_blocks=NUM_BLOCKS))
    blocks = begins(drive, 4)
    drive.scheduler.on_report(0.0, ReceiveBroken(key()))
    assert drive.launch() is None
    drive.scheduler.on_report(0.0, ReceiveEnded(key(), LOST))
    assert first_of(drive).tokens
    assert set(blocks) <= set(drive.plans[0].slices[0].block_table)


def test_a_prompt_whose_blocks_are_lost_to_a_read_goes_elsewhere():
    drive = asking(prefill_drive(num_blocks=NUM_BLOCKS))
    blocks = begins(drive, 4)
    drive.scheduler.on_report(0.0, ReceiveEnded(key(), LOST, quarantined=blocks[:1]))
    drive.run()
    [failed] = [message for message in drive.said if isinstance(message, Failed)]
    assert failed.failure == LOST
    assert (drive.pool.num_owned, drive.pool.num_quarantined) == (0, 1)


def test_blocks_of_a_cancelled_prompt_are_kept_until_its_read_has_ended(reader):
    begins(reader, 4)
    reader.scheduler.cancel(0, (key(),))
    reader.run()
    assert isinstance(reader.asked[-1], Abandon)
    assert reader.pool.num_owned == NUM_BLOCKS
    reader.scheduler.on_report(0.0, ReceiveEnded(key(), LOST))
    assert reader.pool.num_owned == 0
    assert reader.scheduler.load().num_running == 0


def test_a_prompt_that_waits_for_its_prefix_holds_up_no_other(reader):
    reader.scheduler.add(
        0.0, 0, msgspec.structs.replace(prefill("b", [1, 2]), decode_node=None)
    )
    assert first_of(reader, "b").tokens


@pytest.mark.parametrize("num_blocks", [0, 6])
def test_an_offer_of_another_number_of_blocks_is_not_taken(reader, num_blocks):
    reader.scheduler.on_report(0.0, offered("r", num_blocks * BLOCK_SIZE, num_blocks))
    reader.launch()
    assert isinstance(reader.asked[-1], Abandon)


def wanted(
    name: str = "r", prompt: list[int] = PROMPT, num_held: int = 0
) -> PrefixWanted:
    return PrefixWanted(
        key(name), NodeId("p0"), pack_hashes(block_hashes(prompt, BLOCK_SIZE)), num_held
    )


def lender(num_blocks: int = 64) -> Drive:
    """A decode node that has cached a prompt and its output."""
    drive = decode_drive(num_blocks)
    drive.scheduler.add(0.0, 0, local("done", PROMPT, max_tokens=12))
    drive.run()
    return drive


def test_a_decode_node_lends_what_it_has_of_a_prompt_and_a_response():
    drive = lender()
    history = [*PROMPT, *continuation(PROMPT, 12), 1, 2, 3]
    drive.scheduler.on_report(0.0, wanted(prompt=history))
    drive.launch()
    offer, block_range, end = drive.asked[-3:]
    assert isinstance(offer, Offer)
    assert (offer.reader, offer.num_tokens, offer.num_blocks) == ("p0", 32, 8)
    assert isinstance(block_range, BlockRange)
    context = drive.model._root.extended(history[:32])
    assert drive.model.slots[block_range.block_ids[-1]][BLOCK_SIZE - 1] is context
    assert end == End(key(), (), 32)
    held = drive.pool.num_owned
    assert held == 8
    drive.scheduler.on_report(0.0, Released(key()))
    assert drive.pool.num_owned == 0


@pytest.mark.parametrize(
    ("num_blocks", "num_held", "prompt"),
    [(64, 5, PROMPT), (64, 0, [1] * 20), (16, 4, PROMPT)],
    ids=["the reader has as much", "it has none", "it would lend too much of its pool"],
)
def test_what_is_not_there_or_too_much_is_not_lent(num_blocks, num_held, prompt):
    drive = lender(num_blocks)
    drive.scheduler.on_report(0.0, wanted(prompt=prompt, num_held=num_held))
    drive.launch()
    refusal = drive.asked[-1]
    assert isinstance(refusal, RefusePrefix)
    assert (refusal.key, refusal.reader, refusal.failure.code) == (
        key(),
        "p0",
        "no_prefix",
    )
    assert drive.pool.num_owned == 0


def test_a_node_lends_a_part_of_a_prefix_that_is_too_long_for_its_pool():
    drive = lender(16)
    drive.scheduler.on_report(0.0, wanted(prompt=PROMPT))
    drive.launch()
    offer = drive.asked[-3]
    assert isinstance(offer, Offer)
    assert offer.num_blocks == drive.pool.num_owned == 4


def test_a_read_is_waited_for_as_long_as_computing_takes_and_not_begun_if_that_is_quicker():
    costs = PrefixCosts()
    assert costs.timeout_s(0.0, SOURCE, 1000) == prefix_reads.FIRST_TIMEOUT_S
    for _ in range(50):
        costs.computed(0.0, num_tokens=100, seconds=0.1)
    assert costs.timeout_s(0.0, SOURCE, 1000) == pytest.approx(1.0)
    assert costs.timeout_s(0.0, SOURCE, BLOCK_SIZE) == MIN_TIMEOUT_S
    assert costs.timeout_s(0.0, SOURCE, BLOCK_SIZE - 1) is None
    costs.computed(0.0, num_tokens=1, seconds=10.0)
    assert costs.timeout_s(0.0, SOURCE, 1000) == pytest.approx(1.0), (
        "a step of one token"
    )
    costs.read(1.0, SOURCE, num_tokens=1000, seconds=2.0)
    assert costs.timeout_s(1.0, SOURCE, 1000) is None
    assert costs.timeout_s(1.0, NodeId("other"), 1000) is not None
    assert costs.timeout_s(2.0 + FORGET_S, SOURCE, 1000) is not None, (
        "it may be quicker now"
    )
    costs.read(100.0, SOURCE, num_tokens=1000, seconds=0.1)
    assert costs.timeout_s(100.0, SOURCE, 1000) is not None
