"""The short form of `make soak`: faults of real processes under streams."""

import asyncio
from pathlib import Path

import pytest

from tests.support.checkpoints import model_folder
from tools.soak.__main__ import SoakSettings, soak, table


@pytest.mark.release
def test_a_few_faults_lose_and_alter_no_token(tmp_path: Path) -> None:
    settings = SoakSettings(
        requests=24, faults=4, clients=4, model=str(model_folder("qwen3")), vocab_size=250
    )
    report = asyncio.run(soak(settings, tmp_path))
    assert not report.problems, table(report)
    assert report.outcomes["wrong"] == report.outcomes["lost"] == 0
    assert report.outcomes["whole"]
