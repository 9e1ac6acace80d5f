"""What a rank's `shm` address says: where its pool's descriptor can be had, and on which host.

`choice` reads it to learn whether two ranks share a host, `transports.shm` to connect. The host
name is a hint only; the proof is the nonce, read through the mapping.
"""

import msgspec

from baton.protocol.errors import TransferError
from baton.protocol.ids import Epoch


class ShmAddress(msgspec.Struct, frozen=True, array_like=True):
    host: str  # boot id of the kernel
    socket: str  # name in the abstract namespace
    nonce: bytes
    epoch: Epoch

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)


def decode_address(data: bytes) -> ShmAddress:
    """Raises `TransferError` on anything but an address."""
    try:
        return msgspec.msgpack.decode(data, type=ShmAddress)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise TransferError(f"not an shm address: {error}") from error


def this_host() -> str:
    """Random per boot, equal for all processes of a kernel."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()
