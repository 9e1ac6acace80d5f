"""Prefill scheduling on an executor that checks every slot it reads."""

import pytest

from baton.kv_transfer.interfaces import Offer, Released
from baton.protocol.errors import Failure
from baton.protocol.messages import End, Failed, FirstTokens, Span, Withdrawn
from tests.support.drive import (
    Drive,
    key,
    prefill,
    prefill_drive,
    sampling,
)
from tests.support.toy_executor import next_token

LOST = Failure("node_lost", "gone", retryable=True)


def announced(drive: Drive, name: str) -> list[int]:
    """The blocks announced for a prompt, in order; fails when one is skipped or repeated."""
    blocks: list[int] = []
    for event in drive.asked:
        if isinstance(event, Span) and event.key == key(name):
            assert event.first_block == len(blocks)
            blocks += event.block_ids
    return blocks


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 16, 17, 50])
def test_a_prompt_is_offered_computed_in_chunks_and_announced(length: int, depth: int) -> None:
    drive, prompt = prefill_drive(), list(range(length))
    drive.scheduler.add(0.0, 0, prefill("a", prompt))
    drive.run(depth=depth)
    assert drive.asked[0] == Offer(key("a"), "d0", length, drive.pool.blocks_for(length))
    blocks = announced(drive, "a")
    written = [drive.executor.slots[blocks[p // 4]][p % 4] for p in range(length)]
    assert written == [tuple(prompt[: p + 1]) for p in range(length)]
    (first,) = [m for m in drive.said if isinstance(m, FirstTokens)]
    assert (first.position, first.tokens[0].token_id) == (length, next_token(prompt))
    assert drive.asked[-1] == End(key("a"), first.tokens)
    assert all(sum(part.length for part in plan.slices) <= 16 for plan in drive.plans)


def test_blocks_stay_until_the_connector_releases_them() -> None:
    drive = prefill_drive()
    drive.scheduler.add(0.0, 0, prefill("a", list(range(10))))
    drive.run()
    assert drive.pool.num_free == 61
    drive.scheduler.on_report(0.0, Released(key("a")))
    assert drive.pool.num_free == 64


def test_blocks_are_announced_only_when_their_step_is_settled() -> None:
    drive = prefill_drive()
    drive.scheduler.add(0.0, 0, prefill("a", list(range(20))))
    plan = drive.launch()
    assert plan is not None
    assert announced(drive, "a") == []
    drive.settle(plan)
    assert len(announced(drive, "a")) == 4


def test_a_cached_prefix_is_announced_at_once_and_not_computed() -> None:
    drive = prefill_drive()
    drive.scheduler.add(0.0, 0, prefill("a", list(range(20))))
    drive.run()
    drive.scheduler.add(0.0, 0, prefill("b", [*range(12), 99]))
    plan = drive.launch()
    assert plan is not None
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


def test_several_prompts_share_a_step() -> None:
    drive = prefill_drive()
    for name in "abc":
        drive.scheduler.add(0.0, 0, prefill(name, [ord(name)] * 5))
    drive.run(steps=1)
    assert [part.length for part in drive.plans[0].slices] == [5, 5, 5]


def test_a_prompt_that_does_not_fit_waits_until_blocks_return() -> None:
    drive = prefill_drive(num_blocks=4)
    drive.scheduler.add(0.0, 0, prefill("a", list(range(12))))
    drive.scheduler.add(0.0, 0, prefill("b", list(range(100, 110))))
    drive.run()
    assert announced(drive, "b") == []
    drive.scheduler.on_report(0.0, Released(key("a")))
    drive.run()
    assert len(announced(drive, "b")) == 3


def test_one_prefill_serves_all_choices() -> None:
    drive, prompt = prefill_drive(), list(range(6))
    drive.scheduler.add(0.0, 0, prefill("a", prompt, num_choices=3))
    drive.run()
    (first,) = [m for m in drive.said if isinstance(m, FirstTokens)]
    assert [t.token_id for t in first.tokens] == [next_token(prompt, c) for c in range(3)]
    assert len(drive.plans) == 1


def test_without_a_decode_node_the_blocks_return_at_once() -> None:
    drive = prefill_drive()
    message = type(prefill("a", [1]))(key("a"), [1, 2, 3, 4, 5], 5, sampling(1))
    drive.scheduler.add(0.0, 0, message)
    drive.run()
    (first,) = [m for m in drive.said if isinstance(m, FirstTokens)]
    assert first.tokens[0].finish_reason == "length"
    assert drive.asked == []
    assert drive.pool.num_free == 64


def test_a_prompt_larger_than_the_pool_is_refused_at_once() -> None:
    drive = prefill_drive(num_blocks=2)
    drive.scheduler.add(0.0, 0, prefill("a", list(range(9))))
    drive.launch()
    (failed,) = drive.said
    assert isinstance(failed, Failed)
    assert failed.failure.param == "prompt"


def test_when_decode_declines_the_computing_stops_and_the_router_hears() -> None:
    drive = prefill_drive()
    drive.scheduler.add(0.0, 0, prefill("a", list(range(60))))
    drive.run(steps=1)
    drive.scheduler.on_report(0.0, Released(key("a"), LOST))
    drive.run()
    assert Failed(key("a"), LOST) in drive.said
    assert len(drive.plans) == 1
    assert drive.pool.num_free == 64


def test_a_higher_attempt_ends_the_lower_one() -> None:
    drive, prompt = prefill_drive(), list(range(60))
    drive.scheduler.add(0.0, 0, prefill("a", prompt))
    drive.run(steps=1)
    again = prefill("a", prompt)
    message = type(again)(key("a", attempt=1), prompt, 60, again.sampling, decode_node="d1")
    drive.scheduler.add(0.0, 0, message)
    drive.launch()
    assert [e.key for e in drive.asked if isinstance(e, Withdrawn)] == [key("a")]


def test_a_handoff_whose_router_is_gone_is_withdrawn_as_lost_and_not_as_cancelled() -> None:
    """Decode passes the reason on, perhaps to a router that only this node has lost."""
    drive = prefill_drive()
    drive.scheduler.add(0.0, 7, prefill("a", list(range(60))))
    drive.run(steps=1)
    drive.scheduler.forget(7)
    drive.launch()
    (withdrawn,) = [event for event in drive.asked if isinstance(event, Withdrawn)]
    assert (withdrawn.failure.code, withdrawn.failure.retryable) == ("node_lost", True)
