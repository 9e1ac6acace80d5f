"""How one rank reads another."""

import pytest

from baton.kv_transfer.transports.choice import choose_transport
from baton.protocol.errors import TransferError
from baton.protocol.messages import RankAddress
from tests.support.connectors import rank_address

NIXL = RankAddress({"nixl": b"agent"})


def both(host: str) -> RankAddress:
    return RankAddress({**rank_address("e", host).metadata, **NIXL.metadata})


def test_shm_on_one_host_and_nixl_between_hosts() -> None:
    assert choose_transport(both("a"), both("a"), "auto") == "shm"
    assert choose_transport(both("a"), both("b"), "auto") == "nixl"


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
