"""What attention in one order of sums can compute, and the proof that it does on a GPU."""

from collections.abc import Callable

import torch
from torch import Tensor

from baton.kernels.cuda.paged import rows_of_tile
from baton.kernels.hopper.attention import prefill_proof
from baton.kernels.hopper.attention.cases import (
    LAYER,
    AttentionCase,
    attention_case,
    difference,
    fault_in,
)
from baton.kernels.hopper.attention.decode import (
    HEAD_DIMS,
    MAX_GROUP,
    one_decode_attention,
    plan_decode,
)
from baton.kernels.hopper.attention.prefill import (
    paged_prefill_attention,
    prefill_plan,
    tiles_of,
)
from baton.kernels.hopper.attention.prefill_proof import (
    attend,
    chunk_fault,
    windows_of,
)
from baton.kernels.proofs import ModelShapes

# A prompt with cuts of 256 and of 512 keys, and the end of one with cuts of 2,048.
PROMPT = 2700
LONG = 10_300
LAST = 90
# Positions around the borders of tiles and cuts.
BORDERS = (1, 64, 128, 192, 256, 384, 512, 1024, 2048, 2304, 2560, PROMPT)
LENGTHS = (700, 1, 0, 129, 2049, 257, 16)
PROGRAMS = (1, 7, 131, 1000)
# Contexts that end around borders; the last rows of the first fill a tile.
GUESSES = (256, 2050, 1026, 131, 2304, 3)
# Contexts and queries of chunks for which a step is captured, and with which it is replayed.
CAPTURED = ((500, 69, 300), (100, 69, 300))
REPLAYED = ((700, 129, 300), (300, 129, 40))


def missing_for(shapes: ModelShapes, capability: tuple[int, int]) -> str:
    """Return why the kernels cannot compute such a model; empty if they can."""
    if missing := prefill_proof.missing_for(shapes, capability):
        return missing
    if shapes.head_dim not in HEAD_DIMS:
        return f"heads of {shapes.head_dim}"
    group = shapes.num_heads // shapes.kv_heads
    return f"{group} heads share a KV head" if group > MAX_GROUP else ""


def prove(shapes: ModelShapes, device: str) -> str:
    """Return the first fault that running the kernels shows; empty if there is none."""
    for window in windows_of(shapes):
        if fault := _fault_of(shapes, window, device):
            return f"window {window}: {fault}"
    return ""


def _fault_of(shapes: ModelShapes, window: int | None, device: str) -> str:
    lengths: tuple[int, ...] = LENGTHS
    borders: tuple[int, ...] = BORDERS
    if window is not None:
        lengths = (*lengths, window - 1, window, window + 1, window + 300)
        # There a window begins at a border.
        borders = (*borders, *(border + window for border in borders))
    batch = attention_case(shapes, lengths, [min(n, 1) for n in lengths], device)
    if fault := _decode_fault(batch, window):
        return f"decode of contexts {lengths}: {fault}"
    if fault := _replay_fault(batch, shapes, window):
        return f"a replayed step: {fault}"
    if fault := _rows_fault(shapes, window, device):
        return f"rows of contexts {GUESSES}: {fault}"
    prompt = attention_case(shapes, (PROMPT,), (PROMPT,), device)
    near = {border + step for border in borders for step in (-2, -1, 0, 1)}
    near = {position for position in near if 0 <= position < PROMPT}
    if fault := _order_fault(prompt, 0, sorted(near), window):
        return f"a prompt of {PROMPT}: {fault}"
    if fault := chunk_fault(prompt, window, cuts=True):
        return f"a prompt of {PROMPT}: {fault}"
    end = attention_case(shapes, (LONG,), (LAST,), device)
    first = LONG - LAST
    if fault := _order_fault(end, first, list(range(first, LONG, 7)), window):
        return f"the end of a prompt of {LONG}: {fault}"
    return ""


def _decode_fault(batch: AttentionCase, window: int | None) -> str:
    """Return what is wrong with decoding sequences; an empty one has a row in decode alone."""
    lens = batch.context_lens
    live = [row for row, length in enumerate(batch.contexts) if length]
    q = torch.zeros_like(batch.q[: len(lens)])
    q[live] = batch.q[: len(live)]
    out = _decode(batch, q, batch.block_tables, lens, window)
    wanted = batch.expected(
        range(len(live)), [length - 1 for length in batch.contexts if length], window
    )
    if fault := fault_in(out[live], wanted):
        return fault
    if out[lens == 0].any():
        return "a row of length 0 is not zero"
    for programs in PROGRAMS:
        other = _decode(batch, q, batch.block_tables, lens, window, programs)
        if fault := difference(other, out):
            return f"other bits with {programs} programs in {fault}"
    for rows in ([0], live[::-1]):
        other = _decode(batch, q[rows], batch.block_tables[rows], lens[rows], window)
        if fault := difference(other, out[rows]):
            return f"other bits in a batch of rows {rows} in {fault}"
    return ""


