"""Sequences with a state on both schedulers, whose executor checks the state before each slice."""

import msgspec
import pytest

from baton.kv_transfer.interfaces import BeginReceive, KVReceived, Offer, Released
from baton.node.scheduling.plan import StepPlan, StepResult
from baton.protocol.messages import BlockRange, Failed, FirstToken
from tests.sim.executor import BLOCK_SIZE
from tests.support.drive import (
    LIMITS,
    ROOT,
    Drive,
    continuation,
    decode_drive,
    handed,
    key,
    local,
    offered,
    prefill,
    prefill_drive,
    result_of,
)

STATE = 3
PROMPT = [7 * n % 50 for n in range(1, 23)]
NUM_BLOCKS = -(-len(PROMPT) // BLOCK_SIZE)


def refused(drive: Drive, plan: StepPlan) -> StepResult:
    """What a step gives whose samples have to be repeated."""
    result = result_of(drive.model, plan)
    return msgspec.structs.replace(result, tokens=tuple(() for _ in plan.slices))


@pytest.mark.parametrize("depth", [1, 2])
def test_a_local_prompt_and_its_output_go_through_one_state(depth):
    drive = decode_drive(state_blocks=STATE)
    drive.scheduler.add(0.0, 0, local("r", PROMPT, max_tokens=20))
    drive.run(depth=depth)
    assert drive.output("r", PROMPT) == continuation(PROMPT, 20)
    assert drive.pool.num_owned == 0


@pytest.mark.parametrize("num_choices", [2, 5])
def test_each_choice_gets_a_copy_of_the_state(num_choices):
    drive = decode_drive(state_blocks=STATE)
    for length in (len(PROMPT), 20):  # the second ends with a whole block
        name, prompt = f"r{length}", PROMPT[:length]
        drive.scheduler.add(0.0, 0, local(name, prompt, 9, num_choices))
        drive.run(depth=2)
        for choice in range(num_choices):
            assert drive.output(name, prompt, choice) == continuation(prompt, 9, choice)
    assert drive.pool.num_owned == 0


def test_a_sample_that_is_refused_advances_the_state_once():
    drive = decode_drive(state_blocks=STATE)
    message = local("r", PROMPT, 6)
    grammar = msgspec.structs.replace(message.sampling, grammar="rule")
    drive.scheduler.add(0.0, 0, msgspec.structs.replace(message, sampling=grammar))
    helds = []
    for step in range(40):
        plan = drive.launch()
        if plan is None:
            break
        helds += [part.num_held for part in plan.slices]
        is_refused = step in (1, 2, 3)  # the end of the prompt, again and again
        result = refused(drive, plan) if is_refused else result_of(drive.model, plan)
        drive.scheduler.settle(0.0, plan, result)
    assert helds[:6] == [0, 0, 1, 1, 1, 0]
    assert drive.output("r", PROMPT) == continuation(PROMPT, 6)


def test_prefill_announces_the_state_with_the_last_token():
    drive = prefill_drive(state_blocks=STATE)
    drive.scheduler.add(0.0, 0, prefill("r", PROMPT))
    drive.run()
    (offer,) = [one for one in drive.asked if isinstance(one, Offer)]
    assert offer.num_blocks == NUM_BLOCKS + STATE
    ranges = [one for one in drive.asked if isinstance(one, BlockRange)]
    announced = [block for one in ranges for block in one.block_ids]
    assert len(announced) == len(set(announced)) == offer.num_blocks
    whole = ROOT.extended(PROMPT)
    assert all(drive.model.slots[block][0] is whole for block in announced[-STATE:])
    assert set(ranges[0].block_ids).isdisjoint(announced[-STATE:])
    drive.scheduler.on_report(0.0, Released(key("r")))
    assert drive.pool.num_owned == 0


@pytest.mark.parametrize("num_choices", [1, 3])
def test_decode_goes_on_from_the_state_that_it_receives(num_choices):
    drive = decode_drive(state_blocks=STATE)
    drive.scheduler.add(0.0, 0, handed("r", PROMPT, 9, num_choices))
    drive.scheduler.on_report(0.0, offered("r", len(PROMPT), NUM_BLOCKS + STATE))
    drive.run()
    (begin,) = [one for one in drive.asked if isinstance(one, BeginReceive)]
    assert len(begin.block_ids) == NUM_BLOCKS + STATE
    context = ROOT
    for position, token in enumerate(PROMPT):  # what reads would have landed
        context = context.then(token)
        drive.model.write(begin.block_ids[position // BLOCK_SIZE], position % BLOCK_SIZE, context)
    for block in begin.block_ids[-STATE:]:
        drive.model.write_state(block, context)
    firsts = tuple(FirstToken(continuation(PROMPT, 1, choice)[0]) for choice in range(num_choices))
    drive.scheduler.on_report(0.0, KVReceived(key("r"), firsts, 1, 0.1, 0.0))
    drive.run(depth=2)
    for choice in range(num_choices):
        assert drive.output("r", PROMPT, choice) == continuation(PROMPT, 9, choice)
    assert drive.pool.num_owned == 0


def test_a_request_whose_state_can_never_fit_is_refused():
    for drive in (prefill_drive(NUM_BLOCKS + 2, state_blocks=STATE),
                  decode_drive(NUM_BLOCKS + 4, state_blocks=STATE)):  # fmt: skip
        is_prefill = drive.pool.num_blocks == NUM_BLOCKS + 2
        message = prefill("r", PROMPT) if is_prefill else local("r", PROMPT, 8)
        drive.scheduler.add(0.0, 0, message)
        drive.run()
        assert [type(one) for one in drive.said] == [Failed]


def test_a_sequence_that_is_preempted_or_cancelled_gives_its_state_back():
    drive = decode_drive(2 * (STATE + NUM_BLOCKS) + 1, state_blocks=STATE)
    for name in "ab":
        drive.scheduler.add(0.0, 0, local(name, PROMPT, 30))
    drive.run(depth=2)
    assert drive.output("a", PROMPT) == continuation(PROMPT, 30)
    failures = [one.failure.code for one in drive.said if isinstance(one, Failed)]
    assert failures == ["preempted"]
    assert drive.pool.num_owned == 0
    drive.scheduler.add(0.0, 0, local("c", PROMPT, 30))
    drive.run(steps=4)
    drive.scheduler.cancel(0, (key("c"),))
    drive.run()
    assert drive.pool.num_owned == 0


def test_no_token_is_guessed():
    limits = msgspec.structs.replace(LIMITS, num_speculative_tokens=4)
    drive = decode_drive(limits=limits, state_blocks=STATE)
    repeating = [1, 2, 3, 4] * 5
    drive.scheduler.add(0.0, 0, local("r", repeating, 12))
    drive.run(depth=2)
    assert all(not part.num_guesses for plan in drive.plans for part in plan.slices)
    assert drive.output("r", repeating) == continuation(repeating, 12)
