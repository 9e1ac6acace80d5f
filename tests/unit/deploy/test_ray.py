"""The request to Ray for a cluster, and a process as it runs on a host of Ray."""

from pathlib import Path

import pytest
import yaml

from baton.deploy.cluster.processes import ClusterPlan, plan_of
from baton.deploy.cluster.ray import at_its_place, places_of, shortage
from baton.deploy.cluster.reading import read_description
from baton.protocol.errors import ConfigError
from baton.runtime.channels.keys import write_key
from tests.support.sources import REPOSITORY

HOSTS = [{"CPU": 8.0, "GPU": 4.0}, {"CPU": 8.0, "GPU": 2.0}]


def planned(folder: Path, **changes: object) -> ClusterPlan:
    """Return the plan of the example with GPUs, with other keys of the top level."""
    example = yaml.safe_load((REPOSITORY / "deploy/examples/tensor-parallel.yaml").read_text())
    (folder / "cluster.yaml").write_text(yaml.safe_dump({**example, **changes}, sort_keys=False))
    write_key(folder / "cluster.key")
    description = read_description(folder / "cluster.yaml")
    return plan_of(description, places_of(description))


def test_a_process_gets_the_addresses_and_ports_of_its_place(tmp_path: Path) -> None:
    pools = {
        "first": {"role": "prefill", "gpus": 2},
        "decode": {
            "role": "decode", "replicas": 3, "gpus": 2, "peer_port": 6000, "http_port": 6100,
        },
    }  # fmt: skip
    processes = planned(tmp_path, pools=pools).processes
    addresses = ["10.0.0.1", "10.0.0.2", "10.0.0.1", "10.0.0.2", "10.0.0.1", "10.0.0.2"]
    own = at_its_place(processes, "decode-2", addresses, "/private/key")
    assert own.host == "10.0.0.2"
    assert "keys.file=/private/key" in own.argv
    assert own.env == {
        "BATON_NODE_ID": "decode-2",
        "BATON_NODE_ROUTERS": "tcp://10.0.0.1:5570,tcp://10.0.0.2:5571",
        "BATON_NODE_BIND": "tcp://10.0.0.2:6001",
        "BATON_NODE_HTTP": "10.0.0.2:6101",
    }


@pytest.mark.parametrize(
    ("gpus", "said"),
    [
        ([4, 2], ""),
        ([2, 5], "the cluster needs 7 GPU, and all hosts of Ray together have 6 GPU"),
        ([1, 5], "a process needs 5 GPU, and no host of Ray has that"),
    ],
)
def test_what_the_hosts_lack_is_said(gpus: list[int], said: str, tmp_path: Path) -> None:
    pools = {
        f"pool-{i}": {"role": "decode", "gpus": count, "http_port": 9000 + i}
        for i, count in enumerate(gpus)
    }
    assert shortage(planned(tmp_path, pools=pools).processes, HOSTS) == said


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
