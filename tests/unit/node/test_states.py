"""Sequences with a state on both schedulers, whose executor checks the state before each slice."""

import random

import msgspec
import pytest

from baton.kernels.constants import STATE_CHUNK
from baton.kv_transfer.interfaces import BeginReceive, KVReceived, Offer, Released
from baton.node.scheduling.plan import StepPlan, StepResult
from baton.node.scheduling.request import UNIT_TOKENS
from baton.prefill_node.scheduler import PrefillScheduler
from baton.protocol.blocks import block_hashes, state_hashes
from baton.protocol.config import EngineConfig
from baton.protocol.messages import BlockRange, Failed, FirstToken, FirstTokens
from tests.sim.executor import BLOCK_SIZE
from tests.support.depth import nightly
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
from tests.unit.node.test_speculation import in_circles

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
        name = f"r{length}"
        prompt = PROMPT[:length]
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
        drive.model.write(
            begin.block_ids[position // BLOCK_SIZE], position % BLOCK_SIZE, context
        )
    for block in begin.block_ids[-STATE:]:
        drive.model.write_state(block, context)
    firsts = tuple(
        FirstToken(continuation(PROMPT, 1, choice)[0]) for choice in range(num_choices)
    )
    drive.scheduler.on_report(0.0, KVReceived(key("r"), firsts, 1, 0.1, 0.0))
    drive.run(depth=2)
    for choice in range(num_choices):
        assert drive.output("r", PROMPT, choice) == continuation(PROMPT, 9, choice)
    assert drive.pool.num_owned == 0


def test_a_request_whose_state_can_never_fit_is_refused():
    for drive in (
        prefill_drive(NUM_BLOCKS + 2, state_blocks=STATE),
        decode_drive(NUM_BLOCKS + 4, state_blocks=STATE),
    ):
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


@pytest.mark.parametrize("depth", [1, 2])
def test_guesses_save_steps_and_leave_no_trace_in_a_state(depth):
    """What is right of them goes through the state in the step after."""
    num_steps = []
    prompt = [9, 8, 7]
    for num_guesses in (0, 4):
        engine = EngineConfig(num_speculative_tokens=num_guesses)
        limits = msgspec.structs.replace(LIMITS, engine=engine)
        drive = decode_drive(limits=limits, state_blocks=STATE)
        drive.model.says = in_circles
        drive.scheduler.add(0.0, 0, local("r", prompt, 60, 2))
        drive.run(depth=depth)
        for choice in range(2):
            expected = continuation(prompt, 60, choice, in_circles)
            assert drive.output("r", prompt, choice) == expected
        counts = drive.pool.counts
        assert counts.spec_decode_accepted_tokens < counts.spec_decode_draft_tokens or (
            not num_guesses
        )
        assert (counts.spec_decode_accepted_tokens > 0) == bool(num_guesses)
        assert drive.pool.num_owned == 0
        num_steps.append(len(drive.plans))
    assert num_steps[1] < 0.75 * num_steps[0]


def computed(drive: Drive, name: str) -> list[tuple[int, int]]:
    """Where the slices of a prompt start and end."""
    parts = [
        part for plan in drive.plans for part in plan.slices if part.key == key(name)
    ]
    return [(part.start, part.start + part.length) for part in parts]


def ask(
    drive: Drive, name: str, prompt: list[int], max_tokens: int = 4
) -> list[tuple[int, int]]:
    """Serve a prompt on either node; what was computed of it."""
    is_prefill = isinstance(drive.scheduler, PrefillScheduler)
    message = prefill(name, prompt) if is_prefill else local(name, prompt, max_tokens)
    drive.scheduler.add(0.0, 0, message)
    drive.run(depth=2)
    if is_prefill:
        firsts = [
            one
            for one in drive.said
            if isinstance(one, FirstTokens) and one.key == key(name)
        ]
        assert [one.token_id for one in firsts[0].tokens] == continuation(prompt, 1)
        drive.scheduler.on_report(0.0, Released(key(name)))
    else:
        assert drive.output(name, prompt) == continuation(prompt, max_tokens)
    assert drive.pool.num_owned == 0
    return [one for one in computed(drive, name) if one[0] < len(prompt)]


def text(length: int, salt: int = 0) -> list[int]:
    return [(31 * n + salt) % 97 for n in range(1, length + 1)]


@pytest.mark.parametrize("make", [prefill_drive, decode_drive])
def test_a_prompt_begins_at_the_last_checkpoint_of_its_prefix(make):
    drive = make(256, state_blocks=STATE)
    prompt = text(150)
    first = ask(drive, "a", prompt)
    assert (first[0][0], first[-1][1]) == (0, 150)
    assert 128 in [end for _, end in first]  # the last multiple of 64 before the end
    assert ask(drive, "b", prompt)[0] == (128, 144)
    assert ask(drive, "c", [*prompt, *text(40, 5)])[0][0] == 128
    # Its own is at 128, too.
    assert ask(drive, "d", [*prompt, *text(40, 5)])[0][0] == 128
    assert ask(drive, "e", [*prompt, *text(50, 5)])[0][0] == 128
    assert ask(drive, "f", [*prompt, *text(50, 5)])[0][0] == 192
    assert ask(drive, "g", prompt[:129])[0] == (128, 129)
    assert ask(drive, "h", prompt[:128])[0][0] == 64  # a token has to be computed
    assert drive.pool.counts.prefix_hit_tokens == 5 * 128 + 192 + 64


@pytest.mark.parametrize("make", [prefill_drive, decode_drive])
def test_a_prefix_that_several_prompts_share_gets_a_checkpoint(make):
    # So large that a prompt has no checkpoint on its way.
    drive = make(512, state_blocks=40)
    starts = [
        ask(drive, name, [*text(100), *text(60, salt)])[0][0]
        for name, salt in (("a", 1), ("b", 2), ("c", 3))
    ]
    assert starts == [0, 0, 64]


def test_a_resumed_sequence_leaves_no_checkpoint_behind_its_prompt():
    drive = decode_drive(256, state_blocks=STATE)
    resumed = msgspec.structs.replace(
        local("a", text(150), max_tokens=60), num_prompt_tokens=100
    )
    drive.scheduler.add(0.0, 0, resumed)
    drive.run()
    assert ask(drive, "b", text(150))[0][0] == 64


def test_long_prompts_have_checkpoints_on_their_way():
    limits = msgspec.structs.replace(
        LIMITS, max_model_len=2000, max_num_batched_tokens=500
    )
    drive = prefill_drive(1024, limits, state_blocks=50)
    chunks = ask(drive, "a", text(1300))
    assert [end for _, end in chunks if end % 64 == 0] == [448, 896, 1280]
    assert ask(drive, "b", [*text(1000), *text(300, 9)])[0][0] == 896


def test_a_checkpoint_that_has_lost_a_block_counts_no_more():
    drive = decode_drive(128, state_blocks=STATE)
    prompt = text(150)
    ask(drive, "a", prompt)
    hashes = block_hashes(prompt, BLOCK_SIZE)
    saved = state_hashes(hashes[128 // BLOCK_SIZE - 1], STATE)
    held = []
    while drive.pool.cache.lookup(saved[2:]):
        held += drive.pool.allocate(1)
    drive.pool.release(held)
    assert ask(drive, "b", prompt)[0][0] == 0
    assert ask(drive, "c", prompt)[0][0] == 128


def test_a_refused_sample_after_a_checkpoint_does_not_change_it():
    drive = decode_drive(256, state_blocks=STATE)
    prompt = text(129)
    message = local("r", prompt, 6)
    grammar = msgspec.structs.replace(message.sampling, grammar="rule")
    drive.scheduler.add(0.0, 0, msgspec.structs.replace(message, sampling=grammar))
    num_refused = 0
    while (plan := drive.launch()) is not None:
        is_refused = num_refused < 3 and any(part.samples for part in plan.slices)
        num_refused += is_refused
        result = refused(drive, plan) if is_refused else result_of(drive.model, plan)
        drive.scheduler.settle(0.0, plan, result)
        if is_refused:
            drive.pool.reset_prefix_cache()  # so that a checkpoint would be kept again
    assert drive.output("r", prompt) == continuation(prompt, 6)
    assert ask(drive, "a", prompt)[0][0] == 0
    assert ask(drive, "b", prompt)[0][0] == 128


def test_without_a_prefix_cache_no_state_is_kept():
    drive = decode_drive(256, state_blocks=STATE)
    drive.pool.caches_prefixes = False
    assert ask(drive, "a", text(150)) == ask(drive, "b", text(150))
    assert not any(plan.copies for plan in drive.plans)


@pytest.mark.parametrize("seed", [*range(20), *map(nightly, range(20, 60))])
def test_random_prompts_that_share_prefixes_keep_their_states(seed):
    """On a pool that fills up, with cancels: the executor refuses a wrong state."""
    luck = random.Random(seed)
    state_blocks = luck.choice((1, 3, 7))
    limits = msgspec.structs.replace(
        LIMITS, max_num_batched_tokens=luck.choice((16, 50, 200))
    )
    drive = decode_drive(luck.choice((110, 160, 300)), limits, state_blocks)
    asked: dict[str, tuple[list[int], int, int]] = {}
    launched: list[StepPlan] = []
    for turn in range(400):
        if turn < 250 and luck.random() < 0.15:
            name = f"r{turn}"
            salt = luck.randint(0, 2)
            prompt = [*text(luck.randint(1, 150)), *text(luck.randint(1, 60), salt)]
            choices = luck.choice((1, 1, 2))
            asked[name] = prompt, luck.randint(1, 20), choices
            drive.scheduler.add(float(turn), 0, local(name, *asked[name]))
        if luck.random() < 0.03 and asked:
            drive.scheduler.cancel(0, (key(luck.choice(list(asked))),))
        drive.now_s = float(turn)
        if len(launched) < 2 and (plan := drive.launch()) is not None:
            launched.append(plan)
        if launched and (len(launched) == 2 or luck.random() < 0.5):
            drive.settle(launched.pop(0))
    for plan in launched:
        drive.settle(plan)
    drive.run(depth=2)
    for name, (prompt, max_tokens, choices) in asked.items():
        for choice in range(choices):
            said = drive.output(name, prompt, choice)
            assert said == continuation(prompt, max_tokens, choice)[: len(said)]
    assert drive.pool.num_owned == 0
    assert drive.pool.num_free == drive.pool.num_blocks


@pytest.mark.parametrize(
    ("budget", "ends"),
    [(100, [64, 150]), (64, [64, 128, 150]), (40, [40, 64, 104, 128])],
)
def test_chunks_of_a_prompt_end_where_those_of_its_state_do(budget, ends):
    """A smaller budget leaves no choice at first; checkpoints are off."""
    limits = msgspec.structs.replace(LIMITS, max_num_batched_tokens=budget)
    drive = prefill_drive(limits=limits, state_blocks=STATE)
    drive.pool.caches_prefixes = False
    drive.scheduler.add(0.0, 0, prefill("r", [n % 50 for n in range(150)]))
    found = []
    while (plan := drive.launch()) is not None:
        found += [part.start + part.length for part in plan.slices]
        drive.scheduler.settle(0.0, plan, result_of(drive.model, plan))
    assert found[: len(ends)] == ends


def test_the_kernels_of_gpus_cut_chunks_where_schedulers_do():
    assert UNIT_TOKENS == STATE_CHUNK
