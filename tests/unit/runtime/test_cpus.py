"""The CPUs of a host are divided among nodes and ranks, and a setting is taken as it is."""

import os

import pytest

from baton.protocol.config import EngineConfig
from baton.runtime.cpus import threads_per_rank


@pytest.mark.parametrize(
    ("cpus", "threads", "ranks", "nodes", "expected"),
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
    monkeypatch: pytest.MonkeyPatch, cpus: int, threads: int, ranks: int, nodes: int, expected: int
) -> None:
    # A process may be kept to CPUs of any numbers.
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(3, 3 + cpus)))
    engine = EngineConfig(threads=threads, tensor_parallel=ranks)
    assert threads_per_rank(engine, nodes) == expected
