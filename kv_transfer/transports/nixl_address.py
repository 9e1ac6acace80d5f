"""What a rank's `nixl` address says: its agent's metadata and where its pool lies.

NIXL's own parser can crash on damaged metadata, so the address carries a digest that is checked
before NIXL sees a byte. It protects against damage, not against a forger: addresses may only be
taken from authenticated peers.
"""

import hashlib

import msgspec

from baton.protocol.errors import TransferError
from baton.protocol.ids import Epoch

DIGEST_BYTES = 16
MAX_ADDRESS_BYTES = 1 << 20


class NixlAddress(msgspec.Struct, frozen=True, array_like=True):
    epoch: Epoch
    agent: str  # unique per agent, not only per process
    device: str  # "cpu" or "cuda:0"
    pool_address: int
    num_blocks: int
    block_bytes: int
    metadata: bytes

    def encode(self) -> bytes:
        body = msgspec.msgpack.encode(self)
        return _digest(body) + body


def decode_address(data: bytes) -> NixlAddress:
    """Raises `TransferError` on anything but an address."""
    digest, body = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
    if len(data) > MAX_ADDRESS_BYTES or _digest(body) != digest:
        raise TransferError("not a nixl address, or a damaged one")
    try:
        return msgspec.msgpack.decode(body, type=NixlAddress)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise TransferError(f"not a nixl address: {error}") from error


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=DIGEST_BYTES).digest()
