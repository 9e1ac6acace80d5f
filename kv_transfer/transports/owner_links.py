"""The links of one rank to the owners of pools on this host, and the lender of its own pool.

`shm` and `cuda_ipc` use it, on the agent's thread. An owner passes its memfd over a unix socket to
a reader that knows the pool's nonce (`pool_lender`). The reader maps it read-only and finds the
nonce in the mapping, which proves that both see the same memory. The socket stays open; when it
closes, the owner's process has died. `multiprocessing.shared_memory` cannot be used: it unlinks the
memory when any attacher exits, and the memory outlives a killed owner.
"""

import fcntl
import mmap
import os
import select
import socket
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from baton.kv_transfer.host_pool import NONCE_BYTES, HostPool, PoolShape
from baton.kv_transfer.interfaces import PeerRank
from baton.kv_transfer.transports.pool_lender import PoolLender, is_trusted, unix_socket
from baton.protocol.errors import TransferError


class OwnerLinks:
    """Lends `pool` and maps peers' pools. Call `service` when `fileno` is readable."""

    def __init__(self, pool: HostPool) -> None:
        self._peers: dict[PeerRank, _LinkedPeer] = {}
        self._links: dict[int, PeerRank] = {}
        self._gone: list[PeerRank] = []
        self._poller = select.epoll()
        self._lender = PoolLender(pool)
        self._poller.register(self._lender, select.EPOLLIN)

    @property
    def name(self) -> str:
        """Return the name of the lender's socket, in the abstract namespace."""
        return self._lender.name

    def add(self, peer: PeerRank, owner: str, nonce: bytes, shape: PoolShape) -> None:
        """Ask the owner at socket `owner` for its pool. Raises `TransferError`."""
        self.remove(peer)
        link = unix_socket()
        try:
            link.connect("\0" + owner)
            if not is_trusted(link):
                raise OSError("the socket of the pool's owner belongs to another user")
            link.send(nonce)
        except (OSError, ValueError) as error:
            link.close()
            raise TransferError(f"cannot reach the owner of the pool: {error}") from error
        self._peers[peer] = _LinkedPeer(link, nonce, shape)
        self._links[link.fileno()] = peer
        self._poller.register(link, select.EPOLLIN)

    def mapping(self, peer: PeerRank) -> "Mapping | None":
        """Return the pool once it is mapped. Raises `TransferError` if it never will be."""
        found = self._peers.get(peer)
        if found is None:
            raise TransferError("unknown peer")
        if found.failure:
            raise TransferError(found.failure)
        return found.mapping

    def remove(self, peer: PeerRank) -> None:
        found = self._peers.pop(peer, None)
        if found is not None:
            self._drop_link(found)
            if found.mapping is not None:
                found.mapping.close()

    def fileno(self) -> int:
        return self._poller.fileno()

    def service(self) -> list[PeerRank]:
        """Serve readers and owners, and return the peers whose processes are gone."""
        for descriptor, _ in self._poller.poll(0):
            if descriptor == self._lender.fileno():
                self._lender.service()
            elif descriptor in self._links:
                self._hear_owner(descriptor)
        gone, self._gone = self._gone, []
        return gone

    def close(self) -> None:
        for peer in list(self._peers):
            self.remove(peer)
        self._lender.close()
        self._poller.close()

    # --- inside --------------------------------------------------------------------------------

    def _hear_owner(self, descriptor: int) -> None:
        """Map the pool that the owner has sent, or note that its process has ended."""
        owner = self._links[descriptor]
        peer = self._peers[owner]
        assert peer.link is not None
        try:
            said, descriptors, _, _ = socket.recv_fds(peer.link, 16, 1)
        except BlockingIOError:
            return
        except OSError:
            said, descriptors = b"", []
        try:
            if descriptors and peer.mapping is None:
                peer.mapping = Mapping(descriptors[0], peer.shape, peer.nonce)
            elif not said:
                raise TransferError("the owner of the pool is gone")
        except TransferError as error:
            peer.failure = error.message
            self._drop_link(peer)
            self._gone.append(owner)
        finally:
            for received in descriptors:
                os.close(received)

    def _drop_link(self, peer: "_LinkedPeer") -> None:
        if peer.link is not None:
            del self._links[peer.link.fileno()]
            self._poller.unregister(peer.link)
            peer.link.close()
            peer.link = None


@dataclass(slots=True)
class _LinkedPeer:
    link: socket.socket | None
    nonce: bytes
    shape: PoolShape
    mapping: "Mapping | None" = None
    failure: str = ""


class Mapping:
    """A peer's pool, mapped read-only. Raises `TransferError` if it is not what was announced."""

    def __init__(self, descriptor: int, shape: PoolShape, nonce: bytes) -> None:
        self.shape = shape
        try:
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
            if os.fstat(descriptor).st_size != shape.file_bytes:
                raise TransferError("the size of the pool differs from the announced size")
            # Without the seal, the file could shrink, which would cause SIGBUS in the middle of a
            # copy.
            if not seals & fcntl.F_SEAL_SHRINK:
                raise TransferError("the pool is not sealed against shrinking")
            self.file = mmap.mmap(descriptor, shape.file_bytes, prot=mmap.PROT_READ)
        except (OSError, ValueError) as error:
            raise TransferError(f"cannot map the pool: {error}") from error
        begin = shape.nonce_offset
        if self.file[begin : begin + NONCE_BYTES] != nonce:
            self.file.close()
            raise TransferError(
                "the mapping does not contain the pool's nonce, so it is not the announced memory"
            )
        self._generations = np.frombuffer(
            self.file, np.uint32, shape.num_blocks, shape.generations_offset
        )

    def check_generations(self, blocks: NDArray[np.int64], expected: NDArray[np.int64]) -> None:
        """Raise `TransferError` if one of these blocks has another generation than expected."""
        changed = self._generations[blocks] != expected
        if changed.any():
            block = int(blocks[changed.argmax()])
            raise TransferError(f"block {block} of the peer has a new owner", code="stale_block")

    def close(self) -> None:
        del self._generations  # an array's view would keep the file open
        self.file.close()
