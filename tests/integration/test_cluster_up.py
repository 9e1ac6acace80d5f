"""`baton up`, `status`, `down` and `render` on this machine: what runs, what is said and left."""

import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.deployed import TIMEOUT_S, Deployed, until

HASTY = {"node": {"start_timeout_s": 0.01}}


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Deployed]:
    deployed = Deployed(tmp_path)
    yield deployed
    deployed.processes()
    deployed.run("down")
    assert deployed.all_gone()


def test_a_detached_cluster_serves_until_it_is_down(small: Deployed) -> None:
    code, said, complained = small.run("up", "--detach")
    assert code == 0, complained
    assert f"small serves at http://127.0.0.1:{small.port}/v1" in said
    assert small.complete() == " 4071."
    before = small.processes()
    assert set(before) == {"router-0", "prefill-0", "decode-0"}
    assert (small.state.stat().st_mode & 0o777, list(small.state.glob("*.json"))) == (
        0o700, [path for path in small.state.glob("*.json") if path.stat().st_mode & 0o777 == 0o600]
    )  # fmt: skip
    code, _, complained = small.run("up", "--detach")
    assert (code, "is up already" in complained) == (2, True)
    # The keeper starts a process again, and the cluster serves as before.
    before["decode-0"].kill()
    until(lambda: small.processes().get("decode-0") not in (None, before["decode-0"]), str)
    code, said, _ = small.run("status")
    assert (code, said.count("running")) == (0, 3)
    code, said, _ = small.run("down")
    assert (code, said) == (0, "small is down\n")
    assert small.all_gone()
    code, _, complained = small.run("down")
    assert (code, "nothing is up" in complained) == (2, True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_cluster_in_front_ends_with_its_command(number: signal.Signals, small: Deployed) -> None:
    process = small.baton("up")
    assert process.stdout is not None
    for line in process.stdout:
        if "Ctrl-C ends it" in line:
            break
    assert set(small.processes()) == {"router-0", "prefill-0", "decode-0"}
    process.send_signal(number)
    process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == (0 if number == signal.SIGINT else -signal.SIGKILL)
    assert small.all_gone()


@pytest.mark.parametrize(
    ("changes", "code", "said"),
    [
        ({"model": "/nowhere"}, 2, "router-0 on 127.0.0.1: model /nowhere does not exist"),
        (
            {"pools": {"decode": {"role": "decode", "gpus": 64}}},
            2, "decode-0 on 127.0.0.1: no GPU is left for it",
        ),
        (
            {"pools": {"decode": {"role": "decode", "settings": HASTY}}},
            1, "decode-0 on 127.0.0.1 ended while starting (exit code 1: not ready within 0.01 s",
        ),
        (
            {"pools": {"decode": {"role": "decode", "hosts": ["198.51.100.7"]}},
             "routers": [{"host": "198.51.100.7"}], "settings": {"keys": {"insecure": True}}},
            2, "none of the description's hosts is this machine (198.51.100.7)",
        ),
    ],
)  # fmt: skip
def test_a_failed_start_is_one_line_and_leaves_nothing(
    changes: dict[str, object], code: int, said: str, small: Deployed
) -> None:
    small.content |= changes
    ended, _, complained = small.run("up", "--detach")
    (line,) = [line for line in complained.splitlines() if line.startswith("baton: ")]
    assert (ended, line.startswith("baton: ") and said in line) == (code, True), complained
    assert not list(small.state.glob("*.json"))
    assert "Traceback" not in complained


def test_a_state_folder_that_others_can_enter_is_refused(small: Deployed) -> None:
    small.state.mkdir(mode=0o755)
    (small.state / "precious").touch()
    code, _, complained = small.run("up", "--detach")
    assert (code, "is open to other users" in complained) == (2, True)
    assert list(small.state.iterdir()) == [small.state / "precious"]


def test_keep_leaves_what_has_started(small: Deployed) -> None:
    small.content["pools"] = {
        "prefill": {"role": "prefill"},
        "decode": {"role": "decode", "settings": HASTY},
    }
    code, _, complained = small.run("up", "--keep")
    assert (code, "--keep leaves it" in complained) == (1, True), complained
    until(lambda: "prefill-0" in small.processes(), str)


def test_rendered_scripts_serve(small: Deployed) -> None:
    """Each runs one process as it stands, and holds secrets that others cannot read."""
    small.content["settings"] = {"router": {"api_keys": ["s3cret"]}, "cache": {"memory_mib": 64}}
    small.write()
    done = subprocess.run(
        [sys.executable, "-m", "baton", "render", "--out", "files"],
        cwd=small.folder, capture_output=True, text=True, check=True,
    )  # fmt: skip
    scripts = [small.folder / line for line in done.stdout.splitlines()]
    assert [path.name for path in scripts] == ["router-0.sh", "prefill-0.sh", "decode-0.sh"]
    assert {path.stat().st_mode & 0o777 for path in scripts} == {0o700}
    assert "s3cret" in scripts[0].read_text()
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    router = subprocess.Popen([str(scripts[0])], env=env)
    try:
        until(lambda: _answers(f"http://127.0.0.1:{small.port}/live"), str)
    finally:
        router.terminate()
        router.wait(TIMEOUT_S)


def _answers(url: str) -> bool:
    try:
        return bool(urllib.request.urlopen(url, timeout=5.0).status == 200)
    except OSError:
        return False
