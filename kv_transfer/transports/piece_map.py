"""Map the pieces of a peer's pool to the pieces of the local pool, for reads on one host.

`shm` and `cuda_ipc` keep one map for each peer. Both pools are cut into pieces of one size, and a
piece is named by its number in its pool.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from baton.kv_transfer.host_pool import PoolShape, check_piece, check_read
from baton.kv_transfer.interfaces import BlockPiece
from baton.protocol.errors import TransferError


class PieceRead(NamedTuple):
    """One checked read: the peer's blocks and generations, and the pieces to copy."""

    blocks: NDArray[np.int64]
    generations: NDArray[np.int64]
    remote: NDArray[np.int64]
    local: NDArray[np.int64]


@dataclass(slots=True, frozen=True)
class PieceMap:
    """The pieces of one peer. Raises `TransferError` unless both pools can be cut into them."""

    theirs: PoolShape
    ours: PoolShape
    piece: BlockPiece

    def __post_init__(self) -> None:
        check_piece(self.piece, self.theirs.block_bytes, self.ours.block_bytes)

    def read(
        self, remote: Sequence[int], local: Sequence[int], generations: Sequence[int]
    ) -> PieceRead:
        """Return the read of blocks `remote` into `local`.

        Raises `TransferError` unless the ids pair and lie in their pools, and each remote block has
        a generation.
        """
        blocks, into = check_read(remote, self.theirs.num_blocks, local, self.ours.num_blocks)
        expected = np.asarray(generations, np.int64)
        if len(expected) != len(blocks):
            raise TransferError("a read needs a generation for each remote block")
        piece = self.piece
        return PieceRead(
            blocks,
            expected,
            piece_numbers(blocks, self.theirs, piece.remote_offset, piece),
            piece_numbers(into, self.ours, piece.local_offset, piece),
        )


def piece_numbers(
    blocks: NDArray[np.int64], shape: PoolShape, offset: int, piece: BlockPiece
) -> NDArray[np.int64]:
    """Return the number of the piece at `offset` in each of `blocks`."""
    return blocks * (shape.block_bytes // piece.num_bytes) + offset // piece.num_bytes
