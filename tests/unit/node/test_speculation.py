"""Guessed tokens change how many steps an answer takes, and nothing else."""

import itertools
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.decode_node.scheduler import DecodeScheduler
from baton.decode_node.speculation import MAX_PAUSE, HeadDrafts, PromptLookup
from baton.node.scheduling.plan import DraftCost
from baton.protocol.config import EngineConfig
from tests.sim.executor import Context, next_token
from tests.support.drive import LIMITS, Drive, continuation, local

GUESSING = msgspec.structs.replace(
    LIMITS, engine=EngineConfig(num_speculative_tokens=3)
)
PERIOD = 7


def in_circles(context: Context, seed: int, choice: int) -> int:
    """Say one text again and again, but for what depends on everything before."""
    position = context.length
    return position % PERIOD if position % 23 else next_token(context, seed, choice, 0)


def drive(num_guesses: int, *, num_blocks: int = 64) -> Drive:
    limits = msgspec.structs.replace(
        LIMITS, engine=EngineConfig(num_speculative_tokens=num_guesses)
    )
    one = Drive(DecodeScheduler, num_blocks, limits)
    one.model.says = in_circles
    return one


@given(st.lists(st.integers(0, 3) | st.integers(0, 1 << 31), min_size=1, max_size=40))
def test_a_guess_is_what_followed_the_longest_run_where_it_stood_last(text):
    expected: tuple[int, ...] = ()
    for size in (4, 3, 2):
        starts = [
            i for i in range(len(text) - size) if text[i : i + size] == text[-size:]
        ]
        if starts and len(text) > size:
            extended = list(text)
            while len(extended) < len(text) + 3:
                extended.append(extended[starts[-1] + size + len(extended) - len(text)])
            expected = tuple(extended[len(text) :])
            break
    lookup = PromptLookup(GUESSING)
    for end in {len(text) // 2 or 1, len(text)}:
        found = lookup.guesses(text[:end])
    assert found == expected


def test_wrong_guesses_make_pauses_that_grow_and_a_right_one_ends_them():
    lookup = PromptLookup(GUESSING)
    text = [1, 2, 3] * 4
    pauses = []
    assert lookup.guesses(text) == (1, 2, 3)
    for _ in range(8):
        lookup.learn(3, 0, len(text))
        num_before = len(text)
        text += [1, 2, 3]
        while not lookup.guesses(text):
            text += [1, 2, 3]
        pauses.append(len(text) - num_before)
    assert pauses == sorted(pauses)
    assert MAX_PAUSE <= pauses[-1] < MAX_PAUSE + 3
    assert pauses[0] == 3
    lookup.learn(3, 1, len(text))
    text += [1]
    assert lookup.guesses(text)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_blocks", [100, 30])
def test_guesses_save_steps_and_leave_the_tokens_as_they_are(depth, num_blocks):
    """With few blocks, sequences are preempted, and what they said is a beginning."""
    prompts = {f"r{i}": [9, 8, 7, *range(i)] for i in range(3)}
    num_steps = []
    for num_guesses in (0, 3):
        one = drive(num_guesses, num_blocks=num_blocks)
        for name, prompt in prompts.items():
            one.scheduler.add(0.0, 0, local(name, prompt, max_tokens=40, num_choices=2))
        one.run(depth=depth)
        num_whole = 0
        for name, prompt in prompts.items():
            for choice in range(2):
                said = one.output(name, prompt, choice)
                assert said == continuation(prompt, len(said), choice, in_circles)
                num_whole += len(said) == 40
        assert num_whole == 6 if num_blocks == 100 else 0 < num_whole < 6
        num_steps.append(len(one.plans))
        counts = one.pool.counts
        assert (counts.spec_decode_accepted_tokens > 0) == bool(num_guesses)
        assert counts.spec_decode_accepted_tokens <= counts.spec_decode_draft_tokens
        assert one.pool.num_owned == 0
    assert num_steps[1] < 0.75 * num_steps[0]


def num_drafted(drafts: HeadDrafts, share: float, num_tokens: int) -> int:
    """How many drafts a head makes while a text of `num_tokens` grows, if it is right so often."""
    source = random.Random(0)
    length = 0
    total = 0
    guesses = 0
    while length < num_tokens:
        rights = itertools.takewhile(lambda _: source.random() < share, range(guesses))
        num_right = sum(1 for _ in rights)
        length += 1 + num_right
        if guesses:
            drafts.learn(guesses, num_right, length)
        guesses = drafts.num_drafts(length, num_guessing=4)
        drafts.take((7,) * guesses)
        guesses = len(drafts.guesses([0] * length))
        total += guesses
    return total


@pytest.mark.parametrize(
    ("cost", "share", "least", "most"),
    [
        (DraftCost(0.05), 0.9, 700, 1000),
        (DraftCost(0.1, 0.2), 0.8, 400, 850),
        (DraftCost(0.5), 0.1, 10, 90),
        (DraftCost(0.0, 1.0), 0.9, 10, 90),
    ],
)
def test_a_head_drafts_as_much_as_pays(cost, share, least, most):
    """Of a thousand tokens of one of four sequences.

    A head that is seldom right, or slow, is asked now and then alone.
    """
    limits = msgspec.structs.replace(GUESSING, draft_cost=cost)
    assert least <= num_drafted(HeadDrafts(limits), share, 1000) <= most
