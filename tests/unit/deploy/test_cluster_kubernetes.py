"""The manifests of a cluster: valid for every version of Kubernetes, or refused by name."""

import re
import shutil
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from baton.deploy.cluster.platforms.helm import addresses_of
from baton.deploy.cluster.platforms.kubernetes import render
from baton.deploy.cluster.processes import plan_of
from baton.deploy.cluster.reading import read_description
from baton.protocol.errors import ConfigError
from baton.router.http.metrics import ROUTER_FAMILIES
from baton.runtime.channels.keys import write_key
from tests.support.chart import needs_helm
from tests.support.sources import REPOSITORY

pytestmark = needs_helm
VERSIONS = ("1.27", kubernetes_validate.latest_version())
CONTENT: dict[str, Any] = {
    "name": "small",
    "model": "/models/qwen3",
    "key": "cluster.key",
    "routers": [{}, {}],
    "pools": {
        "prefill": {
            "role": "prefill",
            "gpus": 1,
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
        "cache_claim": "caches",
        "pod": {
            "tolerations": [{"key": "gpu", "operator": "Exists"}],
            "imagePullSecrets": [{"name": "registry"}],
        },
        "annotations": {"k8s.v1.cni.cncf.io/networks": "rdma"},
        "prometheus": "http://prometheus:9090",
        "pod_monitor": True,
    },
}
# Objects of operators, whose schemas are their own.
CUSTOM = ("Kustomization", "ScaledObject", "PodMonitor")
Object = dict[str, Any]


def rendered(folder: Path, **changes: Any) -> list[Path]:
    (folder / "cluster.yaml").write_text(
        yaml.safe_dump({**CONTENT, **changes}, sort_keys=False)
    )
    return written(folder, folder / "cluster.yaml")


def written(folder: Path, path: Path) -> list[Path]:
    if not (folder / "cluster.key").exists():
        write_key(folder / "cluster.key")
    description = read_description(path, shares_hosts=False)
    return render(plan_of(description, addresses_of(description)), folder / "out")


def objects(files: list[Path]) -> dict[tuple[str, str], Object]:
    """Return the objects of all files by kind and name."""
    found = [one for path in files for one in yaml.safe_load_all(path.read_text())]
    return {
        (one["kind"], one.get("metadata", {}).get("name", "")): one for one in found
    }


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_valid_in_the_oldest_and_the_newest_version(version, tmp_path):
    example = shutil.copy(REPOSITORY / "deploy/examples/tensor-parallel.yaml", tmp_path)
    for files in (rendered(tmp_path), written(tmp_path, Path(example))):
        for (kind, _), one in objects(files).items():
            if kind not in CUSTOM:
                kubernetes_validate.validate(one, version, strict=True)


def test_clusters_of_one_namespace_share_no_name_and_select_no_pod_of_each_other(
    tmp_path,
):
    ours, theirs = (
        objects(rendered(tmp_path, name=name)) for name in ("small", "other")
    )
    assert ours.keys() & theirs.keys() == {("Kustomization", "")}
    other = theirs["StatefulSet", "other-decode"]["spec"]["template"]["metadata"][
        "labels"
    ]
    for (kind, _), one in ours.items():
        spec = one.get("spec", {})
        for place in (spec, spec.get("podSelector", {})):
            selector = place.get("selector", place)
            wanted = selector.get("matchLabels", selector if kind == "Service" else {})
            if wanted and kind != "StatefulSet":
                assert not wanted.items() <= other.items(), kind


def test_pods_begin_anew_when_a_secret_changes(tmp_path):
    digests = []
    for _ in range(2):
        (tmp_path / "cluster.key").unlink(missing_ok=True)
        decode = objects(rendered(tmp_path))["StatefulSet", "small-decode"]
        digests.append(decode["spec"]["template"]["metadata"]["annotations"])
        assert digests[-1]["k8s.v1.cni.cncf.io/networks"] == "rdma"
    assert digests[0]["baton/secrets"] != digests[1]["baton/secrets"]


def test_a_pool_is_scaled_on_what_waits_for_its_role(tmp_path):
    pools = {
        **CONTENT["pools"],
        "decode": {**CONTENT["pools"]["decode"], "max_replicas": 9},
    }
    found = objects(rendered(tmp_path, pools=pools))
    spec = found["ScaledObject", "small-decode"]["spec"]
    queries = [one["metadata"]["query"] for one in spec["triggers"]]
    families = {family.full_name for family in ROUTER_FAMILIES}
    for query in queries:
        (family,) = re.findall(r"baton_[a-z_]+", query)
        assert family in families
        assert 'role="decode"' in query
    assert "replicas" not in found["StatefulSet", "small-decode"]["spec"], (
        "an apply would undo it"
    )
    options = {"model_claim": "models", "external_metrics": True}
    found = objects(rendered(tmp_path, pools=pools, kubernetes=options))
    scaler = found["HorizontalPodAutoscaler", "small-decode"]
    for version in VERSIONS:
        kubernetes_validate.validate(scaler, version, strict=True)
    with pytest.raises(
        ConfigError, match=r"pools\.decode\.max_replicas: nothing measures"
    ):
        rendered(tmp_path, pools=pools, kubernetes={"model_claim": "models"})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"routers": [{}, {"port": 8001}]}, r"routers\[1\]"),
        (
            {
                "name": "n" * 40,
                "pools": {**CONTENT["pools"], "p" * 20: {"role": "decode"}},
            },
            "52",
        ),
        ({"kubernetes": {"model_claim": "m", "pod": {"containers": []}}}, "containers"),
        ({"kubernetes": {}}, r"kubernetes\.model_claim"),
    ],
)
def test_what_kubernetes_cannot_have_is_refused(changes, reason, tmp_path):
    with pytest.raises(ConfigError, match=reason):
        rendered(tmp_path, **changes)


def test_the_probes_of_a_router_with_a_certificate_speak_https(tmp_path):
    for settings, scheme in (
        ({}, None),
        ({"router": {"ssl_certfile": "/tls/pem"}}, "HTTPS"),
    ):
        found = objects(rendered(tmp_path, settings=settings))
        (router,) = found["StatefulSet", "small-router"]["spec"]["template"]["spec"][
            "containers"
        ]
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert router[probe]["httpGet"].get("scheme") == scheme


def test_manifests_need_helm_and_say_so(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        ConfigError, match="helm fills in the manifests and is not installed"
    ):
        rendered(tmp_path)
