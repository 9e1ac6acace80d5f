"""Prompts of which no token is wanted, on a scheduler whose model has one number for each token."""

from array import array

import msgspec
import pytest

from baton.node.scheduling.plan import NOT_FINITE, Slice, StepPlan
from baton.node.scheduling.pooling import SUM_SCALE
from baton.protocol.messages import Decode, Failed, Pooled, Prefill
from baton.protocol.pooling import ModelTasks, Pooling
from tests.support.drive import (
    LIMITS,
    Drive,
    decode_drive,
    key,
    prefill_drive,
    result_of,
    sampling,
)

EMBEDS = ModelTasks(embedding="last", num_labels=1)


def drive_of(pooling: Pooling = "last", num_blocks: int = 64) -> Drive:
    tasks = ModelTasks(
        embedding=None if pooling == "classify" else pooling, num_labels=1
    )
    return prefill_drive(num_blocks, msgspec.structs.replace(LIMITS, tasks=tasks))


def to_pool(name: str, prompt: list[int], pooling: Pooling = "last") -> Prefill:
    return Prefill(key(name), prompt, len(prompt), sampling(1, pooling=pooling))


def made_of(part: Slice) -> bytes:
    assert not part.samples
    if part.pooling == "mean":
        return array("q", [sum(part.token_ids) * SUM_SCALE]).tobytes()
    return array("f", [part.token_ids[0 if part.pooling == "cls" else -1]]).tobytes()


def settle(
    drive: Drive, plan: StepPlan, failed: tuple[tuple[int, str], ...] = ()
) -> None:
    parts = enumerate(plan.slices)
    pooled = tuple(
        (index, made_of(part)) for index, part in parts if part.pooling is not None
    )
    result = msgspec.structs.replace(
        result_of(drive.model, plan), pooled=pooled, failed=failed
    )
    drive.scheduler.settle(drive.now_s, plan, result)


def run(drive: Drive, depth: int = 1) -> dict[str, Pooled]:
    launched: list[StepPlan] = []
    while True:
        while len(launched) < depth and (plan := drive.launch()) is not None:
            launched.append(plan)
        if not launched:
            said = [one for one in drive.said if isinstance(one, Pooled)]
            return {str(one.key.request_id): one for one in said}
        settle(drive, launched.pop(0))


def number(pooled: Pooled) -> float:
    (found,) = array("f", pooled.numbers)
    return found


PROMPTS = {"a": list(range(1, 41)), "b": list(range(7, 19)), "c": [5]}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("pooling", ["last", "mean", "cls", "classify"])
def test_each_prompt_is_pooled_once_and_gives_its_blocks_back(pooling, depth):
    drive = drive_of(pooling)
    for name, prompt in PROMPTS.items():
        drive.scheduler.add(0.0, 0, to_pool(name, prompt, pooling))
    pooled = run(drive, depth)
    expected = {
        name: {"mean": sum(ids) / len(ids), "cls": ids[0]}.get(pooling, ids[-1])
        for name, ids in PROMPTS.items()
    }
    assert {name: number(one) for name, one in pooled.items()} == expected
    assert len(drive.said) == len(PROMPTS)
    assert drive.pool.num_owned == 0
    assert not drive.asked


@pytest.mark.parametrize(
    ("pooling", "num_cached"), [("last", 36), ("classify", 36), ("mean", 0)]
)
def test_a_cached_prefix_is_used_where_its_rows_are_not_needed(pooling, num_cached):
    drive = drive_of(pooling)
    for name in "ab":
        drive.scheduler.add(0.0, 0, to_pool(name, PROMPTS["a"], pooling))
        pooled = run(drive)
    assert pooled["b"].times.num_cached_tokens == num_cached
    assert pooled["a"].numbers == pooled["b"].numbers


def test_a_cancelled_prompt_and_one_that_is_not_finite_say_nothing_more():
    drive = drive_of("mean")
    for name, prompt in PROMPTS.items():
        drive.scheduler.add(0.0, 0, to_pool(name, prompt, "mean"))
    plan = drive.launch()
    assert plan is not None
    drive.scheduler.cancel(0, (key("a"),))
    settle(drive, plan)
    plan = drive.launch()
    assert plan is not None
    settle(drive, plan, failed=((0, NOT_FINITE),))
    assert run(drive).keys() == {"c"}
    (failed,) = (one for one in drive.said if isinstance(one, Failed))
    assert (failed.key, failed.failure.code) == (key("b"), "not_finite")
    assert drive.pool.num_owned == 0


def refusal(message: Prefill | Decode, drive: Drive) -> str:
    drive.scheduler.add(0.0, 0, message)
    assert drive.launch() is None
    (failed,) = (one for one in drive.said if isinstance(one, Failed))
    return failed.failure.code


def test_what_cannot_be_pooled_is_refused():
    prompt = to_pool("a", [1, 2, 3])
    ask = msgspec.structs.replace
    handed = ask(prompt, decode_node="d0")
    assert refusal(handed, drive_of()) == "malformed_message"
    assert refusal(ask(prompt, num_choices=2), drive_of()) == "malformed_message"
    assert refusal(prompt, prefill_drive()) == "unsupported"
    assert refusal(prompt, drive_of("mean")) == "unsupported"
    local = Decode(key("a"), [1, 2, 3], 3, sampling(1, pooling="last"))
    limits = ask(LIMITS, tasks=EMBEDS)
    assert refusal(local, decode_drive(limits=limits)) == "malformed_message"
    no_tokens = ask(LIMITS, tasks=ModelTasks(generates=False, embedding="last"))
    generates = Prefill(key("a"), [1, 2, 3], 3, sampling(1))
    assert refusal(generates, prefill_drive(limits=no_tokens)) == "unsupported"


def test_a_prompt_to_pool_may_be_as_long_as_the_model_takes():
    longest = [1] * LIMITS.max_model_len
    drive = drive_of()
    drive.scheduler.add(0.0, 0, to_pool("a", longest))
    assert number(run(drive)["a"]) == 1
    assert refusal(to_pool("b", [*longest, 1]), drive_of()) == "context_length_exceeded"
