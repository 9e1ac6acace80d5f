"""A head drafts on a device what it drafts on a host, eagerly and in steps that are replayed."""

import json
import os
import random
import sys

import msgspec
import pytest
import torch
from llguidance import LLMatcher

from baton.model.runner.cuda_start import buckets_up_to, with_guesses
from baton.model.runner.drafting import DeviceDrafter, Drafter
from baton.model.runner.packing import Bucket
from baton.model.runner.runner import Runner
from baton.model.sampling.token_masks import TokenMasks
from baton.node.scheduling.plan import Slice, StepPlan, StepResult
from baton.node.scheduling.scheduler import NodeLimits
from baton.protocol.config import EngineConfig
from baton.protocol.sampling import Penalties, Sampling
from tests.support.compute import no_progress
from tests.support.draft_heads import eagle_folder, eagle_model, nextn_folder
from tests.support.drive import key
from tests.support.graph_stand_in import SHAPE, RecordingQueue, stand_in
from tests.support.graph_world import World, write_characters
from tests.support.module_process import said_by

NUM_BLOCKS = 48
NUM_SCHEDULES = int(os.environ.get("BATON_SCHEDULES", "10"))
PROMPTS = [
    [3 + (7 * salt + 5 * i) % 90 for i in range(length)]
    for salt, length in enumerate((1, 4, 7, 13, 22))
]
# The noise of hot samples is that of their drafts, which are often right then.
SAMPLINGS = [
    Sampling(seed=5, max_tokens=9, temperature=0.0),
    Sampling(seed=6, max_tokens=20, temperature=9.0),
    Sampling(seed=7, max_tokens=20, temperature=40.0, logprobs=2),
    Sampling(seed=8, max_tokens=20, temperature=400.0, ignore_eos=True),
    Sampling(
        seed=9, max_tokens=12, min_tokens=6, temperature=40.0, stop_token_ids=(11, 40)
    ),
    Sampling(seed=10, max_tokens=12, penalties=Penalties(0.5, 0.7, 1.4)),
    Sampling(seed=11, max_tokens=20, temperature=40.0, bad_words=((7,), (9,))),
    Sampling(
        seed=12, max_tokens=9, grammar=LLMatcher.grammar_from_regex("[a-o]{2,9}-[1-9]+")
    ),
]
NUM_UNMASKED = 6  # the first ones
EOS = (1, 17)
PLAIN = NodeLimits(16, 6, 40, EOS, SHAPE.vocab_size)


def limits_of(num_drafts: int) -> NodeLimits:
    engine = EngineConfig(num_speculative_tokens=num_drafts, speculative_method="mtp")
    return msgspec.structs.replace(PLAIN, engine=engine)


def test_a_step_of_several_rows_is_replayed_with_one_row_of_the_head_each():
    """As beside a response that is computed again, and of which two tokens are left."""
    sampling = Sampling(seed=5, max_tokens=9, temperature=0.0)
    token_ids = tuple(range(5, 25))
    size = len(token_ids)

    def part(number: int, start: int, end: int, **more: object) -> Slice:
        blocks = tuple(range(1 + 8 * number, 9 + 8 * number))
        length = end - start
        part = Slice(key(str(number)), start, length, token_ids[start:end], blocks)
        return msgspec.structs.replace(part, num_prompt_tokens=4, **more)

    def said(buckets: tuple[Bucket, ...]) -> list[StepResult]:
        runner = stand_in(NUM_BLOCKS, RecordingQueue(), num_drafts=3)
        if buckets:
            runner.capture(buckets, no_progress)
        sample = {"samples": (0,), "sampling": sampling}
        steps = (
            tuple(
                part(number, 0, size - 2, following=token_ids[-2]) for number in (0, 1)
            ),
            (
                part(0, size - 2, size - 1, num_drafts=3, **sample),
                part(1, size - 2, size, **sample),
            ),
        )
        return [runner.execute(StepPlan(0, step)) for step in steps]

    eager, replayed = (
        said(()),
        said((Bucket(2, 2, num_drafts=3), Bucket(8, 2, True, 3))),
    )
    assert [one.tokens for one in replayed] == [one.tokens for one in eager]
    assert replayed[1].drafts == eager[1].drafts


@pytest.fixture(scope="module")
def masks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_characters(folder)
    return lambda: TokenMasks(folder, SHAPE.vocab_size, EOS)


def drafting(num_drafts: int, masks: TokenMasks, kind: str) -> Runner:
    """A runner whose head drafts on the host, or on the device in eager or replayed steps."""
    on_host = kind == "host"
    runner = stand_in(
        NUM_BLOCKS,
        RecordingQueue(),
        EOS,
        masks=masks,
        num_drafts=num_drafts,
        reads_chunks=on_host,
        has_counts=not on_host,
    )
    assert isinstance(runner.drafter, Drafter if on_host else DeviceDrafter)
    if kind == "replayed":
        buckets = buckets_up_to(PLAIN.max_num_seqs, 64)
        runner.capture(with_guesses(buckets, num_drafts, has_head=True), no_progress)
    # A grammar that is not compiled in time makes a step sample again.
    world = World(runner, random.Random(0), 1, limits_of(num_drafts), "grammar-")
    world.ask(PROMPTS[0], SAMPLINGS[-1])
    while world.turn():
        pass
    return runner


