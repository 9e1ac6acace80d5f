"""What is asked of Ray for a cluster, and what a host of it makes of a process."""

import sys
from pathlib import Path

import msgspec
import pytest
import yaml

from baton.deploy.cluster.platform import PlatformOptions
from baton.deploy.cluster.processes import ClusterPlan, plan_of
from baton.deploy.cluster.ray import RayPlatform
from baton.deploy.cluster.ray_layout import (
    Bundle,
    RayHost,
    RayOrders,
    at_its_place,
    bundles_of,
    shortage,
)
from baton.deploy.cluster.reading import read_description
from baton.protocol.errors import ConfigError
from baton.runtime.channels.keys import write_key
from tests.support.sources import REPOSITORY

ADDRESS = "10.0.0.9:6379"
PLATFORM = RayPlatform(PlatformOptions(address=ADDRESS))
HOSTS = [
    RayHost("a", "10.0.0.1", {"CPU": 8.0, "GPU": 4.0, "memory": float(64 << 30)}, {"zone": "a"}),
    RayHost("b", "10.0.0.2", {"CPU": 8.0, "GPU": 2.0, "memory": float(64 << 30)}, {"zone": "b"}),
]


def planned(folder: Path, platform: RayPlatform = PLATFORM, **changes: object) -> ClusterPlan:
    """Return the plan of the example with GPUs, with other keys of the top level."""
    example = yaml.safe_load((REPOSITORY / "deploy/examples/tensor-parallel.yaml").read_text())
    (folder / "cluster.yaml").write_text(yaml.safe_dump({**example, **changes}, sort_keys=False))
    write_key(folder / "cluster.key")
    description = read_description(folder / "cluster.yaml")
    return plan_of(description, platform.places(description))


def test_one_group_and_detached_actors_without_secrets_are_rendered(tmp_path: Path) -> None:
    plan = planned(tmp_path, settings={"router": {"api_keys": ["s3cret"]}})
    (path,) = PLATFORM.render(plan, tmp_path)
    assert (path.name, path.stat().st_mode & 0o777) == ("ray.yaml", 0o600)
    assert "s3cret" not in path.read_text()
    content = yaml.safe_load(path.read_text())
    group, actors = content["placement_group"], content["actors"]
    assert (content["namespace"], group["strategy"]) == ("baton-tensor-parallel", "SPREAD")
    assert group["bundles"][:2] == [{"CPU": 1.0}] * 2
    assert group["bundles"][2] == {"CPU": 1.0, "GPU": 2.0, "memory": float(128 << 30)}
    assert group["bundles"][6] == {"CPU": 1.0, "GPU": 1.0, "memory": float(64 << 30)}
    assert [one["bundle"] for one in actors] == list(range(14))
    assert {(one["lifetime"], one["max_restarts"]) for one in actors} == {("detached", -1)}
    assert actors[2]["command"] == list(plan.processes[2].argv)
    assert actors[0]["secret_env"] == ["BATON_ROUTER_API_KEYS"]


def test_a_process_gets_the_addresses_and_ports_of_its_place(tmp_path: Path) -> None:
    pools = {
        "first": {"role": "prefill", "gpus": 2},
        "decode": {
            "role": "decode", "replicas": 3, "gpus": 2, "peer_port": 6000, "http_port": 6100,
        },
    }  # fmt: skip
    orders = RayOrders("t0ken", planned(tmp_path, pools=pools).processes, "", "")
    addresses = ["10.0.0.1", "10.0.0.2", "10.0.0.1", "10.0.0.2", "10.0.0.1", "10.0.0.2"]
    own, *others = at_its_place(orders, "decode-2", addresses, "/private/key")
    assert [one.name for one in others] == ["router-1", "decode-0"]
    assert own.host == "10.0.0.2"
    assert "keys.file=/private/key" in own.argv
    assert own.env == {
        "BATON_NODE_ID": "decode-2",
        "BATON_NODE_ROUTERS": "tcp://10.0.0.1:5570,tcp://10.0.0.2:5571",
        "BATON_NODE_BIND": "tcp://10.0.0.2:6001",
        "BATON_NODE_HTTP": "10.0.0.2:6101",
    }


@pytest.mark.parametrize(
    ("gpus", "labels", "said"),
    [
        ([4, 2], {}, ""),
        ([4, 2], {"zone": "a"}, ""),
        ([2, 5], {}, "the cluster needs 7 GPU, and all hosts of Ray together have 6 GPU"),
        ([1, 5], {}, "decode-1 needs a host that has 1 CPU, 5 GPU, and Ray has none"),
        (
            [1, 1], {"zone": "c"},
            "decode-0 needs a host with the labels zone=c that has 1 CPU, 1 GPU, and Ray has none",
        ),
        ([1, 1], {"zone": "!in(a,b)"}, ""),
    ],
)  # fmt: skip
def test_what_the_hosts_lack_is_said(gpus: list[int], labels: dict[str, str], said: str) -> None:
    bundles = [
        Bundle(f"decode-{i}", {"CPU": 1.0, "GPU": float(count)}, labels if i == 0 else {})
        for i, count in enumerate(gpus)
    ]
    assert shortage(bundles, HOSTS) == said


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"routers": [{"host": "10.0.0.1"}]}, r"routers\[0\]\.host: Ray chooses the hosts"),
        ({"resources": {"GPU": "1"}}, r"pools\.decode\.resources\.GPU: write gpus of the pool"),
        ({"resources": {"nic": "one"}}, r"resources\.nic: one must be the number above 0"),
    ],
)
def test_what_ray_cannot_grant_is_refused(
    changes: dict[str, object], said: str, tmp_path: Path
) -> None:
    pool = {"role": "decode", **changes}
    routers = pool.pop("routers", [{}])
    hosts = {"hosts": ["10.0.0.2"]} if routers != [{}] else {}
    with pytest.raises(ConfigError, match=said):
        planned(tmp_path, routers=routers, pools={"decode": {**pool, **hosts}})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (PlatformOptions(address="ray://10.0.0.9:10001"), "does not speak to Ray's client server"),
        (PlatformOptions(hosts=("10.0.0.1",)), "--host: Ray chooses the hosts"),
    ],
)
def test_other_ways_to_ray_are_refused(options: PlatformOptions, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        planned(tmp_path, RayPlatform(options))


def test_a_python_without_ray_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    plan = planned(tmp_path)
    with pytest.raises(ConfigError, match=r"Ray is not installed in this Python: .* extra `ray`"):
        PLATFORM.start(plan, tmp_path)
    assert not (tmp_path / "ray.json").exists()


def test_memory_and_cpus_are_those_of_the_pool(tmp_path: Path) -> None:
    pool = {"role": "decode", "cpus": 3, "memory_mib": 2, "resources": {"nic": "0.5"}}
    *_, bundle = bundles_of(planned(tmp_path, pools={"decode": pool}))
    assert msgspec.to_builtins(bundle) == {
        "process": "decode-0",
        "resources": {"CPU": 3.0, "memory": 2097152.0, "nic": 0.5},
        "labels": {},
    }
