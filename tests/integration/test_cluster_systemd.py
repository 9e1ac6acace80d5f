"""`--on systemd`: units that systemd accepts, run by a real manager of systemd."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from baton.deploy.cluster.platform import PlatformOptions
from baton.deploy.cluster.systemd import INSTALLED, SystemdPlatform
from tests.support.deployed import Deployed
from tests.support.waiting import TIMEOUT_S, until

MANAGER = "/lib/systemd/systemd"
# systemd starts only where the system seems to run it, so the manager sees a /run of its own.
START = f"""
mount -t tmpfs tmpfs /run && mkdir -p /run/systemd/system && mkdir -m 700 /run/user-0 &&
exec {MANAGER} --user --log-target=console
"""


@pytest.fixture
def managed(tmp_path: Path) -> Iterator[Deployed]:
    """A small cluster whose commands see a systemd manager of the user."""
    if not Path(MANAGER).exists() or shutil.which("unshare") is None:
        pytest.skip("needs systemd and unshare")
    env = {"XDG_RUNTIME_DIR": "/run/user-0", "XDG_CONFIG_HOME": str(tmp_path / "config")}
    with (tmp_path / "manager.log").open("wb") as log:
        manager = subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", START],
            stdout=log, stderr=log, env={**os.environ, **env}, start_new_session=True,
        )  # fmt: skip
    inside = ("nsenter", "--mount", f"--target={manager.pid}", f"--wd={tmp_path}")
    systemctl = [*inside, "systemctl", "--user"]

    def is_up() -> bool:
        if manager.poll() is not None:
            pytest.skip(f"no systemd manager here: {(tmp_path / 'manager.log').read_text()}")
        words = [*systemctl, "is-system-running"]
        done = subprocess.run(
            words, env={**os.environ, **env}, capture_output=True, text=True, check=False
        )
        return done.stdout.strip() in ("running", "degraded")

    until(is_up, (tmp_path / "manager.log").read_text)
    deployed = Deployed(tmp_path, inside, env)
    deployed.content["systemd"] = {"scope": "user"}
    # The manager passes on no variables of this process.
    deployed.content["env"] = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    try:
        yield deployed
    finally:
        deployed.run("down")
        subprocess.run([*systemctl, "exit"], env={**os.environ, **env}, check=False)
        manager.wait(TIMEOUT_S)


def test_a_cluster_runs_under_systemd(managed: Deployed) -> None:
    code, said, complained = managed.run("up", "--on", "systemd")
    assert code == 0, complained
    assert f"small serves at http://127.0.0.1:{managed.port}/v1" in said
    assert managed.complete() == " 4071."
    before = managed.processes()
    assert set(before) == {"router-0", "prefill-0", "decode-0"}
    before["decode-0"].kill()
    until(lambda: managed.processes().get("decode-0") not in (None, before["decode-0"]))
    code, said, complained = managed.run("down")
    assert (code, said) == (0, "small is down\n"), complained
    assert managed.all_gone()
    left = [path for path in (managed.folder / "config").rglob("*") if path.is_file()]
    assert not left


def test_a_node_that_fails_under_systemd_is_named_and_nothing_is_left(managed: Deployed) -> None:
    managed.content["pools"] = {
        "decode": {"role": "decode", "settings": {"node": {"start_timeout_s": 0.01}}}
    }
    code, _, complained = managed.run("up", "--on", "systemd")
    assert code == 1
    assert "decode-0 on 127.0.0.1 ended while starting (" in complained
    assert "see journalctl --user -u baton-small-decode@0.service)" in complained
    assert not managed.processes()


# Fails when it is asked first, as systemd does while it reloads its units.
RELOADING = """\
#!/bin/sh
[ -e asked ] && exec printf 'ActiveState=active\\nSubState=running\\nMainPID=7\\nNRestarts=0\\n'
touch asked
echo "Failed to get properties: Connection timed out" >&2
exit 1
"""


def test_a_unit_that_systemd_does_not_show_at_once_is_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "systemctl").write_text(RELOADING)
    (tmp_path / "systemctl").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    units = {"baton-small-decode@0.service": ("decode-0", "decode", "127.0.0.1")}
    installed = {"scope": "user", "target": "baton-small.target", "files": [], "units": units}
    (tmp_path / INSTALLED).write_text(json.dumps(installed))
    (status,) = SystemdPlatform(PlatformOptions()).status(tmp_path)
    assert (status.state, status.note) == ("running", "pid 7")


@pytest.mark.parametrize("scope", ["system", "user"])
def test_systemd_accepts_every_unit(scope: str, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is missing: install the package systemd")
    words = ["hostile: 100% $HOME \"quoted\" \\ 'x'", "plain"]
    content = {
        "name": "small",
        "logs": "logs",
        "routers": [{}, {"port": 8001, "control_port": 5571}],
        "pools": {
            "first": {"role": "prefill", "cpus": 2, "memory_mib": 2048},
            "second": {"role": "decode", "replicas": 2, "env": {"NOTE": words[0]}},
        },
        "settings": {"model": {"name": words[0]}, "router": {"api_keys": ["s3cret"]}},
        "systemd": {"scope": scope},
    }
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    done = subprocess.run(
        [sys.executable, "-m", "baton", "render", "--on", "systemd", "--out", "out"],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    files = [tmp_path / line for line in done.stdout.splitlines()]
    units = [path for path in files if path.suffix != ".env"]
    assert [path.name for path in units] == [
        "baton-small.target",
        "baton-small-router@.service",
        "baton-small-first@.service",
        "baton-small-second@.service",
    ]
    assert not [path for path in units if "s3cret" in path.read_text()]
    assert {path.stat().st_mode & 0o777 for path in files if path not in units} == {0o600}
    instances = [path.name.replace("@.", "@0.") for path in units]
    checked = subprocess.run(
        ["systemd-analyze", "verify", *[f"./{name}" for name in instances]],
        cwd=units[0].parent, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (checked.returncode, checked.stderr) == (0, "")
    for path in units[1:]:
        text = path.read_text()
        (stop,) = [line for line in text.splitlines() if line.startswith("TimeoutStopSec=")]
        assert float(stop.partition("=")[2]) > (30 if "router" not in path.name else 1)
        assert ("NoNewPrivileges=yes" in text) is (scope == "system")