@pytest.fixture(scope="module")
def expected(masks):
    """What each of two choices says without drafts, by the numbers of prompt and sampling."""
    runner = stand_in(NUM_BLOCKS, RecordingQueue(), EOS, masks=masks())
    said = {}
    for prompt in range(len(PROMPTS)):
        for sampling in range(len(SAMPLINGS)):
            world = World(runner, random.Random(0), 1, PLAIN, f"{prompt}-{sampling}-")
            world.ask(PROMPTS[prompt], SAMPLINGS[sampling], 2)
            while world.turn():
                pass
            said[prompt, sampling] = [*world.said.values()]
    return said


def can_be_replayed(plan: StepPlan) -> bool:
    """Whether a step has guesses, and all its sequences decode."""
    parts = plan.slices
    return any(part.num_guesses for part in parts) and all(
        part.num_drafts is not None for part in parts
    )


@pytest.mark.parametrize("num_drafts", [1, 2, 3])
def test_drafts_on_a_device_are_those_on_a_host_and_change_no_token(
    num_drafts, masks, expected
):
    """Choices, chunks, cached prefixes, preemption, cancels, penalties and masks."""
    kinds = ("host", "eager", "replayed")
    runners = [drafting(num_drafts, masks(), kind) for kind in kinds]
    num_right = num_cut = num_replayed = num_drafted = 0
    for schedule in range(NUM_SCHEDULES):
        worlds = []
        for runner in runners:
            luck = random.Random(schedule)
            limits = limits_of(num_drafts)
            world = World(runner, luck, 1 + schedule % 2, limits, f"{schedule}-")
            few = SAMPLINGS[: luck.choice((NUM_UNMASKED, len(SAMPLINGS)))]
            world.play(PROMPTS, few, most_choices=2)
            worlds.append(world)
        host = worlds[0]
        for world in worlds[1:]:
            for (plan, result, _), (other, theirs, _) in zip(
                world.done, host.done, strict=True
            ):
                assert plan.slices == other.slices
                assert result.tokens == theirs.tokens
                assert result.drafts == theirs.drafts, (schedule, plan.step_id)
                num_drafted += sum(len(drafts) for _, drafts in result.drafts)
            stored, others = (one.runner.cache.pool[:-1] for one in (world, host))
            torch.testing.assert_close(stored, others)
        for of, (prompt, sampling) in host.asked.items():
            choices = expected[PROMPTS.index(prompt), SAMPLINGS.index(sampling)]
            own = choices[of.choice]
            said = host.said[of]
            assert said == (own[: len(said)] if of in host.cut else own), of
        for plan, _, is_replayed in worlds[2].done:
            if can_be_replayed(plan):
                assert is_replayed, plan
                num_replayed += 1
        assert host.pool.num_owned == 0
        num_right += host.pool.counts.spec_decode_accepted_tokens
        num_cut += len(host.cut)
    assert num_replayed > 5 * NUM_SCHEDULES
    assert num_right > 5 * NUM_SCHEDULES
    assert num_drafted > 5 * num_right
    assert num_cut > NUM_SCHEDULES / 4


STATES = {
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 32,
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "kind",
    [
        "deepseek_v32",
        "qwen3_5_text",
        *(
            pytest.param(kind, marks=pytest.mark.release)
            for kind in ("deepseek_v3", "glm4_moe", "glm_moe_dsa", "eagle3")
        ),
    ],
)
def test_the_kernels_of_gpus_draft_what_those_of_cpus_do(kind):
    """Chunks of prompts, repeated tokens and guesses, in Triton's interpreter."""
    if sys.platform != "linux":
        pytest.skip("Triton runs on Linux only")
    match kind:
        case "eagle3":
            words = f"{eagle_model()},{eagle_folder()},float32,16"
        case "qwen3_5_text":
            words = f"{nextn_folder(kind, **STATES)},,bfloat16,64"
        case "glm4_moe":
            words = f"{nextn_folder(kind, head_dim=32)},,float32,16"
        case _:
            words = f"{nextn_folder(kind)},,float32,16"
    *_, line = said_by(
        "tests.support.interpret_drafts", words, env={"TRITON_INTERPRET": "1"}
    )
    (found,) = json.loads(line)
    texts = [one["texts"] for one in found.values()]
    assert texts == texts[:1] * 4
    host, eager, replayed, none = found.values()
    assert host["drafts"] == eager["drafts"] == replayed["drafts"]
    assert host["num_right"] > 3
    assert host["num_steps"] < none["num_steps"]
    assert replayed["num_replays"] > 3
