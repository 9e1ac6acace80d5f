"""How one rank reads another, and what of it a process can have."""

import os
from contextlib import closing

import msgspec
import pytest

from baton.kv_transfer.host_pool import HostPool
from baton.kv_transfer.interfaces import PoolMemory
from baton.kv_transfer.transports import nixl_binding
from baton.kv_transfer.transports.choice import choose_transport, make_transports, reaches_of
from baton.kv_transfer.transports.nixl import NixlTransport
from baton.kv_transfer.transports.shm import ShmAddress, this_place
from baton.protocol.config import TransferConfig
from baton.protocol.errors import ConfigError, TransferError
from baton.protocol.ids import Epoch
from baton.protocol.messages import RankAddress
from baton.protocol.pairs import pair_problem
from tests.support.connectors import node, rank_address

EPOCH = Epoch("e")
NIXL = RankAddress({"nixl": b"agent"})


def both(host: str) -> RankAddress:
    return RankAddress({**rank_address("e", host).metadata, **NIXL.metadata})


def test_shm_on_one_host_and_nixl_between_hosts() -> None:
    assert choose_transport(both("a"), both("a"), "auto") == "shm"
    assert choose_transport(both("a"), both("b"), "auto") == "nixl"


def test_the_next_transport_is_taken_when_one_did_not_connect() -> None:
    assert choose_transport(both("a"), both("a"), "auto", {"shm"}) == "nixl"
    with pytest.raises(TransferError, match="no transport serves both"):
        choose_transport(rank_address("e", "a"), both("a"), "auto", {"shm"})


def test_one_kernel_with_two_network_namespaces_is_two_hosts() -> None:
    there = ShmAddress("a", "socket", b"n" * 16, Epoch("e"), network="4026532000")
    elsewhere = msgspec.structs.replace(there, network="4026532999")
    ends = [RankAddress({"shm": one.encode(), "nixl": b"agent"}) for one in (there, elsewhere)]
    assert choose_transport(ends[0], ends[0], "auto") == "shm"
    assert choose_transport(ends[0], ends[1], "auto") == "nixl"
    assert choose_transport(ends[0], both("a"), "auto") == "shm"  # an older node does not say


def test_a_node_publishes_how_its_pool_can_be_reached() -> None:
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
        ((), ("shm@b",), None),
        (("shm@a",), (), None),
        (("shm@a",), ("shm@b",), "no common transport: p has shm@a, d has shm@b"),
        (("nixl@a", "shm@a"), ("nixl", "shm@b"), "set transfer.device"),
    ],
)
def test_two_nodes_know_beforehand_whether_blocks_can_travel(
    prefill: tuple[str, ...], decode: tuple[str, ...], problem: str | None
) -> None:
    found = pair_problem(node("p", "prefill", reaches=prefill), node("d", "decode", reaches=decode))
    assert (found is None) if problem is None else (found is not None and problem in found)


def test_what_only_one_side_has_is_not_chosen() -> None:
    assert choose_transport(both("a"), NIXL, "auto") == "nixl"
    assert choose_transport(rank_address("e", "a"), both("a"), "auto") == "shm"


def test_a_setting_forces_the_transport() -> None:
    assert choose_transport(both("a"), both("a"), "nixl") == "nixl"


def test_nothing_in_common_is_an_error_that_names_both_sides() -> None:
    with pytest.raises(TransferError, match="prefill offers nixl, decode can use shm"):
        choose_transport(NIXL, rank_address("e", "a"), "auto")
    with pytest.raises(TransferError, match="no transport serves both"):
        choose_transport(rank_address("e", "a"), rank_address("f", "b"), "auto")


def test_a_forced_transport_that_cannot_work_is_an_error() -> None:
    with pytest.raises(TransferError, match="different hosts"):
        choose_transport(both("a"), both("b"), "shm")
    with pytest.raises(TransferError, match="is nixl, but prefill offers"):
        choose_transport(both("a"), rank_address("e", "a"), "nixl")


def test_a_missing_wheel_is_an_error_that_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_binding, "WHEELS", ("no_such_wheel_of_nixl",))
    with closing(HostPool(1, 4096)) as pool:
        with pytest.raises(ConfigError, match=r"pip install -e .\.\[nixl\]"):
            make_transports(pool, EPOCH, TransferConfig(transport="nixl"))
        (only,) = make_transports(pool, EPOCH, TransferConfig(device="mlx5_0:1"))
        assert only.name == "shm"
        only.close()


@pytest.mark.parametrize(
    ("device", "given", "found"),
    [("cuda:0", None, "on"), ("cuda:0", "off", "off"), ("cpu", None, None)],
)
def test_ucx_is_told_to_read_within_a_gpu_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, device: str, given: str | None, found: str | None
) -> None:
    monkeypatch.setattr(nixl_binding, "WHEELS", ())  # UCX reads it when it is loaded
    name = "UCX_CUDA_IPC_ENABLE_GET_ZCOPY"
    monkeypatch.setenv(name, given or "")
    if given is None:
        monkeypatch.delenv(name)
    with pytest.raises(ConfigError, match=r"pip install -e .\.\[nixl\]"):
        NixlTransport(PoolMemory(0, 1, 4096, device), EPOCH)
    assert os.environ.get(name) == found


def test_shm_cannot_be_asked_for_on_a_gpu() -> None:
    with pytest.raises(ConfigError, match="nixl"):
        make_transports(PoolMemory(0, 1, 4096, "cuda:0"), EPOCH, TransferConfig(transport="shm"))
