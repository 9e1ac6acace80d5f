"""The short form of `make soak`: faults of real processes under streams."""

import asyncio
from pathlib import Path

import pytest

from tests.support.checkpoints import model_folder
from tools.soak.__main__ import SoakSettings, soak, table
from tools.soak.faults import KINDS, OF_ROUTER

NUM_FAULTS = 2 * len(KINDS) + len(OF_ROUTER)


def test_a_few_faults_lose_and_alter_no_token(tmp_path: Path) -> None:
    settings = SoakSettings(
        requests=24, faults=4, clients=4, model=str(model_folder("qwen3")), vocab_size=250
    )
    report = asyncio.run(soak(settings, tmp_path))
    assert not report.problems, table(report)
    assert report.outcomes["wrong"] == report.outcomes["lost"] == 0
    assert report.outcomes["whole"]


@pytest.mark.release
def test_no_fault_of_a_process_loses_or_alters_a_token(tmp_path: Path) -> None:
    """Only the end of a router cuts streams, and what was cut was right as far as it went."""
    settings = SoakSettings(
        requests=120, faults=NUM_FAULTS, clients=6, model=str(model_folder("qwen3")), vocab_size=250
    )
    report = asyncio.run(soak(settings, tmp_path))
    assert not report.problems, table(report)
    outcomes = report.outcomes
    assert outcomes["wrong"] == outcomes["lost"] == 0
    assert outcomes["whole"] > outcomes["aborted"] > 0
    assert sum(outcomes.values()) >= settings.requests
    assert sum(row.num_faults for row in report.rows) == NUM_FAULTS
    assert all(row.num_streams for row in report.rows), table(report)
