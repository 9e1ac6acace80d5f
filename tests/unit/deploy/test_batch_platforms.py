"""Slurm and Ray: what a job asks for, and a process as it runs where the platform put it."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import yaml

from baton.deploy.cluster import ray, slurm
from baton.deploy.cluster.description import Description
from baton.deploy.cluster.processes import ClusterPlan, ProcessPlaces, plan_of
from baton.deploy.cluster.reading import read_description
from baton.protocol.errors import ConfigError
from baton.runtime.channels.keys import write_key
from tests.support.sources import REPOSITORY

PlacesOf = Callable[[Description], ProcessPlaces]
POOLS = {
    "first": {"role": "prefill", "gpus": 2},
    "decode": {"role": "decode", "replicas": 4, "gpus": 2, "peer_port": 6000, "http_port": 6100},
}


def planned(folder: Path, places_of: PlacesOf, **changes: object) -> ClusterPlan:
    """Return the plan of the example with GPUs, with other keys of the top level."""
    example = yaml.safe_load((REPOSITORY / "deploy/examples/tensor-parallel.yaml").read_text())
    example["routers"].append({"port": 8001, "control_port": 5571})
    (folder / "cluster.yaml").write_text(yaml.safe_dump({**example, **changes}, sort_keys=False))
    write_key(folder / "cluster.key")
    description = read_description(folder / "cluster.yaml")
    return plan_of(description, places_of(description))


def test_slurm_tasks_of_one_host_differ_in_ports_and_gpus(tmp_path):
    plan = planned(tmp_path, slurm.places_of, pools=POOLS)
    slurm.render(plan, tmp_path)
    read = msgspec.json.decode((tmp_path / "plan.json").read_bytes(), type=slurm.SlurmPlan)
    assert read.processes == plan.processes
    spec = next(one for one in plan.processes if one.name == "decode-3")
    task = {
        "OWN_ADDRESS": "10.0.0.2", "SLURMD_NODENAME": "n2", "SLURM_LOCALID": "1",
        "CUDA_VISIBLE_DEVICES": "4,5,6,7",
    }  # fmt: skip
    own = slurm.placed(spec, tmp_path, "10.0.0.1", task)
    assert own.host == "n2"
    assert f"keys.file={tmp_path}/key" in own.argv
    assert own.env == {
        "BATON_NODE_ID": "decode-3",
        "BATON_NODE_ROUTERS": "tcp://10.0.0.1:5570,tcp://10.0.0.1:5571",
        "BATON_NODE_BIND": "tcp://10.0.0.2:6003",
        "BATON_NODE_HTTP": "10.0.0.2:6103",
        "CUDA_VISIBLE_DEVICES": "6,7",
    }
    with pytest.raises(ConfigError, match="decode-3 on n2: it needs 2 GPUs and Slurm gave it 1"):
        slurm.placed(spec, tmp_path, "10.0.0.1", {**task, "CUDA_VISIBLE_DEVICES": "0"})


def test_nodes_notice_routers_that_moved_and_never_wait_for_their_file(monkeypatch, tmp_path):
    now_s = 0.0
    monkeypatch.setattr(slurm, "monotonic", lambda: now_s)
    watch, found = slurm.RoutersWatch(tmp_path, "10.0.0.1"), []
    for text in (None, "10.0.0.1\n", "10.0.0.2\n"):
        if text is not None:
            (tmp_path / slurm.ROUTERS_FILE).write_text(text)
        now_s += slurm.LOOK_S
        found += [watch.are_elsewhere(), watch.are_elsewhere()]
    assert found == [False] * 4 + [True, False], "a second look comes later"


def test_a_process_on_ray_gets_the_addresses_and_ports_of_its_place(tmp_path):
    processes = planned(tmp_path, ray.places_of, pools=POOLS).processes
    addresses = [f"10.0.0.{host}" for host in (1, 2, 1, 2, 1, 2, 1)]
    own = ray.at_its_place(processes, "decode-2", addresses, "/private/key")
    assert own.host == "10.0.0.2"
    assert "keys.file=/private/key" in own.argv
    assert own.env["BATON_NODE_ROUTERS"] == "tcp://10.0.0.1:5570,tcp://10.0.0.2:5571"
    assert own.env["BATON_NODE_BIND"] == "tcp://10.0.0.2:6001"


@pytest.mark.parametrize(
    ("gpus", "said"),
    [
        ([4, 2], ""),
        ([2, 5], "the cluster needs 7 GPU, and all hosts of Ray together have 6 GPU"),
        ([1, 5], "a process needs 5 GPU, and no host of Ray has that"),
    ],
)
def test_what_the_hosts_of_ray_lack_is_said(gpus, said, tmp_path):
    pools = {
        f"pool-{i}": {"role": "decode", "gpus": count, "http_port": 9000 + i}
        for i, count in enumerate(gpus)
    }
    hosts = [{"CPU": 8.0, "GPU": 4.0}, {"CPU": 8.0, "GPU": 2.0}]
    assert ray.shortage(planned(tmp_path, ray.places_of, pools=pools).processes, hosts) == said


@pytest.mark.parametrize(
    ("places_of", "changes", "said"),
    [
        (slurm.places_of, {"node_selector": {"gpu": "h100"}}, "node_selector.gpu: features"),
        (slurm.places_of, {"resources": {"nic": "one"}}, "resources.nic: give the number"),
        (ray.places_of, {"resources": {"GPU": "1"}}, "resources.GPU: write gpus of the pool"),
        (ray.places_of, {"resources": {"nic": "one"}}, "resources.nic: one must be the number"),
    ],
)
def test_a_resource_that_a_platform_cannot_grant_is_refused(places_of, changes, said, tmp_path):
    with pytest.raises(ConfigError, match=said):
        planned(tmp_path, places_of, pools={"decode": {"role": "decode", **changes}})


@pytest.mark.parametrize("places_of", [slurm.places_of, ray.places_of])
def test_hosts_are_refused_where_the_platform_chooses_them(places_of, tmp_path):
    pools = {"decode": {"role": "decode", "hosts": ["10.0.0.2"]}}
    with pytest.raises(ConfigError, match=r"routers\[0\]\.host: .* chooses the hosts"):
        planned(tmp_path, places_of, routers=[{"host": "10.0.0.1"}], pools=pools)
