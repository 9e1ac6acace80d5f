"""What the self-test plays: good answers of every shape, and every way to fail, with its outcome.

`selftest` holds the client to them. Each fault comes a number of times that tells it from its
neighbours. All is drawn from a seed, so a deviation can be had again. Pure.
"""

import random
from collections.abc import Callable
from typing import Literal

import msgspec

from baton.bench.client.target import Api
from baton.bench.records import Message, Outcome, Planned
from baton.bench.selftest.answers import DONE, error, event
from baton.bench.selftest.scripts import Chunk, Script, answer_ids, paced, steady

FIRST_NUMBER = 10_000  # of the scripts; warm-up prompts lie below
# What a server returns: the ids, or usage in every chunk, or text alone and usage at the end.
Counting = Literal["token_ids", "running_usage", "text"]
TIMEOUT_S = 4.0  # far above every good answer; a silent one lasts so long
FILLER_IDS = 24
NUM_WARM_UP = 4  # prompts without a script


class Mix(msgspec.Struct, frozen=True):
    """How one load asks, and by what the client can count tokens."""

    api: Api
    counting: Counting
    num_good: int
    rate: float
    seed: int
    timeout_s: float = TIMEOUT_S
    concurrency: int | None = None  # as many at once; others wait, and that is their latency


class Case(msgspec.Struct, frozen=True):
    """One request, its answer, and what the client has to make of it."""

    name: str
    script: Script
    output_tokens: int  # as many are asked for
    outcome: Outcome = Outcome.ANSWERED

    def expected(self, number: int, counting: Counting) -> dict[str, object]:
        """Return the fields of the record that the script decides."""
        script = self.script
        expected: dict[str, object] = {"outcome": self.outcome}
        if script.status != 200:
            expected |= {"status": script.status, "retry_after_s": script.retry_after_s}
        if self.outcome is Outcome.ANSWERED:
            expected["num_tokens"] = script.num_tokens
            expected["output_tokens"] = script.num_tokens if script.usage else None
            expected["cached_tokens"] = script.cached_tokens if script.usage else None
            if counting == "token_ids":
                expected["token_ids"] = answer_ids(number, script.num_tokens)
        return expected


Shape = Callable[[random.Random], Script]


def _paced(dice: random.Random, sizes: list[int], stall_ms: float = 0.0) -> tuple[Chunk, ...]:
    gaps = [dice.uniform(4.0, 12.0) for _ in sizes[1:]]
    if stall_ms:
        gaps[dice.randrange(len(gaps))] = stall_ms
    return paced(dice.uniform(20, 120), gaps, sizes)


def _burst(dice: random.Random) -> Script:
    """Return several events in one write, again and again."""
    moments = [dice.uniform(20, 120)]
    for _ in range(dice.randint(2, 5)):
        moments.append(moments[-1] + dice.uniform(20, 50))
    return Script(tuple(Chunk(at_ms) for at_ms in moments for _ in range(dice.randint(2, 5))))


def _empty_first(dice: random.Random) -> Script:
    """Return an opening without tokens long before the first one."""
    first_ms = dice.uniform(80, 160)
    return Script((Chunk(first_ms / 2, 0), *steady(first_ms, dice.uniform(5, 9), 12)))


def _late_end(dice: random.Random) -> Script:
    """Return an answer whose usage and [DONE] come well after its last token."""
    chunks = steady(dice.uniform(20, 120), 7.0, 10)
    return Script(chunks, end_ms=chunks[-1].at_ms + dice.uniform(30, 90))


def _uneven(dice: random.Random) -> Script:
    """Return chunks of several sizes, which text could not tell."""
    sizes = [dice.choice((1, 1, 2, 5)) for _ in range(dice.randint(4, 12))]
    return Script(_paced(dice, sizes), cached_tokens=dice.randint(1, FILLER_IDS))


SHAPES: dict[str, Shape] = {
    "plain": lambda dice: Script(_paced(dice, [1] * dice.randint(8, 40))),
    # Chunks of several tokens, the first one too. All of one size, so that text tells as much.
    "merged": lambda dice: Script(_paced(dice, [dice.randint(2, 6)] * dice.randint(3, 10))),
    "burst": _burst,
    "stall": lambda dice: Script(_paced(dice, [1] * 20, stall_ms=dice.uniform(150, 400))),
    "empty first delta": _empty_first,
    "late end": _late_end,
    "single token": lambda dice: Script((Chunk(dice.uniform(20, 120)),)),
    # There is no gap and no TPOT.
    "all at once": lambda dice: Script((Chunk(dice.uniform(20, 120), 6),)),
    "no usage": lambda dice: Script(_paced(dice, [1] * dice.randint(8, 40)), usage=False),
    "uneven": _uneven,
}

