"""`--on slurm`: one heterogeneous job of a real Slurm cluster on this machine."""

import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from baton.runtime.channels.keys import write_key
from tests.support.deployed import Deployed
from tests.support.slurm import slurm
from tests.support.waiting import TIMEOUT_S, until

MAX_TOKENS = 300


@pytest.fixture
def queued(tmp_path: Path) -> Iterator[Deployed]:
    """A small cluster whose commands see a Slurm cluster of three nodes."""
    with slurm(tmp_path / "slurm") as env:
        deployed = Deployed(tmp_path, env=env)
        write_key(tmp_path / "cluster.key")
        deployed.content |= {
            "key": "cluster.key",
            "settings": {
                "cache": {"memory_mib": 64},
                "engine": {"threads": 1},
                "router": {"drain_s": TIMEOUT_S},
            },
        }
        try:
            yield deployed
            assert not active(env)
        finally:
            deployed.run("down")


def active(env: Mapping[str, str]) -> str:
    return subprocess.check_output(["squeue", "--noheader"], env={**os.environ, **env}, text=True)


def test_a_cluster_is_a_job_that_drains_before_it_ends(queued: Deployed) -> None:
    code, said, complained = queued.run("up", "--on", "slurm")
    assert code == 0, complained
    assert f"small serves at http://127.0.0.1:{queued.port}/v1" in said
    assert queued.complete() == " 4071."
    secrets = [path for path in queued.state.rglob("*") if path.suffix in ("", ".json", ".sh")]
    assert {path.stat().st_mode & 0o077 for path in secrets if path.is_file()} == {0}
    code, said, _ = queued.run("status")
    assert (code, [line.split()[3] for line in said.splitlines()[2:]]) == (0, ["ready"] * 3)
    assert all(f" {host} " in said for host in ("n1", "n2", "n3"))
    code, said, complained = queued.run("doctor", "cluster.yaml")
    assert code == 0, said + complained
    assert all(f"{host}:\n" in said for host in ("n1", "n2", "n3"))
    assert " reads " in said.partition("paths:")[2]
    code, said, _ = queued.run("doctor", "--url", f"http://127.0.0.1:{queued.port}")
    assert (code, said.count("  ok       node ")) == (0, 2)
    before = queued.processes()
    assert set(before) == {"router-0", "prefill-0", "decode-0"}
    before["prefill-0"].kill()
    until(lambda: queued.processes().get("prefill-0") not in (None, before["prefill-0"]))
    with queued.ask(max_tokens=MAX_TOKENS, ignore_eos=True, stream=True) as reply:
        first = reply.readline()
        code, said, complained = queued.run("down")
        lines = [line for line in [first, *reply] if line.startswith(b"data: ")]
    assert (code, said) == (0, "small is down\n"), complained
    assert lines[-1] == b"data: [DONE]\n"
    assert b'"finish_reason":"length"' in b"".join(lines).replace(b": ", b":")
    assert queued.all_gone()
    assert not [
        path for path in queued.state.rglob("*") if path.suffix != ".log" and path.is_file()
    ]


@pytest.mark.parametrize(
    ("decode", "said"),
    [
        (
            {"settings": {"node": {"start_timeout_s": 0.01}}},
            "decode-0 on n2 ended while starting (exit code 1: not ready within 0.01 s",
        ),
        ({"replicas": 40}, "not ready within 3 s: router-0 is waiting; job 1 is PENDING"),
    ],
)
def test_a_job_that_fails_is_one_line_and_leaves_nothing(
    decode: dict[str, object], said: str, queued: Deployed
) -> None:
    queued.content["pools"] = {
        "decode": {"role": "decode", **decode},
        "prefill": {"role": "prefill"},
    }
    # Three hosts never run the job that needs 40, so any time is too short for it.
    words = ("--timeout", "3") if "replicas" in decode else ()
    code, _, complained = queued.run("up", "--on", "slurm", *words)
    (line,) = [line for line in complained.splitlines() if line.startswith("baton: ")]
    assert code != 0
    assert said in line
    assert "Traceback" not in complained
    assert not list(queued.state.glob("*.json"))
