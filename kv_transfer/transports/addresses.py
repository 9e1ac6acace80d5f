"""The addresses that ranks publish, and which transport one rank takes to read another.

The choice is a plain rule over two addresses: GPUs of one host that see each other take cuda_ipc,
ranks on one host that both have shm take shm, and other pairs take nixl. A setting can force one
transport. Nothing is tried here: if a pair cannot connect, the connector chooses again without the
transport that failed. An address comes from another process, so a damaged one is refused.
"""

import hashlib
import os
from collections.abc import Collection, Sequence
from typing import Annotated, Self

import msgspec

from baton.kv_transfer.pools import NONCE_BYTES
from baton.protocol.config import TransferConfig, TransportChoice
from baton.protocol.errors import TransferError
from baton.protocol.ids import BlockCount, Epoch, NumBytes
from baton.protocol.messages import RankAddress

SHM = "shm"
NIXL = "nixl"
CUDA_IPC = "cuda_ipc"
DIGEST_BYTES = 16
MAX_ADDRESS_BYTES = 1 << 20
UNREACHABLE = {
    SHM: "the two ranks are on different hosts",
    CUDA_IPC: "decode does not see prefill's GPU: it is on another host, hidden by "
    "CUDA_VISIBLE_DEVICES, or in a container with its own ipc or pid namespace",
}

Address = Annotated[int, msgspec.Meta(ge=0, lt=(1 << 63) - 1)]


def reaches_of(ranks: Sequence[RankAddress], config: TransferConfig) -> tuple[str, ...]:
    """Return the ways to read the pools of a node, as `NodeInfo` publishes them.

    Two nodes with an equal text can use that transport with each other.
    """
    names = set.intersection(*({*rank.metadata} for rank in ranks))
    try:
        here = "/".join(this_place())
    except OSError:  # a sandbox without /proc: the two nodes may try
        return ()
    if not names:  # a text that no other node has
        return (f"nothing@{here}/{os.getpid()}",)
    near = {
        SHM: f"{SHM}@{here}",
        CUDA_IPC: f"{CUDA_IPC}@{here}/{process_space()}",
        NIXL: NIXL if config.device else f"{NIXL}@{here}",
    }
    return tuple(sorted(near[name] for name in names))


def choose_transport(
    source: RankAddress, target: RankAddress, forced: TransportChoice, failed: Collection[str] = ()
) -> str:
    """Return the transport by which `target` reads `source`. Raises `TransferError` if none works.

    `failed` are the transports that did not connect this pair.
    """
    common = (source.metadata.keys() & target.metadata.keys()) - {*failed}
    usable = [name for name in (CUDA_IPC, SHM, NIXL) if name in common]
    if SHM in usable and not _on_one_host(source, target):
        usable.remove(SHM)
    if CUDA_IPC in usable and not _see_one_gpu(source, target):
        usable.remove(CUDA_IPC)
    if forced == "auto" and usable:
        return usable[0]
    if forced in usable:
        return forced
    reason = (
        f"prefill offers {_names(source)}, decode can use {_names(target)}, and no transport "
        "serves both where they run"
    )
    if forced in common:
        reason = UNREACHABLE[forced]
    prefix = "" if forced == "auto" else f"transfer.transport is {forced}, but "
    raise TransferError(prefix + reason, code="no_transport")


def _on_one_host(source: RankAddress, target: RankAddress) -> bool:
    ours, theirs = (ShmAddress.decode(rank.metadata[SHM]) for rank in (source, target))
    return ours.shares_host(theirs)


def _see_one_gpu(source: RankAddress, target: RankAddress) -> bool:
    owner, reader = (CudaIpcAddress.decode(rank.metadata[CUDA_IPC]) for rank in (source, target))
    return owner.can_be_read_by(reader)


def _names(rank: RankAddress) -> str:
    return ", ".join(sorted(rank.metadata)) or "nothing"


class _Address(msgspec.Struct, frozen=True, array_like=True):
    """The root of addresses, each of which is a tuple of msgpack."""

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Return the decoded address. Raises `TransferError` if `data` is not one."""
        try:
            return msgspec.msgpack.decode(data, type=cls)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise TransferError(f"not a {cls.__name__}: {error}") from error


class NixlAddress(_Address, frozen=True):
    """An agent's metadata and where its pool lies.

    NIXL's own parser can crash on damaged metadata, so the encoded form has a digest that is
    checked before NIXL parses anything. The digest protects against damage, not against forgery:
    addresses may only be accepted from authenticated peers.
    """

    epoch: Epoch
    agent: str  # unique per agent, not only per process
    device: str  # "cpu" or "cuda:0"
    pool_address: Address
    num_blocks: BlockCount
    block_bytes: NumBytes
    metadata: bytes

    def encode(self) -> bytes:
        body = super().encode()
        return _digest(body) + body

    @classmethod
    def decode(cls, data: bytes) -> Self:
        digest = data[:DIGEST_BYTES]
        body = data[DIGEST_BYTES:]
        if len(data) > MAX_ADDRESS_BYTES or _digest(body) != digest:
            raise TransferError("not a nixl address, or a damaged one")
        return super().decode(body)


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=DIGEST_BYTES).digest()


class ShmAddress(_Address, frozen=True):
    """The host of a rank's pool, and the socket that passes on the pool's descriptor."""

    host: str  # boot id of the kernel
    socket: str  # name in the abstract namespace
    nonce: bytes
    epoch: Epoch
    network: str = ""  # the namespace of the socket; an older owner does not publish it

    @classmethod
    def here(cls, socket: str, nonce: bytes, epoch: Epoch) -> "ShmAddress":
        """Return the address of a pool that a process of this host lends at `socket`."""
        host, network = this_place()
        return cls(host, socket, nonce, epoch, network)

    def check(self, peer: Epoch) -> None:
        """Raise `TransferError` unless this is an address of `peer`, on this host."""
        if self.host != this_place()[0]:
            raise TransferError("the pool is on another host")
        if self.epoch != peer or len(self.nonce) != NONCE_BYTES:
            raise TransferError("the address is not that peer's")

    def shares_host(self, other: "ShmAddress") -> bool:
        """Return whether both name one host. The nonce in the reader's mapping then proves it."""
        is_one_network = "" in (self.network, other.network) or self.network == other.network
        return self.host == other.host and is_one_network


def this_place() -> tuple[str, str]:
    """Return the ids of this boot of the kernel and of the namespace of our abstract sockets."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip(), str(os.stat("/proc/self/ns/net").st_ino)


class CudaIpcAddress(_Address, frozen=True):
    """Where to get a rank's table of generations and its GPU memory.

    The handle opens the memory to any process of this user that sees the GPU, so addresses may only
    travel between authenticated peers.
    """

    table: ShmAddress
    handle: bytes
    block_bytes: int
    gpu: str
    visible: tuple[str, ...]  # the GPUs that the process can read from
    processes: str  # the namespaces in which CUDA's handles are valid

    def can_be_read_by(self, reader: "CudaIpcAddress") -> bool:
        """Return whether both are on one host and share handles, and the reader sees the GPU."""
        is_near = self.table.shares_host(reader.table) and self.processes == reader.processes
        return is_near and self.gpu in reader.visible


def process_space() -> str:
    """Return the namespaces of processes and of shared memory; CUDA's handles need both."""
    return "/".join(str(os.stat(f"/proc/self/ns/{name}").st_ino) for name in ("pid", "ipc"))
