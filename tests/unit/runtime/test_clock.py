"""What is told of the time by clocks that are passed in."""

from baton.runtime.clock import Standstill


def test_a_standstill_begins_anew_with_each_change() -> None:
    now_s = 0.0
    standstill = Standstill(5.0, lambda: now_s)
    found = []
    for now_s, state in ((1, "a"), (5, "a"), (6.5, "a"), (7, "b"), (12, "b"), (12.5, "b")):
        found.append((now_s, standstill.lasts(state)))
    assert [at_s for at_s, lasts in found if lasts] == [6.5, 12.5]
    now_s = 0.0
    standstill = Standstill(5.0, lambda: now_s)
    now_s = 5.5
    assert standstill.lasts(None), "nothing was ever seen"
