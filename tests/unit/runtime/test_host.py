"""What a host has, how nodes divide it, and what its addresses mean."""

import os
import subprocess

import pytest

from baton.model.executors.step_threads import NUM_SLOTS, SharedCpus
from baton.protocol.config import EngineConfig, NodeConfig
from baton.protocol.errors import ConfigError
from baton.runtime import host
from baton.runtime.channels.endpoint import Endpoint, parse_endpoint
from baton.runtime.clock import Standstill
from baton.runtime.host import devices_for, gpus_of, nodes_on_gpu, threads_per_rank


def test_ranks_share_the_cpus_of_a_process_and_the_quota_of_its_container(
    monkeypatch, tmp_path
):
    # A process may be kept to CPUs of any numbers.
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(3, 19)))
    monkeypatch.setattr(host, "CGROUP", tmp_path)
    for quota, threads, ranks, nodes, expected in (
        ("max 100000", 0, 1, 1, 16),
        ("max 100000", 0, 4, 2, 2),
        ("max 100000", 0, 1, 50, 1),
        ("250000 100000", 0, 1, 1, 3),
        ("?", 7, 4, 2, 7),
    ):
        (tmp_path / "cpu.max").write_text(quota + "\n")
        engine = EngineConfig(threads=threads, tensor_parallel_size=ranks)
        assert threads_per_rank(engine, nodes) == expected


def test_a_node_takes_all_cpus_only_while_the_others_are_idle(tmp_path):
    path = tmp_path / "cpus"
    one = SharedCpus(path, 2, 8)
    two = SharedCpus(path, 3, 8)
    assert one.take() == 8
    assert two.take() == 3
    one.give_back()
    two.give_back()
    assert two.take() == 8
    assert one.take() == 2
    two.give_back()
    assert one.take() == 8  # its own number of the step before is not another node's
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_process_that_died_in_a_step_leaves_its_place_to_the_next(
    tmp_path, monkeypatch
):
    path = tmp_path / "cpus"
    ended = subprocess.Popen(["true"])
    ended.wait()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: ended.pid)
        SharedCpus(path, 1, 4).take()
    first = SharedCpus(path, 1, 4)
    assert first.take() == 4
    first.give_back()
    for _ in range(NUM_SLOTS - 1):
        last = SharedCpus(path, 1, 4)
    assert last.take() == 4
    with pytest.raises(ConfigError, match="share their CPUs"):
        SharedCpus(path, 1, 4)


def test_nodes_take_the_gpus_in_turn_and_see_the_others_too(tmp_path):
    assert gpus_of(0, tmp_path, {}) == ()
    for name in ("nvidiactl", "nvidia-uvm", "nvidia0", "nvidia1", "nvidia2"):
        (tmp_path / name).touch()
    seen = [gpus_of(number, tmp_path, {}) for number in range(4)]
    assert seen == [("0", "1", "2"), ("1", "2", "0"), ("2", "0", "1"), ("0", "1", "2")]
    visible = {"CUDA_VISIBLE_DEVICES": "5, GPU-1f"}
    assert gpus_of(1, tmp_path, visible) == ("GPU-1f", "5")
    assert [nodes_on_gpu(number, 4, 3) for number in range(4)] == [2, 1, 1, 2]
    assert [nodes_on_gpu(number, 3, 4, gpus_each=2) for number in range(3)] == [2, 1, 2]
    assert [nodes_on_gpu(number, 2, 8, gpus_each=4) for number in range(2)] == [1, 1]


@pytest.fixture
def rdma(tmp_path):
    for name, state in (("mlx5_0", "4: ACTIVE\n"), ("mlx5_1", "1: DOWN\n")):
        port = tmp_path / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(state)
    return tmp_path


@pytest.mark.parametrize("bind", ["tcp://127.0.0.1", "tcp://0.0.0.0"])
def test_a_cluster_on_one_host_opens_nothing(bind, rdma):
    assert (
        devices_for(NodeConfig(routers=("tcp://localhost:5570",), bind=bind), rdma)
        == ""
    )


def test_an_address_of_this_host_brings_its_interface_and_the_rdma_ports_that_are_up(
    rdma, monkeypatch
):
    # Loopback is the one interface that every machine has; here it plays one that others reach.
    monkeypatch.setattr(host.Endpoint, "is_loopback", False)
    node = NodeConfig(routers=("ipc:///tmp/control", "tcp://127.0.0.1:5570"))
    assert devices_for(node, rdma) == "mlx5_0:1,lo"
    assert devices_for(NodeConfig(bind="tcp://127.0.0.1"), rdma / "none") == "lo"


@pytest.mark.parametrize(
    ("text", "endpoint", "is_loopback"),
    [
        ("tcp://10.0.0.1:5570", Endpoint("10.0.0.1", 5570), False),
        ("tcp://10.0.0.1:*", Endpoint("10.0.0.1"), False),
        ("tcp://127.8.0.1", Endpoint("127.8.0.1"), True),
        ("tcp://[::1]:80", Endpoint("::1", 80), True),
        ("tcp://*:80", Endpoint("*", 80), False),
        ("tcp://0.0.0.0:80", Endpoint("0.0.0.0", 80), False),
        ("tcp://localhost:80", Endpoint("localhost", 80), True),
        ("ipc:///tmp/socket", Endpoint(path="/tmp/socket"), True),
    ],
)
def test_an_address_is_read(text, endpoint, is_loopback):
    assert parse_endpoint(text) == endpoint
    assert endpoint.is_loopback == is_loopback


@pytest.mark.parametrize(
    "text",
    ["", "tcp://:80", "tcp://a:b", "tcp://a:70000", "ipc://", "http://a:1", "a:1"],
)
def test_what_is_no_address_is_refused(text):
    with pytest.raises(ConfigError, match="write tcp://host:port or ipc:///path"):
        parse_endpoint(text)


@pytest.mark.parametrize("text", ["tcp://10.0.0.1", "tcp://*:80"])
def test_nobody_dials_what_is_no_single_place(text):
    with pytest.raises(ConfigError, match="cannot dial"):
        _ = parse_endpoint(text).dial_endpoint


def test_a_standstill_begins_anew_with_each_change():
    now_s = 0.0
    standstill = Standstill(5.0, lambda: now_s)
    found = []
    for now_s, state in (
        (1, "a"),
        (5, "a"),
        (6.5, "a"),
        (7, "b"),
        (12, "b"),
        (12.5, "b"),
    ):
        found.append((now_s, standstill.lasts(state)))
    assert [at_s for at_s, lasts in found if lasts] == [6.5, 12.5]
    now_s = 0.0
    standstill = Standstill(5.0, lambda: now_s)
    now_s = 5.5
    assert standstill.lasts(None), "nothing was ever seen"
