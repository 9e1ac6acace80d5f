"""Tiers below a pool, on schedulers with checked slots."""

from collections.abc import Callable

import msgspec
import pytest

from baton.kv_transfer.interfaces import (
    TIER_TIMEOUT,
    Abandon,
    BlocksCopied,
    BlocksSaved,
    ClearTier,
    FetchPrefix,
    KVReceived,
    LoadPrefix,
    PrefixWanted,
    ReceiveBroken,
    ReceiveEnded,
    RefusePrefix,
    Released,
    SaveBlocks,
    TierOpened,
)
from baton.node.scheduling import prefix_reads
from baton.node.scheduling.tiers import MAX_SAVES, RETRY_S
from baton.protocol.blocks import (
    KEY_BYTES,
    NO_HASH,
    block_hashes,
    pack_hashes,
    unpack_hashes,
)
from baton.protocol.errors import Failure
from baton.protocol.ids import NodeId
from baton.protocol.messages import BlockRange, TierName
from baton.protocol.sampling import Scope
from tests.sim.executor import Context
from tests.support.drive import (
    BLOCK_SIZE,
    ROOT,
    Drive,
    continuation,
    decode_drive,
    key,
    local,
    prefill,
    prefill_drive,
)

PROMPT = list(range(100, 121))  # five whole blocks, and a token
OTHER = list(range(300, 321))
BROKEN = Failure("bad_record", "damaged", retryable=True)
LATE = Failure(TIER_TIMEOUT, "late", retryable=True)
FULL = Failure("transfer_failed", "no space", retryable=True)


@pytest.fixture(autouse=True)
def few_tokens_are_worth_it(monkeypatch):
    monkeypatch.setattr(prefix_reads, "MIN_READ_TOKENS", BLOCK_SIZE)


class TierDrive:
    """A scheduler with a tier whose store does at once what it is told."""

    def __init__(
        self, drive: Drive, num_slots: int = 32, name: TierName = "folder"
    ) -> None:
        self.drive = drive
        self.name: TierName = name
        self.stored: dict[int, tuple[bytes, list[Context | int | None]]] = {}
        self.num_seen = 0
        self.reports(TierOpened(name, num_slots, NO_HASH * num_slots))

    @property
    def tiers(self):
        return self.drive.scheduler.tiers

    def reports(self, report) -> None:
        self.drive.scheduler.on_report(self.drive.now_s, report)

    def asked(self, kind) -> list:
        """The commands of that kind since the last call of any."""
        new = self.drive.asked[self.num_seen :]
        self.num_seen = len(self.drive.asked)
        return [event for event in new if isinstance(event, kind)]

    def copies(self, save: SaveBlocks) -> None:
        slots = self.drive.model.slots
        hashes = unpack_hashes(save.hashes)
        for slot, block_hash, block in zip(
            save.slots, hashes, save.block_ids, strict=True
        ):
            self.stored[slot] = block_hash, list(slots[block])
        self.reports(BlocksCopied(save.ticket))

    def saves_all(self) -> int:
        """Return how many blocks were saved."""
        num_blocks = 0
        while True:
            self.drive.run()
            saves = [save for save in self.asked(SaveBlocks) if save.tier == self.name]
            if not saves:
                return num_blocks
            for save in saves:
                self.copies(save)
                self.reports(BlocksSaved(save.ticket))
                num_blocks += len(save.block_ids)

    def lands(self, load: LoadPrefix) -> None:
        for part in load.parts:
            hashes = unpack_hashes(part.hashes)
            for slot, block_hash, block in zip(
                part.slots, hashes, part.block_ids, strict=True
            ):
                held, content = self.stored[slot]
                assert held == block_hash
                self.drive.model.slots[block] = list(content)

    def loads(self, failure: Failure | None = None) -> LoadPrefix:
        self.drive.launch()
        [load] = self.asked(LoadPrefix)
        if failure is None:
            self.lands(load)
            self.reports(KVReceived(load.key, (), 0, 0.0, 0.0))
        else:
            self.reports(ReceiveEnded(load.key, failure))
        return load


