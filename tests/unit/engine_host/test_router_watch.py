"""What a node tells of itself: a missing router after 5 s and then seldom; when idle, nothing."""

from dataclasses import dataclass

import pytest

from baton.engine.process.registration import FIRST_S, LONGEST_S, RouterWatch
from tests.support.virtual_clock import VirtualClock


@dataclass
class Link:
    endpoint: str
    connected: bool = False
    refusals: int = 0
    is_resolved: bool = True


def test_a_router_that_does_not_answer_is_told_of_after_5_s_and_then_ever_more_rarely(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    clock, watch, link = VirtualClock(), RouterWatch(), Link("tcp://front:5570")

    def said(seconds: float = 0.0) -> list[str]:
        """The lines of the next `seconds`, looked at as often as heartbeats do."""
        caplog.clear()
        end_s = clock() + seconds
        while True:
            watch.look(clock(), link)
            if clock() >= end_s:
                return [record.message for record in caplog.records]
            clock.advance(0.5)

    line = "waiting for router tcp://front:5570: nothing answers there"
    assert said(FIRST_S - 0.5) == []
    assert said(0.5) == [line]
    assert said(3600.0).count(line) <= 3600.0 / LONGEST_S + 3
    link.is_resolved = False
    assert said(LONGEST_S) == ["waiting for router tcp://front:5570: name does not resolve"]
    link.connected = True
    assert said() == ["found the router"]
    link.connected = False
    assert said(FIRST_S - 0.5) == []  # a router that restarts is back by then
    link.connected = True
    assert said() == []
