"""What brings the tiles of the prefill kernel: a warp, or over an FP8 pool a warpgroup.

The products read 16 bits. So the codes of a tile land by TMA in the room of its own numbers: those
of each two panels of 64 columns where the numbers of the second come to lie, a row in the room of a
row, and those of a single panel in its second half. From there they go through registers, 64 rows
at a time, the first panel and the first rows first, so that no number is written over a code that
is still to be read. An e4m3 number times a power of 2 is exact in fp32, and is rounded once to the
model's type; bf16 holds it exactly. Decode attention does the same, so both multiply equal numbers.

Keys are ahead of values, whose room is free later: while the codes of a tile of values come, the
keys of a later tile are widened.
"""

# ruff: noqa: N803, N806, PLR0913, PLR0915, PLR0917, RUF005, SIM102, SIM113
# Compile-time values are in capitals, as in Triton's own code; their branches are statements.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
)
from triton.language.core import _aggregate as aggregate

from baton.kernels.hopper.attention.prefill_form import Form, Inputs, Shared
from baton.kernels.hopper.attention.prefill_plan import RECORD

PIECE = gl.constexpr(64)  # rows, and columns
FEW_ROWS = gl.constexpr(32)


@aggregate
class Narrow:
    """The codes of keys, or of values, in shared memory, and where their numbers go."""

    boxes: gl.shared_memory_descriptor  # [*, 1, PAGE, columns]: what a TMA box brings
    codes: gl.shared_memory_descriptor  # [*, PIECE, columns], of the same memory
    words: gl.shared_memory_descriptor  # [*, FEW_ROWS, columns / 4] int32, the same
    numbers: gl.shared_memory_descriptor  # [*, PIECE, PIECE]
    factors: gl.shared_memory_descriptor  # [KEYS] fp32: those of the present tile
    come: gl.shared_memory_descriptor  # barriers: all codes of a tile are there
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(
        self,
        boxes: gl.shared_memory_descriptor,
        codes: gl.shared_memory_descriptor,
        words: gl.shared_memory_descriptor,
        numbers: gl.shared_memory_descriptor,
        factors: gl.shared_memory_descriptor,
        come: gl.shared_memory_descriptor,
        full: gl.shared_memory_descriptor,
        empty: gl.shared_memory_descriptor,
    ) -> None:
        self.boxes = boxes
        self.codes = codes
        self.words = words
        self.numbers = numbers
        self.factors = factors
        self.come = come
        self.full = full
        self.empty = empty


