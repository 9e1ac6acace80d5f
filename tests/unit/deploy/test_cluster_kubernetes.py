"""The manifests of a cluster: valid for every version of Kubernetes, confined, and complete."""

import shutil
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from baton.deploy.cluster.kubernetes import places_of, render
from baton.deploy.cluster.processes import plan_of
from baton.deploy.cluster.reading import read_description
from baton.protocol.errors import ConfigError
from baton.runtime.channels.keys import write_key
from tests.support.sources import REPOSITORY

VERSIONS = ("1.27", kubernetes_validate.latest_version())
CONTENT: dict[str, Any] = {
    "name": "small",
    "model": "/models/qwen3",
    "key": "cluster.key",
    "routers": [{}, {"port": 8001, "control_port": 5571}],
    "pools": {
        "prefill": {
            "role": "prefill",
            "gpus": 1,
            "http_port": 9100,
            "resources": {"rdma/hca": "1"},
            "node_selector": {"gpu": "h100"},
        },
        "decode": {"role": "decode", "gpus": 1, "replicas": 3, "http_port": 9200},
    },
    "settings": {
        "router": {"api_keys": ["s3cret"]},
        "model": {"served_model_name": "costs $(HOME)"},
    },
    "kubernetes": {
        "image": "example/baton:1",
        "model_claim": "models",
    },
}
Object = dict[str, Any]


def rendered(folder: Path, **changes: Any) -> list[Path]:
    (folder / "cluster.yaml").write_text(yaml.safe_dump({**CONTENT, **changes}, sort_keys=False))
    return written(folder, folder / "cluster.yaml")


def written(folder: Path, path: Path) -> list[Path]:
    if not (folder / "cluster.key").exists():
        write_key(folder / "cluster.key")
    description = read_description(path)
    return render(plan_of(description, places_of(description)), folder / "out")


def objects(files: list[Path]) -> dict[tuple[str, str], Object]:
    """Return the objects of all files by kind and name."""
    found = [one for path in files for one in yaml.safe_load_all(path.read_text())]
    return {(one["kind"], one.get("metadata", {}).get("name", "")): one for one in found}


def pods(found: dict[tuple[str, str], Object]) -> dict[str, Object]:
    return {
        name: one["spec"]["template"]["spec"]
        for (kind, name), one in found.items()
        if kind in ("Deployment", "StatefulSet")
    }


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_valid_in_the_oldest_and_the_newest_version(
    version: str, tmp_path: Path
) -> None:
    example = shutil.copy(REPOSITORY / "deploy/examples/tensor-parallel.yaml", tmp_path)
    for files in (rendered(tmp_path), written(tmp_path, Path(example))):
        for (kind, _), one in objects(files).items():
            if kind != "Kustomization":
                kubernetes_validate.validate(one, version, strict=True)


def test_processes_run_confined_and_their_secrets_are_in_secrets_only(tmp_path: Path) -> None:
    pools = CONTENT["pools"]
    pools = {**pools, "decode": {**pools["decode"], "env": {"MINE": "s3cret-2"}}}
    env = {"HF_TOKEN": "s3cret-1", "UCX_TLS": "tcp"}
    files = rendered(tmp_path, env=env, secrets=["MINE"], pools=pools)
    found = objects(files)
    key = (tmp_path / "cluster.key").read_text()
    for name, pod in pods(found).items():
        assert pod["securityContext"]["runAsNonRoot"]
        for container in pod["containers"] + pod["initContainers"]:
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"]
            assert not security["allowPrivilegeEscalation"]
            assert security["capabilities"]["drop"] == ["ALL"]
            pinned = name == "prefill" and container["name"] == "baton"
            assert ("add" in security["capabilities"]) == pinned
    for path in files:
        assert path.stat().st_mode & 0o777 == 0o600
        if path.name != "secrets.yaml":
            assert "s3cret" not in path.read_text()
            assert key.split()[1] not in path.read_text()
    assert found["Secret", "baton-key"]["stringData"]["cluster.key"] == key
    for name, extra in (("router-0", "BATON_ROUTER_API_KEYS"), ("decode", "MINE")):
        assert set(found["Secret", name]["stringData"]) == {"HF_TOKEN", extra}
        (container,) = pods(found)[name]["containers"]
        assert container["envFrom"] == [{"secretRef": {"name": name}}]
        assert {"name": "UCX_TLS", "value": "tcp"} in container["env"]
    (kustomization,) = [one for (kind, _), one in found.items() if kind == "Kustomization"]
    assert {path.name for path in files} == {*kustomization["resources"], "kustomization.yaml"}


def test_what_kubernetes_must_know_of_a_process_is_said(tmp_path: Path) -> None:
    found = objects(rendered(tmp_path))
    decode = found["StatefulSet", "decode"]["spec"]
    assert decode["replicas"] == 3
    pod = decode["template"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "1"}
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert pod["terminationGracePeriodSeconds"] > 30
    assert "model.served_model_name=costs $$(HOME)" in container["args"]
    values = {one["name"]: one.get("value") for one in container["env"]}
    assert values["BATON_NODE_ROUTERS"] == "tcp://router-0:5570,tcp://router-1:5571"
    assert values["BATON_NODE_BIND"] == "tcp://[$(POD_IP)]"
    for name in ("router-0", "router-1"):
        assert found["Service", name]["spec"]["publishNotReadyAddresses"]
    assert found["StatefulSet", "prefill"]["spec"]["template"]["spec"]["nodeSelector"] == {
        "gpu": "h100"
    }


def test_a_model_folder_needs_a_claim(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"kubernetes\.model_claim"):
        rendered(tmp_path, kubernetes={})


def test_the_probes_of_a_router_with_a_certificate_speak_https(tmp_path: Path) -> None:
    tls = {"settings": {"router": {"ssl_certfile": "/tls/pem"}}}
    routers = [{}, {"port": 8001, "control_port": 5571, **tls}]
    found = objects(rendered(tmp_path, routers=routers))
    for name, scheme in (("router-0", None), ("router-1", "HTTPS")):
        (router,) = found["Deployment", name]["spec"]["template"]["spec"]["containers"]
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert router[probe]["httpGet"].get("scheme") == scheme
