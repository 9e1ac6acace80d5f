"""The files that `baton render` writes for each platform, compared as a whole with those beside it.

Delete a file below `rendered/` and run the test once to write it anew; then read it.
"""

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton.deploy.cluster.commands import main
from baton.runtime.channels.keys import write_key
from tests.support.chart import needs_helm

EXPECTED = Path(__file__).parent / "rendered"
HOSTILE = "hostile: 100% $(HOME) \"quoted\" \\ 'x'"
CONTENT: dict[str, Any] = {
    "name": "small",
    "model": "/models/qwen3",
    "key": "cluster.key",
    "logs": "logs",
    "gpus_per_host": 4,
    "routers": [{}, {}],
    "pools": {
        "prefill": {"role": "prefill", "gpus": 1, "replicas": 2, "memory_mib": 2048},
        "decode": {
            "role": "decode",
            "replicas": 3,
            "cpus": 2,
            "peer_port": 6000,
            "http_port": 9200,
            "env": {"NOTE": HOSTILE, "HF_TOKEN": "s3cret-1", "MINE": "s3cret-2"},
        },
    },
    "secrets": ["MINE"],
    "settings": {
        "router": {"api_keys": ["s3cret", "other"]},
        "model": {"served_model_name": HOSTILE},
    },
}
OF_PLATFORM: dict[str, dict[str, Any]] = {
    "kubernetes": {
        "kubernetes": {
            "image": "example/baton:1",
            "model_claim": "models",
            "cache_claim": "caches",
            "pod": {"tolerations": [{"key": "gpu", "operator": "Exists"}]},
            "annotations": {"k8s.v1.cni.cncf.io/networks": "rdma"},
            "prometheus": "http://prometheus:9090",
            "pod_monitor": True,
        },
    },
    "slurm": {
        "slurm": {
            "partition": "gpus",
            "account": "lab",
            "time": "2-00",
            "arguments": ["--qos=high"],
        },
    },
    "systemd": {"systemd": {"program": "/opt/baton/bin/baton"}},
}
# Two routers of one host need ports of their own, and those of Kubernetes must be alike.
ROUTERS = [{}, {"port": 8001, "control_port": 5571}]


@pytest.mark.parametrize(
    "platform", ["slurm", "systemd", pytest.param("kubernetes", marks=needs_helm)]
)
def test_a_platform_gets_these_files_and_no_secret_that_others_can_read(
    platform, tmp_path, capsys
):
    content = CONTENT | OF_PLATFORM[platform]
    if platform == "kubernetes":
        decode = content["pools"]["decode"] | {
            "max_replicas": 9,
            "node_selector": {"gpu": "h100"},
        }
        prefill = content["pools"]["prefill"] | {"resources": {"rdma/hca": "1"}}
        content["pools"] = {"prefill": prefill, "decode": decode}
    else:
        content["routers"] = ROUTERS
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    write_key(tmp_path / "cluster.key")
    key = (tmp_path / "cluster.key").read_text()
    out = tmp_path / "out"
    words = [str(tmp_path / "cluster.yaml"), "--on", platform, "--out", str(out)]
    assert main("render", "", words) == 0
    files = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert files
    assert set(files) == {path for path in out.rglob("*") if path.is_file()}
    for path in files:
        text = path.read_text()
        if "s3cret" in text or key.split()[1] in text:
            assert path.stat().st_mode & 0o077 == 0
            assert (
                path.suffix in (".env", ".key", ".json", "")
                or path.name == "secrets.yaml"
            )
        for found, shown in (
            (key, "KEY"),
            (str(tmp_path), "FOLDER"),
            (sys.executable, "PYTHON"),
        ):
            text = text.replace(found.strip(), shown)
        compare(platform, str(path.relative_to(out)), text)
    names = {str(path.relative_to(out)) for path in files}
    kept = {str(path.relative_to(EXPECTED / platform)) for path in files_of(platform)}
    assert kept == names


def files_of(platform: str) -> list[Path]:
    return [path for path in (EXPECTED / platform).rglob("*") if path.is_file()]


def compare(platform: str, name: str, text: str) -> None:
    expected = EXPECTED / platform / name
    # Of a new key.
    lines = [line for line in text.splitlines() if "baton/secrets: " not in line]
    if not expected.exists():
        expected.parent.mkdir(parents=True, exist_ok=True)
        expected.write_text("\n".join(lines) + "\n")
        pytest.fail(f"{expected} was missing and is written: read it")
    assert lines == expected.read_text().splitlines(), name
