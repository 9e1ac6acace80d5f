"""Prefill of latent attention on Hopper: prompts attend to keys and values of their own heads.

Latent rows of a context are expanded to the keys and values of all heads, up to a number that the
model decides, and a query's sums over these are merged with those over the rows before. That is
less than a third of the products that absorbed queries need. Cuts are at absolute positions, so the
bits of a query depend neither on its chunk nor on the batch.
"""

# ruff: noqa: PLR0913, PLR0917  (the signatures are the kernels': tensors, not records)

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from baton.kernels.constants import in_powers_of_2
from baton.kernels.cuda.paged import NO_WINDOW, num_programs
from baton.kernels.hopper.attention.prefill import (
    REGISTERS,
    ROWS,
    described,
    launch_prefill,
)
from baton.kernels.hopper.attention.prefill_plan import CACHED_BYTES, RECORD

PLAIN_DIM = 128  # numbers of a key that are its head's own, and those of a value
TURNED_DIM = 64  # numbers of a key that all heads share
KEYS = 128  # of a tile
WARPGROUPS = 2
QUERIES = ROWS * WARPGROUPS
STAGES = 2
VALUE_BYTES = 2
EXPANDED_BYTES = 256 << 20  # of the keys and values of a pass


class Prompt(NamedTuple):
    """Tokens of a prompt in a step: those before its last one."""

    sequence: int  # the row of its block table
    row: int  # of the first token in the batch
    start: int  # its position
    num_tokens: int

    @property
    def context(self) -> int:
        return self.start + self.num_tokens


class Segment(NamedTuple):
    """The keys `first:end` of a prompt, which lie in the rows of a pass from `row` on."""

    prompt: int
    first: int  # a multiple of `KEYS`
    end: int
    row: int

    @property
    def num_rows(self) -> int:
        return padded(self.end - self.first)


@dataclass(frozen=True, slots=True)
class Pass:
    """Latent rows that are expanded at once, and the items of `items_of` that see them."""

    rows: Tensor  # [num_rows] int64: those of `rows_of` a layer
    items: Tensor


@dataclass(frozen=True, slots=True)
class LatentPlan:
    passes: tuple[Pass, ...]
    num_programs: int


