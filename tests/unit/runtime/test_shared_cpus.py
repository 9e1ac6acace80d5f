"""CPUs that nodes of one host lend to each other."""

import subprocess
import sys
from pathlib import Path

import pytest

from baton.protocol.errors import ConfigError
from baton.runtime.shared_cpus import NUM_SLOTS, SharedCpus


def test_a_node_takes_all_cpus_only_while_the_others_are_idle(tmp_path: Path) -> None:
    path = tmp_path / "cpus"
    one, two = SharedCpus(path, 2, 8), SharedCpus(path, 3, 8)
    assert one.take() == 8
    assert two.take() == 3
    one.give_back()
    two.give_back()
    assert two.take() == 8
    assert one.take() == 2
    two.give_back()
    assert one.take() == 8  # its own number of the step before is not another node's
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_process_that_died_in_a_step_leaves_its_place_to_the_next(tmp_path: Path) -> None:
    path = tmp_path / "cpus"
    script = (
        "from pathlib import Path; from baton.runtime.shared_cpus import SharedCpus\n"
        f"SharedCpus(Path({str(path)!r}), 1, 4).take()"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    first = SharedCpus(path, 1, 4)
    assert first.take() == 4
    first.give_back()
    for _ in range(NUM_SLOTS - 1):
        last = SharedCpus(path, 1, 4)
    assert last.take() == 4
    with pytest.raises(ConfigError, match="share their CPUs"):
        SharedCpus(path, 1, 4)


def test_a_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine\.shared_cpus"):
        SharedCpus(tmp_path / "gone" / "cpus", 1, 2)
