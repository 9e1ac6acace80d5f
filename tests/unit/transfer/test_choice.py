"""How one rank reads another, and what of it a process can have."""

from contextlib import closing
from dataclasses import replace

import msgspec
import pytest

from baton.kv_transfer import transports
from baton.kv_transfer.pools import HostPool
from baton.kv_transfer.transports import (
    choose_transport,
    make_transports,
    nixl_binding,
    reaches_of,
)
from baton.kv_transfer.transports.addresses import ShmAddress, process_space, this_place
from baton.kv_transfer.transports.cuda_ipc import CUDA_IPC, CudaIpcAddress
from baton.kv_transfer.transports.nixl import NIXL as NIXL_KIND
from baton.protocol.config import TransferConfig
from baton.protocol.errors import ConfigError, TransferError
from baton.protocol.ids import Epoch
from baton.protocol.messages import RankAddress
from baton.protocol.pairing import pair_problem
from tests.support.connectors import node, rank_address
from tests.support.memfd_memory import GPU, device_pool
from tests.support.refusals import raises

EPOCH = Epoch("e")
SHM = rank_address("e", "a")
NIXL = RankAddress({"nixl": b"agent"})


def both(host: str) -> RankAddress:
    return RankAddress({**rank_address("e", host).metadata, **NIXL.metadata})


@pytest.mark.parametrize(
    ("prefill", "decode", "setting", "failed", "found"),
    [
        (both("a"), both("a"), "auto", (), "shm"),
        (both("a"), both("b"), "auto", (), "nixl"),
        (both("a"), both("a"), "nixl", (), "nixl"),
        (both("a"), both("a"), "auto", {"shm"}, "nixl"),
        (SHM, rank_address("f", "b"), "auto", (), None),
        (NIXL, SHM, "auto", (), None),
        (both("a"), both("b"), "shm", (), None),
        (both("a"), SHM, "nixl", (), None),
    ],
)
def test_two_ranks_take_the_first_transport_that_both_have(
    prefill, decode, setting, failed, found
):
    if found:
        assert choose_transport(prefill, decode, setting, failed) == found
    else:
        with raises(TransferError, "no_transport"):
            choose_transport(prefill, decode, setting, failed)


def test_one_kernel_with_two_network_namespaces_is_two_hosts():
    there = ShmAddress("a", "socket", b"n" * 16, Epoch("e"), network="4026532000")
    elsewhere = msgspec.structs.replace(there, network="4026532999")
    ends = [
        RankAddress({"shm": one.encode(), "nixl": b"agent"})
        for one in (there, elsewhere)
    ]
    assert choose_transport(ends[0], ends[0], "auto") == "shm"
    assert choose_transport(ends[0], ends[1], "auto") == "nixl"
    # An older node does not say.
    assert choose_transport(ends[0], both("a"), "auto") == "shm"


def test_a_node_publishes_how_its_pool_can_be_reached():
    place = "/".join(this_place())
    near = reaches_of((both("a"), both("a")), TransferConfig())
    far = reaches_of((both("a"),), TransferConfig(device="mlx5_0:1"))
    assert near == (f"nixl@{place}", f"shm@{place}")
    assert far == ("nixl", f"shm@{place}")
    assert reaches_of((both("a"), NIXL), TransferConfig(device="eth0")) == ("nixl",)


@pytest.mark.parametrize(
    ("prefill", "decode", "problem"),
    [
        (("shm@a",), ("nixl", "shm@a"), None),
        (("shm@a",), (), None),
        (("shm@a",), ("shm@b",), "no common transport: p has shm@a, d has shm@b"),
        (("nixl@a", "shm@a"), ("nixl", "shm@b"), "different hosts need NIXL"),
    ],
)
def test_two_nodes_know_beforehand_whether_blocks_can_travel(prefill, decode, problem):
    found = pair_problem(
        node("p", "prefill", reaches=prefill), node("d", "decode", reaches=decode)
    )
    assert (
        (found is None) if problem is None else (found is not None and problem in found)
    )


def test_a_missing_wheel_is_an_error_that_names_the_extra(monkeypatch):
    monkeypatch.setattr(nixl_binding, "WHEELS", ("no_such_wheel_of_nixl",))
    with closing(HostPool(1, 4096)) as pool:
        with pytest.raises(ConfigError, match=r"pip install -e .\.\[nixl\]"):
            make_transports(pool, EPOCH, TransferConfig(transport="nixl"))
        (only,) = make_transports(pool, EPOCH, TransferConfig(device="mlx5_0:1"))
        assert only.name == "shm"
        only.close()


# --- GPUs ----------------------------------------------------------------------------------------