def _rows_fault(shapes: ModelShapes, window: int | None, device: str) -> str:
    """Return how rows of a sequence that share a tile differ from each of them alone."""
    most = rows_of_tile(shapes.num_heads // shapes.kv_heads)
    if most == 1:
        return ""  # none do
    counts = [
        min(max(most - number, 1), length) for number, length in enumerate(GUESSES)
    ]
    batch = attention_case(shapes, GUESSES, counts, device)
    lens = batch.context_lens
    starts = batch.query_starts
    num_rows = sum(counts)
    alone = torch.tensor(counts, device=lens.device)
    owners = torch.arange(len(counts), device=lens.device).repeat_interleave(alone)
    behind = starts[1:][owners] - 1 - torch.arange(num_rows, device=lens.device)
    seen = (lens[owners] - behind).int()
    tables = batch.block_tables
    wanted = _decode(batch, batch.q[:num_rows], tables[owners], seen, window)
    positions = (seen - 1).tolist()
    if fault := fault_in(wanted, batch.expected(range(num_rows), positions, window)):
        return fault
    for programs in (0, *PROGRAMS):
        out = _decode(batch, batch.q, tables, lens, window, programs, starts)
        if fault := difference(out[:num_rows], wanted):
            return f"other bits than alone with {programs} programs in {fault}"
        if out[num_rows:].any():
            return "a row of padding is not zero"
    return ""


def _replay_fault(batch: AttentionCase, shapes: ModelShapes, window: int | None) -> str:
    """Return how steps that are replayed with other lengths differ from eager ones."""
    lens = batch.context_lens
    q = batch.q[: len(lens)]

    def decode() -> Tensor:
        return _decode(batch, q, batch.block_tables, lens, window)

    eager = decode()
    lens //= 2
    replay = captured(decode)
    lens.copy_(batch.context_lens)
    if fault := difference(replay(), eager):
        return f"decode has other bits in {fault}"

    chunks = attention_case(shapes, *REPLAYED, str(batch.q.device))
    starts = chunks.query_starts
    lens = chunks.context_lens
    count = sum(chunks.queries)

    def prefill() -> Tensor:
        with torch.inference_mode():
            return paged_prefill_attention(
                chunks.q,
                chunks.pool,
                LAYER,
                chunks.block_tables,
                prefill_plan(chunks.q, chunks.pool, starts, lens, window, cuts=True),
                chunks.scale,
                chunks.softcap,
                chunks.sinks,
            )[:count]

    eager = prefill()
    contexts, queries = CAPTURED
    starts.copy_(torch.tensor([0, *queries]).cumsum(0))
    lens.copy_(torch.tensor(contexts))
    replay = captured(prefill)
    starts.copy_(chunks.query_starts)
    lens.copy_(chunks.context_lens)
    fault = difference(replay(), eager)
    return f"prefill has other bits in {fault}" if fault else ""


def captured(work: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Return what replays the launches of `work`; a CPU, which captures none, repeats them."""
    if work().device.type == "cpu":
        return work
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = work()

    def replay() -> Tensor:
        graph.replay()
        return out

    return replay


def _order_fault(
    case: AttentionCase, first: int, positions: list[int], window: int | None
) -> str:
    """Return where decode and the tiles of prefill have other bits at some positions."""
    rows = [position - first for position in positions]
    lens = torch.tensor(positions, dtype=torch.int32, device=case.q.device) + 1
    tables = case.block_tables.expand(len(rows), -1)
    decoded = _decode(case, case.q[rows], tables, lens, window)
    if fault := fault_in(decoded, case.expected(rows, positions, window)):
        return f"decode: {fault}"
    for tile in tiles_of(case.q, case.pool, cuts=True):
        for programs in (None, prefill_proof.FEW_PROGRAMS):
            out = attend(case, window, tile, programs, cuts=True)[rows]
            if fault := difference(out, decoded):
                return f"{tile}: other bits than decode in {fault}"
    return ""


def _decode(  # noqa: PLR0913, PLR0917  (what the launchers take)
    case: AttentionCase,
    q: Tensor,
    tables: Tensor,
    lens: Tensor,
    window: int | None,
    programs: int = 0,
    starts: Tensor | None = None,
) -> Tensor:
    how = window, case.softcap, case.sinks
    with torch.inference_mode():
        plan = plan_decode(q, case.pool, lens, window, programs, starts)
        return one_decode_attention(
            q, case.pool, LAYER, tables, lens, plan, case.scale, *how, starts
        )
