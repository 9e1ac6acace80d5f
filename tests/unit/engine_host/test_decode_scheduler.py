"""Decode scheduling on an executor that checks every slot it reads."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.decode_node.scheduler import DecodeScheduler
from baton.engine.block_pool import BlockPool
from baton.engine.plan import StepPlan
from baton.engine.scheduler import NodeLimits
from baton.kv_transfer.interfaces import Abandon, Expect, Land, Landed, LandingEnded
from baton.protocol.errors import Failure
from baton.protocol.messages import Accepted, CancelDone, Failed, FirstToken
from tests.support.drive import LIMITS, Drive, handed, key, local, offered
from tests.support.toy_executor import ToyExecutor, continuation, next_token

BLOCK_SIZE = 4
LOST = Failure("node_lost", "gone", retryable=True)


def make(num_blocks: int = 64, limits: NodeLimits = LIMITS) -> Drive:
    pool = BlockPool(num_blocks, BLOCK_SIZE)
    return Drive(DecodeScheduler(pool, limits), ToyExecutor(num_blocks, BLOCK_SIZE))


def pool_of(drive: Drive) -> BlockPool:
    assert isinstance(drive.scheduler, DecodeScheduler)
    return drive.scheduler.pool


def offer(drive: Drive, name: str, prompt: list[int]) -> StepPlan | None:
    num_blocks = pool_of(drive).blocks_for(len(prompt))
    drive.scheduler.on_report(0.0, offered(name, len(prompt), num_blocks))
    return drive.launch()


def land(drive: Drive, name: str, prompt: list[int], num_choices: int = 1) -> None:
    """What connector and prefill do for a handed-over request: offer, fill the blocks, report."""
    assert offer(drive, name, prompt) is None, "nothing else may be running"
    fill(drive, name, prompt, num_choices)


def fill(drive: Drive, name: str, prompt: list[int], num_choices: int) -> None:
    (order,) = [e for e in drive.asked if isinstance(e, Land) and e.key == key(name)]
    for position in range(order.first_block * BLOCK_SIZE, len(prompt)):
        block = order.block_ids[position // BLOCK_SIZE - order.first_block]
        drive.executor.slots[block][position % BLOCK_SIZE] = tuple(prompt[: position + 1])
    firsts = tuple(FirstToken(next_token(prompt, choice)) for choice in range(num_choices))
    drive.scheduler.on_report(0.0, Landed(key(name), firsts, 0, 0.0, 0.0))


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 40])
def test_a_local_prompt_is_computed_in_chunks_and_continued(length: int, depth: int) -> None:
    drive, prompt = make(), list(range(length))
    drive.scheduler.add(0.0, 0, local("a", prompt, max_tokens=9))
    drive.run(depth=depth)
    assert drive.output("a", prompt) == continuation(prompt, 9)
    assert pool_of(drive).num_free == 64


@pytest.mark.parametrize("length", [3, 4, 9])
def test_choices_share_the_prompt_and_differ_from_the_first_token(length: int) -> None:
    drive, prompt = make(), list(range(length))
    drive.scheduler.add(0.0, 0, local("a", prompt, max_tokens=7, num_choices=3))
    drive.run()
    for choice in range(3):
        assert drive.output("a", prompt, choice) == continuation(prompt, 7, choice)
    prompt_steps = [p for p in drive.plans if p.slices[0].start == 0]
    assert len(prompt_steps) == 1, "the prompt is computed once for all choices"
    assert pool_of(drive).num_free == 64


@pytest.mark.parametrize("num_choices", [1, 3])
@pytest.mark.parametrize("length", [1, 4, 9])
def test_a_landed_prompt_goes_on_without_computing_prompt_tokens(
    length: int, num_choices: int
) -> None:
    drive, prompt = make(), list(range(length))
    drive.scheduler.add(0.0, 0, handed("a", prompt, 6, num_choices))
    assert drive.launch() is None
    assert drive.asked == [Expect(key("a"), "p0")]
    land(drive, "a", prompt, num_choices)
    drive.run(depth=2)
    assert Accepted(key("a")) in drive.said
    assert all(part.start >= length for plan in drive.plans for part in plan.slices)
    for choice in range(num_choices):
        assert drive.output("a", prompt, choice) == continuation(prompt, 6, choice)
    assert pool_of(drive).num_free == 64


def test_only_blocks_that_are_not_cached_are_landed() -> None:
    drive, prompt = make(), list(range(10))
    drive.scheduler.add(0.0, 0, local("warm", prompt, max_tokens=2))
    drive.run()
    drive.scheduler.add(0.0, 0, handed("a", prompt))
    land(drive, "a", prompt)
    (order,) = [e for e in drive.asked if isinstance(e, Land)]
    assert (order.first_block, len(order.block_ids)) == (2, 1)
    assert Accepted(key("a"), 8) in drive.said
    drive.run()
    assert drive.output("a", prompt) == continuation(prompt, 8)


def test_sequences_join_and_leave_while_others_run() -> None:
    drive = make()
    drive.scheduler.add(0.0, 0, local("a", [1, 2], max_tokens=20))
    drive.run(steps=5)
    for name in "bcd":
        drive.scheduler.add(0.0, 0, local(name, list(name.encode()), max_tokens=5))
    drive.run()
    sizes = [sum(part.length == 1 for part in plan.slices) for plan in drive.plans]
    assert max(sizes) >= 4
    assert sizes[-1] == 1, "the longest one is alone again"
    assert drive.output("a", [1, 2]) == continuation([1, 2], 20)


def test_a_long_local_prompt_leaves_room_for_running_sequences() -> None:
    drive = make()
    drive.scheduler.add(0.0, 0, local("a", [1], max_tokens=30))
    drive.run(steps=3)
    drive.scheduler.add(0.0, 0, local("long", list(range(60)), max_tokens=2))
    drive.run(steps=4)
    mixed = [plan for plan in drive.plans if len(plan.slices) == 2]
    assert [sum(part.length for part in plan.slices) for plan in mixed[:3]] == [16, 16, 16]


def test_when_no_block_is_left_the_youngest_goes_back_to_its_router() -> None:
    drive = make(num_blocks=8)
    drive.scheduler.add(0.0, 0, local("old", [1, 2, 3], max_tokens=21))
    drive.scheduler.add(0.0, 0, local("young", [4, 5, 6], max_tokens=21))
    drive.run(depth=2)
    failed = [message for message in drive.said if isinstance(message, Failed)]
    assert [(f.key.request_id, f.failure.code) for f in failed] == [("young", "preempted")]
    assert failed[0].failure.retryable
    assert drive.output("old", [1, 2, 3]) == continuation([1, 2, 3], 21)
    got = drive.output("young", [4, 5, 6])
    assert got == continuation([4, 5, 6], 21)[: len(got)]
    assert pool_of(drive).num_free == 8


def test_what_can_never_fit_is_refused_at_once() -> None:
    drive = make(num_blocks=4)
    drive.scheduler.add(0.0, 0, local("a", [1, 2], max_tokens=100))
    drive.launch()
    (failed,) = drive.said
    assert isinstance(failed, Failed)
    assert (failed.failure.http_status, failed.failure.param) == (400, "max_tokens")


def test_a_local_prompt_with_too_few_cached_tokens_is_refused_before_any_token() -> None:
    drive, prompt = make(), list(range(20))
    message = local("a", prompt)
    drive.scheduler.add(
        0.0, 0, type(message)(message.key, prompt, 20, message.sampling, max_uncached_tokens=8)
    )
    drive.launch()
    (failed,) = drive.said
    assert isinstance(failed, Failed)
    assert failed.failure.code == "not_cached"


def test_cancel_while_a_step_runs_keeps_the_blocks_until_it_is_settled() -> None:
    drive = make()
    drive.scheduler.add(0.0, 0, local("a", [1, 2, 3], max_tokens=50))
    drive.run(steps=3)
    plan = drive.launch()
    assert plan is not None
    drive.scheduler.cancel(0, (key("a"),))
    assert pool_of(drive).num_free < 64
    drive.settle(plan)
    assert CancelDone((key("a"),)) in drive.said
    assert pool_of(drive).num_free == 64


def test_a_cancelled_landing_keeps_its_blocks_until_it_is_quiet() -> None:
    drive, prompt = make(), list(range(10))
    drive.scheduler.add(0.0, 0, handed("a", prompt))
    drive.scheduler.on_report(0.0, offered("a", 10, 3))
    drive.launch()
    drive.scheduler.cancel(0, (key("a"),))
    drive.launch()
    assert any(isinstance(event, Abandon) for event in drive.asked)
    assert pool_of(drive).num_free == 61
    (order,) = [e for e in drive.asked if isinstance(e, Land)]
    drive.scheduler.on_report(0.0, LandingEnded(key("a"), LOST, (order.block_ids[1],)))
    assert pool_of(drive).num_free == 63
    assert pool_of(drive).num_quarantined == 1
    drive.launch()
    assert not any(isinstance(message, Failed) for message in drive.said), "it was cancelled"


def test_a_landing_that_fails_is_reported_and_returns_its_blocks() -> None:
    drive, prompt = make(), list(range(10))
    drive.scheduler.add(0.0, 0, handed("a", prompt))
    drive.scheduler.on_report(0.0, offered("a", 10, 3))
    drive.launch()
    drive.scheduler.on_report(0.0, LandingEnded(key("a"), LOST))
    drive.launch()
    assert drive.said[-1] == Failed(key("a"), LOST)
    assert pool_of(drive).num_free == 64


def test_choices_that_ended_with_the_first_token_are_let_go() -> None:
    drive, prompt = make(), list(range(5))
    drive.scheduler.add(0.0, 0, handed("a", prompt, num_choices=2))
    drive.scheduler.on_report(0.0, offered("a", 5, 2))
    drive.launch()
    ended = (FirstToken(1, "stop"), FirstToken(2, "stop"))
    drive.scheduler.on_report(0.0, Landed(key("a"), ended, 0, 0.0, 0.0))
    assert drive.launch() is None
    assert list(drive.entries()) == []
    assert pool_of(drive).num_free == 64


def test_forks_cancelled_before_their_first_step_leave_nothing_behind() -> None:
    drive, prompt = make(), list(range(5))
    drive.scheduler.add(0.0, 0, handed("a", prompt, num_choices=3))
    land(drive, "a", prompt, 3)
    drive.scheduler.cancel(0, tuple(key("a", choice) for choice in range(3)))
    assert drive.launch() is None
    assert pool_of(drive).num_free == 64


def test_a_router_that_is_gone_takes_its_requests_along() -> None:
    drive = make()
    drive.scheduler.add(0.0, 7, local("a", [1, 2, 3], max_tokens=50))
    drive.scheduler.add(0.0, 8, local("b", [1, 2, 3], max_tokens=3))
    drive.run(steps=1)
    drive.scheduler.forget(7)
    drive.run()
    assert len(drive.output("b", [1, 2, 3])) == 3
    assert pool_of(drive).num_free == 64


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_whatever_is_cancelled_the_rest_is_right_and_all_blocks_return(data: st.DataObject) -> None:
    """Random prompts that share prefixes, random cancels and depths, a pool that is too small."""
    drive = make(num_blocks=data.draw(st.integers(16, 40)))
    total = pool_of(drive).num_blocks
    assert isinstance(drive.scheduler, DecodeScheduler)
    intake = drive.scheduler.intake
    requests: dict[str, tuple[list[int], int, int]] = {}
    launched: list[StepPlan] = []
    for index in range(data.draw(st.integers(1, 30))):
        action = data.draw(st.sampled_from(["add", "hand", "step", "step", "cancel"]))
        if action in ("add", "hand"):
            name = f"r{index}"
            prompt = list(range(data.draw(st.integers(1, 24))))
            max_tokens, choices = data.draw(st.integers(2, 12)), data.draw(st.integers(1, 3))
            make_request = local if action == "add" else handed
            drive.scheduler.add(0.0, 0, make_request(name, prompt, max_tokens, choices))
            requests[name] = (prompt, max_tokens, choices)
            if action == "hand" and key(name) in intake.pending:
                if (plan := offer(drive, name, prompt)) is not None:
                    launched.append(plan)
                if intake.pending[key(name)].has_seats:
                    fill(drive, name, prompt, choices)
        elif action == "cancel" and requests:
            name = data.draw(st.sampled_from(sorted(requests)))
            drive.scheduler.cancel(0, (key(name, data.draw(st.integers(0, 2))),))
        elif len(launched) < 2 and (plan := drive.launch()) is not None:
            launched.append(plan)
        elif launched:
            drive.settle(launched.pop(0))
    for plan in launched:
        drive.settle(plan)
    drive.run(depth=2)
    for name, (prompt, max_tokens, choices) in requests.items():
        for choice in range(choices):
            got = drive.output(name, prompt, choice)
            assert got == continuation(prompt, max_tokens, choice)[: len(got)]
    for arrival in list(intake.pending.values()):
        drive.scheduler.on_report(0.0, LandingEnded(arrival.key, LOST))
    assert pool_of(drive).num_free == total