def gpu(
    number: int = 0, host: str = "a", visible: str = "01", processes: str = "here"
) -> RankAddress:
    """Return what a rank on that GPU publishes where NIXL is installed."""
    table = ShmAddress(host, "socket", b"n" * 16, EPOCH)
    ids = tuple(f"GPU-{one}" for one in visible)
    where = CudaIpcAddress(table, b"handle", 4096, f"GPU-{number}", ids, processes)
    return RankAddress({"cuda_ipc": where.encode(), **NIXL.metadata})


@pytest.mark.parametrize(
    ("reader", "found"),
    [
        (gpu(0), "cuda_ipc"),  # two processes on one GPU
        (gpu(1, visible="10"), "cuda_ipc"),
        (gpu(1, visible="1"), "nixl"),
        (gpu(1, host="b"), "nixl"),
        (gpu(1, processes="in another container"), "nixl"),
        (both("a"), "nixl"),  # a CPU
    ],
)
def test_gpus_of_one_host_that_see_each_other_share_memory(reader, found):
    assert choose_transport(gpu(0), reader, "auto") == found
    if found == "cuda_ipc":
        assert choose_transport(gpu(0), reader, "auto", {"cuda_ipc"}) == "nixl"
        assert choose_transport(gpu(0), reader, "cuda_ipc") == "cuda_ipc"
    else:
        with raises(TransferError, "no_transport"):
            choose_transport(gpu(0), reader, "cuda_ipc")


def test_a_gpu_lends_its_memory_and_publishes_where_that_can_be_opened():
    with closing(HostPool(3, 4096)) as memory, closing(device_pool(memory)) as pool:
        (only,) = make_transports(pool, EPOCH, TransferConfig(transport="cuda_ipc"))
        where = CudaIpcAddress.decode(only.address())
        assert (where.gpu, where.visible) == (GPU, (GPU,))
        assert where.can_be_read_by(where)
        found = reaches_of(
            [RankAddress({"cuda_ipc": only.address()})], TransferConfig()
        )
        assert found == (f"cuda_ipc@{'/'.join(this_place())}/{process_space()}",)
        only.close()


def test_a_gpu_whose_memory_cannot_be_shared_says_so_in_one_line(monkeypatch, caplog):
    absent = replace(NIXL_KIND, is_installed=lambda: False)
    monkeypatch.setattr(transports, "TRANSPORTS", (CUDA_IPC, absent))
    with (
        closing(HostPool(3, 4096)) as memory,
        closing(device_pool(memory, lacking="no handles here")) as pool,
    ):
        with pytest.raises(ConfigError, match="no handles here"):
            make_transports(pool, EPOCH, TransferConfig(transport="cuda_ipc"))
        assert make_transports(pool, EPOCH, TransferConfig()) == []
    assert "pip install -e '.[nixl]'" in caplog.records[-1].getMessage()


@pytest.mark.parametrize(
    ("num_gpus", "device", "found"),
    [
        (1, "", ["cuda_ipc"]),
        (
            2,
            "",
            ["cuda_ipc", "nixl"],
        ),  # nixl may be faster, or alone reach the other one
        (1, "mlx5_0:1", ["cuda_ipc", "nixl"]),
    ],
)
def test_nixl_starts_beside_cuda_ipc_only_where_there_may_be_a_peer_for_it(
    num_gpus, device, found, monkeypatch
):
    started = []

    class Nixl:
        name = "nixl"

        def __init__(self, *given: object) -> None:
            started.append(given)

        def close(self) -> None: ...

    present = replace(NIXL_KIND, make=Nixl, is_installed=lambda: True)
    monkeypatch.setattr(transports, "TRANSPORTS", (CUDA_IPC, present))
    monkeypatch.setattr(transports, "num_gpus", lambda: num_gpus)
    with (
        closing(HostPool(4, 4096)) as memory,
        closing(device_pool(memory, num_spare=1)) as pool,
    ):
        made = make_transports(pool, EPOCH, TransferConfig(device=device))
        assert [one.name for one in made] == found
        assert len(started) == len(found) - 1
        for one in made:
            one.close()


@pytest.mark.skipif(
    not nixl_binding.is_installed(), reason="the NIXL wheel is not installed"
)
def test_a_nixl_that_cannot_use_the_gpu_says_what_to_do_and_leaves_the_other_transport(
    monkeypatch,
):
    """UCX finds the memory of a GPU to be the host's, as it does when it is built without CUDA."""
    for name, value in (
        ("UCX_NET_DEVICES", "lo"),
        ("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", "on"),
    ):
        monkeypatch.setenv(name, value)  # the binding sets them for the whole process
    with (
        closing(HostPool(4, 4096)) as memory,
        closing(device_pool(memory, num_spare=1)) as pool,
    ):
        with pytest.raises(ConfigError, match="cannot use this GPU: install the wheel"):
            make_transports(pool, EPOCH, TransferConfig(transport="nixl"))
        monkeypatch.setattr(transports, "num_gpus", lambda: 2)
        (only,) = make_transports(pool, EPOCH, TransferConfig())
        assert only.name == "cuda_ipc"
        only.close()
