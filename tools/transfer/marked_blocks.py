"""The process whose blocks `tools.transfer` reads, and the check of what was read.

The process owns a pool whose blocks hold marks of their ids, publishes its addresses in one line,
and waits for its parent to end it. `BlockOwner` starts it.
"""

import select
import sys
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from baton.kv_transfer.agent import make_port
from baton.kv_transfer.pools import HostPool, PoolShape
from baton.protocol.config import TransferConfig, TransportChoice
from baton.protocol.messages import RankAddress
from baton.runtime.process import die_with_parent
from tools.block_owner import publish
from tools.transfer.block_readers import OWNER, Ids

MODULE = "tools.transfer.marked_blocks"
STRIDE_BYTES = 64  # the check of a read looks at one byte in this many


class Owned(msgspec.Struct, frozen=True):
    """The blocks that the process is to own."""

    shape: PoolShape
    transports: tuple[TransportChoice, ...]


def marks(ids: Ids) -> NDArray[np.uint8]:
    """Return the value of every byte of these blocks: neighbours differ, and no block is zero."""
    return (ids.astype(np.int64) * 37 % 251 + 1).astype(np.uint8)


def wrong_blocks(pool: HostPool, remote: Ids, local: Ids) -> int:
    """Return how many of the blocks `local` differ from the owner's blocks `remote`."""
    bytes_of = np.frombuffer(pool.buffer, np.uint8).reshape(pool.shape.num_blocks, -1)
    looked_at = bytes_of[:, ::STRIDE_BYTES][local]
    return int((looked_at != marks(remote)[:, None]).any(axis=1).sum())


def main(arguments: Sequence[str]) -> int:
    """Run the child process."""
    die_with_parent()
    owned = msgspec.json.decode(arguments[0], type=Owned)
    pool = HostPool(owned.shape.num_blocks, owned.shape.block_bytes)
    blocks = np.frombuffer(pool.buffer, np.uint8).reshape(owned.shape.num_blocks, -1)
    blocks[:] = marks(np.arange(owned.shape.num_blocks, dtype=np.int32))[:, None]
    ports = [make_port(pool, OWNER, TransferConfig(transport=name)) for name in owned.transports]
    metadata: dict[str, bytes] = {}
    for port in ports:
        metadata |= port.address().metadata
    publish(RankAddress(metadata))
    while True:
        select.select([port.fileno() for port in ports], [], [], 60.0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
