"""The kernel that streams codes of four bits and FP8, and multiplies the numbers they stand for.

A warp brings tiles of codes and rows by TMA. Two warpgroups turn codes into bf16 in the registers
of the first operand, which no rounding touches, and multiply them by up to 128 rows. Scales are
applied to sums in fp32: after each step of 128 inputs, or at the end where an output has one.

The inputs are cut in parts that follow from the weight alone, and the sums of parts are added in
order: by the program that comes last where each part has one of its own, or in registers where one
program computes all parts. So a row's bits depend on the row and the weight.
"""

# ruff: noqa: N803, N806, PLR0913, PLR0915, PLR0917
# Compile-time values are in capitals, as in Triton's own code; arguments are pointers and sizes.
# mypy: disable-error-code="no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# Triton 3.7 has renamed it. In a part of a specialised kernel it is of that part's warps alone.
sync_warpgroup = getattr(gl, "thread_barrier", None) or gl.barrier

INT4 = "int4"
FP8_BLOCKS = "fp8 in blocks"
FP8_ROWS = "fp8 by rows"
UNIT = 64  # outputs of a warpgroup
STEP = 128  # inputs
GROUPS = 2  # warpgroups that multiply


def _int4_text() -> str:
    """Two words of four codes in each half -> eight pairs: 128 + code, minus 128 + zero point."""
    lines = ["{ .reg .b32 t, u;"]
    for pair in range(8):
        word = f"${8 + pair // 4}"
        shift = 4 * (pair % 4)
        lines.append(f"shr.b32 u, {word}, {shift};" if shift else f"mov.b32 u, {word};")
        # (a & b) | c is 0xea
        lines.append("lop3.b32 t, u, 0x000f000f, 0x43004300, 0xea;")
        lines.append(f"sub.rn.bf16x2 ${pair}, t, $10;")
    return "\n".join([*lines, "}"])


def _fp8_text() -> str:
    """Two words of four bytes -> four pairs: their fields where bf16 has them, times 2^120."""
    lines = ["{ .reg .b32 t, u, c;", "mov.b32 c, 0x7b807b80;"]
    for pair in range(4):
        word = f"${4 + pair // 2}"
        if pair % 2:
            lines += [f"mov.b32 t, {word};", f"shr.b32 u, {word}, 4;"]
        else:
            lines += [f"shl.b32 t, {word}, 8;", f"shl.b32 u, {word}, 4;"]
        lines.append("and.b32 u, u, 0x07f007f0;")
        lines.append("lop3.b32 t, t, 0x80008000, u, 0xea;")
        lines.append(f"mul.rn.bf16x2 ${pair}, t, c;")
    return "\n".join([*lines, "}"])


INT4_TEXT = gl.constexpr(_int4_text())
FP8_TEXT = gl.constexpr(_fp8_text())
INT4_OPERANDS = gl.constexpr(",".join(["=&r"] * 8 + ["r"] * 4))
FP8_OPERANDS = gl.constexpr(",".join(["=&r"] * 4 + ["r"] * 2))
EIGHT = gl.constexpr((gl.bfloat16,) * 8)
FOUR = gl.constexpr((gl.bfloat16,) * 4)


@gluon.jit
def _fragments(words, OPERAND: gl.constexpr):
    """Return `[32, 32]` words as `[64, 16]` of the first operand; no word moves."""
    words = words.reshape([2, 4, 8, 4, 2, 2]).permute([1, 4, 2, 0, 3, 5])
    return gl.convert_layout(words.reshape([64, 16]), OPERAND, assert_trivial=True)


@gluon.jit
def _joined(a, b, c, d, e, f, g, h, OPERAND: gl.constexpr):
    first = gl.join(gl.join(a, b), gl.join(c, d))
    second = gl.join(gl.join(e, f), gl.join(g, h))
    numbers = gl.join(first, second).permute([0, 4, 3, 2, 1]).reshape([64, 128])
    return gl.convert_layout(numbers, OPERAND)


@gluon.jit
def _widened(first, second, meta, IS_FP8: gl.constexpr, OPERAND: gl.constexpr):
    """Return `[64, 128]` numbers in bf16, without the scales that their sums get."""
    w = _fragments(first, OPERAND)
    if IS_FP8:
        v = _fragments(second, OPERAND)
        a = gl.inline_asm_elementwise(
            FP8_TEXT, FP8_OPERANDS, [w], dtype=FOUR, is_pure=True, pack=2
        )
        b = gl.inline_asm_elementwise(
            FP8_TEXT, FP8_OPERANDS, [v], dtype=FOUR, is_pure=True, pack=2
        )
        return _joined(a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3], OPERAND)
    else:
        zero = ((meta & 0xFFFF) * 0x00010001)[:, None]
        o = gl.inline_asm_elementwise(
            INT4_TEXT, INT4_OPERANDS, [w, zero], dtype=EIGHT, is_pure=True, pack=2
        )
        return _joined(o[0], o[1], o[2], o[3], o[4], o[5], o[6], o[7], OPERAND)


