"""The kernel that streams codes of four and eight bits, and multiplies what they stand for.

A warp brings tiles of codes and rows by TMA. Two warpgroups turn codes into bf16 in the registers
of the first operand, which no rounding touches, and multiply them by up to 128 rows. Scales are
applied to sums in fp32: after each group of 32, 64 or 128 inputs, or at the end where an output has
one. Those of MXFP4, which are powers of two, multiply the numbers themselves.

The inputs are cut in parts that follow from the weight alone, and the sums of parts are added in
order: by the program that comes last where each part has one of its own, or in registers where one
program computes all parts. So a row's bits depend on the row and the weight.

Of experts, a tile holds rows of one alone, and each program finds its tile. The grid depends on the
number of rows and not on how they are spread, so a CUDA graph can contain it.
"""

# ruff: noqa: N803, N806, PLR0913, PLR0915, PLR0917, PLR1714, RUF005
# Compile-time values are in capitals, as in Triton's own code; arguments are pointers and sizes.
# mypy: disable-error-code="no-untyped-def,assignment"

from typing import NamedTuple

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
INT8 = "int8"
INT8_ROWS = "int8 by rows"
FP8_BLOCKS = "fp8 in blocks"
FP8_ROWS = "fp8 by rows"
MXFP4 = "mxfp4"
UNIT = 64  # outputs of a warpgroup
STEP = 128  # inputs
GROUPS = 2  # warpgroups that multiply


class Format(NamedTuple):
    """How codes lie in memory, and the words beside them."""

    bits: int
    # Of each output in a step, words for each group of inputs, or one; 0: scales lie apart.
    has_group_words: bool = False
    has_step_words: bool = False


FORMATS = {
    INT4: Format(4, has_group_words=True),
    INT8: Format(8, has_group_words=True),
    INT8_ROWS: Format(8),
    FP8_BLOCKS: Format(8),
    FP8_ROWS: Format(8),
    MXFP4: Format(4, has_step_words=True),
}


def _int4_text(zeros: int) -> str:
    """Two words of four codes in each half -> eight pairs: 128 + code, minus 128 + zero point.

    The pairs are neighbours, and as many as there are zero points share one each.
    """
    lines = ["{ .reg .b32 t, u;"]
    for pair in range(8):
        word = f"${8 + pair // 4}"
        shift = 4 * (pair % 4)
        zero = f"${10 + 2 * (pair * zeros // 8)}"
        lines.append(f"shr.b32 u, {word}, {shift};" if shift else f"mov.b32 u, {word};")
        # (a & b) | c is 0xea
        lines.append("lop3.b32 t, u, 0x000f000f, 0x43004300, 0xea;")
        lines.append(f"sub.rn.bf16x2 ${pair}, t, {zero};")
    return "\n".join([*lines, "}"])


def _int8_text() -> str:
    """Two words of four bytes -> four pairs: 128 + seven bits, minus 128 or 256 by the sign."""
    lines = ["{ .reg .b32 t, u, v;"]
    for pair in range(4):
        word = f"${4 + pair // 2}"
        lines.append(f"shr.b32 u, {word}, 8;" if pair % 2 else f"mov.b32 u, {word};")
        lines.append("lop3.b32 t, u, 0x007f007f, 0x43004300, 0xea;")
        lines.append("lop3.b32 v, u, 0x00800080, 0x43004300, 0xea;")
        lines.append(f"sub.rn.bf16x2 ${pair}, t, v;")
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


def _mxfp4_text() -> str:
    """Two words of eight codes -> eight pairs: their fields where bf16 has them, times a scale.

    Three codes of each half are a shift away from there, and the fourth has the bits between them.
    """
    lines = ["{ .reg .b32 t, u, v;"]
    for pair in range(8):
        word = f"${8 + pair // 4}"
        turn = pair % 4
        scale = f"${10 + 2 * (pair // 2)}"
        if turn < 3:
            shift = 3 * turn
            lines.append(
                f"shl.b32 u, {word}, {shift};" if shift else f"mov.b32 u, {word};"
            )
            lines.append("and.b32 t, u, 0x81c081c0;")
        else:
            lines += [
                f"shl.b32 t, {word}, 1;",
                f"shr.b32 u, {word}, 3;",
                f"shr.b32 v, {word}, 7;",
                "and.b32 v, v, 0x00400040;",
                "lop3.b32 u, u, 0x01800180, v, 0xea;",
                "lop3.b32 t, t, 0x80008000, u, 0xea;",
            ]
        lines.append(f"mul.rn.bf16x2 ${pair}, t, {scale};")
    return "\n".join([*lines, "}"])


