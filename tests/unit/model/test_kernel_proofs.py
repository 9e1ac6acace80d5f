"""Only proven kernels are used, and one that fails, hangs or crashes costs nothing else."""

import os
import sys

import pytest

from baton.kernels.proofs import (
    Candidate,
    ModelShapes,
    Proof,
    ProofRequest,
    possible,
)
from baton.model.runner import kernel_proofs
from baton.model.runner.kernel_proofs import proofs_of
from tests.support.compute import no_progress

SHAPES = ModelShapes(((64, 64),), 4, 2, 16, 16)
LIMIT_S = 5.0
MEETING = (
    "import pathlib, time\n    here = pathlib.Path(__file__).parent\n    "
    '(here / "{}").touch()\n    '
    'while not (here / "{}").exists(): time.sleep(0.01)\n    '
    'return ""'
)
# What a kernel's module does in `prove`.
BODIES = {
    "right": 'return ""',
    "wrong": 'return "row 3 differs\\nfrom its reference"',
    "uncompiled": 'raise ValueError("ptxas: C7510")',
    "crashing": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
    "hanging": "import time; time.sleep(600)",
    "slow": 'import time; time.sleep(3); return ""',
    "as_slow": 'import time; time.sleep(3); return ""',
    # Each goes on when the other one has come.
    "meeting": MEETING.format("one", "two"),
    "met": MEETING.format("two", "one"),
    "alone": (
        "import os\n    "
        'return "" if os.getpid() == PARENT else "all devices are busy or unavailable"'
    ),
}


@pytest.fixture
def candidates(tmp_path, monkeypatch):
    """A module per behaviour, on the path of this process and its children."""
    for name, body in BODIES.items():
        (tmp_path / f"{name}_kernels.py").write_text(
            f"PARENT = {os.getpid()}\n"
            "def missing_for(shapes, capability):\n"
            '    return "" if capability >= (9, 0) else "too old"\n'
            f"def prove(shapes, device):\n    {body}\n"
        )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), *sys.path)))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return {name: Candidate(name, f"{name}_kernels") for name in BODIES}


def proven(candidates: list[Candidate], environment: str = "one") -> list[Proof]:
    request = ProofRequest(SHAPES, "cpu", tuple(candidates))
    return [*proofs_of(request, environment, no_progress, LIMIT_S)]


def test_what_is_wrong_crashes_or_hangs_leaves_the_others_proven(candidates, caplog):
    names = ["wrong", "right", "crashing", "uncompiled", "hanging"]
    found = proven([*(candidates[name] for name in names), Candidate("no", "absent")])
    assert [proof.name for proof in found] == [*names, "no"]
    wrong, right, crashing, uncompiled, hanging, absent = found
    assert wrong.problem == "row 3 differs from its reference"
    assert not right.problem
    assert "ended with -11" in crashing.problem
    assert "C7510" in uncompiled.problem
    assert "longer than" in hanging.problem
    assert "ModuleNotFoundError" in absent.problem
    assert len(caplog.records) == 5, "a line for each that failed"


def test_all_candidates_are_tried_at_once(candidates):
    both = [candidates["meeting"], candidates["met"]]
    assert [proof.problem for proof in proven(both)] == ["", ""]


def test_each_candidate_has_the_whole_limit(candidates):
    both = [candidates["slow"], candidates["as_slow"]]
    assert [proof.problem for proof in proven(both)] == ["", ""]


def test_a_gpu_for_one_process_proves_kernels_in_the_nodes_own(candidates):
    both = [candidates["alone"], candidates["right"]]
    assert [proof.problem for proof in proven(both)] == ["", ""]


def test_what_was_proven_stays_proven_until_what_it_rests_on_changes(
    candidates, monkeypatch
):
    both = [candidates["right"], candidates["wrong"]]
    assert [bool(proof.problem) for proof in proven(both)] == [False, True]

    started: list[str] = []

    class Counted(kernel_proofs.Child):
        def __init__(self, command, relay):
            started.append(command.args[0])
            super().__init__(command, relay)

    monkeypatch.setattr(kernel_proofs, "Child", Counted)
    assert not proven([candidates["right"]])[0].problem
    assert not started
    assert proven(both)[1].problem
    assert len(started) == 1
    assert '"right"' not in started[0], "only what is not proven is tried again"
    proven([candidates["right"]], "another driver")
    assert len(started) == 2


def test_what_others_may_have_written_proves_nothing(candidates, tmp_path):
    assert not proven([candidates["right"]])[0].problem
    (file,) = (tmp_path / "cache" / "baton" / "proofs").iterdir()
    file.chmod(0o666)
    assert not kernel_proofs._is_kept(file.name)


def test_candidates_say_themselves_what_they_cannot_compute(candidates):
    right = (candidates["right"],)
    assert possible(SHAPES, (9, 0), right) == right
    assert possible(SHAPES, (8, 6), right) == ()
