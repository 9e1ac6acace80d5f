"""The parts that decide see no clock, no random numbers and no I/O, so a test can replay them."""

import ast
from pathlib import Path

import pytest

from tests.support.sources import REPOSITORY, imports, name_of, sources, tree

# Of the transfer's files, those that touch memory, threads or sockets.
TRANSFER_IO = {"__init__.py", "agent.py", "agent_turns.py", "pools.py", "interfaces.py"}
PURE = (
    "bench/figures/metrics.py",
    "bench/figures/paired.py",
    "bench/figures/search.py",
    "bench/figures/validity.py",
    "bench/plan/arrivals.py",
    "bench/plan/plan.py",
    "decode_node/intake.py",
    "decode_node/scheduler.py",
    "decode_node/stream.py",
    "deploy/doctor/comparison.py",
    "deploy/doctor/orders.py",
    "deploy/doctor/path_rules.py",
    "deploy/doctor/rules.py",
    "engine/block_pool.py",
    "engine/cache_journal.py",
    "engine/choices.py",
    "engine/plan.py",
    "engine/prefix_cache.py",
    "engine/reservation.py",
    "engine/scheduler.py",
    "engine/sequence.py",
    "prefill_node/handoff.py",
    "prefill_node/scheduler.py",
    "protocol/blocks.py",
    "engine/by_request.py",
    "router/cache_index.py",
    "router/pairs.py",
    "router/queue.py",
    "router/lifecycle.py",
    "router/request.py",
    "router/health.py",
    "router/policy.py",
    "router/registry.py",
    *(
        name_of(path)
        for path in sorted((REPOSITORY / "kv_transfer").rglob("*.py"))
        if path.name not in TRANSFER_IO and path.parent.name != "transports"
    ),
)
IMPURE_MODULES = {
    "asyncio", "datetime", "os", "random", "secrets", "select", "socket", "subprocess", "tempfile",
    "threading", "time", "torch", "uuid", "zmq",
}  # fmt: skip
IMPURE_NAMES = {"open", "print", "input"}
# Words that differ between runs of the same input.
UNSTABLE_NAMES = {"hash", "id"}


SAYS_SO = "This file is pure"


def says_it_is_pure(path: Path) -> bool:
    return SAYS_SO in " ".join((ast.get_docstring(tree(path)) or "").split())


@pytest.mark.parametrize("name", sorted({*PURE, *map(name_of, filter(says_it_is_pure, sources()))}))
def test_a_part_that_decides_sees_no_clock_no_chance_and_no_io(name: str) -> None:
    path = REPOSITORY / name
    impure = {module for module in imports(path) if module.partition(".")[0] in IMPURE_MODULES}
    assert not impure, f"{name} imports {impure}"
    called = {
        node.func.id
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert not called & (IMPURE_NAMES | UNSTABLE_NAMES), f"{name} calls {called & IMPURE_NAMES}"


def test_only_the_clock_reads_the_clock_of_the_runtime() -> None:
    """Shells take a `Clock`, so a test can own time; who may read it at all is listed here."""
    readers = {"runtime/clock.py", "runtime/log.py", "runtime/process.py"}
    found = {
        name_of(path) for path in (REPOSITORY / "runtime").glob("*.py") if "time" in imports(path)
    }
    assert found <= readers