def _operands(outputs: int, inputs: int) -> str:
    return ",".join(["=&r"] * outputs + ["r"] * inputs)


INT4_TEXT = gl.constexpr(_int4_text(1))
INT4_TEXT_OF_2 = gl.constexpr(_int4_text(2))
INT4_TEXT_OF_4 = gl.constexpr(_int4_text(4))
INT8_TEXT = gl.constexpr(_int8_text())
FP8_TEXT = gl.constexpr(_fp8_text())
MXFP4_TEXT = gl.constexpr(_mxfp4_text())
# Triton gives each operand twice, as two words are widened at once.
BYTES_OPERANDS = gl.constexpr(_operands(4, 2))
OPERANDS_OF_1 = gl.constexpr(_operands(8, 4))
OPERANDS_OF_2 = gl.constexpr(_operands(8, 6))
OPERANDS_OF_4 = gl.constexpr(_operands(8, 10))
EIGHT = gl.constexpr((gl.bfloat16,) * 8)
FOUR = gl.constexpr((gl.bfloat16,) * 4)


@gluon.jit
def _fragments(words, OPERAND: gl.constexpr):
    """Return `[32, 32]` words as `[64, 16]` of the first operand; no word moves."""
    words = words.reshape([2, 4, 8, 4, 2, 2]).permute([1, 4, 2, 0, 3, 5])
    return gl.convert_layout(words.reshape([64, 16]), OPERAND, assert_trivial=True)


@gluon.jit
def _joined(p, AT: gl.constexpr, GROUP: gl.constexpr, OPERAND: gl.constexpr):
    """Return `[64, GROUP]` numbers of as many parts of 16 inputs, the first of which is `AT`."""
    if GROUP == 32:
        numbers = gl.join(p[AT], p[AT + 1]).permute([0, 2, 1])
    elif GROUP == 64:
        first = gl.join(p[AT], p[AT + 1])
        second = gl.join(p[AT + 2], p[AT + 3])
        numbers = gl.join(first, second).permute([0, 3, 2, 1])
    else:
        first = gl.join(gl.join(p[0], p[1]), gl.join(p[2], p[3]))
        second = gl.join(gl.join(p[4], p[5]), gl.join(p[6], p[7]))
        numbers = gl.join(first, second).permute([0, 4, 3, 2, 1])
    return gl.convert_layout(numbers.reshape([64, GROUP]), OPERAND)


@gluon.jit
def _doubled(word):
    """Return the lower half of words in both halves, a column."""
    return ((word & 0xFFFF) * 0x00010001)[:, None]


@gluon.jit
def _power(word, SHIFT: gl.constexpr):
    """Return a byte of words as exponents of bf16 in both halves, a column."""
    return (((word >> SHIFT) & 0xFF) * 0x00800080)[:, None]


@gluon.jit
def _widened(first, second, words, KIND: gl.constexpr, OPERAND: gl.constexpr):
    """Return eight `[64, 16]` of numbers in bf16, without the scales that their sums get."""
    w = _fragments(first, OPERAND)
    if KIND == "int4":
        if len(words) == 1:
            return gl.inline_asm_elementwise(
                INT4_TEXT,
                OPERANDS_OF_1,
                [w, _doubled(words[0])],
                dtype=EIGHT,
                is_pure=True,
                pack=2,
            )
        elif len(words) == 2:
            return gl.inline_asm_elementwise(
                INT4_TEXT_OF_2,
                OPERANDS_OF_2,
                [w, _doubled(words[0]), _doubled(words[1])],
                dtype=EIGHT,
                is_pure=True,
                pack=2,
            )
        else:
            return gl.inline_asm_elementwise(
                INT4_TEXT_OF_4,
                OPERANDS_OF_4,
                [
                    w,
                    _doubled(words[0]),
                    _doubled(words[1]),
                    _doubled(words[2]),
                    _doubled(words[3]),
                ],
                dtype=EIGHT,
                is_pure=True,
                pack=2,
            )
    elif KIND == "mxfp4":
        word = words[0]
        return gl.inline_asm_elementwise(
            MXFP4_TEXT,
            OPERANDS_OF_4,
            [w, _power(word, 0), _power(word, 8), _power(word, 16), _power(word, 24)],
            dtype=EIGHT,
            is_pure=True,
            pack=2,
        )
    else:
        IS_INTEGER: gl.constexpr = KIND == "int8" or KIND == "int8 by rows"
        TEXT: gl.constexpr = INT8_TEXT if IS_INTEGER else FP8_TEXT
        v = _fragments(second, OPERAND)
        a = gl.inline_asm_elementwise(
            TEXT, BYTES_OPERANDS, [w], dtype=FOUR, is_pure=True, pack=2
        )
        b = gl.inline_asm_elementwise(
            TEXT, BYTES_OPERANDS, [v], dtype=FOUR, is_pure=True, pack=2
        )
        return a + b


