"""The CPUs of a host are divided among nodes and ranks, and a setting is taken as it is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from baton.protocol.config import EngineConfig
from baton.runtime import cpus
from baton.runtime.cpus import threads_per_rank

# An earlier test of a node's command line may have set one of them.
SPINNING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


@pytest.mark.parametrize(
    ("num_cpus", "threads", "ranks", "nodes", "expected"),
    [
        (1, 0, 1, 1, 1),
        (2, 0, 1, 1, 2),  # one node takes all
        (2, 0, 1, 2, 1),
        (2, 0, 1, 5, 1),  # more nodes than CPUs
        (16, 0, 1, 3, 5),
        (16, 0, 4, 2, 2),
        (2, 7, 4, 2, 7),
    ],
)
def test_threads_of_a_rank(
    monkeypatch: pytest.MonkeyPatch,
    num_cpus: int,
    threads: int,
    ranks: int,
    nodes: int,
    expected: int,
) -> None:
    # A process may be kept to CPUs of any numbers.
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(3, 3 + num_cpus)))
    engine = EngineConfig(threads=threads, tensor_parallel=ranks)
    assert threads_per_rank(engine, nodes) == expected


@pytest.mark.parametrize(("quota", "expected"), [("max 100000", 8), ("250000 100000", 3), ("?", 8)])
def test_the_quota_of_a_container_bounds_the_threads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quota: str, expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    (tmp_path / "cpu.max").write_text(quota + "\n")
    monkeypatch.setattr(cpus, "CGROUP", tmp_path)
    assert threads_per_rank(EngineConfig()) == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, str(cpus.SPINS)), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "PASSIVE"}, "0")],
)
def test_the_threads_of_torch_spin_briefly(given: dict[str, str], expected: str) -> None:
    code = "from baton.runtime.cpus import spin_briefly; spin_briefly(); import torch"
    command = [sys.executable, "-c", code]
    others = {name: one for name, one in os.environ.items() if name not in SPINNING}
    env = others | {"OMP_DISPLAY_ENV": "VERBOSE"} | given
    shown = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stderr
    if "GOMP_" in shown:  # else torch was built with another OpenMP, which ignores the variable
        assert f"GOMP_SPINCOUNT = '{expected}'" in shown
