"""The cases of the self-test: what servers do that a harness can get wrong, with the right outcome.

Each fault comes a different number of times, which distinguishes it from others. Everything is
drawn from a seed, and nothing here does I/O.
"""

import random
from collections.abc import Callable

import msgspec

from baton.bench.records import Message, Outcome, Planned
from baton.bench.selftest.answers import DONE, Chunk, Script, event, paced, steady, usage

FIRST_NUMBER = 10_000  # the number of the first script; warm-up prompts have lower ones
FILLER_IDS = 24
NUM_WARM_UP = 4  # prompts without a script


class Mix(msgspec.Struct, frozen=True):
    """The requests of one load.

    Tokens are counted by their ids in completions, and by chunks of text in chats.
    """

    counts_ids: bool
    num_good: int
    rate: float
    seed: int
    timeout_s: float = 4.0  # far above every good answer; a silent answer lasts this long
    processes: int = 1


class Case(msgspec.Struct, frozen=True):
    """One request, its answer, and the outcome that the client has to record."""

    name: str
    script: Script
    output_tokens: int  # the number of tokens asked for
    outcome: Outcome = Outcome.ANSWERED


def _gaps(dice: random.Random, count: int) -> list[float]:
    return [dice.uniform(4.0, 12.0) for _ in range(count)]


def _stall(dice: random.Random) -> Script:
    gaps = _gaps(dice, 20)
    gaps[dice.randrange(len(gaps))] = dice.uniform(150, 400)
    return Script(paced(dice.uniform(20, 120), gaps, [1] * 21))


def _merged(dice: random.Random) -> Script:
    """Return chunks of several tokens, the first too; of one size, so that text suffices."""
    count, size = dice.randint(3, 10), dice.randint(2, 6)
    chunks = paced(dice.uniform(20, 120), _gaps(dice, count - 1), [size] * count)
    return Script(chunks, cached_tokens=dice.randint(1, FILLER_IDS))


def _burst(dice: random.Random) -> Script:
    """Return several events in one write, again and again."""
    moments = [dice.uniform(20, 120)]
    for _ in range(dice.randint(2, 5)):
        moments.append(moments[-1] + dice.uniform(20, 50))
    return Script(tuple(Chunk(at_ms) for at_ms in moments for _ in range(dice.randint(2, 5))))


def _empty_first_late_end(dice: random.Random) -> Script:
    """Return an opening long before the first token, and the end well after the last one."""
    first_ms = dice.uniform(80, 160)
    chunks = (Chunk(first_ms / 2, 0), *steady(first_ms, dice.uniform(5, 9), 12))
    return Script(chunks, end_ms=chunks[-1].at_ms + dice.uniform(30, 90))


SHAPES: dict[str, Callable[[random.Random], Script]] = {
    "stall": _stall,
    "merged chunks": _merged,
    "burst": _burst,
    "empty first delta, late end": _empty_first_late_end,
    "single token": lambda dice: Script((Chunk(dice.uniform(20, 120)),)),  # no gap and no TPOT
}
SOME = steady(15.0, 6.0, 6)
NUM = len(SOME)
FAILED = event({"error": {"message": "scripted failure", "type": "server_error"}})
FAULTS = (
    Case("cut in an event", Script(SOME, b'data: {"ch', "close"), NUM, Outcome.TRUNCATED),
    Case("silence", Script(SOME, b"", "hang"), NUM, Outcome.TIMED_OUT),
    Case("error, then [DONE]", Script(SOME, FAILED + DONE), NUM, Outcome.ERROR_IN_STREAM),
    Case("no JSON", Script(SOME, b"data: {]\n\n" + DONE), NUM, Outcome.MALFORMED),
    Case("usage too high", Script(SOME, usage(NUM + 3) + DONE), NUM, Outcome.WRONG_USAGE),
    Case("too few tokens", Script(SOME), NUM + 2, Outcome.WRONG_LENGTH),
)


def make_cases(mix: Mix) -> list[Case]:
    """Return the cases in the order of their arrival."""
    dice = random.Random(mix.seed)
    cases = []
    for position in range(mix.num_good):
        script = SHAPES[name := list(SHAPES)[position % len(SHAPES)]](dice)
        cases.append(Case(name, script, script.num_tokens))
    for position, fault in enumerate(FAULTS):
        cases += [fault] * (1 + position % 3)
    dice.shuffle(cases)
    return cases


def plan(cases: list[Case], mix: Mix) -> list[Planned]:
    """Return Poisson arrivals; request `index` is case `index`. The warm-up comes before zero."""
    planned = [
        _planned(len(cases) + place, -0.1 * (place + 1), place, NUM, mix)
        for place in range(NUM_WARM_UP)
    ]
    dice, at_s = random.Random(mix.seed + 1), 0.0
    for index, case in enumerate(cases):
        at_s += dice.expovariate(mix.rate)
        planned.append(_planned(index, at_s, FIRST_NUMBER + index, case.output_tokens, mix))
    return planned


def _planned(index: int, at_s: float, number: int, output_tokens: int, mix: Mix) -> Planned:
    """Return a request for a script; the numbers of the warm-up have none."""
    return Planned(
        index=index,
        at_s=at_s,
        output_tokens=output_tokens,
        prompt_ids=(number, *range(1, FILLER_IDS)) if mix.counts_ids else (),
        messages=() if mix.counts_ids else (Message("user", f"play script {number}"),),
        warm_up=at_s < 0,
    )
