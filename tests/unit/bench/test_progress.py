"""What people see while a load runs."""

import pytest

from baton.bench.client.load import Progress
from baton.bench.progress import LoadProgress

TIMES_S = (0.0, 0.0, 10.0, 20.0)  # made, begun, shown, shown


def test_a_load_is_counted_without_its_warm_up_and_tokens_are_not_said_before_they_are_known(
    capsys: pytest.CaptureFixture[str],
) -> None:
    progress = LoadProgress(clock=iter(TIMES_S).__next__)
    progress.begin("a load", total=9, num_warm_up=4)
    progress.show(Progress(sent=3))
    progress.show(Progress(sent=7, ended=5, failed=1, tokens=100))
    assert capsys.readouterr().err.splitlines() == [
        "a load: 0/5 ended  3 in flight  10 s",
        "a load: 1/5 ended  1 failed  2 in flight  5 tok/s  20 s",
    ]
