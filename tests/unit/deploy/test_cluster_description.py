"""cluster.yaml: what it comes to, on Slurm and Ray too, and what it refuses."""

import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import yaml

from baton.deploy.cluster.description import Description
from baton.deploy.cluster.hosts import check_machine, on_this_machine
from baton.deploy.cluster.platforms import ray_plan, slurm
from baton.deploy.cluster.processes import (
    ClusterAddresses,
    ClusterPlan,
    ProcessSpec,
    plan_of,
)
from baton.deploy.cluster.reading import read_description
from baton.protocol.config import ClusterConfig
from baton.protocol.errors import ConfigError
from baton.runtime.channels.keys import write_key
from baton.runtime.settings import Subcommand, load
from tests.support.sources import REPOSITORY

EXAMPLES = sorted((REPOSITORY / "deploy/examples").glob("*.yaml"))
SMALL: dict[str, object] = {
    "name": "small",
    "pools": {"prefill": {"role": "prefill"}, "decode": {"role": "decode"}},
}
HERE = ClusterAddresses(("127.0.0.1",), "127.0.0.1", host="127.0.0.1")


def written(folder: Path, **changes: object) -> Path:
    """Write the small cluster with other keys of the top level."""
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump({**SMALL, **changes}, sort_keys=False))
    return path


def pools(**changes: object) -> dict[str, object]:
    """The small cluster's pools, with other keys of the decode pool."""
    return {"prefill": {"role": "prefill"}, "decode": {"role": "decode", **changes}}


def planned(path: Path, places: ClusterAddresses = HERE) -> ClusterPlan:
    return plan_of(read_description(path), places)


def settings_of(process: ProcessSpec) -> ClusterConfig:
    """The settings that the process itself will make of its command and its environment."""
    _, role, *words = process.argv
    return load(Subcommand(role, "", ()), words, {**process.env, **process.secret_env})


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_becomes_processes_that_understand_their_commands(example, tmp_path):
    write_key(tmp_path / "cluster.key")
    description = read_description(Path(shutil.copy(example, tmp_path)))
    address = "10.9.0.1" if description.key else "127.0.0.1"
    routers = tuple(router.host or address for router in description.routers)
    plan = plan_of(description, ClusterAddresses(routers, address))
    assert len({process.name for process in plan.processes}) == len(plan.processes)
    for process in plan.processes:
        config = settings_of(process)
        assert config.model.path == description.model
        if process.role == "router":
            assert config.router.port == process.ports[0].port
            continue
        assert config.node.id == process.name
        assert config.engine.tensor_parallel_size == max(1, process.gpus)
        assert len(config.node.routers) == len(routers)
        assert process.grace_s > config.node.shutdown_timeout_s


def test_nodes_take_the_hosts_and_the_gpus_of_a_host_in_turn(tmp_path):
    hosts = {"a": ["10.0.0.1"], "b": ["10.0.0.1", "10.0.0.2"]}
    path = written(
        tmp_path,
        routers=[{"host": "10.0.0.9"}],
        gpus_per_host=4,
        settings={"keys": {"insecure": True}},
        pools={
            "prefill": {"role": "prefill", "gpus": 2, "hosts": hosts["a"]},
            "decode": {"role": "decode", "gpus": 1, "replicas": 4, "hosts": hosts["b"]},
        },
    )
    plan = planned(path, ClusterAddresses(("10.0.0.9",), ""))
    assert [(one.host, one.gpu_ids) for one in plan.processes if one.gpus] == [
        ("10.0.0.1", (0, 1)),
        ("10.0.0.1", (2,)),
        ("10.0.0.2", (0,)),
        ("10.0.0.1", (3,)),
        ("10.0.0.2", (1,)),
    ]
    assert plan.pool("decode")[2].env["CUDA_VISIBLE_DEVICES"] == "3"


