"""The chart, filled in by the real helm: alone, and with what a description comes to."""

import json
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import msgspec
import pytest
import yaml

from baton.deploy.cluster.commands import main
from baton.deploy.cluster.platforms import helm
from baton.deploy.cluster.reading import POOL_SECTIONS, ROUTER_SECTIONS
from baton.deploy.model_folder import HUB_FILES, HUB_WEIGHTS
from baton.protocol import VERSION
from baton.protocol.config import ClusterConfig, NodeConfig, RouterConfig
from baton.runtime.channels.keys import Keys, write_key
from tests.support.chart import (
    Object,
    Objects,
    needs_helm,
    objects_of,
    refusal,
    values_file,
)
from tests.support.chart import helm as run_helm
from tests.support.depth import nightly
from tests.support.sources import REPOSITORY
from tests.unit.deploy.test_cluster_kubernetes import (
    CONTENT,
    CUSTOM,
    VERSIONS,
    rendered,
)
from tests.unit.deploy.test_cluster_kubernetes import objects as objects_in

pytestmark = needs_helm
SCALED = ("--set", "pools.decode.autoscaling.maxReplicas=8")
EXAMPLE = ("--values", str(REPOSITORY / "examples" / "production-values.yaml"))
KEDA = (*SCALED, "--set", "node.autoscaling.prometheus=http://prometheus:9090")
HPA = (*SCALED, "--set", "node.autoscaling.externalMetrics=true")
SCALERS = ("ScaledObject", "HorizontalPodAutoscaler")
FULL: dict[str, Any] = {
    "model": "Qwen/Qwen3-0.6B",
    "image": {"repository": "example/baton", "tag": "sha256:" + "0" * 64},
    "imagePullSecrets": [{"name": "registry"}],
    "apiKeys": {"existingSecret": "ours"},
    "huggingFace": {"token": "hf_x"},
    "modelStorage": {
        "create": {"size": "10Gi"},
        "path": "qwen/small",
        "download": True,
    },
    "node": {
        "extraEnv": [{"name": "ONE", "value": "1"}],
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "extraVolumes": [{"name": "certificates", "secret": {"secretName": "tls"}}],
        "extraVolumeMounts": [{"name": "certificates", "mountPath": "/tls"}],
    },
    "pools": {
        "prefill": {
            "cacheFolder": {"size": "9Gi", "storageClass": "nvme"},
            "gpus": 2,
            "resources": {"limits": {"rdma/hca": "1"}},
        }
    },
    "serviceAccount": {"create": True},
    "ingress": {
        "enabled": True,
        "host": "llm.example",
        "tlsSecret": "tls",
        "className": "nginx",
    },
    "httpRoute": {"enabled": True, "parentRefs": [{"name": "gateway"}]},
    "podMonitor": {
        "enabled": True,
        "labels": {"release": "prometheus"},
        "interval": "15s",
    },
}


def described(
    folder: Path, capsys: pytest.CaptureFixture[str], **changes: Any
) -> list[str]:
    """Return helm's flags for the files that `baton render` writes for a description."""
    (folder / "cluster.yaml").write_text(
        yaml.safe_dump({**CONTENT, **changes}, sort_keys=False)
    )
    if not (folder / "cluster.key").exists():
        write_key(folder / "cluster.key")
    words = [
        str(folder / "cluster.yaml"),
        "--on",
        "helm",
        "--out",
        str(folder / "values"),
    ]
    assert main("render", "", words) == 0
    paths = capsys.readouterr().out.splitlines()
    return [word for path in paths for word in ("--values", path)]


def container_of(found: Objects, name: str) -> Object:
    (container,) = found["StatefulSet", name]["spec"]["template"]["spec"]["containers"]
    return container


def named(entries: list[Object]) -> dict[str, Object]:
    return {entry["name"]: entry for entry in entries}


def test_helm_finds_no_fault(tmp_path):
    for words in ((), KEDA, HPA, EXAMPLE, ("--values", values_file(tmp_path, **FULL))):
        done = run_helm("lint", "--strict", str(helm.CHART), *words)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("version", [nightly(VERSIONS[0]), *VERSIONS[1:]])
