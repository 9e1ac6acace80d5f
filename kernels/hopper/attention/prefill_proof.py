"""What prefill attention on Hopper can compute, and the proof that it does on a GPU."""

from itertools import pairwise

import torch
from torch import Tensor

from baton.kernels.cuda.paged import MAX_GROUP
from baton.kernels.hopper.attention.cases import (
    LAYER,
    AttentionCase,
    attention_case,
    difference,
    fault_in,
    picked,
)
from baton.kernels.hopper.attention.prefill import (
    BLOCK_SIZES,
    CAPABILITY,
    DTYPES,
    HEAD_DIMS,
    Tile,
    paged_prefill_attention,
    prefill_plan,
    tiles_of,
)
from baton.kernels.proofs import FP8_POOL, ModelShapes

# Whole prompts; chunks at any place, with an empty row; and rows of guesses.
BATCHES = (
    ((1, 64, 127, 128, 129, 300, 517), (1, 64, 127, 128, 129, 300, 517)),
    ((700, 40, 1, 2049, 0, 1333), (128, 1, 1, 300, 0, 333)),
    ((333, 2049, 65, 0, 1200), (1, 5, 3, 0, 16)),
)
PROMPT = 1100
CHUNKS = (0, 3, 130, 700, PROMPT)  # where they begin and end
LONGEST_WINDOW = 4096  # longer ones take the same code
FEW_PROGRAMS = 3  # each has many items


def missing_for(shapes: ModelShapes, capability: tuple[int, int]) -> str:
    """Return why the kernels cannot compute such a model; empty if they can."""
    if capability != CAPABILITY:
        return f"compute capability {capability}"
    if shapes.is_latent:
        return "latent attention"
    if shapes.dtype not in {str(one).removeprefix("torch.") for one in DTYPES}:
        return f"numbers of {shapes.dtype}"
    if shapes.pool_dtype not in {shapes.dtype, FP8_POOL}:
        return f"a pool of {shapes.pool_dtype}"
    if shapes.head_dim not in HEAD_DIMS:
        return f"heads of {shapes.head_dim}"
    if shapes.block_size not in BLOCK_SIZES:
        return f"blocks of {shapes.block_size}"
    group = shapes.num_heads // shapes.kv_heads
    return f"{group} heads share a KV head" if group > MAX_GROUP else ""


def prove(shapes: ModelShapes, device: str) -> str:
    """Return the first fault that running the kernels shows; empty if there is none."""
    for window in windows_of(shapes):
        batches = list(BATCHES)
        if window is not None:
            batches.append(((window + 300, window), (77, 40)))
        for contexts, queries in batches:
            case = attention_case(shapes, contexts, queries, device)
            if fault := _fault_of(case, window):
                return (
                    f"contexts {contexts}, queries {queries}, window {window}: {fault}"
                )
        prompt = attention_case(shapes, (PROMPT,), (PROMPT,), device)
        if fault := chunk_fault(prompt, window):
            return f"a prompt of {PROMPT}, window {window}: {fault}"
    return ""


def windows_of(shapes: ModelShapes) -> tuple[int | None, ...]:
    """Return the windows to prove, and none, with which a layer sees all keys."""
    windows = {min(window, LONGEST_WINDOW) for window in shapes.windows}
    return (*sorted(windows), None)


def _fault_of(case: AttentionCase, window: int | None) -> str:
    rows, positions = picked(case)
    wanted = case.expected(rows, positions, window)
    first: Tensor | None = None
    for tile in tiles_of(case.q, case.pool, cuts=False):
        for programs in (None, FEW_PROGRAMS):
            out = attend(case, window, tile, programs)[: sum(case.queries)]
            if fault := fault_in(out[rows], wanted):
                return f"{tile}: {fault}"
            first = out if first is None else first
            if fault := difference(out, first):
                return f"{tile}: other bits in {fault}"
    return ""


def chunk_fault(
    prompt: AttentionCase, window: int | None = None, *, cuts: bool = False
) -> str:
    """Return how the bits of a prompt depend on its chunks; empty if they do not."""
    whole = attend(prompt, window, cuts=cuts)
    for first, end in pairwise(CHUNKS):
        chunk = attend(prompt.chunk(first, end), window, cuts=cuts)
        if fault := difference(chunk[: end - first], whole[first:end]):
            return f"the chunk from {first} to {end} has other bits in {fault}"
    return ""


def attend(
    case: AttentionCase,
    window: int | None = None,
    tile: Tile | None = None,
    programs: int | None = None,
    *,
    cuts: bool = False,
) -> Tensor:
    plan = prefill_plan(
        case.q,
        case.pool,
        case.query_starts,
        case.context_lens,
        window,
        cuts=cuts,
        tile=tile,
        programs=programs,
    )
    with torch.inference_mode():
        return paged_prefill_attention(
            case.q,
            case.pool,
            LAYER,
            case.block_tables,
            plan,
            case.scale,
            case.softcap,
            case.sinks,
        )
