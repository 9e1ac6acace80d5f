"""What a step does besides computing: copies, generations, draws, and the token it remembers."""

from collections.abc import Iterator

import pytest
import torch

from baton.engine.plan import Slice, StepPlan
from baton.engine.runner import REMEMBERED_STEPS, Runner
from baton.protocol.errors import InvariantBroken
from baton.protocol.sampling import Sampling
from tests.support.checkpoints import model_folder
from tests.support.compute import Text, compute_config, loaded, logits, next_step, random_tokens

PROMPT = random_tokens(37)


@pytest.fixture
def runner() -> Iterator[Runner]:
    with loaded(compute_config(model_folder("qwen3", num_layers=2), num_blocks=32)) as it:
        yield it


@pytest.fixture
def text() -> Text:
    return Text("r", PROMPT, (9, 4, 7, 2))


def test_a_token_that_a_plan_leaves_out_is_the_last_one_sampled(runner: Runner, text: Text) -> None:
    first = runner.execute(StepPlan(1, (text.chunk(0, 37, draw=True),))).tokens[0]
    second = runner.execute(StepPlan(2, (next_step(text, 37),))).tokens[0]
    told = Text("told", [*PROMPT, *first], (20, 21, 22, 23))
    expected = logits(runner, told.chunk(0, 38))[0]
    assert [*first, *second] == expected[-2:].argmax(dim=-1).tolist()


def test_a_step_without_draws_does_not_hide_the_last_token(runner: Runner, text: Text) -> None:
    runner.execute(StepPlan(1, (text.chunk(0, 37, draw=True),)))
    other = Text("other", random_tokens(20, seed=1), (11, 12))
    assert runner.execute(StepPlan(2, (other.chunk(0, 20),))).tokens == ((),)
    mixed = StepPlan(3, (other.chunk(0, 20), next_step(text, 37)))
    assert [len(tokens) for tokens in runner.execute(mixed).tokens] == [0, 1]


def test_tokens_are_not_remembered_for_ever(runner: Runner, text: Text) -> None:
    runner.execute(StepPlan(1, (text.chunk(0, 37, draw=True),)))
    for step_id in range(2, 2 + REMEMBERED_STEPS):
        runner.execute(StepPlan(step_id, (text.chunk(0, 5),)))
    with pytest.raises(InvariantBroken, match="no token was sampled"):
        runner.execute(StepPlan(9, (next_step(text, 37),)))


def test_every_choice_of_a_prompt_draws_and_is_remembered_apart(runner: Runner, text: Text) -> None:
    noisy = Sampling(seed=5, max_tokens=99, temperature=5.0)
    chunk = text.chunk(0, 37, draw=True)
    prompt = Slice(
        chunk.key, 0, 37, chunk.token_ids, chunk.block_table, (0, 1, 2), noisy, 37
    )  # fmt: skip
    tokens = runner.execute(StepPlan(1, (prompt,))).tokens[0]
    assert len(set(tokens)) == 3
    for choice, token_id in enumerate(tokens):
        told = Text("told", [*PROMPT, token_id], (20, 21, 22, 23))
        expected = logits(runner, told.chunk(0, 38))[0][-1].argmax().item()
        step = StepPlan(2 + choice, (next_step(text, 37, choice),))
        assert runner.execute(step).tokens == ((expected,),)


def test_blocks_are_copied_before_anything_is_computed(runner: Runner, text: Text) -> None:
    """A fork: the second choice goes on in a copy of the last block."""
    runner.execute(StepPlan(1, (text.chunk(0, 37, draw=True),)))
    told = Text("told", [*PROMPT, 77], text.blocks)
    expected = logits(runner, told.chunk(37, 38))[0]
    fork = Text("fork", [*PROMPT, 77], (9, 4, 15))
    runner.cache.pool[15] = float("nan")
    before = runner.cache.pool[7].clone()
    plan = StepPlan(2, (fork.chunk(37, 38, draw=True),), copies=((7, 15),))
    assert runner.execute(plan).tokens == ((int(expected.argmax()),),)
    assert torch.equal(runner.cache.pool[7], before)


def test_copies_run_in_the_order_given(runner: Runner, text: Text) -> None:
    runner.cache.pool[1] = 1.0
    runner.cache.pool[2] = 2.0
    runner.execute(StepPlan(1, (text.chunk(0, 5),), copies=((1, 20), (2, 1), (20, 21))))
    assert [runner.cache.pool[block].unique().item() for block in (20, 1, 21)] == [1.0, 2.0, 1.0]


def test_generations_reach_the_pools_table(runner: Runner, text: Text) -> None:
    runner.execute(StepPlan(1, (text.chunk(0, 5),), generations=((9, 4), (31, 2**32 - 1))))
    assert runner.cache.generations[[9, 31, 3]].tolist() == [4, 2**32 - 1, 0]


def test_only_the_slots_of_the_slice_are_written(runner: Runner, text: Text) -> None:
    runner.execute(StepPlan(1, (text.chunk(0, 20),)))
    pool = runner.cache.pool.clone()
    runner.execute(StepPlan(2, (text.chunk(20, 23),)))
    changed = (runner.cache.pool != pool).flatten(1, 3).any(dim=1).any(dim=-1).nonzero()
    assert changed.tolist() == [[4, 4], [4, 5], [4, 6]]
