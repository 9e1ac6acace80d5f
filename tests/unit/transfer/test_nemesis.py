"""Schedules nobody would think of: blocks stay safe, and every handoff ends exactly once."""

import os
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.transfer_nemesis import HARMLESS, Malice, run_schedule, successes


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), num_actions=st.integers(1, 300))
def test_blocks_are_safe_and_every_handoff_ends_once_whatever_happens(
    seed: int, num_actions: int
) -> None:
    run_schedule(Random(seed), num_actions=num_actions)


@pytest.mark.parametrize("seed", range(60))
def test_without_malice_every_handoff_lands(seed: int) -> None:
    nemesis = run_schedule(Random(seed), HARMLESS)
    assert successes(nemesis) == (nemesis.num_started, nemesis.num_started)


def test_a_channel_that_breaks_now_and_then_costs_only_what_was_under_way() -> None:
    landed = started = 0
    for seed in range(60):
        malice = Malice(cut=0.5, restart=0, give_up=0, bad_read=0, late=0, flap=1)
        nemesis = run_schedule(Random(seed), malice)
        started += nemesis.num_started
        landed += successes(nemesis)[0]
    assert landed > started / 2


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_many_schedules() -> None:
    """BATON_SCHEDULES=100000 is the run before a release; the seed of a failure is in its name."""
    for seed in range(int(os.environ.get("BATON_SCHEDULES", "2000"))):
        try:
            run_schedule(Random(seed), num_actions=300)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error
