"""The address of a NIXL agent: what one rank publishes so that another can read its pool.

Only `nixl` and the tools use it.
"""

import hashlib
from typing import Annotated

import msgspec

from baton.kv_transfer.transports.addresses import decode_address
from baton.protocol.errors import TransferError
from baton.protocol.ids import BlockCount, Epoch, NumBytes

DIGEST_BYTES = 16
MAX_ADDRESS_BYTES = 1 << 20

Address = Annotated[int, msgspec.Meta(ge=0, lt=(1 << 63) - 1)]


class NixlAddress(msgspec.Struct, frozen=True, array_like=True):
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
    host: str = ""  # the pool's place; an older owner does not publish it

    def encode(self) -> bytes:
        body = msgspec.msgpack.encode(self)
        return _digest(body) + body

    @classmethod
    def decode(cls, data: bytes) -> "NixlAddress":
        """Return the decoded address. Raises `TransferError` if `data` is not one."""
        digest, body = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
        if len(data) > MAX_ADDRESS_BYTES or _digest(body) != digest:
            raise TransferError("not a nixl address, or a damaged one")
        return decode_address(body, cls, "nixl")


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=DIGEST_BYTES).digest()
