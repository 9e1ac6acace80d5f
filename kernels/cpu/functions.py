"""The compiled CPU kernels as functions of tensors, on as many threads as torch uses.

Threads take slices of rows, of outputs, or of the queries of one KV head, and share no sum, so
their number cannot change a bit. `reference` defines the meaning of the attention and row kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from baton.kernels.constants import (
    DEPTH,
    LOG2_E,
    NO_WINDOW,
    PANEL,
    ROW_INTS,
    ROW_REALS,
    ROWS,
    SHEET,
    SILU,
    SUMS,
    WIDTH,
    Gate,
    in_powers_of_2,
    padded,
    scratch_floats,
)
from baton.kernels.cpu.library import CpuLibrary, Kernel
from baton.kernels.cpu.threads import MIN_SHARED_NS, CpuThreads
from baton.kernels.reference import NarrowWeight, pool_head_dim

# ruff: noqa: PLR0913, PLR0917  (the signatures follow the references': tensors, not records)


# These costs were measured on a Zen 5 core. On other CPUs threads may share the work less evenly,
# but no bit changes.
NS_PER_NUMBER = 0.25  # of a row
NS_PER_KEY_NUMBER = 0.13  # to unpack it
NS_PER_SCORE_NUMBER = 0.025  # for each query and head that sees the key
MIN_SLICE_NS = 150_000  # because waking a thread takes up to 100 µs


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """The queries of one step, in items that fit one thread's scratch memory."""

    tables: NDArray[np.int32]  # the block tables one after the other
    # [num_items, 4]: first row, tokens, first position, start of a table.
    items: NDArray[np.int64]
    addresses: tuple[int, int]  # of the two
    cuts: tuple[int, ...]  # the bounds of the threads' slices of all items and KV heads


