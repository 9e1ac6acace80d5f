"""What the self-test scripts: good answers of every shape, and every way to fail, with its outcome.

`selftest` plays them and holds the client to them. Each fault comes a number of times that tells it
from its neighbours. Drawn from a seed, so a deviation can be had again. Pure.
"""

import random
from collections.abc import Callable
from typing import Literal

import msgspec

from baton.bench.client.target import Api
from baton.bench.records import Message, Outcome, Planned
from baton.bench.selftest.scripts import Chunk, Ending, Script, paced, steady

FIRST_NUMBER = 10_000  # of the scripts; warm-up prompts lie below
# What a server returns: the ids, or usage in every chunk, or text alone and usage at the end.
Counting = Literal["token_ids", "running_usage", "text"]
TIMEOUT_S = 4.0  # far above every good answer; a silent one lasts so long
RETRY_AFTER_S = 2.0
FILLER_IDS = 24
NUM_WARM_UP = 4  # prompts without a script


class Case(msgspec.Struct, frozen=True):
    """One request, its answer and what must come of it."""

    name: str
    script: Script
    output_tokens: int  # as many are asked for
    outcome: Outcome = Outcome.ANSWERED


class Mix(msgspec.Struct, frozen=True):
    """Of one load: how it asks, and by what the client can count tokens."""

    api: Api
    counting: Counting
    num_good: int
    rate: float
    seed: int
    timeout_s: float = TIMEOUT_S
    concurrency: int | None = None  # as many at once; others wait, and that is their latency


Shape = Callable[[random.Random], Script]


def _gaps(dice: random.Random, count: int) -> list[float]:
    return [dice.uniform(4.0, 12.0) for _ in range(count)]


def _plain(dice: random.Random) -> Script:
    count = dice.randint(8, 40)
    return Script(chunks=paced(dice.uniform(20, 120), _gaps(dice, count - 1), [1] * count))


def _merged(dice: random.Random) -> Script:
    """Chunks of several tokens, the first one too. All of one size, so that text tells as much."""
    count, size = dice.randint(3, 10), dice.randint(2, 6)
    return Script(chunks=paced(dice.uniform(20, 120), _gaps(dice, count - 1), [size] * count))


def _uneven(dice: random.Random) -> Script:
    sizes = [dice.choice((1, 1, 2, 5)) for _ in range(dice.randint(4, 12))]
    chunks = paced(dice.uniform(20, 120), _gaps(dice, len(sizes) - 1), sizes)
    return Script(chunks=chunks, cached_tokens=dice.randint(1, FILLER_IDS))


def _burst(dice: random.Random) -> Script:
    """Several events in one write, again and again."""
    chunks: list[Chunk] = []
    at_ms = dice.uniform(20, 120)
    for _ in range(dice.randint(3, 6)):
        chunks += [Chunk(at_ms)] * dice.randint(2, 5)
        at_ms += dice.uniform(20, 50)
    return Script(chunks=tuple(chunks))


def _stall(dice: random.Random) -> Script:
    gaps = _gaps(dice, 19)
    gaps[dice.randrange(19)] = dice.uniform(150, 400)
    return Script(chunks=paced(dice.uniform(20, 120), gaps, [1] * 20))


def _empty_first(dice: random.Random) -> Script:
    """An opening without tokens long before the first one, headers before that."""
    first_ms = dice.uniform(80, 160)
    chunks = (Chunk(first_ms / 2, 0), *steady(first_ms, dice.uniform(5, 9), 12))
    return Script(chunks=chunks, headers_ms=first_ms / 4, own_finish=True)


def _late_end(dice: random.Random) -> Script:
    """Finish, usage and [DONE] come well after the last token."""
    chunks = steady(dice.uniform(20, 120), 7.0, 10)
    end_ms = chunks[-1].at_ms + dice.uniform(30, 90)
    return Script(chunks=chunks, end_ms=end_ms, own_finish=True)


def _split(dice: random.Random) -> Script:
    first_ms = dice.uniform(40, 120)
    chunks = tuple(Chunk(first_ms + 14.0 * step, 1, dice.randint(1, 4)) for step in range(10))
    return Script(chunks=chunks, crlf=dice.random() < 0.5)


def _crlf(dice: random.Random) -> Script:
    return msgspec.structs.replace(_plain(dice), crlf=True)


def _comments(dice: random.Random) -> Script:
    chunks = steady(dice.uniform(60, 120), 8.0, 12)
    waiting = (Chunk(10.0, 0, comment=True), Chunk(20.0, 0, 2, comment=True))
    between = Chunk(chunks[5].at_ms + 4.0, 0, comment=True)
    return Script(chunks=(*waiting, *chunks[:6], between, *chunks[6:]))


def _until_close(dice: random.Random) -> Script:
    return msgspec.structs.replace(_plain(dice), chunked=False)


def _drip(dice: random.Random) -> Script:
    chunks = steady(dice.uniform(40, 120), 30.0, 5)
    return Script(chunks=chunks, drip_bytes=dice.choice((31, 37, 61)))


def _single(dice: random.Random) -> Script:
    return Script(chunks=(Chunk(dice.uniform(20, 120)),))


def _at_once(dice: random.Random) -> Script:
    """All tokens in one chunk: there is no gap and no TPOT."""
    return Script(chunks=(Chunk(dice.uniform(20, 120), 6),))


