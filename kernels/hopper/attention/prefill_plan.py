"""The plan of prefill attention: which program takes which items, made on the device once a step.

An item is a tile of queries of one head, or of all heads that share a KV head, with the tiles of
keys that it sees. Longer ones come first, and programs take them in turns to and fro, so each has
about as much to do. Where keys and values do not fit the L2 cache, a part of the KV heads comes
after the other. Lengths are read on the device: a captured step plans what it is replayed with.
"""

# ruff: noqa: N803, PLR0913, PLR0915, PLR0917
# Compile-time values are in capitals, as in Triton's own code; arguments are pointers and strides.

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from baton.kernels.cuda.paged import MAX_BATCH, NO_WINDOW
from baton.kernels.launch import Launcher, cdiv, next_power_of_2

RECORD = tl.constexpr(8)  # numbers of an item
MAX_PROGRAMS = 256
# Bytes of keys and values that stay in the L2 cache of 50 MB.
CACHED_BYTES = tl.constexpr(24 << 20)
# Items of a part for each program; with fewer, the parts would not be shared evenly.
LEAST_ROUNDS = tl.constexpr(4)


def plan_prefill(
    query_starts: Tensor,  # [batch + 1] int32
    context_lens: Tensor,  # [batch] int32
    num_tokens: int,
    kv_heads: int,
    group: int,  # query heads that share a KV head
    lines: int,  # items of a KV head for each tile of queries: `group`, or 1 for all of them
    queries: int,  # of a tile
    keys: int,  # of a tile
    key_bytes: int,  # of one KV head: a key and a value
    num_programs: int,
    window: int | None = None,  # keys that a query sees, itself included
) -> Tensor:
    """Return the plan as int32 `[*, RECORD]`; `num_tokens` may count padding.

    It begins with the first item of each program and the one after its last, counted in records
    from the plan's start. An item is its first row and that row's position, its number of queries,
    its first tile of keys and the one after its last, its first head, its sequence, and the length
    of the context.
    """
    assert num_programs <= MAX_PROGRAMS
    batch = len(context_lens)
    num_units = num_tokens // queries + batch
    num_items = num_units * kv_heads * lines
    # Each part of the heads may end within a round.
    room = num_items // num_programs + 1 + kv_heads
    head = cdiv(2 * num_programs, RECORD.value)
    plan = context_lens.new_empty((head + num_programs * room, RECORD.value))
    units = context_lens.new_empty((2, num_units))
    _launch_measure_units(
        (batch, 1, 1),
        query_starts,
        context_lens,
        units,
        num_units,
        window or NO_WINDOW,
        QUERIES=queries,
        KEYS=keys,
        BLOCK=64,
        num_warps=1,
    )
    _launch_plan_prefill(
        (num_units, 1, 1),
        query_starts,
        context_lens,
        units,
        plan,
        batch,
        num_units,
        num_programs,
        head,
        room,
        window or NO_WINDOW,
        key_bytes,
        KV_HEADS=kv_heads,
        LINES=lines,
        GROUP=group,
        QUERIES=queries,
        KEYS=keys,
        HEADS=next_power_of_2(kv_heads * lines),
        BLOCK=256,
        MAX_BATCH=MAX_BATCH,
        MAX_PROGRAMS=MAX_PROGRAMS,
        num_warps=4,
    )
    return plan