def test_every_object_is_valid_in_the_oldest_and_the_newest_version(
    version, tmp_path, capsys
):
    full = ("--values", values_file(tmp_path, **FULL))
    for words in ((), KEDA, HPA, EXAMPLE, full, described(tmp_path, capsys)):
        for (kind, _), one in objects_of(*words).items():
            if kind not in (*CUSTOM, "HTTPRoute"):
                kubernetes_validate.validate(one, version, strict=True)


def test_releases_of_one_namespace_share_no_name_and_no_pod(tmp_path):
    words = ("--values", values_file(tmp_path, **FULL))
    ours, theirs = (objects_of(*words, release=name) for name in ("ours", "theirs"))
    assert ours
    assert not ours.keys() & theirs.keys()
    for one in ours.values():
        assert "theirs" not in json.dumps(one)
        selector = json.dumps(one.get("spec", {}).get("selector", "instance"))
        assert "instance" in selector


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--set", "pools.decode.replica=4"), "replica"),
        (("--set", "componets.decode.replicas=4"), "componets"),
        (("--set", "settings.cahce.block_size=16"), "cahce"),
        (("--set", "pools.other.replicas=1"), "role"),
        (("--set", "pools.router.role=decode"), "router"),
        (("--set", "pod.containers=x"), "containers"),
        (SCALED, "nothing measures when to scale"),
        ((*KEDA, "--set", "pools.decode.replicas=9"), "must not be smaller"),
        (("--set", "modelStorage.download=true"), "give `model`"),
        (("--set", f"pools.{'p' * 41}.role=decode"), "does not match pattern"),
    ],
)
def test_values_that_cannot_work_are_refused(words, reason):
    # helm 3 and helm 4 begin their sentences differently.
    assert reason.lower() in refusal(*words).lower()


def test_names_that_are_too_long_for_labels_are_refused():
    reason = refusal("--set", f"pools.{'p' * 40}.role=decode", release="r" * 20)
    assert "more than 52 characters" in reason


@pytest.mark.parametrize("words", [KEDA, HPA])
def test_replicas_are_the_least_number_where_a_pool_is_scaled(words):
    found = objects_of(*words, "--set", "pools.decode.replicas=4")
    assert "replicas" not in found["StatefulSet", "small-decode"]["spec"]
    (scaler,) = (one for (kind, _), one in found.items() if kind in SCALERS)
    spec = scaler["spec"]
    assert (spec.get("minReplicaCount") or spec["minReplicas"]) == 4
    assert (spec.get("maxReplicaCount") or spec["maxReplicas"]) == 8
    for trigger in spec.get("triggers", []):
        assert trigger["metadata"]["ignoreNullValues"] == "false"
    fixed = objects_of("--set", "pools.decode.replicas=4")[
        "StatefulSet", "small-decode"
    ]
    assert fixed["spec"]["replicas"] == 4


def test_thresholds_and_behaviour_are_values(tmp_path):
    behavior = {"scaleDown": {"stabilizationWindowSeconds": 600}}
    scaling = {"waitingRequests": 7, "busyRatio": 0.5, "behavior": behavior}
    more = ("--values", values_file(tmp_path, node={"autoscaling": scaling}))
    keda = objects_of(*KEDA, *more)["ScaledObject", "small-decode"]["spec"]
    assert [one["metadata"]["threshold"] for one in keda["triggers"]] == ["7", "0.5"]
    assert keda["advanced"]["horizontalPodAutoscalerConfig"]["behavior"] == behavior
    hpa = objects_of(*HPA, *more)["HorizontalPodAutoscaler", "small-decode"]["spec"]
    assert hpa["metrics"][0]["external"]["target"]["averageValue"] == "7"
    assert hpa["behavior"] == behavior