def padded(num_keys: int) -> int:
    return -(-num_keys // KEYS) * KEYS


def keys_at_once(num_heads: int) -> int:
    """Return how many keys of a prompt are expanded at once."""
    row_bytes = 2 * num_heads * PLAIN_DIM * VALUE_BYTES
    return max(EXPANDED_BYTES // row_bytes // KEYS, 1) * KEYS


def latent_plan(
    prompts: Sequence[Prompt],
    pool: Tensor,  # [num_blocks, 1, num_layers, 1, block_size, latent + TURNED_DIM]
    block_tables: Tensor,  # [num_sequences, max_blocks] int32
    num_heads: int,
    *,
    split: int = 0,
    programs: int = 0,
) -> LatentPlan:
    """Return the plan of a step. `split` and `programs` are for tests and proofs."""
    device = block_tables.device
    count = programs or num_programs(device, 1)
    split = split or keys_at_once(num_heads)
    segments = passes_of([prompt.context for prompt in prompts], split)
    items = [items_of(prompts, own, num_heads, count) for own in segments]
    passes = []
    parts = sent(np.concatenate(items), device).split([len(own) for own in items])
    for own, part in zip(segments, parts, strict=True):
        tables = [block_tables[prompts[one.prompt].sequence] for one in own]
        rows = [
            _rows_in(pool, table, one) for table, one in zip(tables, own, strict=True)
        ]
        passes.append(Pass(torch.cat(rows), part))
    return LatentPlan(tuple(passes), count)


def sent(array: NDArray[np.int32], device: torch.device) -> Tensor:
    """Return an array on a device, from memory that a GPU reads by itself."""
    is_pinned = device.type == "cuda"
    host = torch.empty(array.shape, dtype=torch.int32, pin_memory=is_pinned)
    host.numpy()[:] = array
    there = torch.empty(array.shape, dtype=torch.int32, device=device)
    return there.copy_(host, non_blocking=True)


def passes_of(contexts: Sequence[int], split: int) -> list[list[Segment]]:
    """Return which keys of prompts are expanded at once.

    Each prompt is cut at multiples of `split`, and a pass has as many rows and one of its parts.
    """
    passes: list[list[Segment]] = [[]]
    used = 0
    for prompt, context in enumerate(contexts):
        for first in range(0, context, split):
            end = min(first + split, context)
            if first or used + padded(end - first) > split:
                passes.append([])
                used = 0
            segment = Segment(prompt, first, end, used)
            passes[-1].append(segment)
            used += segment.num_rows
    return passes


def items_of(
    prompts: Sequence[Prompt],
    segments: Sequence[Segment],
    num_heads: int,
    num_programs: int,
) -> NDArray[np.int32]:
    """Return the items of a pass, as `plan_prefill` does.

    In place of a sequence, an item has the row at which its prompt's first key would be.
    """
    units = np.concatenate(
        [_units_of(prompts[one.prompt], one) for one in segments]
    ).astype(np.int32)
    longest_first = np.argsort(units[:, 3] - units[:, 4], kind="stable")
    units = units[longest_first]
    # As many heads one after the other as keep their keys and values in the L2 cache.
    num_rows = sum(one.num_rows for one in segments)
    head_bytes = 2 * num_rows * PLAIN_DIM * VALUE_BYTES
    width = min(max(CACHED_BYTES.value // head_bytes, 1), num_heads)
    parts = []
    for first in range(0, num_heads, width):
        heads = np.arange(first, min(first + width, num_heads), dtype=np.int32)
        part = units.repeat(len(heads), axis=0)
        part[:, 5] = np.tile(heads, len(units))
        parts.append(part)
    items = np.concatenate(parts)
    turn, program = np.divmod(np.arange(len(items)), num_programs)
    program = np.where(turn % 2 == 0, program, num_programs - 1 - program)
    counts = np.bincount(program, minlength=num_programs)
    head = -(-2 * num_programs // RECORD.value)
    ends = head + counts.cumsum()
    plan = np.zeros((head + len(items), RECORD.value), np.int32)
    bounds = np.stack((ends - counts, ends), axis=1)
    plan.reshape(-1)[: 2 * num_programs] = bounds.reshape(-1)
    plan[head:] = items[np.argsort(program, kind="stable")]
    return plan


def _units_of(prompt: Prompt, segment: Segment) -> NDArray[np.int64]:
    """Return what the items of all heads have in common, for tiles that see keys of a segment."""
    first = np.arange(0, prompt.num_tokens, QUERIES)
    counts = np.minimum(prompt.num_tokens - first, QUERIES)
    positions = prompt.start + first
    begin = np.full_like(first, segment.first // KEYS)
    ends = np.minimum(positions + counts, segment.end)
    fields = (
        prompt.row + first,
        positions,
        counts,
        begin,
        -(-ends // KEYS),
        np.zeros_like(first),
        np.full_like(first, segment.row - segment.first),
        np.zeros_like(first),
    )
    return np.stack(fields, axis=1)[positions + counts > segment.first]


def rows_of(pool: Tensor, layer: int) -> Tensor:
    """Return a view of the pool as rows, `[*, row_dim]`, that begins with the first of a layer."""
    num_blocks, *_, block_size, row_dim = pool.shape
    assert pool.stride(0) % row_dim == 0, "blocks begin with a row"
    last = (num_blocks - 1) * (pool.stride(0) // row_dim) + block_size
    first = pool.storage_offset() + layer * pool.stride(2)
    return pool.as_strided((last, row_dim), (row_dim, 1), first)


def _rows_in(pool: Tensor, table: Tensor, segment: Segment) -> Tensor:
    """Return which of `rows_of` a layer are a segment's; its padding repeats the last one."""
    block_size, row_dim = pool.shape[4:]
    last = segment.first + segment.num_rows
    keys = torch.arange(segment.first, last, device=table.device)
    keys = keys.clamp_(max=segment.end - 1)
    first = table[keys // block_size] * (pool.stride(0) // row_dim)
    return first + keys % block_size


def expanded_prefill_attention(
    q: Tensor,  # [num_tokens, num_heads, PLAIN_DIM]
    q_turned: Tensor,  # [num_tokens, num_heads, TURNED_DIM]
    pool: Tensor,  # [num_blocks, 1, num_layers, 1, block_size, latent + TURNED_DIM]
    layer: int,
    plan: LatentPlan,
    # Latent rows -> [num_rows, num_heads * 2 * PLAIN_DIM]: a head's key, then its value.
    expand: Callable[[Tensor], Tensor],
    scale: float,
) -> Tensor:
    """Return the attention of prompts' tokens, `[num_tokens, num_heads, PLAIN_DIM]`.

    The kernel does not write the other rows.
    """
    num_tokens, num_heads, _ = q.shape
    out = q.new_empty((num_tokens, num_heads, PLAIN_DIM))
    carried_tokens = num_tokens if len(plan.passes) > 1 else 0
    carried = out.new_empty((carried_tokens, num_heads, PLAIN_DIM), dtype=torch.float32)
    sums = out.new_empty((carried_tokens, num_heads, 2), dtype=torch.float32)
    scale_log2, cap_log2 = in_powers_of_2(scale, None)
    registers, producer_registers, most_registers = REGISTERS[WARPGROUPS]
    for own in plan.passes:
        rows = rows_of(pool, layer).index_select(0, own.rows)
        kv = expand(rows[:, :-TURNED_DIM])
        turned = rows[:, -TURNED_DIM:]
        launch_prefill(
            (plan.num_programs, 1, 1),
            _queries(q),
            described(kv, [*kv.shape], [kv.shape[1], 1], [KEYS, 64]),
            _queries(q_turned),
            described(turned, [*turned.shape], [rows.shape[1], 1], [KEYS, 64]),
            own.items,
            own.items,
            out,
            own.items,
            None,
            carried,
            sums,
            0,
            0,
            0,
            0,
            NO_WINDOW,
            scale_log2,
            cap_log2,
            num_heads,
            HEAD_DIM=PLAIN_DIM,
            DIM=PLAIN_DIM,
            GROUP=1,
            PACK=1,
            WARPGROUPS=WARPGROUPS,
            STAGES=STAGES,
            KEYS=KEYS,
            PAGE=KEYS,
            WINDOWED=False,
            CAPPED=False,
            SINKS=False,
            CUTS=False,
            LATENT=True,
            REGISTERS=registers,
            PRODUCER_REGISTERS=producer_registers,
            num_warps=4,
            maxnreg=most_registers,
        )
    return out


def _queries(q: Tensor) -> TensorDescriptor:
    """Describe queries so that a box is 64 rows of 64 numbers of one head."""
    num_tokens, num_heads, dim = q.shape
    strides = [q.stride(0), q.stride(1), q.stride(1), 1]
    return described(q, [num_tokens, num_heads, 1, dim], strides, [ROWS, 1, 1, 64])