# Counts are not specialised, because variants for 1 and for multiples of 16 would be compiled
# during service.
@triton.jit(do_not_specialize=["start_ptr", "len_ptr", "num_units", "window"])
def _measure_units_kernel(
    start_ptr: tl.tensor,
    len_ptr: tl.tensor,
    unit_ptr: tl.tensor,
    num_units: tl.tensor,
    window: tl.tensor,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write of each unit of a sequence how many tiles of keys it sees, 0 for a spare one.

    Sequence `s` owns the units from `query_starts[s] // QUERIES + s` on. That is sometimes one
    unit more than it needs, but finding the units takes no prefix sum.
    """
    sequence = tl.program_id(0)
    start = tl.load(start_ptr + sequence)
    stop = tl.load(start_ptr + sequence + 1)
    context_len = tl.load(len_ptr + sequence)
    base = start // QUERIES + sequence
    count = stop // QUERIES + sequence + 1 - base
    for first in range(0, count, BLOCK):
        unit = first + tl.arange(0, BLOCK)
        num_queries = tl.minimum(stop - start - unit * QUERIES, QUERIES)
        position = context_len - (stop - start) + unit * QUERIES
        begin = tl.maximum(position - window + 1, 0) // KEYS
        length = tl.where(
            num_queries > 0, tl.cdiv(position + num_queries, KEYS) - begin, 0
        )
        tl.store(unit_ptr + base + unit, length, mask=unit < count)
        tl.store(unit_ptr + num_units + base + unit, sequence, mask=unit < count)


_launch_measure_units = Launcher(_measure_units_kernel)


@triton.jit
def _share(
    program: tl.tensor, num_items: tl.tensor, first: tl.tensor, num_programs: tl.tensor
) -> tl.tensor:
    """Return how many items of a part a program takes, where program `first` takes the longest."""
    turn = (program - first + num_programs) % num_programs
    left = num_items % num_programs
    forth = (num_items // num_programs) % 2 == 0
    more = tl.where(forth, turn < left, turn >= num_programs - left)
    return num_items // num_programs + more.to(tl.int32)


@triton.jit(
    do_not_specialize=[
        "start_ptr",
        "len_ptr",
        "batch",
        "num_units",
        "num_programs",
        "head",
        "room",
        "window",
        "key_bytes",
    ]
)
def _plan_prefill_kernel(
    start_ptr: tl.tensor,
    len_ptr: tl.tensor,
    unit_ptr: tl.tensor,
    plan_ptr: tl.tensor,
    batch: tl.tensor,
    num_units: tl.tensor,
    num_programs: tl.tensor,
    head: tl.tensor,
    room: tl.tensor,
    window: tl.tensor,
    key_bytes: tl.tensor,
    KV_HEADS: tl.constexpr,
    LINES: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    MAX_BATCH: tl.constexpr,
    MAX_PROGRAMS: tl.constexpr,
) -> None:
    """Write the items of a unit; the program of the first unit also writes where lists begin."""
    unit = tl.program_id(0)
    used = tl.load(start_ptr + batch) // QUERIES + batch
    if unit >= used:
        return
    mine = tl.load(unit_ptr + unit)
    rank = 0  # among all units, the longest first
    live = 0
    for first in range(0, used, BLOCK):
        other = first + tl.arange(0, BLOCK)
        length = tl.load(unit_ptr + other, mask=other < used, other=0)
        live += tl.sum((length > 0).to(tl.int32), 0)
        ahead = (length > mine) | ((length == mine) & (other < unit))
        rank += tl.sum(ahead.to(tl.int32), 0)

    row = tl.arange(0, MAX_BATCH)
    lens = tl.load(len_ptr + row, mask=row < batch, other=0)
    num_bytes = tl.sum(lens, 0).to(tl.int64) * key_bytes * KV_HEADS
    rounds = live * KV_HEADS * LINES // num_programs
    parts = tl.minimum(tl.cdiv(num_bytes, CACHED_BYTES).to(tl.int32), KV_HEADS)
    parts = tl.maximum(tl.minimum(parts, rounds // LEAST_ROUNDS), 1)
    heads = tl.cdiv(KV_HEADS, parts)  # KV heads of a part; the last may have fewer
    parts = tl.cdiv(KV_HEADS, heads)
    whole = live * heads * LINES

    if unit == 0:
        program = tl.arange(0, MAX_PROGRAMS)
        count = tl.zeros((MAX_PROGRAMS,), tl.int32)
        for part in range(parts):
            num_items = live * tl.minimum(heads, KV_HEADS - part * heads) * LINES
            start = part * whole % num_programs
            count += _share(program, num_items, start, num_programs)
        begin = head + program * room
        is_program = program < num_programs
        tl.store(plan_ptr + 2 * program, begin, mask=is_program)
        tl.store(plan_ptr + 2 * program + 1, begin + count, mask=is_program)
    if mine == 0:
        return

    line = tl.arange(0, HEADS)
    kv_head = line // LINES
    part = kv_head // heads
    first_head = part * heads
    width = tl.minimum(heads, KV_HEADS - first_head) * LINES
    number = rank * width + line - first_head * LINES
    turn = number // num_programs
    program = number % num_programs
    program = tl.where(turn % 2 == 0, program, num_programs - 1 - program)
    program = (program + part * whole) % num_programs
    for before in range(parts - 1):
        taken = _share(program, whole, before * whole % num_programs, num_programs)
        turn += tl.where(before < part, taken, 0)

    sequence = tl.load(unit_ptr + num_units + unit)
    token = tl.load(start_ptr + sequence)
    num_queries = tl.load(start_ptr + sequence + 1) - token
    context_len = tl.load(len_ptr + sequence)
    tile = unit - (token // QUERIES + sequence)
    position = context_len - num_queries + tile * QUERIES
    begin = tl.maximum(position - window + 1, 0) // KEYS
    to = plan_ptr + (head + program * room + turn) * RECORD
    is_line = line < KV_HEADS * LINES
    tl.store(to, token + tile * QUERIES, mask=is_line)
    tl.store(to + 1, position, mask=is_line)
    tl.store(to + 2, tl.minimum(num_queries - tile * QUERIES, QUERIES), mask=is_line)
    tl.store(to + 3, begin, mask=is_line)
    tl.store(to + 4, begin + mine, mask=is_line)
    tl.store(to + 5, kv_head * GROUP + line % LINES, mask=is_line)
    tl.store(to + 6, sequence, mask=is_line)
    tl.store(to + 7, context_len, mask=is_line)


_launch_plan_prefill = Launcher(_plan_prefill_kernel)
