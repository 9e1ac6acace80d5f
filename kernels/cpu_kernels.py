"""The compiled CPU kernels as functions of tensors, on as many threads as torch may use.

A kernel's work is a range of rows, or of queries of one KV head, and threads take slices of it: no
sum is shared between threads, so their number cannot change a bit. Called by the engine's CPU
backend; the meanings are those of `reference`.
"""

# ruff: noqa: PLR0913, PLR0917  (the signatures follow the twins': tensors, not records)

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.kernels.cpu_library import CpuLibrary
from baton.kernels.cpu_shapes import LOG2_E, NO_WINDOW, ROWS, WIDTH, padded, scratch_floats
from baton.kernels.cpu_threads import CpuThreads

# Measured on a Zen 5 core; a guess that is off costs balance, never a bit.
NS_PER_NUMBER = 0.25  # of a row
NS_PER_KEY_NUMBER = 0.13  # to unpack it
NS_PER_SCORE_NUMBER = 0.025  # for each query and head that sees the key
MIN_SLICE_NS = 100_000  # waking a thread takes about half of this


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """Queries of one step, cut into items small enough for one thread's scratch memory."""

    tables: NDArray[np.int32]  # the block tables one after the other
    items: NDArray[np.int64]  # [num_items, 4]: first row, tokens, first position, start of a table
    ends: NDArray[np.float64]  # ns until the end of each item of each KV head


def attention_work(
    tables: NDArray[np.int32],
    spans: NDArray[np.int64],  # [num_spans, 4]: the fields of an item, of any length
    kv_heads: int,
    group: int,
    head_dim: int,
) -> AttentionWork:
    """Cut whatever is longer than an item. What is cut together never decides a bit."""
    longest = max(1, ROWS // group)
    lengths = spans[:, 1]
    pieces = -(-lengths // longest)
    span = np.repeat(np.arange(len(spans)), pieces)
    skipped = (np.arange(len(span)) - np.repeat(pieces.cumsum() - pieces, pieces)) * longest
    items = spans[span]
    items[:, 0] += skipped
    items[:, 1] = np.minimum(longest, lengths[span] - skipped)
    items[:, 2] += skipped
    keys = (items[:, 1] + items[:, 2]) * head_dim
    costs = keys * (NS_PER_KEY_NUMBER + NS_PER_SCORE_NUMBER * group * items[:, 1])
    return AttentionWork(tables, items, np.repeat(costs, kv_heads).cumsum())


class CpuKernels:
    """One rank's kernels, and the memory and threads they work with. One caller at a time."""

    def __init__(self, library: CpuLibrary) -> None:
        self._library = library
        self._threads = CpuThreads()
        self._scratch = torch.empty(0)

    def attend(
        self,
        q: Tensor,  # [num_tokens, num_heads, head_dim], contiguous
        pool: Tensor,
        layer: int,
        work: AttentionWork,
        window: int | None,
        scale: float,
        out: Tensor,  # as q
    ) -> None:
        """Causal attention of ragged chunks, or single tokens, over their paged contexts."""
        _, kv_heads, _, _, block_size, head_dim = pool.shape
        group = q.shape[1] // kv_heads
        cuts = _cuts(work)
        staging = scratch_floats(group, head_dim)
        size = (staging + WIDTH * padded(head_dim)) * 4
        if self._scratch.numel() * 4 < size * (len(cuts) - 1):
            self._scratch = torch.empty(size // 4 * (len(cuts) - 1))
        scratch = self._scratch.data_ptr()
        arguments = (
            q.data_ptr(), _of_layer(pool, layer), work.tables.ctypes.data, work.items.ctypes.data,
            kv_heads, group, head_dim, block_size, pool.stride(0), pool.stride(1),
            window or NO_WINDOW, scale * LOG2_E, out.data_ptr(),
        )  # fmt: skip
        slices = [
            (first, end, scratch + i * size, scratch + i * size + staging * 4, *arguments)
            for i, (first, end) in enumerate(pairwise(cuts))
        ]
        self._threads.run(self._library.kernels["attend"], slices)

    def rope_and_store(
        self,
        qkv: Tensor,  # [num_rows, num_heads + 2 * kv_heads, head_dim], contiguous
        positions: Tensor,  # [num_tokens] int64
        cos_sin: Tensor,  # [max_position, head_dim] fp32: the cosines, then the sines
        pool: Tensor,
        layer: int,
        slots: Tensor,  # [num_tokens] int64
        head_norms: Tensor | None,  # [num_heads + kv_heads, head_dim]
        eps: float,
    ) -> Tensor:
        """Rotate queries and keys, store keys and values, return the queries of all tokens."""
        num_tokens = len(slots)
        _, kv_heads, _, _, block_size, head_dim = pool.shape
        num_heads = qkv.shape[1] - 2 * kv_heads
        q = qkv.new_empty(num_tokens, num_heads, head_dim)
        self._run_rows(
            "rope_and_store", num_tokens, qkv[0].numel(),
            qkv.data_ptr(), num_heads, kv_heads, head_dim, positions.data_ptr(),
            cos_sin.data_ptr(), slots.data_ptr(),
            0 if head_norms is None else head_norms.data_ptr(), head_norms is not None, eps,
            _of_layer(pool, layer), block_size, pool.stride(0), pool.stride(1), q.data_ptr(),
        )  # fmt: skip
        return q

    def add_rms_norm(
        self,
        x: Tensor,  # [num_rows, hidden]
        residual: Tensor | None,  # [num_rows, hidden]
        weight: Tensor,  # [hidden]
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        """The RMS norm of `x + residual`, and that sum; `x` itself without a residual."""
        num_rows, hidden = x.shape
        normed = x.new_empty(num_rows, hidden)
        stream = x if residual is None else x.new_empty(num_rows, hidden)
        self._run_rows(
            "add_rms_norm", num_rows, hidden,
            x.data_ptr(), x.stride(0), 0 if residual is None else residual.data_ptr(),
            residual is not None, weight.data_ptr(), eps, hidden, normed.data_ptr(),
            stream.data_ptr(),
        )  # fmt: skip
        return normed, stream

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """`silu(gate) * up` of `[num_rows, 2 * features]`, gates first."""
        num_rows, width = gate_up.shape
        out = gate_up.new_empty(num_rows, width // 2)
        self._run_rows(
            "silu_mul", num_rows, width // 2, gate_up.data_ptr(), width // 2, out.data_ptr()
        )
        return out

    def _run_rows(self, name: str, num_rows: int, row_numbers: int, *arguments: float) -> None:
        most = int(num_rows * row_numbers * NS_PER_NUMBER) // MIN_SLICE_NS
        count = max(1, min(most, torch.get_num_threads(), num_rows))
        cuts = [num_rows * i // count for i in range(count + 1)]
        slices = [(first, end, *arguments) for first, end in pairwise(cuts)]
        self._threads.run(self._library.kernels[name], slices)


def _cuts(work: AttentionWork) -> list[int]:
    """Where the items of all KV heads are cut into slices of about equal cost."""
    total = work.ends[-1]
    count = max(1, min(int(total) // MIN_SLICE_NS, torch.get_num_threads(), len(work.ends)))
    inner = np.searchsorted(work.ends, total * np.arange(1, count) / count)
    return [0, *inner.tolist(), len(work.ends)]


def _of_layer(pool: Tensor, layer: int) -> int:
    """Where the keys of a layer begin in the pool's first block."""
    return pool.data_ptr() + layer * pool.stride(2) * pool.element_size()