def adds(drive: Drive, name: str, prompt: list[int]) -> None:
    if isinstance(drive.scheduler, type(decode_drive().scheduler)):
        drive.scheduler.add(drive.now_s, 0, local(name, prompt, max_tokens=1))
    else:
        message = msgspec.structs.replace(prefill(name, prompt), decode_node=None)
        drive.scheduler.add(drive.now_s, 0, message)


def computed(drive: Drive) -> list[tuple[int, int]]:
    return [(part.start, part.length) for part in drive.plans[-1].slices]


@pytest.fixture(params=[prefill_drive, decode_drive], ids=["prefill", "decode"])
def make(request) -> Callable[..., Drive]:
    return request.param


def saved(
    make: Callable[..., Drive], num_blocks: int = 64, num_slots: int = 32
) -> TierDrive:
    """One whose tier has what its pool has forgotten."""
    tier = TierDrive(make(num_blocks), num_slots)
    adds(tier.drive, "before", PROMPT)
    tier.drive.run()
    assert tier.saves_all() == 5
    tier.drive.pool.reset_prefix_cache()
    return tier


def test_every_idle_block_is_saved_once_and_held_only_while_it_is_copied(make):
    tier = TierDrive(make())
    pool = tier.drive.pool
    adds(tier.drive, "a", PROMPT)
    tier.drive.run()
    [save] = tier.asked(SaveBlocks)
    assert len(save.block_ids) == 5
    assert set(unpack_hashes(save.hashes)) == set(block_hashes(PROMPT, BLOCK_SIZE))
    assert pool.num_owned == 5
    tier.copies(save)
    assert pool.num_owned == 0
    adds(tier.drive, "b", PROMPT)
    assert tier.saves_all() == 0, "its blocks are being saved"
    tier.reports(BlocksSaved(save.ticket))
    adds(tier.drive, "c", PROMPT)
    assert tier.saves_all() == 0, "its blocks are saved"


def test_what_the_pool_has_lost_is_read_and_not_computed(make):
    tier = saved(make)
    drive = tier.drive
    adds(drive, "r", PROMPT)
    load = tier.loads()
    assert unpack_hashes(load.parts[0].hashes) == block_hashes(PROMPT, BLOCK_SIZE)
    drive.run()
    assert computed(drive) == [(20, 1)]
    assert drive.pool.counts.folder_hit_tokens == 20
    assert drive.pool.num_owned == 0
    assert len(drive.pool.cache) == 5
    assert tier.saves_all() == 0


def test_blocks_are_read_before_their_prompt_has_its_turn():
    tier = saved(prefill_drive)
    drive = tier.drive
    adds(drive, "a", list(range(400, 424)))
    adds(drive, "b", list(range(500, 512)))
    adds(drive, "r", PROMPT)
    adds(drive, "s", PROMPT)
    plan = drive.launch()
    assert plan is not None
    assert [part.key for part in plan.slices] == [key("a")]
    assert not tier.asked(LoadPrefix), "another prompt comes before it"
    drive.settle(plan)
    plan = drive.launch()
    assert plan is not None
    assert [part.key for part in plan.slices] == [key("a"), key("b")]
    [load] = tier.asked(LoadPrefix)
    assert load.key == key("r"), "the prompts of more than a step are not admitted"
    tier.lands(load)
    tier.reports(KVReceived(load.key, (), 0, 0.0, 0.0))
    drive.settle(plan)
    drive.run()
    [chunk] = [
        part for made in drive.plans for part in made.slices if part.key == key("r")
    ]
    assert (chunk.start, chunk.length) == (20, 1)


def test_a_decode_node_says_what_it_read():
    tier = saved(decode_drive)
    drive = tier.drive
    drive.scheduler.add(0.0, 0, local("r", PROMPT, max_tokens=4))
    tier.loads()
    drive.run()
    assert drive.output("r", PROMPT) == continuation(PROMPT, 4)


@pytest.mark.parametrize("failure", [BROKEN, LATE], ids=["damaged", "late"])
def test_a_prompt_whose_blocks_do_not_come_is_computed(make, failure):
    tier = saved(make)
    adds(tier.drive, "r", PROMPT)
    tier.loads(failure)
    tier.drive.run()
    assert (
        tier.drive.plans[-1].slices[0].start + tier.drive.plans[-1].slices[0].length
        == 21
    )
    assert tier.drive.pool.counts.failed_prefix_reads == 1
    num_saved = tier.saves_all()
    assert tier.drive.pool.num_owned == 0
    assert num_saved == (5 if failure is BROKEN else 0), "a damaged one is saved again"


