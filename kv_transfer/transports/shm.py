"""Reads between processes of one host: the reader maps the peer's pool and copies its blocks.

The owner passes its memfd over a unix socket to a reader that knows the pool's nonce. The reader
maps it read-only and finds the nonce in the mapping, which proves that both see the same memory.
The socket stays open; when it closes, the owner's process has died. The reader reads the blocks'
generations again after each copy, and the read fails if a block got a new owner meanwhile. A copy
has ended when `read` returns, so nothing lands later. `multiprocessing.shared_memory` cannot be
used: it unlinks the memory when any attacher exits, and outlives a killed owner.
"""

import contextlib
import ctypes
import fcntl
import mmap
import os
import platform
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from baton.kv_transfer.interfaces import (
    TRIAL_BLOCKS,
    AddPeer,
    BlockSlice,
    PeerRank,
    Read,
)
from baton.kv_transfer.pools import NONCE_BYTES, HostPool, PoolShape, SliceMap
from baton.kv_transfer.transports.addresses import Pool, ShmAddress, TransportKind, here
from baton.protocol.config import TransferConfig
from baton.protocol.errors import ConfigError, TransferError
from baton.protocol.ids import Epoch

NAME = "shm"


class ShmTransport:
    """Exports the local `pool` to other processes, and reads the pools of peers.

    Raises `ConfigError` if the order of reads cannot be enforced (`fence`).
    """

    name = NAME
    connect_s = 10.0
    min_chunk_bytes = 0
    progress_s: float | None = None
    tells_ends = False

    def __init__(self, pool: HostPool, epoch: Epoch) -> None:
        self._fence = make_fence()
        self._pool = pool
        self._epoch = epoch
        self._maps: dict[PeerRank, SliceMap] = {}
        self._ended: set[int] = set()
        self._next_handle = 0
        self._links = OwnerLinks(pool)

    def address(self) -> bytes:
        return ShmAddress.here(self._links.name, self._pool.nonce, self._epoch).encode()

    def add_peer(self, command: AddPeer) -> None:
        where = ShmAddress.decode(command.address.metadata[NAME])
        where.check(command.peer.epoch)
        theirs = PoolShape(command.num_blocks, command.block_bytes)
        slices = SliceMap(theirs, self._pool.shape, command.part)
        self._links.add(command.peer, where.socket, where.nonce, theirs)
        self._maps[command.peer] = slices

    def connected(self, peer: PeerRank) -> bool:
        return self._links.mapping(peer) is not None

    def remove_peer(self, peer: PeerRank) -> None:
        self._links.remove(peer)
        self._maps.pop(peer, None)

    def read(self, command: Read) -> int:
        mapping = self._links.mapping(command.peer)
        if mapping is None:
            raise TransferError("the pool is not mapped yet")
        slices = self._maps[command.peer]
        read = slices.read(command)
        copy_blocks(
            slice_view(self._pool.buffer, slices.ours, slices.part),
            read.local,
            slice_view(mapping.file, slices.theirs, slices.part),
            read.remote,
        )
        # The check follows the copy. A block's generation grows before the first store of its next
        # owner, so equal numbers mean that nothing of the next owner was copied.
        self._fence()
        mapping.check_generations(read.blocks, read.generations)
        self._next_handle += 1
        self._ended.add(self._next_handle)
        return self._next_handle

    def trial(self, peer: PeerRank) -> int:
        mapping = self._links.mapping(peer)
        if mapping is None:
            raise TransferError("the pool is not mapped yet")
        shape = mapping.shape
        num_bytes = min(TRIAL_BLOCKS, shape.num_blocks) * shape.block_bytes
        np.frombuffer(mapping.file, np.uint8, num_bytes).copy()
        self._next_handle += 1
        self._ended.add(self._next_handle)
        return self._next_handle

    def test(self, handle: int) -> bool:
        self._ended.remove(handle)
        return True

    def cancel(self, handle: int) -> bool:
        self._ended.discard(handle)
        return True

    def fileno(self) -> int:
        return self._links.fileno()

    def service(self) -> list[PeerRank]:
        return self._links.service()

    def close(self) -> None:
        self._links.close()


def slice_view(
    buffer: mmap.mmap | memoryview, shape: PoolShape, part: BlockSlice
) -> NDArray[np.void]:
    """Return the slices of a pool in order, as an array with one opaque element each."""
    num_slices = shape.pool_bytes // part.num_bytes
    return np.ndarray(num_slices, np.dtype((np.void, part.num_bytes)), buffer)