def _no_usage(dice: random.Random) -> Script:
    return msgspec.structs.replace(_plain(dice), usage="none")


SHAPES: dict[str, Shape] = {
    "plain": _plain,
    "merged": _merged,
    "burst": _burst,
    "stall": _stall,
    "empty first delta": _empty_first,
    "late end": _late_end,
    "split events": _split,
    "CRLF": _crlf,
    "comments": _comments,
    "ends by closing": _until_close,
    "drips": _drip,
    "single token": _single,
    "all at once": _at_once,
    "no usage": _no_usage,
}
# Nobody could tell these tokens by text.
COUNTED_SHAPES: dict[str, Shape] = {"uneven": _uneven}

SOME = steady(15.0, 6.0, 6)
_FAULTS: dict[str, tuple[Outcome, Script]] = {
    "cut": (Outcome.TRUNCATED, Script(chunks=SOME, ending=Ending.CUT)),
    "reset": (Outcome.TRUNCATED, Script(chunks=SOME, ending=Ending.RESET)),
    "cut in an event": (Outcome.TRUNCATED, Script(chunks=SOME, ending=Ending.HALF_EVENT)),
    "cut before a token": (Outcome.TRUNCATED, Script(headers_ms=10.0, ending=Ending.CUT)),
    "closed without a word": (Outcome.TRUNCATED, Script(ending=Ending.CUT)),
    "no [DONE]": (Outcome.TRUNCATED, Script(chunks=SOME, ending=Ending.NO_DONE)),
    "silence": (Outcome.TIMED_OUT, Script(chunks=SOME, ending=Ending.SILENCE)),
    "error event": (Outcome.ERROR_IN_STREAM, Script(chunks=SOME, ending=Ending.ERROR)),
    "error, then [DONE]": (
        Outcome.ERROR_IN_STREAM,
        Script(chunks=SOME, ending=Ending.ERROR_THEN_DONE),
    ),
    "no JSON": (Outcome.MALFORMED, Script(chunks=SOME, ending=Ending.MALFORMED)),
    "foreign JSON": (Outcome.MALFORMED, Script(chunks=SOME, ending=Ending.FOREIGN)),
    "one JSON body": (Outcome.NOT_STREAMED, Script(chunks=SOME, body="json")),
    "one HTML body": (Outcome.MALFORMED, Script(chunks=SOME, body="html")),
    "429": (Outcome.REFUSED, Script(status=429, retry_after_s=RETRY_AFTER_S)),
    "503": (Outcome.REFUSED, Script(status=503)),
    "400": (Outcome.CLIENT_ERROR, Script(status=400)),
    "404": (Outcome.CLIENT_ERROR, Script(status=404)),
    "500": (Outcome.SERVER_ERROR, Script(status=500)),
    "502": (Outcome.SERVER_ERROR, Script(status=502)),
    "usage too low": (Outcome.WRONG_USAGE, Script(chunks=SOME, usage_error=-2)),
    "usage too high": (Outcome.WRONG_USAGE, Script(chunks=SOME, usage_error=3)),
    "no token at all": (Outcome.WRONG_LENGTH, Script(end_ms=20.0)),
}


def make_cases(mix: Mix) -> list[Case]:
    """In the order of their arrival."""
    dice = random.Random(mix.seed)
    shapes = SHAPES if mix.counting == "text" else SHAPES | COUNTED_SHAPES
    names = list(shapes)
    cases = []
    for position in range(mix.num_good):
        name = names[position % len(names)]
        script = shapes[name](dice)
        cases.append(Case(name, script, script.num_tokens))
    for position, (name, (outcome, script)) in enumerate(_FAULTS.items()):
        cases += [Case(name, script, len(SOME), outcome)] * (1 + position % 3)
    complete = Script(chunks=SOME)
    cases += [Case("too few tokens", complete, len(SOME) + 2, Outcome.WRONG_LENGTH)] * 2
    cases += [Case("too many tokens", complete, len(SOME) - 2, Outcome.WRONG_LENGTH)] * 3
    dice.shuffle(cases)
    return [_counted_by_usage(case) if mix.counting == "running_usage" else case for case in cases]


def _counted_by_usage(case: Case) -> Case:
    if case.script.usage != "final":
        return case
    running = msgspec.structs.replace(case.script, usage="continuous")
    return msgspec.structs.replace(case, script=running)


def plan(cases: list[Case], mix: Mix) -> list[Planned]:
    """Poisson arrivals, the seed's; request `index` is case `index`. Warm-up comes before zero."""
    planned = [
        _planned(len(cases) + index, 0.1 * (index - NUM_WARM_UP), index + 1, len(SOME), mix)
        for index in range(NUM_WARM_UP)
    ]
    planned = [msgspec.structs.replace(one, warm_up=True) for one in planned]
    dice = random.Random(mix.seed + 1)
    at_s = 0.0
    for index, case in enumerate(cases):
        at_s += dice.expovariate(mix.rate)
        planned.append(_planned(index, at_s, FIRST_NUMBER + index, case.output_tokens, mix))
    return planned


def _planned(index: int, at_s: float, number: int, output_tokens: int, mix: Mix) -> Planned:
    if mix.api == "chat":
        said = (Message("user", f"play script {number}"),)
        return Planned(index, at_s, output_tokens, messages=said)
    return Planned(index, at_s, output_tokens, prompt_ids=(number, *range(1, FILLER_IDS)))
