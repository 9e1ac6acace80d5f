"""How long a client of a closed loop leaves a server alone."""

import pytest

from baton.bench.client.worker import Pauses
from baton.bench.records import Arrival, Outcome, Record


def ended(
    outcome: Outcome, retry_after_s: float | None = None, arrivals: list[Arrival] | None = None
) -> Record:
    return Record(
        index=0,
        intended_s=0.0,
        sent_s=0.0,
        end_s=0.1,
        outcome=outcome,
        arrivals=arrivals or [],
        retry_after_s=retry_after_s,
    )


@pytest.mark.parametrize(
    "outcome",
    [
        Outcome.UNREACHABLE,
        Outcome.NO_SOCKET,
        Outcome.REFUSED,
        Outcome.SERVER_ERROR,
        Outcome.TRUNCATED,
    ],
)
def test_pauses_double_up_to_a_second_while_a_client_is_turned_away(outcome: Outcome) -> None:
    pauses = Pauses()
    assert [pauses.after(ended(outcome)) for _ in range(6)] == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]


@pytest.mark.parametrize(
    "served",
    [
        ended(Outcome.ANSWERED),
        ended(Outcome.CLIENT_ERROR),
        ended(Outcome.TIMED_OUT),
        ended(Outcome.TRUNCATED, arrivals=[Arrival(0.05, 1)]),
    ],
)
def test_a_client_that_was_not_turned_away_does_not_pause_and_the_next_pause_is_short(
    served: Record,
) -> None:
    pauses = Pauses()
    refusal = ended(Outcome.REFUSED)
    assert [pauses.after(one) for one in (refusal, refusal, served, refusal)] == [0.1, 0.2, 0, 0.1]


@pytest.mark.parametrize(("told_s", "pause_s"), [(0.0, 0.1), (2.5, 2.5), (3600.0, 10.0)])
def test_what_the_server_says_is_kept_within_bounds(told_s: float, pause_s: float) -> None:
    assert Pauses().after(ended(Outcome.REFUSED, told_s)) == pause_s