@gluon.jit
def produce(
    q_desc: tma.tensor_descriptor,
    kv_desc: tma.tensor_descriptor,
    q_turned_desc: tma.tensor_descriptor | None,
    k_turned_desc: tma.tensor_descriptor | None,
    table_ptr: gl.tensor,
    stride_table: gl.tensor,
    base_rows: gl.tensor,
    block_rows: gl.tensor,
    head_rows: gl.tensor,
    q_parts: gl.shared_memory_descriptor,
    k_pages: gl.shared_memory_descriptor,
    v_pages: gl.shared_memory_descriptor,
    q_turned_parts: gl.shared_memory_descriptor,
    k_turned_pages: gl.shared_memory_descriptor,
    shared: Shared,
    inputs: Inputs,
    form: Form,
) -> None:
    """The warp of a program that brings its tiles."""
    PAGE: gl.constexpr = form.PAGE
    PAGES: gl.constexpr = form.KEYS // form.PAGE
    PANELS: gl.constexpr = form.DIM // 64
    # Expanded values lie behind the keys of their head, others a block's rows below them.
    V_ROWS: gl.constexpr = 0 if form.LATENT else PAGE
    V_COLUMNS: gl.constexpr = form.DIM if form.LATENT else 0
    KEY_NUMBERS: gl.constexpr = form.DIM + (64 if form.LATENT else 0)
    ROWS_AT_ONCE: gl.constexpr = 16
    TAIL: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    g = 0
    t = 0
    tails = 0
    first = inputs.plan + 2 * gl.program_id(0)
    for item in range(gl.load(first), gl.load(first + 1)):
        record = inputs.plan + item * RECORD
        token = gl.load(record)
        begin = gl.load(record + 3)
        end = gl.load(record + 4)
        head = gl.load(record + 5)
        context = gl.load(record + 7)
        kv_head = head // form.GROUP
        base_row = base_rows + kv_head * head_rows
        table = table_ptr + gl.load(record + 6).to(gl.int64) * stride_table
        for j in range(begin, end):
            rows = ()
            column = 0
            first_row = base_row
            if form.LATENT:
                first_row = gl.load(record + 6) + j * form.KEYS
                rows = rows + (first_row,)  # type: ignore[assignment]
                column = head * (2 * form.DIM)
            else:
                for i in gl.static_range(PAGES):
                    page = j * PAGES + i
                    block = gl.load(table + page, mask=page * PAGE < context, other=0)
                    rows = rows + (block * block_rows + base_row,)  # type: ignore[assignment]
            stage = g % form.STAGES
            turn = ((g // form.STAGES) & 1) ^ 1
            mbarrier.wait(shared.k_empty.index(stage), turn)
            k_full = shared.k_full.index(stage)
            mbarrier.expect(k_full, form.KEYS * KEY_NUMBERS * 2)
            for i in gl.static_range(PAGES):
                for part in gl.static_range(PANELS):
                    tma.async_copy_global_to_shared(
                        kv_desc,
                        [rows[i], column + part * 64],
                        k_full,
                        k_pages.index((stage * PANELS + part) * PAGES + i),
                    )
            if form.LATENT:
                tma.async_copy_global_to_shared(
                    k_turned_desc, [first_row, 0], k_full, k_turned_pages.index(stage)
                )
            if j == begin:
                _bring_queries(
                    q_desc,
                    q_turned_desc,
                    q_parts,
                    q_turned_parts,
                    token,
                    head,
                    t,
                    shared,
                    form,
                )
            mbarrier.wait(shared.v_empty.index(stage), turn)
            v_full = shared.v_full.index(stage)
            if form.LATENT or j * form.KEYS + form.KEYS <= context:
                mbarrier.expect(v_full, form.KEYS * form.DIM * 2)
                for i in gl.static_range(PAGES):
                    for part in gl.static_range(PANELS):
                        tma.async_copy_global_to_shared(
                            kv_desc,
                            [rows[i] + V_ROWS, column + V_COLUMNS + part * 64],
                            v_full,
                            v_pages.index((stage * PANELS + part) * PAGES + i),
                        )
            else:
                # Values behind the end must be zeros: a weight of 0 times NaN is NaN.
                for i in gl.static_range(PAGES):
                    live = j * form.KEYS + i * PAGE < context
                    mbarrier.expect(shared.tail, PAGE * form.DIM * 2, pred=live)
                    mbarrier.arrive(shared.tail, count=1, pred=live == 0)
                    for part in gl.static_range(PANELS):
                        tma.async_copy_global_to_shared(
                            kv_desc,
                            [rows[i] + PAGE, part * 64],
                            shared.tail,
                            v_pages.index((stage * PANELS + part) * PAGES + i),
                            pred=live,
                        )
                mbarrier.wait(shared.tail, tails & 1)
                tails += 1
                # As many rows at once as the few registers of this warp hold.
                slot = gl.arange(0, ROWS_AT_ONCE, layout=gl.SliceLayout(1, TAIL))
                for number in range(PAGES):
                    after = j * form.KEYS + (number + 1) * PAGE - context
                    if after > 0:
                        for panel in gl.static_range(PANELS):
                            box = v_pages.index(
                                (stage * PANELS + panel) * PAGES + number
                            )
                            for top in gl.static_range(0, PAGE, ROWS_AT_ONCE):
                                piece = box.slice(top, ROWS_AT_ONCE)
                                seen = (top + slot < PAGE - after)[:, None]
                                piece.store(gl.where(seen, piece.load(TAIL), 0.0))
                fence_async_shared()
                mbarrier.arrive(v_full, count=1)
            g += 1
        t += 1


@gluon.jit
def _bring_queries(
    q_desc: tma.tensor_descriptor,
    q_turned_desc: tma.tensor_descriptor | None,
    q_parts: gl.shared_memory_descriptor,
    q_turned_parts: gl.shared_memory_descriptor,
    token: gl.tensor,
    head: gl.tensor,
    t: gl.tensor,
    shared: Shared,
    form: Form,
) -> None:
    """Bring the queries of the `t`-th item, once those before are no longer needed."""
    PANELS: gl.constexpr = form.DIM // 64
    KEY_NUMBERS: gl.constexpr = form.DIM + (64 if form.LATENT else 0)
    for c in gl.static_range(form.WARPGROUPS):
        mbarrier.wait(shared.q_empty.index(c), (t & 1) ^ 1)
        mbarrier.expect(shared.q_full.index(c), 64 * KEY_NUMBERS * 2)
        for part in gl.static_range(PANELS):
            tma.async_copy_global_to_shared(
                q_desc,
                [
                    token + c * (64 // form.PACK),
                    head // form.GROUP,
                    head % form.GROUP,
                    part * 64,
                ],
                shared.q_full.index(c),
                q_parts.index(c * PANELS + part),
            )
        if form.LATENT:
            tma.async_copy_global_to_shared(
                q_turned_desc,
                [token + c * 64, head, 0, 0],
                shared.q_full.index(c),
                q_turned_parts.index(c),
            )


@gluon.constexpr_function
def code_columns(dim: int) -> int:
    """Return how many codes of a row a TMA box brings: those of one panel, or of two."""
    return min(dim, 128)


@gluon.constexpr_function
def _codes_layout(columns: int) -> gl.DistributedLinearLayout:
    """How the warpgroup holds a piece: a thread has eight neighbours of four rows.

    Sixteen threads read eight codes each at once, in different banks: of two neighbouring rows
    where a row has 64 codes, and otherwise of rows of which swizzling exchanges the halves of one.
    """
    near, far = (1, 4) if columns == 64 else (4, 1)
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [16, 0], [32, 0]],
        [[0, 8], [0, 16], [0, 32], [near, 0], [far, 0]],
        [[2, 0], [8, 0]],
        [],
        [64, 64],
    )


@gluon.constexpr_function
def _words_layout(columns: int) -> gl.BlockedLayout:
    """How it holds rows of words, which are whole wherever their codes are."""
    lanes = columns // 16
    return gl.BlockedLayout([1, 4], [32 // lanes, lanes], [4, 1], [1, 0])


@gluon.constexpr_function
def _keys_layout() -> gl.BlockedLayout:
    """How it holds a number for each key of a tile."""
    return gl.BlockedLayout([1], [32], [4], [0])


@gluon.jit
def produce_widened(
    q_desc: tma.tensor_descriptor,
    code_desc: tma.tensor_descriptor,
    pool_ptr: gl.tensor,
    table_ptr: gl.tensor,
    stride_table: gl.tensor,
    base_tiles: gl.tensor,
    block_tiles: gl.tensor,
    head_tiles: gl.tensor,
    q_parts: gl.shared_memory_descriptor,
    keys: Narrow,
    values: Narrow,
    shared: Shared,
    inputs: Inputs,
    form: Form,
) -> None:
    """The warpgroup of a program that brings and widens its tiles.

    `produce` and the consumers count tiles in the same way. Values are widened two tiles after
    their keys, but an item's last ones before the next item's keys.
    """
    g = 0
    t = 0
    v_exponents = gl.zeros([form.KEYS], gl.int32, _keys_layout())
    first = inputs.plan + 2 * gl.program_id(0)
    for item in range(gl.load(first), gl.load(first + 1)):
        record = inputs.plan + item * RECORD
        token = gl.load(record)
        begin = gl.load(record + 3)
        end = gl.load(record + 4)
        head = gl.load(record + 5)
        context = gl.load(record + 7)
        base_tile = base_tiles + head // form.GROUP * head_tiles
        table = table_ptr + gl.load(record + 6).to(gl.int64) * stride_table
        for j in range(begin, end):
            k_exponents = _bring(
                code_desc,
                pool_ptr,
                table,
                base_tile,
                block_tiles,
                j,
                g,
                context,
                keys,
                form,
            )
            if j > begin + 1:
                _widen(v_exponents, j - 2, g - 2, context, values, True, form)
            if j == begin:
                _bring_queries(
                    q_desc, q_desc, q_parts, q_parts, token, head, t, shared, form
                )
            _widen(k_exponents, j, g, context, keys, False, form)
            if j > begin:
                v_exponents = _bring(
                    code_desc,
                    pool_ptr,
                    table,
                    base_tile + 1,
                    block_tiles,
                    j - 1,
                    g - 1,
                    context,
                    values,
                    form,
                )
            g += 1
        if end > begin + 1:
            _widen(v_exponents, end - 2, g - 2, context, values, True, form)
        v_exponents = _bring(
            code_desc,
            pool_ptr,
            table,
            base_tile + 1,
            block_tiles,
            end - 1,
            g - 1,
            context,
            values,
            form,
        )
        _widen(v_exponents, end - 1, g - 1, context, values, True, form)
        t += 1


@gluon.jit
def _bring(
    code_desc: tma.tensor_descriptor,
    pool_ptr: gl.tensor,
    table: gl.tensor,
    base_tile: gl.tensor,
    block_tiles: gl.tensor,
    j: gl.tensor,
    g: gl.tensor,
    context: gl.tensor,
    narrow: Narrow,
    form: Form,
) -> gl.tensor:
    """Begin to bring the codes of tile `j`, the `g`-th of this program, and return its exponents.

    They are 0 behind the end of the context.
    """
    PAGE: gl.constexpr = form.PAGE
    PAGES: gl.constexpr = form.KEYS // PAGE
    COLUMNS: gl.constexpr = code_columns(form.DIM)
    PARTS: gl.constexpr = form.DIM // COLUMNS
    tiles = ()
    for i in gl.static_range(PAGES):
        page = j * PAGES + i
        block = gl.load(table + page, mask=page * PAGE < context, other=0)
        tiles = tiles + (block * block_tiles + base_tile,)  # type: ignore[assignment]
    key = j * form.KEYS + gl.arange(0, form.KEYS, layout=_keys_layout())
    block = gl.load(table + key // PAGE, mask=key < context, other=0)
    tile = (block * block_tiles + base_tile).to(gl.int64)
    here = pool_ptr + tile * (PAGE * (form.HEAD_DIM + 1)) + PAGE * form.HEAD_DIM
    exponents = gl.load(here + key % PAGE, mask=key < context, other=0)
    stage = g % form.STAGES
    mbarrier.wait(narrow.empty.index(stage), ((g // form.STAGES) & 1) ^ 1)
    come = narrow.come.index(stage)
    mbarrier.expect(come, form.KEYS * form.DIM)
    for i in gl.static_range(PAGES):
        for part in gl.static_range(PARTS):
            tma.async_copy_global_to_shared(
                code_desc,
                [tiles[i], 0, part * COLUMNS],
                come,
                narrow.boxes.index(((stage * PARTS + part) * 2 + 1) * PAGES + i),
            )
    return exponents.to(gl.int32)


@gluon.jit
def _widen(
    exponents: gl.tensor,
    j: gl.tensor,
    g: gl.tensor,
    context: gl.tensor,
    narrow: Narrow,
    IS_VALUE: gl.constexpr,
    form: Form,
) -> None:
    """Widen tile `j`, whose codes `_bring` brings, and say that it is full."""
    COLUMNS: gl.constexpr = code_columns(form.DIM)
    CODES: gl.constexpr = _codes_layout(COLUMNS)
    ROWS: gl.constexpr = gl.SliceLayout(1, CODES)
    WORDS: gl.constexpr = _words_layout(COLUMNS)
    PIECES: gl.constexpr = form.KEYS // PIECE
    PARTS: gl.constexpr = form.DIM // COLUMNS
    stage = g % form.STAGES
    narrow.factors.store((exponents << 23).to(gl.float32, bitcast=True))
    mbarrier.wait(narrow.come.index(stage), (g // form.STAGES) & 1)
    if IS_VALUE:
        if j * form.KEYS + form.KEYS > context:
            # Values behind the end must be zeros: a weight of 0 times NaN is NaN.
            key = j * form.KEYS + gl.arange(
                0, FEW_ROWS, layout=gl.SliceLayout(1, WORDS)
            )
            for part in range(PARTS):
                first = ((stage * PARTS + part) * 2 + 1) * (form.KEYS // FEW_ROWS)
                for number in range(form.KEYS // FEW_ROWS):
                    words = narrow.words.index(first + number)
                    seen = (key + number * FEW_ROWS < context)[:, None]
                    words.store(gl.where(seen, words.load(WORDS), 0))
    for part in range(PARTS):
        number = stage * PARTS + part
        for panel in gl.static_range(COLUMNS // PIECE):
            for piece in gl.static_range(PIECES):
                codes = narrow.codes.index((number * 2 + 1) * PIECES + piece)
                codes = codes.slice(panel * PIECE, PIECE, 1).load(CODES)
                numbers = codes.to(gl.float8e4nv, bitcast=True).to(gl.float32)
                factors = narrow.factors.slice(piece * PIECE, PIECE).load(ROWS)
                numbers = (numbers * factors[:, None]).to(narrow.numbers.dtype)
                here = (number * (COLUMNS // PIECE) + panel) * PIECES + piece
                narrow.numbers.index(here).store(numbers)
    fence_async_shared()
    mbarrier.arrive(narrow.full.index(stage), count=1)
