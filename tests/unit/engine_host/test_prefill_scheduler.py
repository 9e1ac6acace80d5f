"""Prefill scheduling on an executor that checks every slot it reads."""

from baton.kv_transfer.interfaces import OfferBroken, Released
from baton.protocol.errors import TransferError
from baton.protocol.messages import BlockRange, Failed, FirstTokens, Withdrawn
from tests.support.drive import Drive, key, prefill, prefill_drive

LEASE_ENDED = TransferError("the lease ended").to_failure()


def announced(drive: Drive, name: str) -> list[int]:
    """The blocks announced for a prompt, in order; fails when one is skipped or repeated."""
    blocks: list[int] = []
    for event in drive.asked:
        if isinstance(event, BlockRange) and event.key == key(name):
            assert event.first_block == len(blocks)
            blocks += event.block_ids
    return blocks


def test_a_cached_prefix_is_announced_at_once_and_not_computed() -> None:
    drive = prefill_drive()
    drive.scheduler.add(0.0, 0, prefill("a", list(range(20))))
    drive.run()
    drive.scheduler.add(0.0, 0, prefill("b", [*range(12), 99]))
    plan = drive.launch()
    assert (plan.slices[0].start, plan.slices[0].length) == (12, 1)
    assert announced(drive, "b") == announced(drive, "a")[:3]


def test_a_fully_cached_prompt_still_computes_its_last_token() -> None:
    drive, prompt = prefill_drive(), list(range(16))
    for name in "ab":
        drive.scheduler.add(0.0, 0, prefill(name, prompt))
        drive.run()
    assert (drive.plans[-1].slices[0].start, drive.plans[-1].slices[0].length) == (12, 4)
    firsts = [m for m in drive.said if isinstance(m, FirstTokens)]
    assert firsts[1].times.num_cached_tokens == 12
    assert firsts[0].tokens == firsts[1].tokens


def test_a_prompt_that_is_computed_outlives_its_router() -> None:
    """The client may have its first token, so decode must get the blocks."""
    drive = prefill_drive()
    drive.scheduler.add(0.0, 7, prefill("a", list(range(10))))
    drive.run()
    drive.scheduler.forget(7)
    drive.run()
    assert not any(isinstance(event, Withdrawn) for event in drive.asked)
    assert drive.pool.num_owned
    drive.scheduler.on_report(0.0, Released(key("a"), None))
    assert not drive.pool.num_owned


def test_a_handoff_whose_router_is_gone_is_withdrawn_as_lost_and_not_as_cancelled() -> None:
    """Decode passes the reason on, perhaps to a router that only this node has lost."""
    drive = prefill_drive()
    drive.scheduler.add(0.0, 7, prefill("a", list(range(60))))
    drive.run(steps=1)
    drive.scheduler.forget(7)
    drive.launch()
    (withdrawn,) = [event for event in drive.asked if isinstance(event, Withdrawn)]
    assert (withdrawn.failure.code, withdrawn.failure.retryable) == ("node_lost", True)


def test_a_handoff_that_breaks_is_reported_at_once_and_its_blocks_stay_until_released() -> None:
    drive = prefill_drive()
    drive.scheduler.add(0.0, 7, prefill("a", list(range(10))))
    drive.run()
    drive.scheduler.on_report(4.0, OfferBroken(key("a"), LEASE_ENDED))
    assert drive.scheduler.outputs.take_router_messages() == [(7, Failed(key("a"), LEASE_ENDED))]
    assert drive.pool.num_owned
    drive.scheduler.on_report(30.0, Released(key("a"), LEASE_ENDED))
    assert drive.scheduler.outputs.take_router_messages() == []
    assert not drive.pool.num_owned