def test_nodes_get_the_gpus_that_the_command_was_left(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-a,7")
    monkeypatch.setattr("baton.deploy.cluster.hosts.check_port", lambda *_: None)
    plan = planned(written(tmp_path, pools=pools(gpus=1, replicas=2)))
    router, prefill, *decode = on_this_machine(plan.processes, "cpus")
    assert [one.env["CUDA_VISIBLE_DEVICES"] for one in decode] == ["4", "GPU-a"]
    assert prefill.env["BATON_ENGINE_SHARED_CPUS"] == "cpus"
    assert int(prefill.env["BATON_ENGINE_THREADS"]) > 0
    assert "BATON_ENGINE_THREADS" not in router.env
    check_machine(plan, plan.processes)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4")
    with pytest.raises(
        ConfigError, match=r"decode-1 on 127.0.0.1: no GPU is left .* has 1"
    ):
        check_machine(plan, plan.processes)


REMOTE = {"routers": [{"host": "10.0.0.1"}], "settings": {"keys": {"insecure": True}}}


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"rooters": []}, "rooters"),
        ({"pools": pools(replicas=0)}, "pools"),
        (
            {"pools": {"prefill": {"role": "prefill"}}},
            "pools: no pool has `role: decode`",
        ),
        ({"pools": {**pools(), "router": {"role": "decode"}}}, "pools.router"),
        ({"routers": []}, "routers"),
        ({"routers": [{"port": 5570}]}, "routers[0].control_port"),
        ({"pools": pools(peer_port=8000)}, "pools.decode.peer_port (node 0)"),
        ({"pools": pools(peer_port=65535, replicas=2)}, "pools.decode.peer_port"),
        ({"settings": {"cahe": {}}}, "settings: cahe"),
        ({"settings": {"cache": {"block_size": 0}}}, "cache.block_size cannot be 0"),
        (
            {"settings": {"model": {"path": "x"}}},
            "settings.model.path: model decides this",
        ),
        (
            {"pools": pools(settings={"router": {"port": 1}})},
            "pools.decode.settings.router.port",
        ),
        ({"pools": pools(settings={"cache": {"block_size": 8}})}, "cache.block_size"),
        ({"pools": pools(env={"BATON_NODE_ID": "x"})}, "pools.decode.env"),
        ({"pools": pools(hosts=["10.0.0.2"])}, "routers[0].host"),
        (
            {
                "pools": {"decode": {"role": "decode"}},
                "settings": {"router": {"local_prefill": "never"}},
            },
            "pools",
        ),
        (
            {
                "pools": {
                    "p": {"role": "prefill", "gpus": 2},
                    "d": {"role": "decode", "gpus": 3},
                }
            },
            "pools.p.gpus is 2 and pools.d.gpus is 3",
        ),
        (
            {**REMOTE, "pools": {"d": {"role": "decode", "hosts": ["127.0.0.1"]}}},
            "pools.d.hosts",
        ),
        ({"key": "nowhere.key"}, "key"),
        ({"secrets": {"HF_TOKEN": "x"}}, "secrets is a list of names"),
        ({"routers": [{"port": "many"}]}, "routers[0].port: expected a whole number"),
    ],
)
def test_a_mistake_is_refused_in_one_line_with_file_and_key(changes, key, tmp_path):
    path = written(tmp_path, **changes)
    with pytest.raises(ConfigError) as error:
        read_description(path)
    said = error.value.message
    assert said.startswith(str(path))
    assert key in said
    assert len(said.splitlines()) == 1


def test_prefill_nodes_alone_may_be_meant_to_make_embeddings(tmp_path):
    settings = {"model": {"convert": "embed"}}
    path = written(tmp_path, pools={"prefill": {"role": "prefill"}}, settings=settings)
    assert not read_description(path).pools_of("decode")