def copy_blocks(
    target_pool: NDArray[np.void],
    target: NDArray[np.int64],
    source_pool: NDArray[np.void],
    source: NDArray[np.int64],
) -> None:
    """Copy element `source[i]` to `target[i]`; ids are in range, no target occurs twice.

    Blocks that are neighbours in both pools are copied in one call. If there are few of those, a
    run of neighbours in one pool becomes one gather or one scatter. Each call releases the GIL,
    which a busy thread may then keep, so fewer calls are faster. The default of `mode` would copy
    twice.
    """
    order = np.argsort(target, kind="stable")
    target = target[order]
    source = source[order]
    ends = _run_ends(target)
    slices = ends | _run_ends(source)
    num_slices = np.count_nonzero(slices)
    if 2 * np.count_nonzero(ends) <= num_slices:
        for begin, end in _runs(ends):
            to = target_pool[target[begin] : target[end - 1] + 1]
            np.take(source_pool, source[begin:end], out=to, mode="clip")
        return
    order = np.argsort(source, kind="stable")
    ends = _run_ends(source[order])
    if 2 * np.count_nonzero(ends) <= num_slices:
        target = target[order]
        source = source[order]
        for begin, end in _runs(ends):
            values = source_pool[source[begin] : source[end - 1] + 1]
            np.put(target_pool, target[begin:end], values, mode="clip")
        return
    size = target_pool.itemsize
    to_bytes = target_pool.view(np.uint8)
    from_bytes = source_pool.view(np.uint8)
    to_offsets = (target * size).tolist()
    from_offsets = (source * size).tolist()
    for begin, end in _runs(slices):
        to = to_offsets[begin]
        frm = from_offsets[begin]
        length = (end - begin) * size
        to_bytes[to : to + length] = from_bytes[frm : frm + length]