def run_over_rows(
    threads: CpuThreads,
    kernel: Kernel,
    num_rows: int,
    row_numbers: int,
    *arguments: float,
) -> None:
    """Run a kernel that computes rows of `row_numbers` numbers each by themselves."""
    most = int(num_rows * row_numbers * NS_PER_NUMBER) // MIN_SLICE_NS
    count = min(most, torch.get_num_threads(), num_rows) if most > 1 else 1
    cuts = [num_rows * i // count for i in range(count + 1)]
    threads.run(kernel, [(first, end, *arguments) for first, end in pairwise(cuts)])


class CpuKernels:
    """One rank's kernels, with their memory and threads. Only one thread may call them."""

    def __init__(
        self,
        library: CpuLibrary,
        # [num_blocks, kv_heads, num_layers, 2 or 1, block_size, head_dim]; or FP8.
        pool: Tensor,
        num_heads: int,
    ) -> None:
        _, self.kv_heads, _, self.planes, self.block_size, _ = pool.shape
        self.head_dim, self._is_fp8 = pool_head_dim(pool), pool.dtype == torch.uint8
        assert self._is_fp8 == ("store_fp8" in library.kernels), (
            "kernels for another pool"
        )
        self.num_heads, self.group = num_heads, num_heads // self.kv_heads
        self._library = library  # keeps the code in memory
        self._pool = pool
        self._strides = (pool.stride(0), pool.stride(1))
        self._layers = [
            pool.data_ptr() + layer * pool.stride(2) * pool.element_size()
            for layer in range(pool.shape[2])
        ]
        self._threads = CpuThreads()
        self._scratch = torch.empty(0)
        self._staging_bytes = scratch_floats(self.group, self.head_dim) * 4
        self._scratch_bytes = self._staging_bytes + WIDTH * padded(self.head_dim) * 4

    def attention_work(
        self,
        tables: NDArray[np.int32],
        # [num_chunks, 4]: the fields of an item, of any length.
        chunks: NDArray[np.int64],
    ) -> AttentionWork:
        """Return the items into which these chunks are cut. The cuts never change a bit."""
        items = self._items(chunks)
        cuts = self._cuts(items)
        addresses = (tables.ctypes.data, items.ctypes.data)
        return AttentionWork(tables, items, addresses, cuts)

    def _items(self, chunks: NDArray[np.int64]) -> NDArray[np.int64]:
        longest = max(1, ROWS // self.group)
        lengths = chunks[:, 1]
        if lengths.max() <= longest:
            return chunks
        pieces = -(-lengths // longest)
        chunk = np.repeat(np.arange(len(chunks)), pieces)
        skipped = (
            np.arange(len(chunk)) - np.repeat(pieces.cumsum() - pieces, pieces)
        ) * longest
        items = chunks[chunk]
        items[:, 0] += skipped
        items[:, 1] = np.minimum(longest, lengths[chunk] - skipped)
        items[:, 2] += skipped
        return items

    def _cuts(self, items: NDArray[np.int64]) -> tuple[int, ...]:
        """Return the bounds of the threads' slices of all items and KV heads."""
        num_units = len(items) * self.kv_heads
        if torch.get_num_threads() == 1:
            return (0, num_units)
        tokens = items[:, 1]
        positions = items[:, 2]
        keys = tokens + positions
        scores = self.group * tokens * (positions + tokens / 2)
        costs = self.head_dim * (
            NS_PER_KEY_NUMBER * keys + NS_PER_SCORE_NUMBER * scores
        )
        ends = np.repeat(costs, self.kv_heads).cumsum()
        count = max(
            1, min(int(ends[-1]) // MIN_SLICE_NS, torch.get_num_threads(), num_units)
        )
        inner = np.searchsorted(ends, ends[-1] * np.arange(1, count) / count)
        return (0, *inner.tolist(), num_units)

    def attend(
        self,
        q: Tensor,  # [num_tokens, num_heads, head_dim], contiguous
        layer: int,
        work: AttentionWork,
        out: Tensor,  # shaped as q; rows that belong to no chunk keep their values
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,  # [num_heads] fp32
    ) -> None:
        """Compute causal attention of ragged chunks or single tokens over paged contexts."""
        size = self._scratch_bytes
        in_base_2 = None if sinks is None else sinks.float() * LOG2_E
        if self._scratch.nbytes < size * (len(work.cuts) - 1):
            self._scratch = torch.empty(size // 4 * (len(work.cuts) - 1))
        arguments = (
            q.data_ptr(),
            self._layers[layer],
            *work.addresses,
            self.kv_heads,
            self.group,
            self.head_dim,
            self.block_size,
            (self.planes - 1) * self._pool.stride(3),
            *self._strides,
            window or NO_WINDOW,
            *in_powers_of_2(scale, softcap),
            0 if in_base_2 is None else in_base_2.data_ptr(),
            in_base_2 is not None,
            out.data_ptr(),
        )
        scratch = range(self._scratch.data_ptr(), 1 << 64, size)
        slices = [
            (first, end, scratch[i], scratch[i] + self._staging_bytes, *arguments)
            for i, (first, end) in enumerate(pairwise(work.cuts))
        ]
        self._threads.run(self._library.kernels["attend"], slices)

    def rope_and_store(
        self,
        # [num_rows, (num_heads + planes * kv_heads) * head_dim], contiguous.
        qkv: Tensor,
        layer: int,
        positions: Tensor,  # [num_tokens] int64
        slots: Tensor,  # [num_tokens] int64; -1: the pool has what would be stored
        cos_sin: Tensor,  # [max_position, rotary_dim] fp32: the cosines, then the sines
        head_norms: Tensor | None,  # [num_heads + kv_heads, head_dim]
        eps: float,
        *,
        are_stored: bool = True,
    ) -> Tensor:
        """Rotate queries and keys, store keys and values, return the queries of all tokens.

        The last `rotary_dim` numbers of a head are rotated. If keys are not stored, `qkv` has
        queries alone.
        """
        assert qkv.is_contiguous()
        num_tokens = len(slots)
        head_norms = None if head_norms is None else head_norms.float()
        q = qkv.new_empty(num_tokens, self.num_heads, self.head_dim)
        target = self._layers[layer], self.block_size, *self._strides
        # Rows go to a pool of blocks of one token, one for each, and then on.
        if self._is_fp8:
            rows = qkv.new_empty(num_tokens, self.kv_heads, 2, self.head_dim)
            target = rows.data_ptr(), 1, rows.stride(0), rows.stride(1)
            slots, own_slots = torch.arange(num_tokens), slots
        self._run_rows(
            "rope_and_store",
            num_tokens,
            qkv.shape[1],
            qkv.data_ptr(),
            self.num_heads,
            self.kv_heads if are_stored else 0,
            self.planes,
            self.head_dim,
            self.head_dim - cos_sin.shape[1],
            positions.data_ptr(),
            cos_sin.data_ptr(),
            slots.data_ptr(),
            0 if head_norms is None else head_norms.data_ptr(),
            head_norms is not None,
            eps,
            *target,
            q.data_ptr(),
        )
        if self._is_fp8 and are_stored:
            self._run_rows(
                "store_fp8",
                num_tokens,
                2 * self.kv_heads * self.head_dim,
                rows.data_ptr(),
                self.kv_heads,
                self.head_dim,
                own_slots.data_ptr(),
                self._layers[layer],
                self.block_size,
                *self._strides,
            )
        return q

    def add_rms_norm(
        self,
        x: Tensor,  # [num_rows, hidden]
        residual: Tensor | None,  # [num_rows, hidden]
        weight: Tensor,  # [hidden]
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        """Return the RMS norm of `x + residual`, and that sum, which is `x` without a residual."""
        (num_rows, hidden), weight = x.shape, weight.float()
        assert x.stride(1) == 1
        assert residual is None or residual.is_contiguous()
        normed = x.new_empty(num_rows, hidden)
        stream = x if residual is None else x.new_empty(num_rows, hidden)
        self._run_rows(
            "add_rms_norm",
            num_rows,
            hidden,
            x.data_ptr(),
            x.stride(0),
            0 if residual is None else residual.data_ptr(),
            residual is not None,
            weight.data_ptr(),
            eps,
            hidden,
            normed.data_ptr(),
            stream.data_ptr(),
        )
        return normed, stream

    def gate_mul(self, gate_up: Tensor, gate: Gate = SILU) -> Tensor:
        """Return the gated numbers of `[num_rows, 2 * features]`, gates first."""
        assert gate_up.is_contiguous()
        num_rows, width = gate_up.shape
        out = gate_up.new_empty(num_rows, width // 2)
        self._run_rows(
            "gate_mul",
            num_rows,
            width // 2,
            gate_up.data_ptr(),
            width // 2,
            -LOG2_E * gate.slope,
            -LOG2_E * gate.cubic,
            gate.limit,
            gate.offset,
            out.data_ptr(),
        )
        return out

    def sigmoid_mul(self, x: Tensor, gates: Tensor) -> Tensor:
        """Return `x * sigmoid(gates)`, both `[num_rows, count]`."""
        assert x.is_contiguous()
        assert gates.stride(1) == 1
        num_rows, count = x.shape
        out = torch.empty_like(x)
        self._run_rows(
            "sigmoid_mul",
            num_rows,
            count,
            x.data_ptr(),
            gates.data_ptr(),
            gates.stride(0),
            count,
            out.data_ptr(),
        )
        return out

    def soft_cap(self, x: Tensor, softcap: float) -> None:
        """Replace the fp32 numbers of `[num_rows, count]` by `softcap * tanh(x / softcap)`."""
        assert x.is_contiguous()
        assert x.dtype == torch.float32
        num_rows, count = x.shape
        factor, _ = in_powers_of_2(1.0, softcap)
        self._run_rows(
            "soft_cap", num_rows, count, x.data_ptr(), count, count, factor, softcap
        )

    def _run_rows(
        self, name: str, num_rows: int, row_numbers: int, *arguments: float
    ) -> None:
        run_over_rows(
            self._threads,
            self._library.kernels[name],
            num_rows,
            row_numbers,
            *arguments,
        )


# Measured on a Zen 5 core. Elsewhere the number of threads of a product may be a poor choice; no
# bit changes.
NS_PER_WEIGHT = 0.03
NS_PER_MULTIPLICATION = 0.0044
MAX_BYTES = 1 << 16  # inputs, whose sums fit 32 bits
SCRATCH = (2 * SHEET + DEPTH) * PANEL  # floats of a thread
MIN_ROWS = 32  # per thread; of fewer rows, the outputs are divided instead


class CpuLinears:
    """One rank's products, and the threads that they work with.

    Calls with torch set to one thread may run side by side; of other calls, one at a time.
    """

    def __init__(self, library: CpuLibrary) -> None:
        assert library.in_pairs
        self._library = library  # keeps the code in memory
        self._threads = CpuThreads()

    def layer(self, weight: Tensor, bias: Tensor | None) -> CpuLinear:
        """Return a layer with its own copy of `weight`, `[outputs, inputs]` with even `inputs`."""
        outputs, inputs = weight.shape
        words = (
            F.pad(weight, (0, 0, 0, -outputs % PANEL)).contiguous().view(torch.int32)
        )
        panels = words.view(-1, PANEL, inputs // 2).transpose(1, 2).contiguous()
        return CpuLinear(self, (outputs, inputs), panels, bias)

    def narrow_layer(self, weight: NarrowWeight, bias: Tensor | None) -> CpuLinear:
        """Return a layer with its own copy of a weight that `is_whole`."""
        outputs, inputs = weight.codes.shape
        missing = -outputs % PANEL
        # A half of a word has an input of each of four neighbouring pairs.
        codes = F.pad(weight.codes, (0, 0, 0, missing)).view(
            -1, PANEL, inputs // 8, 2, 2, 2
        )
        codes = codes.permute(0, 2, 1, 5, 3, 4)
        panels = (codes[..., 0] | codes[..., 1] << 4).contiguous()
        scales, zeros = (
            F.pad(part, (0, 0, 0, missing))
            .unflatten(0, (-1, PANEL))
            .transpose(1, 2)
            .contiguous()
            for part in (weight.scales, weight.zeros * 0x10001)
        )
        narrow = scales, zeros, weight.group // 2
        return CpuLinear(
            self, (outputs, inputs), panels.reshape(len(scales), -1), bias, narrow
        )

    def multiply(self, x: Tensor, layer: CpuLinear) -> Tensor:
        """Return the layer's outputs, `[num_rows, outputs]`, for `[num_rows, inputs]`."""
        x, (outputs, inputs) = x.contiguous(), layer.shape
        num_rows = len(x)
        out = x.new_empty(len(x), outputs)
        slices = self._slices(num_rows, len(layer.panels), outputs * inputs)
        memory = torch.empty(len(slices), SCRATCH)
        arguments = (
            x.data_ptr(),
            *layer.arguments,
            inputs // 2,
            outputs,
            out.data_ptr(),
        )
        calls = [
            (*part, memory[i].data_ptr(), *arguments) for i, part in enumerate(slices)
        ]
        self._threads.run(self._library.kernels[layer.kernel], calls)
        return out

    def multiply_groups(
        self, layers: Sequence[CpuLinear], x: Tensor, ends: Sequence[int]
    ) -> Tensor:
        """Return `[num_rows, outputs]` for `[num_rows, inputs]`; row i goes to the first layer that
        ends after i. The layers have equal shapes, and all or none of them a bias.
        """
        x, (outputs, inputs), num_panels = (
            x.contiguous(),
            layers[0].shape,
            len(layers[0].panels),
        )
        out = x.new_empty(len(x), outputs)
        groups = [
            (first, end, layer.arguments)
            for layer, (first, end) in zip(layers, pairwise((0, *ends)), strict=True)
            if first < end
        ]
        cost_ns = (
            outputs
            * inputs
            * (NS_PER_WEIGHT * len(groups) + NS_PER_MULTIPLICATION * len(x))
        )
        count = torch.get_num_threads() if cost_ns >= MIN_SHARED_NS else 1
        cuts = [num_panels * i // count for i in range(count + 1)]
        memory = torch.empty(count, SCRATCH)
        kernel = self._library.kernels[layers[0].kernel]
        addresses = (x.data_ptr(), out.data_ptr())

        def compute(first_panel: int, last_panel: int, sums: int) -> None:
            for first, end, weight in groups:
                kernel(
                    first,
                    end,
                    first_panel,
                    last_panel,
                    sums,
                    addresses[0],
                    *weight,
                    inputs // 2,
                    outputs,
                    addresses[1],
                )

        parts = [(*part, memory[i].data_ptr()) for i, part in enumerate(pairwise(cuts))]
        self._threads.run(compute, parts)
        return out

    def _slices(
        self, num_rows: int, num_panels: int, numbers: int
    ) -> list[tuple[int, int, int, int]]:
        """Return the first and last row, and the first and last panel, of each thread.

        `numbers` are those of a weight in bf16 that costs as much.
        """
        whole = (0, num_rows, 0, num_panels)
        cost_ns = numbers * (NS_PER_WEIGHT + NS_PER_MULTIPLICATION * num_rows)
        if cost_ns < MIN_SHARED_NS or (count := torch.get_num_threads()) == 1:
            return [whole]
        if num_rows >= MIN_ROWS * count:
            cuts = [num_rows * i // count for i in range(count + 1)]
            return [(first, end, 0, num_panels) for first, end in pairwise(cuts)]
        count = min(count, num_panels)
        cuts = [num_panels * i // count for i in range(count + 1)]
        return [(0, num_rows, first, end) for first, end in pairwise(cuts)]

    def layer_of_bytes(
        self, weight: Tensor, scales: Tensor, bias: Tensor | None
    ) -> CpuByteLinear:
        """Return a layer with its own copy of `weight`, `[outputs, inputs]` in int8.

        Each output has an fp32 scale. `takes_bytes` must hold.
        """
        outputs, inputs = weight.shape
        assert self.takes_bytes(inputs)
        missing = -outputs % PANEL
        words = F.pad(weight, (0, 0, 0, missing)).contiguous().view(torch.int32)
        panels = words.view(-1, PANEL, inputs // 4).transpose(1, 2).contiguous()
        offsets = F.pad(weight.sum(dim=1, dtype=torch.int32) * 128, (0, missing))
        return CpuByteLinear(
            self, panels, F.pad(scales, (0, missing)), offsets, bias, outputs
        )

    def takes_bytes(self, inputs: int) -> bool:
        """Return whether the CPU multiplies bytes, and rows of `inputs` of them fit the kernel."""
        is_there = "multiply_bytes" in self._library.kernels
        return is_there and not inputs % WIDTH and inputs <= MAX_BYTES

    def multiply_bytes(self, x: Tensor, layer: CpuByteLinear) -> Tensor:
        """Return the layer's outputs, `[num_rows, outputs]`, for `[num_rows, inputs]`."""
        x = x.contiguous()
        bias = layer.bias
        panels = layer.panels
        num_rows, inputs = x.shape
        out = x.new_empty(num_rows, layer.outputs)
        rounded = torch.empty(num_rows, inputs, dtype=torch.int8)
        row_scales = torch.empty(num_rows)
        run_over_rows(
            self._threads,
            self._library.kernels["round_rows"],
            num_rows,
            inputs,
            x.data_ptr(),
            inputs,
            rounded.data_ptr(),
            row_scales.data_ptr(),
        )
        slices = self._slices(num_rows, len(panels), 2 * panels.numel())
        memory = torch.empty(len(slices), SHEET * PANEL)
        arguments = (
            rounded.data_ptr(),
            row_scales.data_ptr(),
            panels.data_ptr(),
            layer.scales.data_ptr(),
            layer.offsets.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            bias is not None,
            panels.shape[1],
            layer.outputs,
            out.data_ptr(),
        )
        calls = [
            (*part, memory[i].data_ptr(), *arguments) for i, part in enumerate(slices)
        ]
        self._threads.run(self._library.kernels["multiply_bytes"], calls)
        return out


@dataclass(slots=True, frozen=True)
class CpuByteLinear:
    """One layer's weight in bytes, packed in the order in which the kernel reads it."""

    of: CpuLinears
    # [num_panels, inputs / 4, PANEL] words of four inputs; missing outputs are 0.
    panels: Tensor
    scales: Tensor  # [num_panels * PANEL] fp32
    # [num_panels * PANEL] int32: 128 times the sum of an output's weights.
    offsets: Tensor
    bias: Tensor | None
    outputs: int

    def __call__(self, x: Tensor, _: Tensor | None = None) -> Tensor:
        return self.of.multiply_bytes(x, self)


@dataclass(slots=True, frozen=True)
class CpuLinear:
    """One layer's weight, packed in the order in which the kernel reads it."""

    of: CpuLinears
    shape: tuple[int, int]  # [outputs, inputs]
    # [num_panels, inputs / 2, PANEL] words of two inputs; missing outputs are 0.
    panels: Tensor
    bias: Tensor | None
    # Of `multiply_narrow`: scales, zeros, group.
    narrow: tuple[Tensor, Tensor, int] | None = None

    @property
    def kernel(self) -> str:
        return "multiply" if self.narrow is None else "multiply_narrow"

    @property
    def kind(self) -> tuple[object, ...]:
        """Return what layers have in common that are computed in one call."""
        return self.kernel, self.shape, self.bias is None

    @property
    def arguments(self) -> tuple[int, ...]:
        """Return what the kernel takes for weight and bias."""
        bias = (0, False) if self.bias is None else (self.bias.data_ptr(), True)
        if self.narrow is None:
            return self.panels.data_ptr(), *bias
        scales, zeros, group = self.narrow
        return self.panels.data_ptr(), scales.data_ptr(), zeros.data_ptr(), group, *bias

    def __call__(self, x: Tensor, _: Tensor | None = None) -> Tensor:
        return self.of.multiply(x, self)


# Measured on a Zen 5 core; it only decides how threads share the rows.
NS_PER_LOGIT = 1.5


class CpuSampler:
    """One rank's sampling kernel, with its memory and threads. Only one thread may call it."""

    def __init__(self, library: CpuLibrary) -> None:
        self._library = library  # keeps the code in memory
        self._threads = CpuThreads()
        self._scratch = torch.empty(0)

    def sample(
        self,
        logits: Tensor,  # [num_rows, vocab] fp32, contiguous
        ints: NDArray[np.int64],  # [num_rows, ROW_INTS]: seed, choice, position, top_k
        # [num_rows, ROW_REALS]: temperature, log of min_p, top_p.
        reals: NDArray[np.float64],
    ) -> list[int]:
        """Return one token id for each row, `[num_rows]`."""
        num_rows, vocab = logits.shape
        assert logits.is_contiguous()
        assert logits.dtype == torch.float32
        assert ints.shape == (num_rows, ROW_INTS)
        assert reals.shape == (num_rows, ROW_REALS)
        tokens = np.empty(num_rows, np.int64)
        most = int(num_rows * vocab * NS_PER_LOGIT) // MIN_SLICE_NS
        count = max(1, min(most, torch.get_num_threads(), num_rows))
        # A sum takes the room of two counters.
        floats = -(-vocab // WIDTH) * WIDTH + 2 * SUMS
        if len(self._scratch) < count * floats:
            self._scratch = torch.empty(count * floats)
        arguments = (
            logits.data_ptr(),
            vocab,
            ints.ctypes.data,
            reals.ctypes.data,
            tokens.ctypes.data,
        )
        cuts = [num_rows * i // count for i in range(count + 1)]
        sums = range(self._scratch.data_ptr(), 1 << 64, 4 * floats)
        slices = [
            (first, end, sums[i] + 8 * SUMS, sums[i] + 8 * SUMS, sums[i], *arguments)
            for i, (first, end) in enumerate(pairwise(cuts))
        ]
        self._threads.run(self._library.kernels["sample"], slices)
        return list(tokens.tolist())
