"""The socket over which shm lends pools: strangers, idle connections, and no descriptors left."""

import contextlib
import os
import select
import socket
from contextlib import ExitStack

import pytest

from baton.kv_transfer.interfaces import PeerUp, Read, ReadEnded
from baton.kv_transfer.transports.addresses import ShmAddress
from baton.kv_transfer.transports.shm import MAX_UNPROVEN, make_fence, membarrier_fence, unix_socket
from baton.protocol.errors import ConfigError
from baton.protocol.ids import Epoch
from tests.support.transfer_peer import PeerOptions, TransferPeer


def started(name: str, stack: ExitStack) -> TransferPeer:
    peer = TransferPeer(PeerOptions(Epoch(name), "shm"))
    stack.callback(peer.close)
    return peer


def connect(reader: TransferPeer, owner: TransferPeer) -> None:
    reader.send(reader.add(owner))
    assert reader.wait(1) == [PeerUp(owner.name, "shm")]


def copy(reader: TransferPeer, owner: TransferPeer, block: int) -> None:
    reader.send(Read(block, owner.name, (block,), (block,), (0,)))
    (end,) = reader.wait(1)
    assert isinstance(end, ReadEnded)
    assert end.failure is None


def test_a_machine_that_reorders_loads_gets_a_fence_or_no_shm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    try:
        membarrier_fence()()
    except ConfigError:
        pytest.skip("this kernel does not allow membarrier")
    monkeypatch.setattr("platform.machine", lambda: "alpha")
    with pytest.raises(ConfigError, match=r"set transfer\.transport to nixl"):
        make_fence()


def connect_idle(owner: TransferPeer, count: int, stack: ExitStack) -> list[socket.socket]:
    """Connections to the owner's socket that say nothing, made as fast as it takes them."""
    name = "\0" + ShmAddress.decode(owner.address.metadata["shm"]).socket
    links = []
    for _ in range(count):
        link = stack.enter_context(unix_socket())
        while True:
            with contextlib.suppress(BlockingIOError):  # its queue is full for a moment
                link.connect(name)
                break
        links.append(link)
    return links


def test_idle_connections_keep_no_reader_out() -> None:
    """Any process of this user can make them. Once, 1,024 stopped all transfers for good."""
    with ExitStack() as stack:
        reader, owner = (started(name, stack) for name in ("reader", "owner"))
        files = owner.ask().open_files
        connect_idle(owner, 2000, stack)
        connect(reader, owner)
        copy(reader, owner, 1)
        assert owner.ask().open_files < files + MAX_UNPROVEN + 3
        copy(reader, owner, 2)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_users_process_gets_no_pool_even_with_the_nonce() -> None:
    with ExitStack() as stack:
        reader, owner = (started(name, stack) for name in ("reader", "owner"))
        nonce = ShmAddress.decode(owner.address.metadata["shm"]).nonce
        stack.callback(os.seteuid, 0)
        for user, found in ((0, 1), (65534, 0)):
            os.seteuid(user)
            (link,) = connect_idle(owner, 1, stack)
            with contextlib.suppress(OSError):
                link.send(nonce)
            os.seteuid(0)
            assert select.select([link], [], [], 30.0)[0]
            descriptors: list[int] = []
            with contextlib.suppress(ConnectionResetError):  # closed without a look at the nonce
                _, descriptors, _, _ = socket.recv_fds(link, 16, 1)
            for descriptor in descriptors:
                os.close(descriptor)
            assert len(descriptors) == found
        connect(reader, owner)
