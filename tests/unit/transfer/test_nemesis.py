"""Random schedules of faults keep blocks safe, and every handoff ends exactly once."""

import os
from enum import Enum
from random import Random
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.kv_transfer.interfaces import BeginReceive, PeerUp, ReadEnded
from baton.kv_transfer.offers import SourceEvent, SourceHandoff, SourceState
from baton.kv_transfer.receive import KVReceive, ReceiveEvent, ReceiveState
from baton.protocol.messages import BlockRange, Done, End, Offered, Renewed
from tests.support.transfer_nemesis import HARMLESS, Malice, run_schedule, successes

# A broken scheduler or connector of this process; the machines end it. `test_handoff` holds some.
BUGS = {
    (SourceState.COMPLETE, BlockRange), (SourceState.COMPLETE, End),
    (ReceiveState.EXPECTED, BeginReceive), (ReceiveState.EXPECTED, PeerUp),
    (ReceiveState.EXPECTED, ReadEnded), (ReceiveState.OFFERED, ReadEnded),
    (ReceiveState.RECEIVING, BeginReceive), (ReceiveState.DRAINING, BeginReceive),
}  # fmt: skip
# Only a peer that breaks the protocol leads here; `test_handoff` does.
LIES = {
    (SourceState.OFFERED, Done),
    (ReceiveState.EXPECTED, BlockRange), (ReceiveState.EXPECTED, End),
    (ReceiveState.EXPECTED, Renewed),
    (ReceiveState.OFFERED, Offered), (ReceiveState.RECEIVING, Offered),
    (ReceiveState.DRAINING, Offered),
}  # fmt: skip
FINAL = {SourceState.RELEASED, ReceiveState.RECEIVED, ReceiveState.ENDED}


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), num_actions=st.integers(1, 300))
def test_blocks_are_safe_and_every_handoff_ends_once_whatever_happens(
    seed: int, num_actions: int
) -> None:
    run_schedule(Random(seed), num_actions=num_actions)


def test_without_malice_every_handoff_lands() -> None:
    for seed in range(60):
        nemesis = run_schedule(Random(seed), HARMLESS)
        assert successes(nemesis) == (nemesis.num_started, nemesis.num_started), seed


def test_a_channel_that_breaks_now_and_then_costs_only_what_was_under_way() -> None:
    landed = started = 0
    for seed in range(60):
        malice = Malice(cut=0.5, restart=0, give_up=0, bad_read=0, late=0, flap=1)
        nemesis = run_schedule(Random(seed), malice)
        started += nemesis.num_started
        landed += successes(nemesis)[0]
    assert landed > started / 2


def test_the_nemesis_meets_every_event_in_every_state(monkeypatch: pytest.MonkeyPatch) -> None:
    met: set[tuple[Enum, type]] = set()

    def watch(machine: type[SourceHandoff | KVReceive]) -> None:
        on = machine.on

        def watched(self: SourceHandoff, event: object, *rest: object) -> None:
            met.add((self.state, type(event)))
            on(self, event, *rest)  # type: ignore[arg-type]

        monkeypatch.setattr(machine, "on", watched)

    watch(SourceHandoff)
    watch(KVReceive)
    for seed in range(300):
        run_schedule(Random(seed), num_actions=300)
    pairs = {(state, event) for state in SourceState for event in get_args(SourceEvent)}
    pairs |= {(state, event) for state in ReceiveState for event in get_args(ReceiveEvent)}
    assert {pair for pair in pairs if pair[0] not in FINAL} - met - BUGS == LIES
    assert not met & BUGS


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_schedules() -> None:
    """BATON_SCHEDULES=100000 is the run before a release; the seed of a failure is in its name."""
    for seed in range(int(os.environ.get("BATON_SCHEDULES", "200"))):
        try:
            run_schedule(Random(seed), num_actions=300)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error
