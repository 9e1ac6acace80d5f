"""The kernels of layers with a state as functions of tensors, on as many threads as torch uses.

`state_reference` defines their meaning. Threads take slices of sequences and heads, or of rows, and
share no sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.kernels.constants import LOG2_E, WIDTH
from baton.kernels.cpu.functions import MIN_SLICE_NS, run_over_rows
from baton.kernels.cpu.library import CpuLibrary
from baton.kernels.cpu.threads import CpuThreads
from baton.kernels.state_layout import MATRIX_BYTES, StateLayout
from baton.kernels.state_reference import Gates, StateWeights

# Measured on a Sapphire Rapids core. Elsewhere threads may share the work less evenly; no bit
# changes.
NS_PER_TAP = 0.1  # of a channel and token
NS_PER_STATE_NUMBER = 0.12  # for each token


@dataclass(frozen=True, slots=True)
class StateWork:
    """The chunks of one step."""

    tables: NDArray[np.int32]  # the blocks of all states, one after the other
    items: NDArray[np.int64]  # [num_items, 6]
    num_tokens: int

    @property
    def addresses(self) -> tuple[int, int]:
        return self.tables.ctypes.data, self.items.ctypes.data


def state_work(
    chunks: Sequence[tuple[int, int, int, int, int]], blocks: Sequence[int]
) -> StateWork:
    """Return chunks of sequences whose states have as many blocks each, in order.

    A chunk is its first row, its tokens, its first position, how many of its first tokens the state
    has already, and how many of the last are guesses, without which the state is kept.
    """
    per_state = len(blocks) // len(chunks)
    items = [
        (row, length, start, number * per_state, num_held, num_guesses)
        for number, (row, length, start, num_held, num_guesses) in enumerate(chunks)
    ]
    num_tokens = sum(length for _, length, *_ in chunks)
    return StateWork(np.array(blocks, np.int32), np.array(items, np.int64), num_tokens)


class CpuStates:
    """The kernels over one pool, with their memory and threads. Only one thread may call them."""

    def __init__(self, library: CpuLibrary, pool: Tensor, layout: StateLayout) -> None:
        self._library = library  # keeps the code in memory
        self._pool = pool
        self._layout = layout
        self._threads = CpuThreads()
        self._offsets = [
            np.array(offsets, np.int64) // MATRIX_BYTES for offsets in layout.strips
        ]

    def convolve(
        self, x: Tensor, layer: int, work: StateWork, weights: StateWeights
    ) -> Tensor:
        """Return the convolved channels, `[num_tokens, groups * channels]` in fp32.

        The channels are the first numbers of each row of `x`. Those of the last tokens are kept.
        """
        shape = self._layout.shape
        layout = self._layout
        out = torch.empty(len(x), shape.num_groups * shape.num_channels)
        sizes = self._sizes(
            layout.tails[layer] // layout.number_bytes, layout.number_bytes
        )
        arguments = (
            x.data_ptr(),
            x.stride(0),
            weights.taps.data_ptr(),
            _address(weights.tap_biases),
            weights.tap_biases is not None,
            weights.activates,
            self._pool.data_ptr(),
            *work.addresses,
            shape.num_groups,
            shape.num_channels,
            shape.num_taps,
            *sizes,
            out.data_ptr(),
        )
        floats = shape.num_taps * shape.num_channels
        cost = work.num_tokens * shape.num_channels * shape.num_taps * NS_PER_TAP
        self._run(
            "convolve", len(work.items) * shape.num_groups, cost, floats, arguments
        )
        return out

    def gate_steps(self, x: Tensor, gates: Gates) -> tuple[Tensor, Tensor]:
        """Return decays and betas, `[num_tokens, heads]` in fp32.

        Decays may be those of each number of a head's keys.
        """
        if gates.num_betas is not None:
            assert gates.to_betas is not None, "a head has one beta and many steps"
            decays, _ = self.gate_steps(
                x, replace(gates, to_betas=None, num_betas=None)
            )
            few = gates.rates[: gates.num_betas]
            _, betas = self.gate_steps(x, replace(gates, rates=few, num_betas=None))
            return decays, betas
        heads = len(gates.rates)
        decays, betas = torch.empty(2, len(x), heads)
        factors = gates.rates * LOG2_E
        run_over_rows(
            self._threads,
            self._library.kernels["gate_steps"],
            len(x),
            heads,
            x.data_ptr(),
            x.stride(0),
            gates.to_steps,
            -1 if gates.to_betas is None else gates.to_betas,
            heads,
            factors.data_ptr(),
            gates.biases.data_ptr(),
            *gates.limits,
            decays.data_ptr(),
            betas.data_ptr(),
        )
        return decays, betas

    def advance(
        self,
        x: Tensor,
        layer: int,
        work: StateWork,
        weights: StateWeights,
        decays: Tensor,
        betas: Tensor,
    ) -> Tensor:
        """Return what the heads read of their states, `[num_tokens, heads * value_dim]` in fp32."""
        shape = self._layout.shape
        heads = shape.num_groups * shape.num_heads
        out = torch.empty(len(x), heads * shape.value_dim)
        offsets = self._offsets[layer]
        arguments = (
            x.data_ptr(),
            x.shape[1],
            weights.to_queries,
            weights.to_keys,
            weights.to_values,
            heads,
            shape.num_heads,
            shape.num_key_heads,
            shape.key_dim,
            shape.value_dim,
            shape.num_strips,
            weights.is_normed,
            weights.scale,
            weights.corrects,
            decays.data_ptr(),
            decays.shape[1] > heads,
            betas.data_ptr(),
            _address(weights.skips),
            weights.skips is not None,
            self._pool.data_ptr(),
            *work.addresses,
            *self._sizes(offsets.ctypes.data, MATRIX_BYTES),
            out.data_ptr(),
        )
        padded = -(-shape.key_dim // WIDTH) * WIDTH
        floats = 5 * padded + shape.strip_bytes // MATRIX_BYTES
        numbers = shape.num_strips * shape.strip_bytes // MATRIX_BYTES
        cost = work.num_tokens * numbers * NS_PER_STATE_NUMBER
        self._run("advance_states", len(work.items) * heads, cost, floats, arguments)
        return out

    def gated_norm(
        self, x: Tensor, gates: Tensor, weights: StateWeights, eps: float
    ) -> Tensor:
        """Return the gated norms of `x` in the dtype of `gates`; `x` may change."""
        num_rows, width = x.shape
        out = gates.new_empty(num_rows, width)
        run_over_rows(
            self._threads,
            self._library.kernels["gated_norm"],
            num_rows,
            width,
            x.data_ptr(),
            gates.data_ptr(),
            gates.stride(0),
            weights.to_gates,
            weights.num_norms,
            width // weights.num_norms,
            weights.norm.data_ptr(),
            eps,
            weights.gates_first,
            weights.by_sigmoid,
            out.data_ptr(),
        )
        return out

    def _sizes(self, offset: int, number_bytes: int) -> tuple[int, int, int, int]:
        """Return an offset or its address, and the sizes of a part, in numbers."""
        layout = self._layout
        sizes = (layout.part_bytes, layout.stride_part, layout.block_bytes)
        part, stride_part, stride_block = (size // number_bytes for size in sizes)
        return offset, part, stride_part, stride_block

    def _run(
        self,
        name: str,
        num_units: int,
        cost_ns: float,  # of all tokens for one head or group
        num_floats: int,
        arguments: tuple[float, ...],
    ) -> None:
        """Run a kernel over its units, each thread with memory of its own."""
        most = int(cost_ns * num_units) // MIN_SLICE_NS
        count = min(most, torch.get_num_threads(), num_units) if most > 1 else 1
        memory = torch.empty(count, num_floats)
        cuts = [num_units * i // count for i in range(count + 1)]
        slices = [
            (first, end, memory[i].data_ptr(), *arguments)
            for i, (first, end) in enumerate(pairwise(cuts))
        ]
        self._threads.run(self._library.kernels[name], slices)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
