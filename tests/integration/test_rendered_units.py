"""`baton render --on systemd` writes units that systemd accepts."""

import shutil
import subprocess
import sys

import pytest
import yaml


@pytest.mark.parametrize("scope", ["system", "user"])
def test_systemd_accepts_every_unit(scope, tmp_path):
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
        "settings": {
            "model": {"served_model_name": words[0]},
            "router": {"api_keys": ["s3cret"]},
        },
        "systemd": {"scope": scope},
        "key": "cluster.key",
    }
    subprocess.run(
        [sys.executable, "-m", "baton", "keygen", "cluster.key"],
        cwd=tmp_path,
        capture_output=True,
        check=True,
    )
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    done = subprocess.run(
        [sys.executable, "-m", "baton", "render", "--on", "systemd", "--out", "out"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    files = [tmp_path / line for line in done.stdout.splitlines()]
    units = [path for path in files if path.suffix not in (".env", ".key")]
    assert [path.name for path in units] == [
        "baton-small.target",
        "baton-small-router@.service",
        "baton-small-first@.service",
        "baton-small-second@.service",
    ]
    instances = [path.name.replace("@.", "@0.") for path in units]
    checked = subprocess.run(
        ["systemd-analyze", "verify", *[f"./{name}" for name in instances]],
        cwd=units[0].parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (checked.returncode, checked.stderr) == (0, "")
    (key,) = [path for path in files if path.suffix == ".key"]
    assert key.read_bytes() == (tmp_path / "cluster.key").read_bytes()
    assert key.stat().st_mode & 0o077 == 0
    assert not any(f"{tmp_path}/cluster.key" in unit.read_text() for unit in units)
