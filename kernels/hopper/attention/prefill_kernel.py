"""The kernel of prefill attention: persistent programs that take items from a plan, in Gluon.

An item is a tile of queries, of one head or of all that share a KV head, over its tiles of keys.
One warp of a program, or a warpgroup that widens codes, brings queries, keys and values by TMA and
goes on to the next item, while one or two warpgroups of 64 rows each finish theirs. Keys are cut at
absolute positions, so the bits of a query depend neither on its chunk nor on its tile. With `CUTS`,
sums have the order of order.py.

With `LATENT`, keys and values are those to which some latent rows of each sequence were expanded,
and all heads share the last numbers of a key. The sums of a query over these keys are merged with
those over the keys before, which other launches have left in memory.
"""

# ruff: noqa: N803, N806, PLR0913, PLR0915, PLR0917, RUF005, SIM108, SIM113
# Compile-time values are in capitals, as in Triton's own code; their branches are statements.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from baton.kernels.hopper.attention.prefill_form import (
    Carried,
    Form,
    Inputs,
    Shared,
    out_layout,
    products,
)
from baton.kernels.hopper.attention.prefill_plan import RECORD
from baton.kernels.hopper.attention.prefill_producers import (
    FEW_ROWS,
    PIECE,
    Narrow,
    code_columns,
    produce,
    produce_widened,
)

LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _scores(C: gl.constexpr, stage: gl.tensor, shared: Shared, form: Form) -> gl.tensor:
    """Begin the product of queries and a tile of keys."""
    s = warpgroup_mma(
        shared.q.index(C),
        shared.k.index(stage).permute((1, 0)),
        gl.zeros([64, form.KEYS], gl.float32, products(form.KEYS)),
        use_acc=False,
        is_async=True,
    )
    if form.LATENT:
        s = warpgroup_mma(
            shared.q_turned.index(C),
            shared.k_turned.index(stage).permute((1, 0)),
            s,
            is_async=True,
        )
    return s


@gluon.jit
def _capped(s: gl.tensor, inputs: Inputs, form: Form) -> gl.tensor:
    """Scores before the factor that the softmax applies; with a cap there is none any more."""
    if form.CAPPED:
        e = gl.exp2(s * inputs.scale)
        r = gl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;",
            "=f,f",
            [1.0 + e],
            dtype=gl.float32,
            is_pure=True,
            pack=1,
        )
        s = gl.fma(r, -2.0 * inputs.cap, inputs.cap)
    return s


@gluon.jit
def _hidden(
    s: gl.tensor, j: gl.tensor, position: gl.tensor, window: gl.tensor, form: Form
) -> gl.tensor:
    """Scores with minus infinity where a query does not see the key.

    `position` is that of the warpgroup's first query.
    """
    LAYOUT: gl.constexpr = products(form.KEYS)
    rows = position + gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT)) // form.PACK
    cols = j * form.KEYS + gl.arange(0, form.KEYS, layout=gl.SliceLayout(0, LAYOUT))
    seen = cols[None, :] <= rows[:, None]
    if form.WINDOWED:
        seen = seen & (cols[None, :] > (rows - window)[:, None])
    return gl.where(seen, s, float("-inf"))