def test_two_pools_of_one_name_are_refused(tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_text("name: a\npools:\n  d: {role: decode}\n  d: {role: decode}\n")
    with pytest.raises(ConfigError, match="d is written twice"):
        read_description(path)


def test_processes_on_hosts_that_a_platform_picks_need_a_key(tmp_path):
    with pytest.raises(ConfigError, match="baton keygen"):
        planned(written(tmp_path), ClusterAddresses(("baton-router-0.baton",), ""))


PlacesOf = Callable[[Description], ClusterAddresses]
POOLS = {
    "first": {"role": "prefill", "gpus": 2},
    "decode": {
        "role": "decode",
        "replicas": 4,
        "gpus": 2,
        "peer_port": 6000,
        "http_port": 6100,
    },
}


def example_on(folder: Path, addresses_of: PlacesOf, **changes: object) -> ClusterPlan:
    """Return the plan of the example with GPUs, with other keys of the top level."""
    example = yaml.safe_load(
        (REPOSITORY / "deploy/examples/tensor-parallel.yaml").read_text()
    )
    example["routers"].append({"port": 8001, "control_port": 5571})
    (folder / "cluster.yaml").write_text(
        yaml.safe_dump({**example, **changes}, sort_keys=False)
    )
    write_key(folder / "cluster.key")
    description = read_description(folder / "cluster.yaml")
    return plan_of(description, addresses_of(description))


def test_slurm_tasks_of_one_host_differ_in_ports_and_gpus(tmp_path):
    plan = example_on(tmp_path, slurm.addresses_of, pools=POOLS)
    slurm.render(plan, tmp_path)
    read = msgspec.json.decode(
        (tmp_path / "plan.json").read_bytes(), type=slurm.SlurmPlan
    )
    assert read.processes == plan.processes
    spec = next(one for one in plan.processes if one.name == "decode-3")
    task = {
        "OWN_ADDRESS": "10.0.0.2",
        "SLURMD_NODENAME": "n2",
        "SLURM_LOCALID": "1",
        "CUDA_VISIBLE_DEVICES": "4,5,6,7",
    }
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
    with pytest.raises(
        ConfigError, match="decode-3 on n2: it needs 2 GPUs and Slurm gave it 1"
    ):
        slurm.placed(spec, tmp_path, "10.0.0.1", {**task, "CUDA_VISIBLE_DEVICES": "0"})


def test_nodes_notice_routers_that_moved_and_never_wait_for_their_file(
    monkeypatch, tmp_path
):
    now_s = 0.0
    monkeypatch.setattr(slurm, "monotonic", lambda: now_s)
    watch = slurm.RoutersWatch(tmp_path, "10.0.0.1")
    found = []
    for text in (None, "10.0.0.1\n", "10.0.0.2\n"):
        if text is not None:
            (tmp_path / slurm.ROUTERS_FILE).write_text(text)
        now_s += slurm.LOOK_S
        found += [watch.are_elsewhere(), watch.are_elsewhere()]
    assert found == [False] * 4 + [True, False], "a second look comes later"


def test_a_process_on_ray_gets_the_addresses_and_ports_of_its_place(tmp_path):
    processes = example_on(tmp_path, ray_plan.addresses_of, pools=POOLS).processes
    (spec,) = (spec for spec in processes if spec.name == "decode-2")
    own = ray_plan.at_its_place(spec, "10.0.0.1", "10.0.0.2", "/private/key")
    assert own.host == "10.0.0.2"
    assert "keys.file=/private/key" in own.argv
    assert own.env["BATON_NODE_ROUTERS"] == "tcp://10.0.0.1:5570,tcp://10.0.0.1:5571"
    assert own.env["BATON_NODE_BIND"] == "tcp://10.0.0.2:6002"


@pytest.mark.parametrize(
    ("addresses_of", "changes", "said"),
    [
        (
            slurm.addresses_of,
            {"node_selector": {"gpu": "h100"}},
            "node_selector.gpu: features",
        ),
        (
            slurm.addresses_of,
            {"resources": {"nic": "one"}},
            "resources.nic",
        ),
    ],
)
def test_a_resource_that_a_platform_cannot_grant_is_refused(
    addresses_of, changes, said, tmp_path
):
    with pytest.raises(ConfigError, match=said):
        example_on(
            tmp_path, addresses_of, pools={"decode": {"role": "decode", **changes}}
        )


def test_ray_is_asked_for_what_a_pool_needs(tmp_path):
    resources = {"nic": "0.5"}
    pool = {"role": "decode", "gpus": 2, "memory_mib": 3, "resources": resources}
    plan = example_on(tmp_path, ray_plan.addresses_of, pools={"decode": pool})
    node = plan.processes[-1]
    asked = {"CPU": 1.0, "GPU": 2.0, "memory": 3.0 * 2**20, "nic": 0.5}
    assert ray_plan.resources_of(node) == asked
    odd = msgspec.structs.replace(node, resources={"nic": "one"})
    with pytest.raises(ConfigError, match=r"pools\.decode\.resources: .*'one'"):
        ray_plan.resources_of(odd)


@pytest.mark.parametrize("addresses_of", [slurm.addresses_of, ray_plan.addresses_of])
def test_hosts_are_refused_where_the_platform_chooses_them(addresses_of, tmp_path):
    pools = {"decode": {"role": "decode", "hosts": ["10.0.0.2"]}}
    with pytest.raises(ConfigError, match=r"routers\[0\]\.host"):
        example_on(tmp_path, addresses_of, routers=[{"host": "10.0.0.1"}], pools=pools)