def test_monitors_have_labels_and_ask_routers_where_no_key_is_needed(tmp_path):
    found = objects_of("--values", values_file(tmp_path, **FULL))
    for name, port in (("small-router", "metrics"), ("small-nodes", "http")):
        monitor = found["PodMonitor", name]
        assert monitor["metadata"]["labels"]["release"] == "prometheus"
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        assert endpoint == {"port": port, "interval": "15s"}


def test_the_key_that_a_chart_makes_is_one(tmp_path):
    found = objects_of("--set", "model=Qwen/Qwen3-0.6B")
    path = tmp_path / "cluster.key"
    path.write_text(found["Secret", "small-key"]["stringData"]["cluster.key"])
    path.chmod(0o600)
    assert Keys(str(path)).first is not None


def test_secrets_that_exist_are_named_and_none_is_made(tmp_path):
    secrets = {
        "clusterKey": {"existingSecret": "a"},
        "apiKeys": {"existingSecret": "b", "existingSecretKey": "keys"},
        "huggingFace": {"existingSecret": "c"},
    }
    words = ("--values", values_file(tmp_path, **secrets), "--set", "model=some/model")
    found = objects_of(*words)
    assert not [name for kind, name in found if kind == "Secret"]
    pod = found["StatefulSet", "small-router"]["spec"]["template"]["spec"]
    assert named(pod["volumes"])["secret"]["secret"]["secretName"] == "a"
    env = named(container_of(found, "small-router")["env"])
    assert env["BATON_ROUTER_API_KEYS"]["valueFrom"]["secretKeyRef"] == {
        "name": "b",
        "key": "keys",
    }
    assert env["HF_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": "c", "key": "token"}


def test_only_pods_that_fetch_the_model_have_the_token(tmp_path):
    found = objects_of("--values", values_file(tmp_path, **FULL))
    having = [
        kind for (kind, _), one in found.items() if '"HF_TOKEN"' in json.dumps(one)
    ]
    assert having == ["Job"]
    args = container_of(found, "small-decode")["args"]
    assert {
        "model.path=/model/qwen/small",
        f"model.served_model_name={FULL['model']}",
    } < set(args)


@pytest.mark.parametrize(
    ("model", "is_fetched"), [("some/model", True), ("/models/a", False)]
)
def test_a_described_token_is_kept_where_the_model_is_fetched(
    model, is_fetched, tmp_path, capsys
):
    found = objects_of(
        *described(tmp_path, capsys, model=model, env={"HF_TOKEN": "hf_s3cret"})
    )
    assert (("Secret", "small-hugging-face") in found) == is_fetched
    for name in ("small-router", "small-decode"):
        assert ("HF_TOKEN" in named(container_of(found, name)["env"])) == is_fetched
    having = [
        kind for (kind, _), one in found.items() if "hf_s3cret" in json.dumps(one)
    ]
    assert having == ["Secret"] * is_fetched


def test_a_pool_of_the_chart_that_a_description_lacks_is_taken_out(tmp_path, capsys):
    pools = {"small-ones": {"role": "decode"}, "big": {"role": "prefill", "gpus": 2}}
    found = objects_of(*described(tmp_path, capsys, pools=pools))
    names = {name for kind, name in found if kind == "StatefulSet"}
    assert names == {"small-router", "small-small-ones", "small-big"}


def test_the_job_fetches_what_baton_reads_and_pods_wait_for_its_mark(tmp_path):
    found = objects_of("--values", values_file(tmp_path, **FULL))
    (job,) = (
        one["spec"]["template"]["spec"]
        for (kind, _), one in found.items()
        if kind == "Job"
    )
    script = job["containers"][0]["command"][2]
    folder = "/model/qwen/small"
    mark = script.split()[-1]
    patterns = " ".join(
        f"--include '{pattern}'" for pattern in (*HUB_FILES, HUB_WEIGHTS)
    )
    assert (
        script
        == f'hf download "$MODEL" --local-dir {folder} {patterns} && touch {mark}'
    )
    pod = found["StatefulSet", "small-decode"]["spec"]["template"]["spec"]
    assert f"[ -e {mark} ]" in named(pod["initContainers"])["model"]["command"][2]
    other = objects_of(
        "--values", values_file(tmp_path, **{**FULL, "model": "other/model"})
    )
    names = [
        {name for kind, name in objects if kind == "Job"} for objects in (found, other)
    ]
    assert names[0] != names[1], "a Job cannot be changed"


