"""How one rank reads another."""

import msgspec
import pytest

from baton.kv_transfer.transports.choice import choose_transport, reaches_of
from baton.kv_transfer.transports.shm import ShmAddress, this_place
from baton.protocol.config import TransferConfig
from baton.protocol.errors import TransferError
from baton.protocol.ids import Epoch
from baton.protocol.messages import RankAddress
from baton.protocol.pairs import pair_problem
from tests.support.connectors import node, rank_address

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