@gluon.jit
def _row_sum(w: gl.tensor, form: Form) -> gl.tensor:
    """The sums of a tile's weights.

    With cuts they are added as `order.row_sum` does.
    """
    if form.CUTS:
        w = gl.sum(w.reshape([64, form.KEYS // 2, 2]), 2)  # bit 0
        if form.KEYS == 128:
            w = gl.sum(w.reshape([64, 2, 2, 16]), 2)  # bit 5
        w = gl.sum(w.reshape([64, 2, 16]), 1)  # bit 6, or 5
        w = gl.sum(gl.sum(w.reshape([64, 2, 2, 4]), 2), 1)  # bit 3, bit 4
        w = gl.sum(gl.sum(w.reshape([64, 2, 2]), 2), 1)  # bit 1, bit 2
        return gl.convert_layout(w, gl.SliceLayout(1, products(form.KEYS)))
    else:
        return gl.sum(w, 1)


@gluon.jit
def _cut_mask(j: gl.tensor, form: Form) -> gl.tensor:
    """`order.cut_mask`."""
    over = (j >= 2048 // form.KEYS).to(gl.int32)
    far = (j >= 8192 // form.KEYS).to(gl.int32)
    return 256 // form.KEYS * (1 + over + 6 * far) - 1


@gluon.jit
def _merge_sums(
    m: gl.tensor, norm: gl.tensor, m_next: gl.tensor, norm_next: gl.tensor
) -> tuple[gl.tensor, gl.tensor, gl.tensor, gl.tensor]:
    """`paged.merge` of a row's maximum and sum, and the two factors of its outputs."""
    m_new = gl.maximum(m, m_next)
    top = gl.where(m_new == float("-inf"), 0.0, m_new)
    old = gl.exp2(m - top)
    new = gl.exp2(m_next - top)
    return m_new, gl.fma(norm, old, norm_next * new), old, new


@gluon.jit
def _merge_out(
    total: gl.shared_memory_descriptor,
    acc: gl.tensor,
    old: gl.tensor,
    new: gl.tensor,
    form: Form,
) -> gl.tensor:
    LAYOUT: gl.constexpr = products(form.DIM)
    ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    return gl.fma(
        total.load(LAYOUT),
        gl.convert_layout(old, ROWS)[:, None],
        acc * gl.convert_layout(new, ROWS)[:, None],
    )


@gluon.jit
def _step(
    C: gl.constexpr,
    j: gl.tensor,
    g: gl.tensor,
    o: gl.tensor,
    m: gl.tensor,
    norm: gl.tensor,
    acc: gl.tensor,
    p: gl.tensor,
    m_all: gl.tensor,
    norm_all: gl.tensor,
    second: gl.tensor,
    position: gl.tensor,
    shared: Shared,
    inputs: Inputs,
    MASKED: gl.constexpr,
    form: Form,
) -> tuple[gl.tensor, ...]:
    """Weigh tile `j` while the product of the tile before runs.

    The tile is the `g`-th of this program, and its products the `o`-th turn of the tensor cores.
    Where it opens a cut, the maximum starts anew, and what the product of the tile before completes
    goes into the total. The item's second cut begins at tile `second`.
    """
    ROWS: gl.constexpr = gl.SliceLayout(1, products(form.DIM))
    ks = g % form.STAGES
    vs = (g - 1) % form.STAGES
    v_turn = ((g - 1) // form.STAGES) & 1
    mbarrier.wait(shared.k_full.index(ks), (g // form.STAGES) & 1)
    if form.PINGPONG:
        mbarrier.wait(shared.turn.index(C), o & 1)
    s = _scores(C, ks, shared, form)
    mbarrier.wait(shared.v_full.index(vs), v_turn)
    acc = warpgroup_mma(p, shared.v.index(vs), acc, is_async=True)
    if form.PINGPONG:
        mbarrier.arrive(shared.turn.index(1 - C), count=1)
    s = warpgroup_mma_wait(1, deps=(s,))
    mbarrier.arrive(shared.k_empty.index(ks), count=1)
    s = _capped(s, inputs, form)
    factor = 1.0 if form.CAPPED else inputs.scale
    if MASKED:
        s = _hidden(s, j, position, inputs.window, form)
    if form.CUTS:
        opens = (j & _cut_mask(j, form)) == 0
        before = gl.where(opens, float("-inf"), m)
    else:
        before = m
    m_new = gl.maximum(before, gl.max(s, 1) * factor)
    top = m_new
    if MASKED and (form.WINDOWED or form.CUTS or form.LATENT):
        top = gl.where(m_new == float("-inf"), 0.0, m_new)
    w = gl.exp2(gl.fma(s, factor, -top[:, None]))
    shrink = gl.exp2(before - top)
    norm_new = gl.fma(norm, shrink, _row_sum(w, form))
    p_new = gl.convert_layout(
        w.to(shared.k.dtype), gl.DotOperandLayout(0, products(form.DIM), 2)
    )
    # This has come long ago. It ends a basic block: within one, ptxas moves the wait for the
    # product up to the softmax, and nothing would run beside it.
    mbarrier.wait(shared.v_full.index(vs), v_turn)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(shared.v_empty.index(vs), count=1)
    if form.CUTS:
        if opens:
            if j > second:
                m_all, norm_all, old, new = _merge_sums(m_all, norm_all, m, norm)
                acc = _merge_out(shared.total.index(C), acc, old, new, form)
            else:
                m_all = m
                norm_all = norm
            shared.total.index(C).store(acc)
            acc = gl.zeros([64, form.DIM], gl.float32, products(form.DIM))
        else:
            acc = acc * gl.convert_layout(shrink, ROWS)[:, None]
    else:
        acc = acc * gl.convert_layout(shrink, ROWS)[:, None]
    return m_new, norm_new, acc, p_new, m_all, norm_all


@gluon.jit
def _sinks(
    sink_ptr: gl.tensor, record: gl.tensor, heads: gl.tensor, form: Form
) -> gl.tensor:
    """The sinks of a warpgroup's rows, in powers of 2."""
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, products(form.KEYS)))
    head = gl.load(record + 5)
    sink = gl.load(sink_ptr + gl.minimum(head + row % form.PACK, heads - 1))
    # A plain product could become a part of the subtraction that follows.
    return gl.fma(sink, LOG2_E, 0.0)


@gluon.jit
def _merged(
    C: gl.constexpr,
    record: gl.tensor,
    m: gl.tensor,
    norm: gl.tensor,
    acc: gl.tensor,
    heads: gl.tensor,
    carried: Carried,
    form: Form,
) -> tuple[gl.tensor, gl.tensor, gl.tensor]:
    """The sums of a warpgroup's rows, merged with what `_carry` has stored."""
    OF_SUMS: gl.constexpr = gl.SliceLayout(1, products(form.KEYS))
    OF_OUT: gl.constexpr = gl.SliceLayout(1, products(form.DIM))
    lines, live = _lines(C, record, heads, form, OF_SUMS)
    sums = carried.sums + 2 * lines
    m_before = gl.load(sums, mask=live, other=float("-inf"))
    norm_before = gl.load(sums + 1, mask=live, other=0.0)
    m, norm, old, new = _merge_sums(m_before, norm_before, m, norm)
    lines, live = _lines(C, record, heads, form, OF_OUT)
    d = gl.arange(0, form.DIM, layout=gl.SliceLayout(0, products(form.DIM)))
    here = carried.out + lines[:, None] * form.DIM + d[None, :]
    before = gl.load(here, mask=live[:, None], other=0.0)
    acc = gl.fma(
        before,
        gl.convert_layout(old, OF_OUT)[:, None],
        acc * gl.convert_layout(new, OF_OUT)[:, None],
    )
    return m, norm, acc


@gluon.jit
def _carry(
    C: gl.constexpr,
    record: gl.tensor,
    m: gl.tensor,
    norm: gl.tensor,
    acc: gl.tensor,
    heads: gl.tensor,
    carried: Carried,
    form: Form,
) -> None:
    """Store the sums of a warpgroup's rows, which have keys to see in later launches."""
    OF_SUMS: gl.constexpr = gl.SliceLayout(1, products(form.KEYS))
    OF_OUT: gl.constexpr = gl.SliceLayout(1, products(form.DIM))
    lines, live = _lines(C, record, heads, form, OF_SUMS)
    gl.store(carried.sums + 2 * lines, m, mask=live)
    gl.store(carried.sums + 2 * lines + 1, norm, mask=live)
    lines, live = _lines(C, record, heads, form, OF_OUT)
    d = gl.arange(0, form.DIM, layout=gl.SliceLayout(0, products(form.DIM)))
    here = carried.out + lines[:, None] * form.DIM + d[None, :]
    gl.store(here, acc, mask=live[:, None])


@gluon.jit
def _lines(
    C: gl.constexpr,
    record: gl.tensor,
    heads: gl.tensor,
    form: Form,
    LAYOUT: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor]:
    """The numbers of a warpgroup's rows among those of all tokens and heads, and which are live."""
    i = C * 64 + gl.arange(0, 64, layout=LAYOUT)
    line = (gl.load(record) + i // form.PACK).to(gl.int64) * heads
    live = i // form.PACK < gl.load(record + 2)
    if form.PACK > form.GROUP:
        live = live & (i % form.PACK < form.GROUP)
    return line + gl.load(record + 5) + i % form.PACK, live


@gluon.jit
def _consume(
    C: gl.constexpr,
    out_ptr: gl.tensor,
    sink_ptr: gl.tensor,
    carried: Carried,
    heads: gl.tensor,
    shared: Shared,
    inputs: Inputs,
    form: Form,
) -> None:
    """Warpgroup `C` of a program."""
    SCORES: gl.constexpr = products(form.KEYS)
    OUT: gl.constexpr = out_layout(form.DIM, not (form.CUTS or form.FP8))
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    g = 0  # tiles of keys so far
    o = 0  # turns of the tensor cores so far
    t = 0  # items so far
    first = inputs.plan + 2 * gl.program_id(0)
    for item in range(gl.load(first), gl.load(first + 1)):
        record = inputs.plan + item * RECORD
        first_position = gl.load(record + 1)
        begin = gl.load(record + 3)
        end = gl.load(record + 4)
        position = first_position + C * 64 // form.PACK
        # Rows past the chunk's end may lie behind the last tile.
        seen_by_all = gl.maximum(
            gl.minimum((position + 1) // form.KEYS, end), begin + 1
        )
        m = gl.full([64], float("-inf"), gl.float32, ROWS)
        if form.SINKS and not form.CUTS:
            m = _sinks(sink_ptr, record, heads, form)

        mbarrier.wait(shared.q_full.index(C), t & 1)
        ks = g % form.STAGES
        mbarrier.wait(shared.k_full.index(ks), (g // form.STAGES) & 1)
        if form.PINGPONG:
            mbarrier.wait(shared.turn.index(C), o & 1)
        s = _scores(C, ks, shared, form)
        if form.PINGPONG:
            mbarrier.arrive(shared.turn.index(1 - C), count=1)
        s = warpgroup_mma_wait(0, deps=(s,))
        mbarrier.arrive(shared.k_empty.index(ks), count=1)
        s = _capped(s, inputs, form)
        factor = 1.0 if form.CAPPED else inputs.scale
        s = _hidden(s, begin, position, inputs.window, form)
        m_new = gl.maximum(m, gl.max(s, 1) * factor)
        top = m_new
        if form.WINDOWED or form.CUTS or form.LATENT:
            top = gl.where(m_new == float("-inf"), 0.0, m_new)
        w = gl.exp2(gl.fma(s, factor, -top[:, None]))
        norm = _row_sum(w, form)
        if form.SINKS and not form.CUTS:
            norm = gl.exp2(m - top) + norm
        m = m_new
        p = gl.convert_layout(
            w.to(shared.k.dtype), gl.DotOperandLayout(0, products(form.DIM), 2)
        )
        acc = gl.zeros([64, form.DIM], gl.float32, products(form.DIM))
        m_all = gl.full([64], float("-inf"), gl.float32, ROWS)
        norm_all = gl.zeros([64], gl.float32, ROWS)
        shift = g - begin
        turn = o - begin  # tile j has turn o + j - begin
        start = begin + 1
        if form.WINDOWED:
            second = (begin | _cut_mask(begin, form)) + 1
        else:
            second = 256 // form.KEYS
        if form.WINDOWED:
            last_row = position + (64 // form.PACK - 1)
            whole = gl.maximum(last_row - inputs.window + 1, 0) + form.KEYS - 1
            whole = gl.minimum(gl.maximum(whole // form.KEYS, start), seen_by_all)
            for j in range(start, whole):
                m, norm, acc, p, m_all, norm_all = _step(
                    C,
                    j,
                    j + shift,
                    j + turn,
                    m,
                    norm,
                    acc,
                    p,
                    m_all,
                    norm_all,
                    second,
                    position,
                    shared,
                    inputs,
                    True,
                    form,
                )
            start = whole
        for j in range(start, seen_by_all):
            m, norm, acc, p, m_all, norm_all = _step(
                C,
                j,
                j + shift,
                j + turn,
                m,
                norm,
                acc,
                p,
                m_all,
                norm_all,
                second,
                position,
                shared,
                inputs,
                False,
                form,
            )
        for j in range(seen_by_all, end):
            m, norm, acc, p, m_all, norm_all = _step(
                C,
                j,
                j + shift,
                j + turn,
                m,
                norm,
                acc,
                p,
                m_all,
                norm_all,
                second,
                position,
                shared,
                inputs,
                True,
                form,
            )
        g += end - begin
        o += end - begin
        t += 1
        # The next queries may come.
        mbarrier.arrive(shared.q_empty.index(C), count=1)
        vs = (g - 1) % form.STAGES
        mbarrier.wait(shared.v_full.index(vs), ((g - 1) // form.STAGES) & 1)
        acc = warpgroup_mma(p, shared.v.index(vs), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(shared.v_empty.index(vs), count=1)

        if form.CUTS:
            if end > second:
                m, norm, old, new = _merge_sums(m_all, norm_all, m, norm)
                acc = _merge_out(shared.total.index(C), acc, old, new, form)
            if form.SINKS:
                sink = _sinks(sink_ptr, record, heads, form)
                top = gl.maximum(m, sink)
                old = gl.exp2(m - top)
                norm = gl.fma(norm, old, gl.exp2(sink - top))
                old = gl.convert_layout(old, gl.SliceLayout(1, products(form.DIM)))
                acc = acc * old[:, None]
            share = gl.div_rn(gl.full([64], 1.0, gl.float32, ROWS), norm)
        else:
            if form.LATENT and begin > 0:
                m, norm, acc = _merged(C, record, m, norm, acc, heads, carried, form)
            share = 1.0 / norm
        is_done = True
        if form.LATENT:
            # Whether its queries have seen all keys.
            is_done = end * form.KEYS >= first_position + gl.load(record + 2)
            if not is_done:
                _carry(C, record, m, norm, acc, heads, carried, form)
        share = gl.convert_layout(share, gl.SliceLayout(1, products(form.DIM)))
        result = gl.convert_layout((acc * share[:, None]).to(shared.k.dtype), OUT)
        line, live = _lines(C, record, heads, form, gl.SliceLayout(1, OUT))
        d = gl.arange(0, form.DIM, layout=gl.SliceLayout(0, OUT))
        mask = (live & is_done)[:, None]
        if form.HEAD_DIM < form.DIM:
            mask = mask & (d < form.HEAD_DIM)[None, :]
        gl.store(
            out_ptr + line[:, None] * form.HEAD_DIM + d[None, :], result, mask=mask
        )


@gluon.jit
def _narrow(
    tiles: gl.shared_memory_descriptor,
    full: gl.shared_memory_descriptor,
    empty: gl.shared_memory_descriptor,
    factors: gl.shared_memory_descriptor,
    code_desc: tma.tensor_descriptor,
    form: Form,
) -> Narrow:
    """The room of tiles as what widens them sees it."""
    PAGES: gl.constexpr = form.KEYS // form.PAGE
    PIECES: gl.constexpr = form.KEYS // PIECE
    PANELS: gl.constexpr = form.STAGES * form.DIM // 64
    COLUMNS: gl.constexpr = code_columns(form.DIM)
    PARTS: gl.constexpr = form.STAGES * form.DIM // COLUMNS
    CODES: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=COLUMNS, element_bitwidth=8, rank=2
    )
    WORDS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    come = gl.allocate_shared_memory(
        gl.int64, [form.STAGES, 1], mbarrier.MBarrierLayout()
    )
    for i in gl.static_range(form.STAGES):
        mbarrier.init(come.index(i), count=1)
    return Narrow(
        tiles._reinterpret(
            gl.uint8, [PARTS * 2 * PAGES, 1, form.PAGE, COLUMNS], code_desc.layout
        ),
        tiles._reinterpret(gl.uint8, [PARTS * 2 * PIECES, PIECE, COLUMNS], CODES),
        tiles._reinterpret(
            gl.int32,
            [PARTS * 2 * form.KEYS // FEW_ROWS, FEW_ROWS, COLUMNS // 4],
            WORDS,
        ),
        tiles._reinterpret(tiles.dtype, [PANELS * PIECES, PIECE, 64], tiles.layout),
        factors,
        come,
        full,
        empty,
    )


@gluon.jit(
    do_not_specialize=["table_ptr", "base_rows", "stride_table", "window", "heads"]
)
def prefill_kernel(
    q_desc: tma.tensor_descriptor,
    kv_desc: tma.tensor_descriptor,
    q_turned_desc: tma.tensor_descriptor | None,
    k_turned_desc: tma.tensor_descriptor | None,
    plan: gl.tensor,
    table_ptr: gl.tensor,
    out_ptr: gl.tensor,
    sink_ptr: gl.tensor,
    pool_ptr: gl.tensor | None,
    carried_ptr: gl.tensor | None,
    carried_sum_ptr: gl.tensor | None,
    base_rows: gl.tensor,
    block_rows: gl.tensor,
    head_rows: gl.tensor,
    stride_table: gl.tensor,
    window: gl.tensor,
    scale: gl.tensor,
    cap: gl.tensor,
    heads: gl.tensor,
    HEAD_DIM: gl.constexpr,
    DIM: gl.constexpr,
    GROUP: gl.constexpr,
    PACK: gl.constexpr,
    WARPGROUPS: gl.constexpr,
    STAGES: gl.constexpr,
    KEYS: gl.constexpr,
    PAGE: gl.constexpr,
    WINDOWED: gl.constexpr,
    CAPPED: gl.constexpr,
    SINKS: gl.constexpr,
    CUTS: gl.constexpr,
    LATENT: gl.constexpr,
    REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
) -> None:
    TYPE: gl.constexpr = q_desc.dtype
    FP8: gl.constexpr = kv_desc.dtype == gl.uint8
    PAGES: gl.constexpr = KEYS // PAGE
    PANELS: gl.constexpr = DIM // 64
    ZERO: gl.constexpr = 0
    ONE: gl.constexpr = 1
    TILE: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=128, element_bitwidth=16, rank=2
    )
    # A thread holds two neighbours of a row, and four lanes eight of them: 32 bytes stay together,
    # eight rows differ.
    TOTAL: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q = gl.allocate_shared_memory(TYPE, [WARPGROUPS, 64, DIM], TILE)
    k = gl.allocate_shared_memory(TYPE, [STAGES, KEYS, DIM], TILE)
    v = gl.allocate_shared_memory(TYPE, [STAGES, KEYS, DIM], TILE)
    if CUTS:
        total = gl.allocate_shared_memory(gl.float32, [WARPGROUPS, 64, DIM], TOTAL)
    else:
        total = q
    # A page's row of 64 numbers is what one TMA box brings: panels of pages are one tile.
    q_parts = q._reinterpret(
        TYPE, [WARPGROUPS * PANELS, 64 // PACK, 1, PACK, 64], q_desc.layout
    )
    if LATENT:
        q_turned = gl.allocate_shared_memory(TYPE, [WARPGROUPS, 64, 64], TILE)
        k_turned = gl.allocate_shared_memory(TYPE, [STAGES, KEYS, 64], TILE)
        q_turned_parts = q_turned._reinterpret(
            TYPE, [WARPGROUPS, 64, 1, 1, 64], q_desc.layout
        )
        k_turned_pages = k_turned._reinterpret(TYPE, [STAGES, KEYS, 64], kv_desc.layout)
    else:
        q_turned = q
        k_turned = k
        q_turned_parts = q_parts
        k_turned_pages = k
        q_turned_desc = q_desc
        k_turned_desc = kv_desc
        carried_ptr = plan
        carried_sum_ptr = plan
    shared = Shared(
        q,
        k,
        v,
        q_turned,
        k_turned,
        total,
        gl.allocate_shared_memory(gl.int64, [WARPGROUPS, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [WARPGROUPS, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [1], BARRIER),
    )
    for i in gl.static_range(WARPGROUPS):
        mbarrier.init(shared.q_full.index(i), count=1)
        mbarrier.init(shared.q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(shared.k_full.index(i), count=1)
        mbarrier.init(shared.k_empty.index(i), count=WARPGROUPS)
        mbarrier.init(shared.v_full.index(i), count=1)
        mbarrier.init(shared.v_empty.index(i), count=WARPGROUPS)
    for i in gl.static_range(2):
        mbarrier.init(shared.turn.index(i), count=1)
    mbarrier.init(shared.tail, count=PAGES)
    form = Form(
        HEAD_DIM,
        DIM,
        GROUP,
        PACK,
        WARPGROUPS,
        STAGES,
        KEYS,
        PAGE,
        WINDOWED,
        CAPPED,
        SINKS,
        CUTS,
        LATENT,
        FP8,
    )
    inputs = Inputs(plan, window, scale, cap)
    consumed = (
        out_ptr,
        sink_ptr,
        Carried(carried_ptr, carried_sum_ptr),
        heads,
        shared,
        inputs,
        form,
    )
    if FP8:
        factors = gl.allocate_shared_memory(
            gl.float32, [KEYS], gl.SwizzledSharedLayout(1, 1, 1, [0])
        )
        brought = (
            q_desc,
            kv_desc,
            pool_ptr,
            table_ptr,
            stride_table,
            base_rows,
            block_rows,
            head_rows,
            q_parts,
            _narrow(k, shared.k_full, shared.k_empty, factors, kv_desc, form),
            _narrow(v, shared.v_full, shared.v_empty, factors, kv_desc, form),
            shared,
            inputs,
            form,
        )
        if WARPGROUPS == 1:
            gl.warp_specialize(
                [(_consume, (ZERO,) + consumed), (produce_widened, brought)],
                [4],
                [PRODUCER_REGISTERS],
            )
        else:
            mbarrier.arrive(shared.turn.index(0), count=1)
            gl.warp_specialize(
                [
                    (_consume, (ZERO,) + consumed),
                    (_consume, (ONE,) + consumed),
                    (produce_widened, brought),
                ],
                [4, 4],
                [REGISTERS, PRODUCER_REGISTERS],
            )
    else:
        k_pages = k._reinterpret(
            TYPE, [STAGES * PANELS * PAGES, PAGE, 64], kv_desc.layout
        )
        v_pages = v._reinterpret(
            TYPE, [STAGES * PANELS * PAGES, PAGE, 64], kv_desc.layout
        )
        produced = (
            q_desc,
            kv_desc,
            q_turned_desc,
            k_turned_desc,
            table_ptr,
            stride_table,
            base_rows,
            block_rows,
            head_rows,
            q_parts,
            k_pages,
            v_pages,
            q_turned_parts,
            k_turned_pages,
            shared,
            inputs,
            form,
        )
        if WARPGROUPS == 1:
            gl.warp_specialize(
                [(_consume, (ZERO,) + consumed), (produce, produced)],
                [1],
                [PRODUCER_REGISTERS],
            )
        else:
            mbarrier.arrive(shared.turn.index(0), count=1)
            gl.warp_specialize(
                [
                    (_consume, (ZERO,) + consumed),
                    (_consume, (ONE,) + consumed),
                    (produce, produced),
                ],
                [4, 1],
                [REGISTERS, PRODUCER_REGISTERS],
            )