@gluon.jit
def _scale_of(word, KIND: gl.constexpr, IS_HALF: gl.constexpr):
    """Return the scales of outputs: words in fp32, or their upper halves in fp16 or bf16."""
    if KIND == "int8":
        return word.to(gl.float32, bitcast=True)
    elif IS_HALF:
        scale = ((word >> 16) & 0xFFFF).to(gl.int16)
        return scale.to(gl.float16, bitcast=True).to(gl.float32)
    else:
        return ((word >> 16) << 16).to(gl.float32, bitcast=True)


@gluon.jit
def _column(word, KIND: gl.constexpr, IS_HALF: gl.constexpr, SUMS: gl.constexpr):
    """Return the scales of outputs as a column of their sums."""
    scale = _scale_of(word, KIND, IS_HALF)
    return gl.convert_layout(scale, gl.SliceLayout(1, SUMS))[:, None]


@gluon.jit
def _multiply(
    PART: gl.constexpr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    sum_ptr,
    count_ptr,
    codes,
    metas,
    x_tiles,
    full,
    empty,
    tile,
    expert,
    first_row,
    rows,
    columns,
    tiles,
    steps_all,
    parts,
    KIND: gl.constexpr,
    PIECES: gl.constexpr,
    NUM_WORDS: gl.constexpr,
    GROUP: gl.constexpr,
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
    IS_CHAIN: gl.constexpr = (
        KIND == "fp8 by rows" or KIND == "int8 by rows" or KIND == "mxfp4"
    )
    NUM_GROUPS: gl.constexpr = 128 // GROUP
    # Groups are multiplied at once; sums of more rows would take too many registers.
    IS_AHEAD: gl.constexpr = ROWS <= 16
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
            scale_of_step = 1.0
            if KIND == "fp8 in blocks":
                block = expert * tiles + tile
                scale_of_step = gl.load(scale_ptr + block * steps_all + step)
            mbarrier.wait(full.index(stage), (turn // STAGES) & 1)
            slot = stage * 2 + PART
            first = codes.index(slot * PIECES).load(STORED)
            second = first
            if PIECES == 2:
                second = codes.index(slot * 2 + 1).load(STORED)
            words = ()
            for number in gl.static_range(NUM_WORDS):
                of = metas.index(slot * NUM_WORDS + number).reshape([64])
                words = words + (of.load(OUTPUTS),)
            weight = _widened(first, second, words, KIND, OPERAND)
            if IS_CHAIN:
                x = x_tiles.index(stage).permute((1, 0))
                numbers = _joined(weight, 0, 128, OPERAND)
                acc = warpgroup_mma(numbers, x, acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=(acc,))
                mbarrier.arrive(empty.index(stage), count=1)
            else:
                sums = ()
                for group in gl.static_range(NUM_GROUPS):
                    x = x_tiles.index(stage * NUM_GROUPS + group).permute((1, 0))
                    numbers = _joined(weight, group * GROUP // 16, GROUP, OPERAND)
                    zeros = gl.zeros([64, ROWS], gl.float32, SUMS)
                    own = warpgroup_mma(numbers, x, zeros, use_acc=False, is_async=True)
                    if not IS_AHEAD:
                        scale = scale_of_step
                        if NUM_WORDS > 0:
                            scale = _column(words[group], KIND, IS_HALF, SUMS)
                        own = warpgroup_mma_wait(0, deps=(own,))
                        if group == NUM_GROUPS - 1:
                            mbarrier.arrive(empty.index(stage), count=1)
                        acc = acc + own * scale
                    sums = sums + (own,)
                if IS_AHEAD:
                    for group in gl.static_range(NUM_GROUPS):
                        scale = scale_of_step
                        if NUM_WORDS > 0:
                            scale = _column(words[group], KIND, IS_HALF, SUMS)
                        own = warpgroup_mma_wait(
                            NUM_GROUPS - 1 - group, deps=(sums[group],)
                        )
                        if group == NUM_GROUPS - 1:
                            mbarrier.arrive(empty.index(stage), count=1)
                        acc = acc + own * scale
            turn += 1
        # The sum of parts begins with +0 in either way of adding them.
        total = total + acc

    n = gl.arange(0, 64, layout=gl.SliceLayout(1, SUMS))
    m = gl.arange(0, ROWS, layout=gl.SliceLayout(0, SUMS))
    column = (tile * 2 + PART) * 64 + n
    # Of all experts, whose last tiles are filled.
    own_column = (expert * tiles * 2 + tile * 2 + PART) * 64 + n
    bias_at = expert * columns + column
    row = first_row + m
    if IS_SPREAD:
        cells = n[:, None] * ROWS + m[None, :]
        units = gl.num_programs(0) * 2
        number = first_part * units + piece * 2 + PART
        gl.store(sum_ptr + number.to(gl.int64) * (64 * ROWS) + cells, total)
        sync_warpgroup()
        counter = count_ptr + piece * 2 + PART
        before = gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
        if before == parts - 1:
            added = gl.zeros([64, ROWS], gl.float32, SUMS)
            source = sum_ptr + (piece * 2 + PART).to(gl.int64) * (64 * ROWS) + cells
            for _ in range(parts):
                added += gl.load(source, cache_modifier=".cg")
                source += units.to(gl.int64) * (64 * ROWS)
            added = _finished(
                added, scale_ptr, own_column, bias_ptr, bias_at, column, columns, KIND
            )
            _store(added, out_ptr, column, columns, row, rows)
            gl.store(counter, 0)
    else:
        total = _finished(
            total, scale_ptr, own_column, bias_ptr, bias_at, column, columns, KIND
        )
        _store(total, out_ptr, column, columns, row, rows)


@gluon.jit
def _finished(
    total,
    scale_ptr,
    own_column,
    bias_ptr,
    bias_at,
    column,
    columns,
    KIND: gl.constexpr,
):
    """Return sums `[64, ROWS]` times the scales of outputs, plus their biases."""
    if KIND == "fp8 by rows" or KIND == "int8 by rows":
        total = total * gl.load(scale_ptr + own_column)[:, None]
    if bias_ptr is not None:
        bias = gl.load(bias_ptr + bias_at, mask=column < columns, other=0.0)
        total = total + bias.to(gl.float32)[:, None]
    return total


@gluon.jit
def _store(total, out_ptr, column, columns, row, rows):
    is_live = (column < columns)[:, None] & (row < rows)[None, :]
    target = out_ptr + row.to(gl.int64)[None, :] * columns + column[:, None]
    gl.store(target, total.to(gl.bfloat16), mask=is_live)


@gluon.jit
def _sum(a, b):
    return a + b


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
    PIECES: gl.constexpr,
    NUM_WORDS: gl.constexpr,
    PANEL: gl.constexpr,
    IS_SPREAD: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
):
    BYTES: gl.constexpr = 2 * (PIECES * 4096 + NUM_WORDS * 256) + ROWS * 256
    PANELS: gl.constexpr = 128 // PANEL
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
            for word in gl.static_range(NUM_WORDS):
                tma.async_copy_global_to_shared(
                    meta_desc,
                    [number * NUM_WORDS + word, 0],
                    barrier,
                    metas.index(slot * NUM_WORDS + word),
                )
        for panel in gl.static_range(PANELS):
            tma.async_copy_global_to_shared(
                x_desc,
                [first_row, step * 128 + panel * PANEL],
                barrier,
                x_panels.index(stage * PANELS + panel),
            )


@gluon.jit(do_not_specialize=["rows", "steps_all", "parts", "tiles"])
def streaming_kernel(
    codes_desc,
    meta_desc,
    x_desc,
    scale_ptr,
    bias_ptr,
    ends_ptr,
    out_ptr,
    sum_ptr,
    count_ptr,
    rows,
    columns,
    steps_all,
    parts,
    tiles,
    EXPERTS: gl.constexpr,
    SLOTS: gl.constexpr,
    KIND: gl.constexpr,
    PIECES: gl.constexpr,
    NUM_WORDS: gl.constexpr,
    GROUP: gl.constexpr,
    IS_HALF: gl.constexpr,
    IS_SPREAD: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    PANEL: gl.constexpr = 64 if GROUP == 128 else GROUP
    if EXPERTS > 0:
        # All tiles of outputs of the same rows run side by side, and those of an expert in a row.
        tile = gl.program_id(0) % tiles
        place = gl.program_id(0) // tiles
        EACH: gl.constexpr = gl.BlockedLayout([(SLOTS + 127) // 128], [32], [4], [0])
        e = gl.arange(0, SLOTS, layout=EACH)
        ends = gl.load(ends_ptr + e, mask=e < EXPERTS, other=0)
        starts = gl.load(ends_ptr + e - 1, mask=(e > 0) & (e < EXPERTS), other=0)
        row_tiles = (ends - starts + ROWS - 1) // ROWS
        tile_ends = gl.associative_scan(row_tiles, 0, _sum)
        expert = gl.sum((tile_ends <= place).to(gl.int32), 0)
        if expert >= EXPERTS:
            return
        is_own = e == expert
        rows = gl.sum(gl.where(is_own, ends, 0), 0)
        before = place - gl.sum(gl.where(is_own, tile_ends - row_tiles, 0), 0)
        first_row = gl.sum(gl.where(is_own, starts, 0), 0) + before * ROWS
    else:
        tiles_m = (rows + ROWS - 1) // ROWS
        tile = gl.program_id(0) // tiles_m
        first_row = gl.program_id(0) % tiles_m * ROWS
        expert = 0
    WORDS: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=128, element_bitwidth=32, rank=2
    )
    VALUES: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=2 * PANEL, element_bitwidth=16, rank=2
    )
    codes = gl.allocate_shared_memory(gl.int32, [STAGES * 2 * PIECES, 32, 32], WORDS)
    NUM_GROUPS: gl.constexpr = 128 // GROUP
    x_tiles = gl.allocate_shared_memory(
        gl.bfloat16, [STAGES * NUM_GROUPS, ROWS, GROUP], VALUES
    )
    x_panels = x_tiles
    if GROUP == 128:
        x_panels = x_tiles._reinterpret(gl.bfloat16, [STAGES * 2, ROWS, 64], VALUES)
    metas = codes
    if NUM_WORDS > 0:
        metas = gl.allocate_shared_memory(
            gl.int32, [STAGES * 2 * NUM_WORDS, 1, 64], meta_desc.layout
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
                    bias_ptr,
                    out_ptr,
                    sum_ptr,
                    count_ptr,
                    codes,
                    metas,
                    x_tiles,
                    full,
                    empty,
                    tile,
                    expert,
                    first_row,
                    rows,
                    columns,
                    tiles,
                    steps_all,
                    parts,
                    KIND,
                    PIECES,
                    NUM_WORDS,
                    GROUP,
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
                    bias_ptr,
                    out_ptr,
                    sum_ptr,
                    count_ptr,
                    codes,
                    metas,
                    x_tiles,
                    full,
                    empty,
                    tile,
                    expert,
                    first_row,
                    rows,
                    columns,
                    tiles,
                    steps_all,
                    parts,
                    KIND,
                    PIECES,
                    NUM_WORDS,
                    GROUP,
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
                    expert * tiles + tile,
                    first_row,
                    steps_all,
                    parts,
                    PIECES,
                    NUM_WORDS,
                    PANEL,
                    IS_SPREAD,
                    ROWS,
                    STAGES,
                ),
            ),
        ],
        [4, 1],
        [REGISTERS, 24],
    )
