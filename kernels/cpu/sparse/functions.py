"""The kernels of sparse attention as functions of tensors, on as many threads as torch uses.

`sparse_reference` defines their meaning. A query that sees no more keys than an index chooses goes
to plain attention. Of each other query, the rows that it sees are gathered, so that attention reads
them as a short sequence, in the order of their positions.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.kernels.constants import DIGIT_BITS, TILE, WIDTH, padded
from baton.kernels.cpu.functions import (
    MIN_SLICE_NS,
    NS_PER_KEY_NUMBER,
    NS_PER_SCORE_NUMBER,
    CpuKernels,
    run_over_rows,
)
from baton.kernels.cpu.library import CpuLibrary
from baton.kernels.cpu.threads import CpuThreads

GATHERED_BYTES = 32 << 20  # rows of several queries at a time


class CpuSparse:
    """The kernels over one pool, with their memory and threads. Only one thread may call them."""

    def __init__(
        self,
        library: CpuLibrary,
        kernels: CpuKernels,  # of the rows in the same blocks
        rows: Tensor,  # [num_blocks, 1, num_layers, 1, block_size, row_dim]
        keys: Tensor,  # [num_blocks, 1, num_layers, 1, block_size, head_dim]
        num_heads: int,  # of the index
        num_chosen: int,
    ) -> None:
        self.num_chosen = num_chosen
        self._library = library  # keeps the code in memory
        self._kernels = kernels
        self._rows = rows
        self._keys = keys
        self._of_index = CpuKernels(library, keys, num_heads)
        self._num_heads, self._head_dim = num_heads, keys.shape[-1]
        self._threads = CpuThreads()
        row_bytes = num_chosen * rows.shape[-1] * rows.element_size()
        count = max(GATHERED_BYTES // row_bytes, 2 * torch.get_num_threads())
        # A block for each query, which holds all that it sees.
        self._gathered = rows.new_empty(count, 1, 1, 1, num_chosen, rows.shape[-1])
        self._over_gathered = CpuKernels(library, self._gathered, kernels.num_heads)

    def begin(self, tables: NDArray[np.int32], chunks: NDArray[np.int64]) -> None:
        """Take a step's block tables, one after the other, and its chunks.

        A chunk is its first row, its tokens, its first position and the start of its block table.
        """
        self._tables = tables
        rows, lengths, starts, own_tables = chunks.T
        # Tokens that see all keys.
        plain = np.clip(self.num_chosen - starts, 0, lengths)
        choosing = lengths - plain
        chunk = np.repeat(np.arange(len(chunks)), choosing)
        numbers = np.arange(choosing.sum())
        place = numbers - (choosing.cumsum() - choosing)[chunk] + plain[chunk]
        # Of each query that chooses: its row, its position, and the start of its block table.
        items = (rows[chunk] + place, starts[chunk] + place, own_tables[chunk])
        self._items = np.stack(items, axis=1)
        self._numbers = np.full(lengths.sum(), -1)  # by row: the number of its choice
        self._numbers[self._items[:, 0]] = numbers

    def choose(
        self,
        layer: int,
        # [num_tokens, (num_heads + 1) * head_dim]: queries, then the key.
        heads: Tensor,
        weights: Tensor,  # [num_tokens, num_heads] fp32
        positions: Tensor,
        slots: Tensor,
        cos_sin: Tensor,
    ) -> None:
        """Store the keys of a step, and choose what its queries see until the next choice."""
        q = self._of_index.rope_and_store(
            heads, layer, positions, slots, cos_sin, None, 0.0
        )
        items, (num_heads, head_dim) = self._items, (self._num_heads, self._head_dim)
        self._slots = torch.empty(len(items), self.num_chosen, dtype=torch.int32)
        if not len(items):
            return
        width = padded(head_dim)
        most_keys = -(-int(items[:, 1].max() + 1) // TILE) * TILE
        before = num_heads * width + TILE * width + num_heads * TILE
        cuts = self._cuts(items[:, 1] + 1)
        scratch = torch.empty(len(cuts) - 1, before + most_keys)
        counters = torch.empty(len(cuts) - 1, 1 << DIGIT_BITS, dtype=torch.int64)
        staging = q.new_empty(len(cuts) - 1, WIDTH, width)
        arguments = (
            q.data_ptr(),
            weights.data_ptr(),
            self._address(self._keys, layer),
            self._tables.ctypes.data,
            items.ctypes.data,
            num_heads,
            head_dim,
            self._keys.shape[4],
            self._keys.stride(0),
            self.num_chosen,
            self._slots.data_ptr(),
        )
        slices = [
            (
                first,
                end,
                scratch[i].data_ptr(),
                scratch[i, before:].data_ptr(),
                counters[i].data_ptr(),
                staging[i].data_ptr(),
                *arguments,
            )
            for i, (first, end) in enumerate(pairwise(cuts))
        ]
        self._threads.run(self._library.kernels["choose_keys"], slices)

    def attend(
        self,
        q: Tensor,  # [num_rows, num_heads, row_dim], contiguous
        layer: int,
        rows: NDArray[np.int64] | None,  # of the step; None: all
        chunks: NDArray[np.int64],  # of the rows of `q`, as `begin` takes them
        scale: float,
    ) -> Tensor:
        """Return the attention of queries over the keys that are chosen, shaped as `q`."""
        out = torch.empty_like(q)
        plain = chunks.copy()
        plain[:, 1] = np.clip(self.num_chosen - plain[:, 2], 0, plain[:, 1])
        plain = plain[plain[:, 1] > 0]
        if len(plain):
            work = self._kernels.attention_work(self._tables, plain)
            self._kernels.attend(q, layer, work, out, scale)
        numbers = self._numbers if rows is None else self._numbers[rows]
        (own,) = np.nonzero(numbers >= 0)
        for first in range(0, len(own), len(self._gathered)):
            some = own[first : first + len(self._gathered)]
            self._gather(layer, self._slots[torch.from_numpy(numbers[some])])
            items = np.zeros((len(some), 4), np.int64)
            items[:, 0], items[:, 1], items[:, 2] = some, 1, self.num_chosen - 1
            items[:, 3] = np.arange(len(some))
            work = self._over_gathered.attention_work(
                np.arange(len(some), dtype=np.int32), items
            )
            self._over_gathered.attend(q, 0, work, out, scale)
        return out

    def layer_norm(self, x: Tensor, norm: Tensor, eps: float) -> Tensor:
        """Return the layer norm of `[num_rows, count]`; `norm`, `[2, count]`, is in fp32."""
        assert x.stride(1) == 1
        num_rows, count = x.shape
        out = x.new_empty(num_rows, count)
        run_over_rows(
            self._threads,
            self._library.kernels["layer_norm"],
            num_rows,
            count,
            x.data_ptr(),
            x.stride(0),
            norm[0].data_ptr(),
            norm[1].data_ptr(),
            eps,
            count,
            out.data_ptr(),
        )
        return out

    def _gather(self, layer: int, slots: Tensor) -> None:
        rows = self._rows
        run_over_rows(
            self._threads,
            self._library.kernels["gather_rows"],
            slots.numel(),
            rows.shape[-1],
            slots.data_ptr(),
            self._address(rows, layer),
            rows.shape[4],
            rows.stride(0),
            rows.shape[-1],
            self._gathered.data_ptr(),
        )

    def _cuts(self, num_keys: NDArray[np.int64]) -> tuple[int, ...]:
        """Return the bounds of the threads' slices of queries that see so many keys."""
        per_number = NS_PER_KEY_NUMBER + NS_PER_SCORE_NUMBER * self._num_heads
        ends = (num_keys * (self._head_dim * per_number)).cumsum()
        count = min(
            int(ends[-1]) // MIN_SLICE_NS, torch.get_num_threads(), len(num_keys)
        )
        if count < 2:
            return (0, len(num_keys))
        inner = np.searchsorted(ends, ends[-1] * np.arange(1, count) / count)
        return (0, *inner.tolist(), len(num_keys))

    @staticmethod
    def _address(pool: Tensor, layer: int) -> int:
        return pool.data_ptr() + layer * pool.stride(2) * pool.element_size()
