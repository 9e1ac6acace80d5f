"""What attention in one order of sums can compute, and the proof that it does on a GPU."""

import torch
from torch import Tensor

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
from baton.kernels.hopper.attention.prefill import tiles_of
from baton.kernels.hopper.attention.prefill_proof import attend, chunk_fault
from baton.kernels.proofs import ModelShapes

# A prompt with cuts of 256 and of 512 keys, and the end of one with cuts of 2,048.
PROMPT = 2700
LONG = 10_300
LAST = 90
# Positions around the borders of tiles and cuts.
BORDERS = (1, 64, 128, 256, 384, 512, 1024, 2048, 2304, 2560, PROMPT)
LENGTHS = (700, 1, 0, 129, 2049, 257, 16)
PROGRAMS = (1, 7, 131, 1000)


def missing_for(shapes: ModelShapes, capability: tuple[int, int]) -> str:
    """Return why the kernels cannot compute such a model; empty if they can."""
    if missing := prefill_proof.missing_for(shapes, capability):
        return missing
    if shapes.dtype != "bfloat16":
        return f"numbers of {shapes.dtype}"
    if shapes.head_dim not in HEAD_DIMS:
        return f"heads of {shapes.head_dim}"
    if shapes.windows or shapes.softcap or shapes.has_sinks:
        return "windows, caps or sinks"
    group = shapes.num_heads // shapes.kv_heads
    return f"{group} heads share a KV head" if group > MAX_GROUP else ""


def prove(shapes: ModelShapes, device: str) -> str:
    """Return the first fault that running the kernels shows; empty if there is none."""
    batch = attention_case(shapes, LENGTHS, [min(n, 1) for n in LENGTHS], device)
    if fault := _decode_fault(batch):
        return f"decode of contexts {LENGTHS}: {fault}"
    prompt = attention_case(shapes, (PROMPT,), (PROMPT,), device)
    near = {p + step for p in BORDERS for step in (-1, 0, 1)}
    if fault := _order_fault(prompt, 0, sorted(p for p in near if p < PROMPT)):
        return f"a prompt of {PROMPT}: {fault}"
    if fault := chunk_fault(prompt, cuts=True):
        return f"a prompt of {PROMPT}: {fault}"
    end = attention_case(shapes, (LONG,), (LAST,), device)
    first = LONG - LAST
    if fault := _order_fault(end, first, list(range(first, LONG, 7))):
        return f"the end of a prompt of {LONG}: {fault}"
    return ""


def _decode_fault(batch: AttentionCase) -> str:
    """Return what is wrong with decoding sequences; an empty one has a row in decode alone."""
    lens = batch.context_lens
    live = [row for row, length in enumerate(batch.contexts) if length]
    q = torch.zeros_like(batch.q[: len(lens)])
    q[live] = batch.q[: len(live)]
    out = _decode(batch, q, batch.block_tables, lens)
    wanted = batch.expected(
        range(len(live)), [length - 1 for length in batch.contexts if length]
    )
    if fault := fault_in(out[live], wanted):
        return fault
    if out[lens == 0].any():
        return "a row of length 0 is not zero"
    for programs in PROGRAMS:
        other = _decode(batch, q, batch.block_tables, lens, programs)
        if fault := difference(other, out):
            return f"other bits with {programs} programs in {fault}"
    for rows in ([0], live[::-1]):
        other = _decode(batch, q[rows], batch.block_tables[rows], lens[rows])
        if fault := difference(other, out[rows]):
            return f"other bits in a batch of rows {rows} in {fault}"
    return ""


def _order_fault(case: AttentionCase, first: int, positions: list[int]) -> str:
    """Return where decode and the tiles of prefill have other bits at some positions."""
    rows = [position - first for position in positions]
    lens = torch.tensor(positions, dtype=torch.int32, device=case.q.device) + 1
    tables = case.block_tables.expand(len(rows), -1)
    decoded = _decode(case, case.q[rows], tables, lens)
    if fault := fault_in(decoded, case.expected(rows, positions)):
        return f"decode: {fault}"
    for tile in tiles_of(case.q, case.pool):
        for programs in (None, prefill_proof.FEW_PROGRAMS):
            out = attend(case, None, tile, programs, cuts=True)[rows]
            if fault := difference(out, decoded):
                return f"{tile}: other bits than decode in {fault}"
    return ""


def _decode(
    case: AttentionCase, q: Tensor, tables: Tensor, lens: Tensor, programs: int = 0
) -> Tensor:
    with torch.inference_mode():
        plan = plan_decode(lens, case.pool.shape[1], programs)
        return one_decode_attention(q, case.pool, LAYER, tables, lens, plan, case.scale)
