"""What a step does besides computing: copies in order, samples, and the tokens it remembers."""

import pytest

from baton.model.runner.device_state import REMEMBERED_STEPS
from baton.node.scheduling.plan import NOT_FINITE, StepPlan
from baton.node.scheduling.request import no_token
from baton.protocol.errors import InvariantBroken
from tests.support.checkpoints import model_folder
from tests.support.compute import Text, compute_config, loaded, next_step, random_tokens

PROMPT = random_tokens(37)


@pytest.fixture
def runner():
    with loaded(
        compute_config(model_folder("qwen3", num_layers=2), num_blocks=32)
    ) as it:
        yield it


@pytest.fixture
def text():
    return Text("r", PROMPT, (9, 4, 7, 2))


def test_a_step_without_draws_does_not_hide_the_last_token(runner, text):
    runner.execute(StepPlan(1, (text.chunk(0, 37, sample=True),)))
    other = Text("other", random_tokens(20, seed=1), (11, 12))
    assert runner.execute(StepPlan(2, (other.chunk(0, 20),))).tokens == ((),)
    mixed = StepPlan(3, (other.chunk(0, 20), next_step(text, 37)))
    assert [len(tokens) for tokens in runner.execute(mixed).tokens] == [0, 1]


def test_tokens_are_not_remembered_for_ever(runner, text):
    runner.execute(StepPlan(1, (text.chunk(0, 37, sample=True),)))
    for step_id in range(2, 2 + REMEMBERED_STEPS):
        runner.execute(StepPlan(step_id, (text.chunk(0, 5),)))
    with pytest.raises(InvariantBroken, match="no token was sampled"):
        runner.execute(StepPlan(9, (next_step(text, 37),)))


def test_copies_run_in_the_order_given(runner, text):
    runner.cache.pool[1] = 1.0
    runner.cache.pool[2] = 2.0
    runner.execute(StepPlan(1, (text.chunk(0, 5),), copies=((1, 20), (2, 1), (20, 21))))
    assert [runner.cache.pool[block].unique().item() for block in (20, 1, 21)] == [
        1.0,
        2.0,
        1.0,
    ]


def test_a_sequence_without_numbers_fails_alone_and_the_node_steps_on(runner):
    """Its next step is launched already, with the token that could not be sampled."""
    whole = Text("whole", PROMPT, (9, 4, 7))
    broken = Text("broken", random_tokens(20, 1), (30, 31))
    prompts = StepPlan(
        1, (whole.chunk(0, 37, sample=True), broken.chunk(0, 20, sample=True))
    )
    expected = runner.execute(prompts).tokens
    runner.cache.pool[30] = float("nan")
    steps = next_step(whole, 37), next_step(broken, 20)
    result = runner.execute(StepPlan(2, steps))
    assert (len(result.tokens[0]), result.tokens[1]) == (1, ())
    assert result.failed == ((1, NOT_FINITE),)
    assert no_token(NOT_FINITE).http_status == 500
    assert not no_token(NOT_FINITE).retryable
    after = StepPlan(3, (next_step(whole, 38), next_step(broken, 21)))
    assert runner.execute(after).failed == ((1, NOT_FINITE),)
    assert runner.execute(prompts).tokens == expected
