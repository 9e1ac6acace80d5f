"""The block tables of sequences in the device's memory.

A sequence keeps its row from step to step, and a step sends only new blocks. A new sequence takes
the row of the sequence that was used least recently, whose whole table is sent again if it returns.
"""

import torch
from torch import Tensor

from baton.protocol.ids import Key

IDLE_ROW = 0  # no sequence has this row, which padding reads


class DeviceTables:
    """`blocks` is `[1 + num_sequences, num_blocks]` int32, undefined after a sequence's blocks."""

    def __init__(self, num_sequences: int, num_blocks: int, device: torch.device) -> None:
        self.blocks = torch.zeros(1 + num_sequences, num_blocks, dtype=torch.int32, device=device)
        self._num_blocks = num_blocks
        self._free = list(range(num_sequences, IDLE_ROW, -1))
        self._rows: dict[Key, tuple[int, tuple[int, ...]]] = {}  # least recently used first

    def follow(self, key: Key, table: tuple[int, ...], changes: tuple[list[int], list[int]]) -> int:
        """Return the row of a sequence with this table; add the changes as (place, block)."""
        row, known = self._rows.pop(key, (0, ()))
        if not row:
            row = self._free.pop() if self._free else self._rows.pop(next(iter(self._rows)))[0]
        if table != known:
            start = len(known) if table[: len(known)] == known else 0
            first = row * self._num_blocks
            places, blocks = changes
            places.extend(range(first + start, first + len(table)))
            blocks.extend(table[start:])
        self._rows[key] = row, table
        return row

    def write(self, places: Tensor, blocks: Tensor) -> None:
        """Write the changes of a step, in the order of the device's work."""
        self.blocks.view(-1).index_copy_(0, places, blocks)