@gluon.jit
def _scale_of(meta, IS_HALF: gl.constexpr):
    """Return the scales of outputs, which are the upper halves of words: fp16 or bf16."""
    if IS_HALF:
        scale = ((meta >> 16) & 0xFFFF).to(gl.int16)
        return scale.to(gl.float16, bitcast=True).to(gl.float32)
    else:
        return ((meta >> 16) << 16).to(gl.float32, bitcast=True)


@gluon.jit
def _multiply(
    GROUP: gl.constexpr,
    scale_ptr,
    out_ptr,
    sum_ptr,
    count_ptr,
    codes,
    metas,
    x_tiles,
    full,
    empty,
    tile,
    first_row,
    rows,
    columns,
    steps_all,
    parts,
    KIND: gl.constexpr,
    IS_HALF: gl.constexpr,
    IS_SPREAD: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
):
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 16]
    )
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SUMS, k_width=2)
    STORED: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    OUTPUTS: gl.constexpr = gl.SliceLayout(1, OPERAND)
    IS_FP8: gl.constexpr = KIND != "int4"
    PIECES: gl.constexpr = 2 if IS_FP8 else 1
    piece = gl.program_id(0)
    first_part = gl.program_id(1)
    last_part = first_part + 1
    if not IS_SPREAD:
        first_part = 0
        last_part = parts
    turn = 0
    total = gl.zeros([64, ROWS], gl.float32, SUMS)
    for part in range(first_part, last_part):
        start = steps_all * part // parts
        end = steps_all * (part + 1) // parts
        acc = gl.zeros([64, ROWS], gl.float32, SUMS)
        for step in range(start, end):
            stage = turn % STAGES
            if KIND == "fp8 in blocks":
                scale = gl.load(scale_ptr + tile * steps_all + step)
            mbarrier.wait(full.index(stage), (turn // STAGES) & 1)
            slot = stage * 2 + GROUP
            first = codes.index(slot * PIECES).load(STORED)
            second = first
            if IS_FP8:
                second = codes.index(slot * 2 + 1).load(STORED)
            meta = gl.full([64], 0, gl.int32, OUTPUTS)
            if not IS_FP8:
                meta = metas.index(slot).reshape([64]).load(OUTPUTS)
            weight = _widened(first, second, meta, IS_FP8, OPERAND)
            x = x_tiles.index(stage).permute((1, 0))
            if KIND == "fp8 by rows":
                acc = warpgroup_mma(weight, x, acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=(acc,))
                mbarrier.arrive(empty.index(stage), count=1)
            else:
                sums = gl.zeros([64, ROWS], gl.float32, SUMS)
                sums = warpgroup_mma(weight, x, sums, use_acc=False, is_async=True)
                if KIND == "int4":
                    scales = _scale_of(meta, IS_HALF)
                    scale = gl.convert_layout(scales, gl.SliceLayout(1, SUMS))[:, None]
                sums = warpgroup_mma_wait(0, deps=(sums,))
                mbarrier.arrive(empty.index(stage), count=1)
                acc = acc + sums * scale
            turn += 1
        # The sum of parts begins with +0 in either way of adding them.
        total = total + acc

    n = gl.arange(0, 64, layout=gl.SliceLayout(1, SUMS))
    m = gl.arange(0, ROWS, layout=gl.SliceLayout(0, SUMS))
    unit = tile * 2 + GROUP
    if IS_SPREAD:
        cells = n[:, None] * ROWS + m[None, :]
        units = gl.num_programs(0) * 2
        number = first_part * units + piece * 2 + GROUP
        gl.store(sum_ptr + number.to(gl.int64) * (64 * ROWS) + cells, total)
        sync_warpgroup()
        counter = count_ptr + piece * 2 + GROUP
        before = gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
        if before == parts - 1:
            added = gl.zeros([64, ROWS], gl.float32, SUMS)
            source = sum_ptr + (piece * 2 + GROUP).to(gl.int64) * (64 * ROWS) + cells
            for _ in range(parts):
                added += gl.load(source, cache_modifier=".cg")
                source += units.to(gl.int64) * (64 * ROWS)
            _store(
                added, scale_ptr, out_ptr, unit, n, first_row + m, rows, columns, KIND
            )
            gl.store(counter, 0)
    else:
        _store(total, scale_ptr, out_ptr, unit, n, first_row + m, rows, columns, KIND)


@gluon.jit
def _store(total, scale_ptr, out_ptr, unit, n, row, rows, columns, KIND: gl.constexpr):
    column = unit * 64 + n
    if KIND == "fp8 by rows":
        total = total * gl.load(scale_ptr + column)[:, None]
    is_live = (column < columns)[:, None] & (row < rows)[None, :]
    target = out_ptr + row.to(gl.int64)[None, :] * columns + column[:, None]
    gl.store(target, total.to(gl.bfloat16), mask=is_live)


@gluon.jit
def _fill(
    codes_desc,
    meta_desc,
    x_desc,
    codes,
    metas,
    x_panels,
    full,
    empty,
    tile,
    first_row,
    steps_all,
    parts,
    IS_FP8: gl.constexpr,
    IS_SPREAD: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
):
    PIECES: gl.constexpr = 2 if IS_FP8 else 1
    BYTES: gl.constexpr = 2 * (PIECES * 4096 + (0 if IS_FP8 else 256)) + ROWS * 256
    part = gl.program_id(1)
    start = steps_all * part // parts
    end = steps_all * (part + 1) // parts
    if not IS_SPREAD:
        start = 0
        end = steps_all
    for turn in range(end - start):
        step = start + turn
        stage = turn % STAGES
        mbarrier.wait(empty.index(stage), ((turn // STAGES) & 1) ^ 1)
        barrier = full.index(stage)
        mbarrier.expect(barrier, BYTES)
        for group in gl.static_range(2):
            slot = stage * 2 + group
            number = (tile * 2 + group) * steps_all + step
            for piece in gl.static_range(PIECES):
                tma.async_copy_global_to_shared(
                    codes_desc,
                    [(number * PIECES + piece) * 32, 0],
                    barrier,
                    codes.index(slot * PIECES + piece),
                )
            if not IS_FP8:
                tma.async_copy_global_to_shared(
                    meta_desc, [number, 0], barrier, metas.index(slot)
                )
        for half in gl.static_range(2):
            tma.async_copy_global_to_shared(
                x_desc,
                [first_row, step * 128 + half * 64],
                barrier,
                x_panels.index(stage * 2 + half),
            )


@gluon.jit(do_not_specialize=["rows", "steps_all", "parts"])
def streaming_kernel(
    codes_desc,
    meta_desc,
    x_desc,
    scale_ptr,
    out_ptr,
    sum_ptr,
    count_ptr,
    rows,
    columns,
    steps_all,
    parts,
    KIND: gl.constexpr,
    IS_HALF: gl.constexpr,
    IS_SPREAD: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    IS_FP8: gl.constexpr = KIND != "int4"
    PIECES: gl.constexpr = 2 if IS_FP8 else 1
    tiles_m = (rows + ROWS - 1) // ROWS
    tile = gl.program_id(0) // tiles_m
    first_row = gl.program_id(0) % tiles_m * ROWS
    WORDS: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=128, element_bitwidth=32, rank=2
    )
    VALUES: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=128, element_bitwidth=16, rank=2
    )
    codes = gl.allocate_shared_memory(gl.int32, [STAGES * 2 * PIECES, 32, 32], WORDS)
    x_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, ROWS, 128], VALUES)
    x_panels = x_tiles._reinterpret(gl.bfloat16, [STAGES * 2, ROWS, 64], VALUES)
    metas = codes
    if not IS_FP8:
        metas = gl.allocate_shared_memory(
            gl.int32, [STAGES * 2, 1, 64], meta_desc.layout
        )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    # Triton takes no starred arguments here.
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    FIRST,
                    scale_ptr,
                    out_ptr,
                    sum_ptr,
                    count_ptr,
                    codes,
                    metas,
                    x_tiles,
                    full,
                    empty,
                    tile,
                    first_row,
                    rows,
                    columns,
                    steps_all,
                    parts,
                    KIND,
                    IS_HALF,
                    IS_SPREAD,
                    ROWS,
                    STAGES,
                ),
            ),
            (
                _multiply,
                (
                    SECOND,
                    scale_ptr,
                    out_ptr,
                    sum_ptr,
                    count_ptr,
                    codes,
                    metas,
                    x_tiles,
                    full,
                    empty,
                    tile,
                    first_row,
                    rows,
                    columns,
                    steps_all,
                    parts,
                    KIND,
                    IS_HALF,
                    IS_SPREAD,
                    ROWS,
                    STAGES,
                ),
            ),
            (
                _fill,
                (
                    codes_desc,
                    meta_desc,
                    x_desc,
                    codes,
                    metas,
                    x_panels,
                    full,
                    empty,
                    tile,
                    first_row,
                    steps_all,
                    parts,
                    IS_FP8,
                    IS_SPREAD,
                    ROWS,
                    STAGES,
                ),
            ),
        ],
        [4, 1],
        [REGISTERS, 24],
    )
