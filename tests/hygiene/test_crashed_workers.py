"""A crash of a worker of xdist is reported with what there is to find its cause."""

import subprocess
import sys

import pytest

from tests.support.sources import REPOSITORY


@pytest.mark.release
def test_the_report_of_a_crash_says_how_the_worker_ended_and_where(tmp_path):
    (tmp_path / "test_it.py").write_text(
        "import os\n\n\ndef test_it():\n    os.abort()\n"
    )
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-n",
            "1",
            "-c",
            str(REPOSITORY / "pyproject.toml"),
            "-p",
            "tests.conftest",
            "-p",
            "no:cacheprovider",
            str(tmp_path),
        ],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 1
    assert "SIGABRT, " in done.stdout
    assert ": worker 'gw0' crashed while running" in done.stdout
    assert ", line 5 in test_it" in done.stdout
