"""The addresses that ranks publish, and what tells a kind of transport from others.

An address comes from another process, so a damaged one is refused.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import msgspec

from baton.kv_transfer.interfaces import PeerTransport
from baton.kv_transfer.pools import NONCE_BYTES, DevicePool, HostPool
from baton.protocol.config import TransferConfig
from baton.protocol.errors import TransferError
from baton.protocol.ids import Epoch

Pool = HostPool | DevicePool


@dataclass(frozen=True)
class TransportKind:
    """A way to read blocks: what it needs, and which ranks can use it with each other."""

    name: str
    # Returns the transport of one rank. Raises `ConfigError` where it cannot work.
    make: Callable[[Pool, Epoch, TransferConfig], PeerTransport]
    lends: tuple[type[Pool], ...]  # the kinds of pools that it can lend
    # Returns what follows its name in a text of `NodeInfo.reaches`: where both ends must be.
    reach: Callable[[TransferConfig], str]
    # Returns whether the rank with the second address can read the one with the first.
    can_read: Callable[[bytes, bytes], bool]
    unreachable: str = ""  # why it cannot, in words
    goes_far: bool = False  # to other hosts
    is_installed: Callable[[], bool] = lambda: True


class Address(msgspec.Struct, frozen=True, array_like=True):
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


class ShmAddress(Address, frozen=True):
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
        is_one_network = (
            "" in (self.network, other.network) or self.network == other.network
        )
        return self.host == other.host and is_one_network


def this_place() -> tuple[str, str]:
    """Return the ids of this boot of the kernel and of the namespace of our abstract sockets."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip(), str(os.stat("/proc/self/ns/net").st_ino)


def here() -> str:
    """Return the text of this place, which only ranks that can share memory have in common."""
    return "/".join(this_place())


def process_space() -> str:
    """Return the namespaces of processes and of shared memory; CUDA's handles need both."""
    return "/".join(
        str(os.stat(f"/proc/self/ns/{name}").st_ino) for name in ("pid", "ipc")
    )