def test_bytes_may_land_late_in_blocks_that_their_prompt_has_left(make):
    tier = saved(make)
    drive = tier.drive
    adds(drive, "r", PROMPT)
    drive.launch()
    [load] = tier.asked(LoadPrefix)
    tier.reports(ReceiveBroken(load.key))
    plan = drive.launch()
    assert plan is not None
    tier.lands(load)
    drive.settle(plan)
    drive.run()
    tier.reports(ReceiveEnded(load.key, LATE))
    tier.saves_all()
    assert drive.pool.num_owned == 0


def test_a_cancelled_prompt_keeps_its_blocks_until_nothing_lands_in_them(make):
    tier = saved(make)
    drive = tier.drive
    adds(drive, "r", PROMPT)
    drive.launch()
    [load] = tier.asked(LoadPrefix)
    drive.scheduler.cancel(0, (key("r"),))
    drive.launch()
    assert tier.asked(Abandon)
    assert drive.pool.num_owned == 6
    tier.reports(ReceiveEnded(load.key, LATE))
    assert drive.pool.num_owned == 0
    assert drive.scheduler.load().num_waiting == 0


def test_a_slot_that_is_read_gets_no_other_block(make):
    tier = saved(make, num_slots=5)
    drive = tier.drive
    adds(drive, "r", PROMPT)
    drive.launch()
    [load] = tier.asked(LoadPrefix)
    adds(drive, "s", OTHER)
    drive.run()
    assert tier.asked(SaveBlocks) == []
    tier.lands(load)
    tier.reports(KVReceived(load.key, (), 0, 0.0, 0.0))
    assert tier.saves_all() > 0
    drive.run()


def test_the_least_recently_used_block_makes_room(make):
    tier = saved(make, num_slots=8)
    adds(tier.drive, "s", OTHER)
    assert tier.saves_all() == 5
    index = tier.tiers.by_name["folder"]
    assert len(index) == 8
    assert all(
        index.slot_of(one) is not None for one in block_hashes(OTHER, BLOCK_SIZE)
    )
    held = [index.slot_of(one) is not None for one in block_hashes(PROMPT, BLOCK_SIZE)]
    assert held == [True, True, True, False, False], (
        "the first ones of a prompt stay longest"
    )


def test_a_full_disk_is_left_alone_for_some_time_and_holds_nothing_of_it(make):
    tier = TierDrive(make())
    adds(tier.drive, "a", PROMPT)
    tier.drive.run()
    [save] = tier.asked(SaveBlocks)
    tier.copies(save)
    tier.reports(BlocksSaved(save.ticket, FULL))
    assert len(tier.tiers.by_name["folder"]) == 0
    adds(tier.drive, "b", OTHER)
    assert tier.saves_all() == 0
    tier.drive.now_s += RETRY_S
    assert tier.saves_all() > 0


def test_writes_that_are_behind_are_not_queued_without_end(make):
    tier = TierDrive(make())
    for number in range(6):
        adds(tier.drive, f"{number}", [number * 10 + i for i in range(21)])
        tier.drive.run()
    saves = tier.asked(SaveBlocks)
    assert len(saves) == MAX_SAVES
    for save in saves:
        tier.copies(save)
    assert tier.drive.pool.num_owned == 0
    for save in saves:
        tier.reports(BlocksSaved(save.ticket))
    assert tier.saves_all() > 0


def test_a_reset_forgets_what_is_saved_and_what_is_being_saved(make):
    tier = saved(make)
    adds(tier.drive, "s", OTHER)
    tier.drive.run()
    [save] = tier.asked(SaveBlocks)
    tier.drive.pool.reset_prefix_cache()
    tier.tiers.reset()
    tier.copies(save)
    tier.drive.launch()
    [clear] = tier.asked(ClearTier)
    tier.reports(BlocksSaved(save.ticket))
    tier.reports(BlocksSaved(clear.ticket))
    assert len(tier.tiers.by_name["folder"]) == 0
    adds(tier.drive, "r", PROMPT)
    tier.drive.run()
    assert not tier.asked(LoadPrefix)
    assert tier.drive.pool.num_owned in (0, 5), "the copy of the next save"


