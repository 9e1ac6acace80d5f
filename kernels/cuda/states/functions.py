"""The kernels of layers with a state as functions of tensors, over one pool.

A token's position says whether a chunk or a step takes it (`state_layout.StateItem`), so its bits
do not depend on where slices begin, as long as those of prompts begin at multiples of a chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton.kernels.constants import STATE_CHUNK, STRIP
from baton.kernels.cuda.paged import WARPGROUPS, tilings_of
from baton.kernels.cuda.states.chunks import (
    _state_convolve_kernel,
    _state_intra_kernel,
    _state_scan_kernel,
)
from baton.kernels.cuda.states.steps import (
    _state_norm_kernel,
    _state_step_kernel,
    _state_tails_kernel,
)
from baton.kernels.launch import Launcher, cdiv, next_power_of_2
from baton.kernels.state_layout import MATRIX_BYTES, StateLayout, StateShape
from baton.kernels.state_reference import StateTables, StateWeights

KEY_DIMS = (16, 32, 64, 128)
COLUMNS = (16, 32, 64)  # of a strip
WIDTH = 128  # channels of a program, where nothing norms queries and keys
# Columns of a scan's program and its stages, without and with the registers and shared memory of
# GPUs that multiply on warpgroups.
SCANS = ((16, 1), (32, 2))
NORM_NUMBERS = 2048  # of a program
TAIL_CHANNELS = 1024

_launch_norm = Launcher(_state_norm_kernel)
_launch_step = Launcher(_state_step_kernel)
_launch_intra = Launcher(_state_intra_kernel)
_launch_scan = Launcher(_state_scan_kernel)
_launch_convolve = Launcher(_state_convolve_kernel)
_launch_tails = Launcher(_state_tails_kernel)


def missing_for(layout: StateLayout, dtype: torch.dtype) -> str:
    """Return why the kernels cannot serve such states; empty if they can."""
    shape = layout.shape
    if dtype != torch.bfloat16:
        name = str(dtype).removeprefix("torch.")
        return f"states of a model in {name} have no CUDA kernel (set model.dtype=bfloat16)"
    columns = min(shape.value_dim, STRIP)
    if shape.has_matrices and (
        shape.key_dim not in KEY_DIMS
        or columns not in COLUMNS
        or shape.value_dim % columns
    ):
        size = f"{shape.key_dim} x {shape.value_dim}"
        return f"states of {size} have no CUDA kernel"
    largest = layout.tail_bytes
    if shape.has_matrices:
        largest = max(largest, shape.strip_bytes)
    if largest > layout.part_bytes:
        return (
            f"a state has pieces of {largest} bytes, and a block {layout.part_bytes} for each "
            "head: raise cache.block_size"
        )
    return ""


class DeviceStates:
    """The states in the blocks of one pool in device memory."""

    def __init__(self, pool: Tensor, layout: StateLayout) -> None:
        numbers = pool.view(len(pool), -1)
        self._tails = numbers
        self._matrices = numbers.view(torch.float32)
        self._shape = layout.shape
        has_warpgroups = tilings_of(pool.device) is WARPGROUPS
        self._scan_columns, self._stages = SCANS[has_warpgroups]
        part = layout.part_bytes
        self._strides = (
            layout.block_bytes // MATRIX_BYTES,
            layout.stride_part // MATRIX_BYTES,
        )
        # [num_layers, strips, 2] and [num_layers, 2]: the number of a block, the offset in a part.
        self._strip_at = torch.tensor(
            [
                [(at // part, at % part // MATRIX_BYTES) for at in strips]
                for strips in layout.strips
            ],
            dtype=torch.int32,
            device=pool.device,
        )
        self._tail_at = torch.tensor(
            [(at // part, at % part // layout.number_bytes) for at in layout.tails],
            dtype=torch.int32,
            device=pool.device,
        )

    def advance(
        self,
        x: Tensor,  # [num_tokens, channels and more]
        layer: int,
        tables: StateTables,
        weights: StateWeights,
    ) -> Tensor:
        """Return what tokens read of their states, `[num_tokens, heads * value_dim]`.

        Without matrices, return the convolved channels.
        """
        shape = self._shape
        if not shape.has_matrices:
            y, _ = self._convolve(x, layer, tables, weights, torch.float32)
            self._keep_tails(x, layer, tables)
            return y
        heads = shape.num_groups * shape.num_heads
        size = (len(x), heads * shape.value_dim)
        # A padded step leaves out rows of chunks.
        out = x.new_empty(size) if tables.is_decoding else x.new_zeros(size)
        if len(tables.chunks):
            self._scan(x, layer, tables, weights, out)
        self._step(x, layer, tables, weights, out)
        if not tables.is_decoding:
            self._keep_tails(x, layer, tables)
        return out

    def gated_norm(
        self,
        out: Tensor,
        x: Tensor,
        weights: StateWeights,
        eps: float,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Return the gated norms of what tokens read, of all or of some."""
        num_rows = len(out) if rows is None else len(rows)
        normed = out.new_empty(num_rows, out.shape[1])
        width = out.shape[1] // weights.num_norms
        block = next_power_of_2(width)
        parts = max(1, NORM_NUMBERS // block)
        num_parts = num_rows * weights.num_norms
        if not num_parts:
            return normed
        _launch_norm(
            (cdiv(num_parts, parts), 1, 1),
            out,
            x,
            rows,
            weights.norm,
            normed,
            num_parts,
            x.stride(0),
            eps,
            TO_GATES=weights.to_gates,
            NORMS=weights.num_norms,
            WIDTH=width,
            GATES_FIRST=weights.gates_first,
            BY_SIGMOID=weights.by_sigmoid,
            BLOCK=block,
            PARTS=parts,
            num_warps=4 if block <= NORM_NUMBERS else 8,
            num_stages=1,
            enable_fp_fusion=True,
        )
        return normed

    # --- inside --------------------------------------------------------------------------------

    def _step(
        self,
        x: Tensor,
        layer: int,
        tables: StateTables,
        weights: StateWeights,
        out: Tensor,
    ) -> None:
        shape = self._shape
        gates = weights.gates
        assert gates is not None, "heads have matrices"
        programs = len(tables.items) * shape.num_groups * shape.num_heads
        _launch_step(
            (programs * shape.num_strips, 1, 1),
            x,
            weights.taps,
            weights.tap_biases,
            gates.rates,
            gates.biases,
            weights.skips,
            self._matrices,
            self._tails,
            self._strip_at,
            self._tail_at,
            tables.blocks,
            tables.items,
            out,
            layer,
            x.stride(0),
            tables.blocks.stride(0),
            *self._strides,
            weights.scale,
            *gates.limits,
            **_heads(shape),
            COLUMNS=min(shape.value_dim, STRIP),
            TAPS=shape.num_taps,
            **_kind(weights),
            TO_STEPS=gates.to_steps,
            TO_BETAS=gates.to_betas,
            BY_KEY=shape.by_key,
            ACTIVATES=weights.activates,
            MANY=not tables.is_decoding,
            num_warps=4,
            num_stages=1,
            enable_fp_fusion=True,
        )

    def _scan(
        self,
        x: Tensor,
        layer: int,
        tables: StateTables,
        weights: StateWeights,
        out: Tensor,
    ) -> None:
        shape = self._shape
        gates = weights.gates
        assert gates is not None, "heads have matrices"
        num_rows = len(x)
        heads = shape.num_groups * shape.num_heads
        y, lengths = self._convolve(x, layer, tables, weights, x.dtype)
        w = x.new_empty(2, num_rows, heads, shape.key_dim) if weights.corrects else None
        u = x.new_empty(num_rows, heads, shape.value_dim, dtype=torch.float32)
        p = x.new_empty(num_rows, heads, STATE_CHUNK)
        decays = x.new_empty(num_rows, heads, dtype=torch.float32)
        _launch_intra(
            (heads, len(tables.chunks), 1),
            x,
            y,
            lengths,
            gates.rates,
            gates.biases,
            tables.items,
            tables.chunks,
            w,
            u,
            p,
            decays,
            num_rows,
            x.stride(0),
            weights.scale,
            *gates.limits,
            **_heads(shape),
            **_kind(weights),
            TO_STEPS=gates.to_steps,
            TO_BETAS=gates.to_betas,
            num_warps=4,
            num_stages=1,
            enable_fp_fusion=True,
        )
        columns = min(shape.value_dim, self._scan_columns)
        _launch_scan(
            (shape.value_dim // columns, heads, len(tables.items)),
            y,
            lengths,
            w,
            u,
            p,
            decays,
            weights.skips,
            self._matrices,
            self._strip_at,
            tables.blocks,
            tables.items,
            out,
            layer,
            num_rows,
            tables.blocks.stride(0),
            *self._strides,
            weights.scale,
            **_heads(shape),
            COLUMNS=columns,
            **_kind(weights),
            STAGES=self._stages,
            num_warps=4,
            num_stages=1,
            enable_fp_fusion=True,
        )

    def _convolve(
        self,
        x: Tensor,
        layer: int,
        tables: StateTables,
        weights: StateWeights,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the channels of chunked tokens, and 1 / the lengths of queries and keys."""
        shape = self._shape
        size = (len(x), shape.num_groups * shape.num_channels)
        # A padded step leaves out rows.
        make = torch.empty if shape.has_matrices else torch.zeros
        y = make(size, dtype=dtype, device=x.device)
        num_normed = 2 * shape.num_key_heads if weights.is_normed else 0
        lengths = None
        if num_normed:
            lengths = torch.empty(
                len(x),
                shape.num_groups * num_normed,
                dtype=torch.float32,
                device=x.device,
            )
        width = shape.key_dim if weights.is_normed else WIDTH
        blocks = cdiv(shape.num_channels, width)
        _launch_convolve(
            (shape.num_groups * blocks, len(tables.chunks), 1),
            x,
            weights.taps,
            weights.tap_biases,
            self._tails,
            self._tail_at,
            tables.blocks,
            tables.items,
            tables.chunks,
            y,
            lengths,
            layer,
            x.stride(0),
            tables.blocks.stride(0),
            *self._strides,
            GROUPS=shape.num_groups,
            CHANNELS=shape.num_channels,
            TAPS=shape.num_taps,
            WIDTH=width,
            NORMED=num_normed,
            ACTIVATES=weights.activates,
            num_warps=4,
            num_stages=1,
            enable_fp_fusion=True,
        )
        return y, lengths

    def _keep_tails(self, x: Tensor, layer: int, tables: StateTables) -> None:
        shape = self._shape
        blocks = cdiv(shape.num_channels, TAIL_CHANNELS)
        _launch_tails(
            (shape.num_groups * blocks, len(tables.items), 1),
            x,
            self._tails,
            self._tail_at,
            tables.blocks,
            tables.items,
            layer,
            x.stride(0),
            tables.blocks.stride(0),
            *self._strides,
            CHANNELS=shape.num_channels,
            TAPS=shape.num_taps,
            BLOCK=TAIL_CHANNELS,
            num_warps=4,
            num_stages=1,
            enable_fp_fusion=True,
        )


def _heads(shape: StateShape) -> dict[str, int]:
    return {
        "GROUPS": shape.num_groups,
        "HEADS": shape.num_heads,
        "KEY_HEADS": shape.num_key_heads,
        "KEY_DIM": shape.key_dim,
        "VALUE_DIM": shape.value_dim,
        "CHANNELS": shape.num_channels,
    }


def _kind(weights: StateWeights) -> dict[str, bool]:
    return {"IS_NORMED": weights.is_normed, "CORRECTS": weights.corrects}