def test_nodes_of_a_private_network_need_no_key():
    found = objects_of("--set", "settings.keys.insecure=true")
    assert not [name for kind, name in found if kind == "Secret"]
    assert "key" not in json.dumps(
        found["StatefulSet", "small-decode"]["spec"]["template"]["spec"]["volumes"]
    )


def test_kustomize_takes_what_render_writes(tmp_path):
    files = rendered(tmp_path)
    done = subprocess.run(
        ["kubectl", "kustomize", str(files[0].parent)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    kinds = [one["kind"] for one in yaml.safe_load_all(done.stdout)]
    assert sorted(kinds) == sorted(
        kind for kind, _ in objects_in(files) if kind != "Kustomization"
    )


def test_pods_ask_for_memory_and_bound_what_they_share(tmp_path, capsys):
    for words in ((), described(tmp_path, capsys)):
        found = objects_of(*words)
        for name in ("small-router", "small-prefill", "small-decode"):
            assert container_of(found, name)["resources"]["requests"]["memory"]
            pod = found["StatefulSet", name]["spec"]["template"]["spec"]
            assert named(pod["volumes"])["shared-memory"]["emptyDir"]["sizeLimit"]


def test_pods_begin_anew_when_a_secret_changes(tmp_path, capsys):
    digests = []
    for _ in range(2):
        (tmp_path / "cluster.key").unlink(missing_ok=True)
        decode = objects_of(*described(tmp_path, capsys))["StatefulSet", "small-decode"]
        about = decode["spec"]["template"]["metadata"]
        digests.append(about["annotations"]["baton/secrets"])
    assert digests[0] != digests[1]


def test_the_chart_knows_the_sections_defaults_and_version_of_baton():
    schema = json.loads((helm.CHART / "values.schema.json").read_text())["properties"]
    sections = {
        name
        for name in ClusterConfig.__struct_fields__
        if isinstance(getattr(ClusterConfig(), name), msgspec.Struct)
    }
    assert set(schema["settings"]["properties"]) == sections
    assert set(schema["node"]["properties"]["settings"]["properties"]) == set(
        POOL_SECTIONS
    )
    assert set(schema["router"]["properties"]["settings"]["properties"]) == set(
        ROUTER_SECTIONS
    )
    chart = yaml.safe_load((helm.CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (VERSION, VERSION)
    pod = objects_of()["StatefulSet", "small-decode"]["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == NodeConfig().shutdown_timeout_s + 15
    (container,) = pod["containers"]
    start_s = (
        container["startupProbe"]["failureThreshold"]
        * container["startupProbe"]["periodSeconds"]
    )
    assert start_s == NodeConfig().start_timeout_s
    assert RouterConfig().shutdown_timeout_s == NodeConfig().shutdown_timeout_s


def test_a_pool_with_a_cache_folder_has_a_volume_for_each_of_its_pods():
    found = objects_of("--set", "pools.decode.cacheFolder.size=20Gi")
    with_one, without = (
        found["StatefulSet", f"small-{name}"] for name in ("decode", "prefill")
    )
    assert "volumeClaimTemplates" not in without["spec"]
    [claim] = with_one["spec"]["volumeClaimTemplates"]
    assert claim["spec"]["resources"]["requests"] == {"storage": "20Gi"}
    mounts = named(container_of(found, "small-decode")["volumeMounts"])
    folder = named(container_of(found, "small-decode")["env"])["BATON_CACHE_FOLDER"][
        "value"
    ]
    assert Path(folder).is_relative_to(mounts[claim["metadata"]["name"]]["mountPath"])
    assert "BATON_CACHE_FOLDER" not in named(
        container_of(found, "small-prefill")["env"]
    )
    assert "sise" in refusal("--set", "node.cacheFolder.sise=1Gi")