@pytest.mark.parametrize("scope", [Scope(cache_salt="x"), Scope(lora="other")])
def test_blocks_of_another_salt_or_adapter_are_not_taken(make, scope):
    tier = saved(make)
    hashes = block_hashes(PROMPT, BLOCK_SIZE, root=scope.root)
    assert tier.tiers.find(hashes) == []
    assert len(tier.tiers.find(block_hashes(PROMPT, BLOCK_SIZE))[0].slots) == 5
    message = local("r", PROMPT) if make is decode_drive else prefill("r", PROMPT)
    sampling = msgspec.structs.replace(message.sampling, cache_root=scope.root)
    message = msgspec.structs.replace(message, sampling=sampling)
    tier.drive.scheduler.add(0.0, 0, message)
    tier.drive.run()
    assert not tier.asked(LoadPrefix)


def test_a_tier_that_was_filled_before_is_found(make):
    drive = make()
    hashes = block_hashes(PROMPT, BLOCK_SIZE)
    before = [NO_HASH, *reversed(hashes), hashes[0]]
    drive.scheduler.on_report(
        0.0, TierOpened("folder", len(before), pack_hashes(before))
    )
    adds(drive, "r", PROMPT)
    drive.launch()
    [load] = [event for event in drive.asked if isinstance(event, LoadPrefix)]
    assert load.parts[0].slots == (5, 4, 3, 2, 1)