SOME = steady(15.0, 6.0, 6)
ERROR = event({"error": {"message": "scripted failure", "type": "server_error"}})
FAULTS: dict[str, tuple[Outcome, Script]] = {
    "cut": (Outcome.TRUNCATED, Script(SOME, b"", "close")),
    "reset": (Outcome.TRUNCATED, Script(SOME, b"", "reset")),
    "cut in an event": (Outcome.TRUNCATED, Script(SOME, b'data: {"choices": [{"ind', "close")),
    "cut before a token": (Outcome.TRUNCATED, Script((Chunk(10.0, 0),), b"", "close")),
    "closed without a word": (Outcome.TRUNCATED, Script((), b"", "close")),
    "no [DONE]": (Outcome.TRUNCATED, Script(SOME, b"")),
    "silence": (Outcome.TIMED_OUT, Script(SOME, b"", "hang")),
    "error event": (Outcome.ERROR_IN_STREAM, Script(SOME, ERROR)),
    "error, then [DONE]": (Outcome.ERROR_IN_STREAM, Script(SOME, ERROR + DONE)),
    "no JSON": (Outcome.MALFORMED, Script(SOME, b'data: {"choices":[{"index":0,\n\n' + DONE)),
    "foreign JSON": (Outcome.MALFORMED, Script(SOME, event({"status": "busy"}) + DONE)),
    "one JSON body": (Outcome.NOT_STREAMED, Script(SOME, body=b'{"choices": []}')),
    "one HTML body": (Outcome.MALFORMED, Script(SOME, body=b"<html/>", kind="text/html")),
    "429": (Outcome.REFUSED, Script(status=429, body=error("full"), retry_after_s=2.0)),
    "503": (Outcome.REFUSED, Script(status=503, body=error("full"))),
    "400": (Outcome.CLIENT_ERROR, Script(status=400, body=error("wrong"))),
    "404": (Outcome.CLIENT_ERROR, Script(status=404, body=error("not here"))),
    "500": (Outcome.SERVER_ERROR, Script(status=500, body=error("broken"))),
    "502": (Outcome.SERVER_ERROR, Script(status=502, body=error("broken"))),
    "usage too low": (Outcome.WRONG_USAGE, Script(SOME, usage_error=-2)),
    "usage too high": (Outcome.WRONG_USAGE, Script(SOME, usage_error=3)),
    "no token at all": (Outcome.WRONG_LENGTH, Script(end_ms=20.0)),
}


def make_cases(mix: Mix) -> list[Case]:
    """Return the cases in the order of their arrival."""
    dice = random.Random(mix.seed)
    names = [name for name in SHAPES if mix.counting != "text" or name != "uneven"]
    cases = []
    for position in range(mix.num_good):
        script = SHAPES[name := names[position % len(names)]](dice)
        cases.append(Case(name, script, script.num_tokens))
    for position, (name, (outcome, script)) in enumerate(FAULTS.items()):
        cases += [Case(name, script, len(SOME), outcome)] * (1 + position % 3)
    complete = Script(SOME)
    cases += [Case("too few tokens", complete, len(SOME) + 2, Outcome.WRONG_LENGTH)] * 2
    cases += [Case("too many tokens", complete, len(SOME) - 2, Outcome.WRONG_LENGTH)] * 3
    dice.shuffle(cases)
    return cases


def plan(cases: list[Case], mix: Mix) -> list[Planned]:
    """Return Poisson arrivals; request `index` is case `index`. Warm-up comes before zero."""
    planned = [
        _planned(len(cases) + place, -0.1 * (place + 1), place, len(SOME), mix)
        for place in range(NUM_WARM_UP)
    ]
    dice = random.Random(mix.seed + 1)
    at_s = 0.0
    for index, case in enumerate(cases):
        at_s += dice.expovariate(mix.rate)
        planned.append(_planned(index, at_s, FIRST_NUMBER + index, case.output_tokens, mix))
    return planned


def _planned(index: int, at_s: float, number: int, output_tokens: int, mix: Mix) -> Planned:
    """Return a request for a script; the numbers of the warm-up have none."""
    said, ids = (Message("user", f"play script {number}"),), (number, *range(1, FILLER_IDS))
    is_chat = mix.api == "chat"
    return Planned(
        index=index,
        at_s=at_s,
        output_tokens=output_tokens,
        prompt_ids=() if is_chat else ids,
        messages=said if is_chat else (),
        warm_up=at_s < 0,
    )
