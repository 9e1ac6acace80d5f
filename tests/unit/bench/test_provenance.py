"""Where figures come from, and what must never be told about it."""

import re
from pathlib import Path

import msgspec
import pytest

import baton
from baton.bench.report.provenance import Provenance, collect, complete


def test_a_checkout_is_named_by_its_commit_and_else_by_the_version() -> None:
    provenance = collect(["baton", "bench", "run"])
    installed = msgspec.structs.replace(provenance, commit="", dirty=False)
    assert installed.revision == f"version {baton.__version__}"
    if not (Path(__file__).parents[3] / ".git").exists():
        pytest.skip("these sources are in no checkout")
    assert re.fullmatch(r"[0-9a-f]{40}", provenance.commit)
    assert provenance.revision.startswith(provenance.commit[:12])


def test_the_machine_and_its_load_are_told_and_survive_json() -> None:
    before = collect([])
    after = complete(before)
    assert after.machine.cpu_model
    assert 1 <= after.machine.num_cpus <= after.machine.num_cpus_total
    assert after.machine.memory_bytes > 0
    assert after.load_before is not None
    assert after.load_after is not None
    assert after.versions["aiohttp"] != "unknown"
    assert after.created_at.endswith("+00:00")
    assert msgspec.structs.replace(after, load_after=None, gpus_after=[]) == before
    assert msgspec.json.decode(msgspec.json.encode(after), type=Provenance) == after