def announced(tier: TierDrive, now_s: float) -> dict[str | None, tuple[int, int]]:
    """How many blocks routers hear that the cache and the tier have added and removed."""
    changes = [change for _, change in tier.drive.pool.cache.journal.take(now_s)]
    return {
        change.tier: (len(change.added) // KEY_BYTES, len(change.removed) // KEY_BYTES)
        for change in changes
    }


def test_routers_hear_what_a_tier_holds_apart_from_the_cache(make):
    tier = saved(make, num_slots=8)
    tier.drive.pool.cache.watch(1)
    tier.tiers.watch(1)
    assert announced(tier, 0.0) == {None: (0, 0), "folder": (5, 0)}
    adds(tier.drive, "s", OTHER)
    assert tier.saves_all() == 5
    assert announced(tier, 1.0) == {None: (5, 0), "folder": (5, 2)}
    tier.tiers.reset()
    assert announced(tier, 2.0) == {"folder": (0, 8)}


def test_a_router_that_watches_before_a_tier_opens_hears_of_it():
    drive = prefill_drive()
    drive.pool.cache.watch(1)
    tier = TierDrive(drive)
    adds(drive, "a", PROMPT)
    assert tier.saves_all() == 5
    assert announced(tier, 0.0) == {None: (5, 0), "folder": (5, 0)}


def test_a_short_rest_of_a_prompt_is_computed_by_a_decode_node_that_has_a_tier():
    tier = saved(decode_drive)
    message = msgspec.structs.replace(local("r", PROMPT), max_uncached_tokens=4)
    tier.drive.scheduler.add(0.0, 0, message)
    tier.loads()
    tier.drive.run()
    assert tier.drive.output("r", PROMPT) == continuation(PROMPT, 8)


def test_memory_is_read_before_the_folder_and_both_make_one_prefix():
    drive = prefill_drive()
    hashes = block_hashes(PROMPT, BLOCK_SIZE)
    drive.scheduler.on_report(0.0, TierOpened("folder", 4, pack_hashes(hashes[:4])))
    drive.scheduler.on_report(
        0.0, TierOpened("memory", 2, pack_hashes([hashes[4], hashes[1]]))
    )
    adds(drive, "r", PROMPT)
    drive.launch()
    [load] = [event for event in drive.asked if isinstance(event, LoadPrefix)]
    slots = {part.tier: part.slots for part in load.parts}
    assert slots == {"memory": (1, 0), "folder": (0, 2, 3)}
    drive.scheduler.on_report(1.0, KVReceived(key("r"), (), 0, 0.0, 0.0))
    assert drive.pool.counts.folder_hit_tokens == 20, "the slowest one counts"


def test_what_a_tier_lacks_is_asked_of_another_node():
    tier = saved(prefill_drive)
    drive = tier.drive
    longer = [*PROMPT[:20], *OTHER]
    message = prefill("r", longer)
    message = msgspec.structs.replace(
        message, decode_node=None, prefix_node=NodeId("d1")
    )
    drive.scheduler.add(0.0, 0, message)
    tier.loads()
    drive.launch()
    [fetch] = [event for event in drive.asked if isinstance(event, FetchPrefix)]
    assert fetch.num_held_blocks == 5
    assert unpack_hashes(fetch.hashes) == block_hashes(longer, BLOCK_SIZE)


def test_a_model_that_keeps_a_state_has_no_tiers():
    drive = prefill_drive(state_blocks=1)
    drive.scheduler.on_report(0.0, TierOpened("folder", 4, NO_HASH * 4))
    assert not drive.scheduler.tiers.by_name


LENT = list(range(100, 100 + 6 * BLOCK_SIZE))
LENT_HASHES = block_hashes(LENT, BLOCK_SIZE)


def wants(drive: Drive, num_held_blocks: int = 0) -> None:
    wanted = PrefixWanted(
        key("r"), NodeId("reader"), pack_hashes(LENT_HASHES), num_held_blocks
    )
    drive.scheduler.on_report(drive.now_s, wanted)
    drive._collect()


def lent(drive: Drive) -> list[int]:
    """The blocks that are announced to the reader, after the steps that it takes."""
    drive.run()
    return [
        block
        for event in drive.asked
        if isinstance(event, BlockRange)
        for block in event.block_ids
    ]


@pytest.mark.parametrize("kind", [prefill_drive, decode_drive])
def test_what_a_tier_alone_has_is_loaded_and_lent(kind):
    tier = TierDrive(kind())
    drive = tier.drive
    adds(drive, "before", LENT)
    assert tier.saves_all() == 6
    drive.pool.reset_prefix_cache()
    wants(drive)
    [load] = tier.asked(LoadPrefix)
    assert load.key != key("r"), "a prompt of that key may load something, too"
    assert not lent(drive)
    tier.lands(load)
    tier.reports(KVReceived(load.key, (), 0, 0.0, 0.0))
    blocks = lent(drive)
    assert [drive.model.slots[block][0] for block in blocks] == [
        ROOT.extended(LENT[: number * BLOCK_SIZE + 1]) for number in range(6)
    ]
    assert drive.pool.cache.lookup(LENT_HASHES) == blocks
    assert not drive.plans[-1].slices, "a step that computes nothing has published them"
    tier.reports(Released(key("r")))
    assert drive.pool.num_owned == 0


@pytest.mark.parametrize("num_known", [0, 2])
def test_a_loan_whose_load_fails_is_of_what_the_pool_has(num_known):
    tier = TierDrive(decode_drive())
    drive = tier.drive
    adds(drive, "before", LENT)
    tier.saves_all()
    drive.pool.reset_prefix_cache()
    known = drive.pool.allocate(num_known)
    drive.pool.store(LENT_HASHES[:num_known], known)
    drive.pool.release(known)
    drive.pool.take_fresh()
    wants(drive)
    [load] = tier.asked(LoadPrefix)
    [part] = load.parts
    assert unpack_hashes(part.hashes) == LENT_HASHES[num_known:]
    tier.reports(ReceiveBroken(load.key))
    tier.reports(ReceiveEnded(load.key, BROKEN, part.block_ids[:1]))
    assert drive.pool.num_quarantined == 1
    assert lent(drive) == known
    if not num_known:
        assert RefusePrefix in map(type, drive.asked)
    assert drive.pool.num_owned == num_known


def test_no_more_is_loaded_to_be_lent_than_may_be_lent():
    tier = TierDrive(decode_drive(num_blocks=16))
    adds(tier.drive, "before", LENT)
    tier.saves_all()
    tier.drive.pool.reset_prefix_cache()
    wants(tier.drive)
    [load] = tier.asked(LoadPrefix)
    assert unpack_hashes(load.parts[0].hashes) == LENT_HASHES[:4]