def _run_ends(ids: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return True where the next id is not the neighbour of this one."""
    ends = np.ones(len(ids), np.bool_)
    np.not_equal(ids[1:] - ids[:-1], 1, out=ends[:-1])
    return ends


def _runs(ends: NDArray[np.bool_]) -> Iterable[tuple[int, int]]:
    """Return (begin, end) of each run."""
    return pairwise([0, *(np.flatnonzero(ends) + 1).tolist()])


class OwnerLinks:
    """Exports `pool` and maps peers' pools. Call `service` when `fileno` is readable."""

    def __init__(self, pool: HostPool) -> None:
        self._peers: dict[PeerRank, _LinkedPeer] = {}
        self._links: dict[int, PeerRank] = {}
        self._gone: list[PeerRank] = []
        self._poller = select.epoll()
        self._exporter = PoolExporter(pool, self._poller)
        self._watched: set[int] = set()

    @property
    def name(self) -> str:
        """Return the name of the exporter's socket, in the abstract namespace."""
        return self._exporter.name

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
            raise TransferError(
                f"cannot reach the owner of the pool: {error}"
            ) from error
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

    def watch(self, eventfd: int) -> None:
        """Let `fileno` be readable while `eventfd` is, too; `service` empties it."""
        self._watched.add(eventfd)
        self._poller.register(eventfd, select.EPOLLIN)

    def service(self) -> list[PeerRank]:
        """Serve readers and owners, and return the peers whose processes are gone."""
        for descriptor, _ in self._poller.poll(0):
            if descriptor in self._watched:
                os.eventfd_read(descriptor)
            elif descriptor in self._links:
                self._receive_pool(descriptor)
            else:
                self._exporter.service(descriptor)
        gone = self._gone
        self._gone = []
        return gone

    def close(self) -> None:
        for peer in list(self._peers):
            self.remove(peer)
        self._exporter.close()
        self._poller.close()

    def _receive_pool(self, descriptor: int) -> None:
        """Map the pool that the owner has sent, or note that its process has ended."""
        owner = self._links[descriptor]
        peer = self._peers[owner]
        assert peer.link is not None
        try:
            data, descriptors, _, _ = socket.recv_fds(peer.link, 16, 1)
        except BlockingIOError:
            return
        except OSError:
            data = b""
            descriptors = []
        try:
            if descriptors and peer.mapping is None:
                peer.mapping = Mapping(descriptors[0], peer.shape, peer.nonce)
            elif not data:
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
                raise TransferError(
                    "the size of the pool differs from the announced size"
                )
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

    def check_generations(
        self, blocks: NDArray[np.int64], expected: NDArray[np.int64]
    ) -> None:
        """Raise `TransferError` if one of these blocks has another generation than expected."""
        changed = self._generations[blocks] != expected
        if changed.any():
            block = int(blocks[changed.argmax()])
            raise TransferError(
                f"block {block} of the peer has a new owner", code="stale_block"
            )

    def close(self) -> None:
        del self._generations  # an array's view would keep the file open
        self.file.close()


BACKLOG = 4096  # the kernel reduces it to its own limit
MAX_READERS = 1024  # connections that have the pool, one for each rank that reads it
MAX_UNPROVEN = 32  # the oldest makes room
ACCEPTED_AT_ONCE = 64  # after this number, the agent's other work has its turn
PAUSE_S = 0.02  # without descriptors, the readable listener would keep a core busy
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid


class PoolExporter:
    """Passes the descriptor of one pool to readers that know its nonce.

    Every process in this network namespace can connect to an abstract socket, so a connection has
    to prove itself: its process must be this user's or root's, and its first packet must be the
    nonce, which only travels over authenticated control channels. Call `service` with descriptors
    that `poller` finds readable.
    """

    def __init__(self, pool: HostPool, poller: select.epoll) -> None:
        self._pool = pool
        self.name = f"baton-{secrets.token_hex(8)}"
        self._readers: dict[int, socket.socket] = {}
        self._unproven: dict[int, socket.socket] = {}  # the oldest first
        self._poller = poller
        self._listener = unix_socket()
        self._listener.bind("\0" + self.name)
        self._listener.listen(BACKLOG)
        self._poller.register(self._listener, select.EPOLLIN)

    def service(self, descriptor: int) -> None:
        """Accept connections, answer a reader, or close a connection that ended."""
        if descriptor == self._listener.fileno():
            self._accept_some()
        elif descriptor in self._unproven:
            self._prove(descriptor)
        elif descriptor in self._readers:
            # A reader sends nothing more, so it has disconnected.
            self._drop(descriptor)

    def close(self) -> None:
        for descriptor in [*self._unproven, *self._readers]:
            self._drop(descriptor)
        self._listener.close()

    def _accept_some(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                reader, _ = self._listener.accept()
            except BlockingIOError:
                return
            # No descriptor is left, so a connection that proved nothing makes room.
            except OSError:
                if not self._unproven:
                    time.sleep(PAUSE_S)
                    return
                self._drop(next(iter(self._unproven)))
                continue
            if not is_trusted(reader) or len(self._readers) >= MAX_READERS:
                reader.close()
                continue
            if len(self._unproven) >= MAX_UNPROVEN:
                self._drop(next(iter(self._unproven)))
            self._unproven[reader.fileno()] = reader
            reader.setblocking(False)
            self._poller.register(reader, select.EPOLLIN)
            # The nonce has usually arrived with the connection.
            self._prove(reader.fileno())

    def _prove(self, descriptor: int) -> None:
        """Pass on the pool for the right nonce, and close the connection for anything else."""
        reader = self._unproven[descriptor]
        with contextlib.suppress(OSError):
            try:
                data = reader.recv(NONCE_BYTES + 1)
            except BlockingIOError:
                return
            if secrets.compare_digest(data, self._pool.nonce):
                socket.send_fds(reader, [b"pool"], [self._pool.fileno()])
                self._readers[descriptor] = self._unproven.pop(descriptor)
                return
        self._drop(descriptor)

    def _drop(self, descriptor: int) -> None:
        reader = self._readers.pop(descriptor, None) or self._unproven.pop(descriptor)
        self._poller.unregister(reader)
        reader.close()


def is_trusted(link: socket.socket) -> bool:
    """Return whether the process at the other end is one of this user's or root's."""
    data = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(data)
    return uid in (os.geteuid(), 0)


def unix_socket() -> socket.socket:
    return socket.socket(
        socket.AF_UNIX,
        socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC,
    )


Fence = Callable[[], None]

ORDERED_MACHINES = ("x86_64", "AMD64", "i686")
# Of membarrier, from linux/membarrier.h.
SYSCALL_NUMBERS = {"x86_64": 324, "aarch64": 283, "riscv64": 283}
GLOBAL_EXPEDITED = 1 << 1
REGISTER_GLOBAL_EXPEDITED = 1 << 2


def make_fence() -> Fence:
    """Return the fence that a reader calls between copy and check; register this process as owner.

    Raises `ConfigError` if the machine needs a fence and the kernel has none.
    """
    if platform.machine() in ORDERED_MACHINES:
        return lambda: None
    return membarrier_fence()


def membarrier_fence() -> Fence:
    """Return a fence by membarrier. Raises `ConfigError` if this kernel does not offer it."""
    number = SYSCALL_NUMBERS.get(platform.machine())
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    if number is None or syscall(number, REGISTER_GLOBAL_EXPEDITED, 0, 0) != 0:
        raise ConfigError(
            f"shm needs the membarrier system call on {platform.machine()}, and it is not allowed "
            "here; set transfer.transport to nixl"
        )

    def fence() -> None:
        if syscall(number, GLOBAL_EXPEDITED, 0, 0) != 0:
            reason = os.strerror(ctypes.get_errno())
            raise TransferError(f"membarrier failed: {reason}")

    return fence


def _make(pool: Pool, epoch: Epoch, _: TransferConfig) -> ShmTransport:
    assert isinstance(pool, HostPool), "another pool is refused"
    return ShmTransport(pool, epoch)


def _can_read(source: bytes, target: bytes) -> bool:
    return ShmAddress.decode(source).shares_host(ShmAddress.decode(target))


SHM = TransportKind(
    NAME,
    _make,
    lends=(HostPool,),
    reach=lambda _: here(),
    can_read=_can_read,
    unreachable="the two ranks are on different hosts",
)
