"""Small batches at a model's own sizes, on which attention is proven before it is used.

Slots that no sequence owns hold NaN, as does block 0, which unused entries of tables name: what
reads too much is not close to its reference.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from baton.kernels import reference
from baton.kernels.proofs import FP8_POOL, ModelShapes

LAYERS = 2
LAYER = 1
PADDING = 5  # rows behind those of all sequences
# The largest error beside fp32: relative and absolute.
TOLERANCE = {torch.bfloat16: (2e-2, 1.6e-2), torch.float16: (5e-3, 4e-3)}


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """The last `queries[i]` of `contexts[i]` positions of each sequence are new."""

    contexts: tuple[int, ...]
    queries: tuple[int, ...]
    q: Tensor  # [num_tokens + PADDING, num_heads, head_dim]
    pool: Tensor  # [num_blocks, kv_heads, LAYERS, 2, block_size, head_dim], or FP8
    block_tables: Tensor
    scale: float
    softcap: float | None
    sinks: Tensor | None

    @property
    def query_starts(self) -> Tensor:
        starts = torch.tensor([0, *self.queries]).cumsum(0)
        return starts.to(self.q.device, torch.int32)

    @property
    def context_lens(self) -> Tensor:
        return torch.tensor(self.contexts, dtype=torch.int32, device=self.q.device)

    def chunk(self, first: int, end: int) -> "AttentionCase":
        """Return the case of some tokens of a prompt, which is the only sequence."""
        return replace(
            self, contexts=(end,), queries=(end - first,), q=self.q[first:end]
        )

    def expected(
        self, rows: Sequence[int], positions: Sequence[int], window: int | None = None
    ) -> Tensor:
        """Return what the reference computes for rows, whose positions are given."""
        owners = torch.searchsorted(
            self.query_starts.long(),
            torch.tensor(rows, device=self.q.device),
            right=True,
        )
        return reference.paged_decode_attention(
            self.q[list(rows)],
            self.pool,
            LAYER,
            self.block_tables[owners - 1],
            torch.tensor(positions) + 1,
            self.scale,
            window,
            self.softcap,
            self.sinks,
        )


def attention_case(
    shapes: ModelShapes, contexts: Iterable[int], queries: Iterable[int], device: str
) -> AttentionCase:
    """Return a batch over scattered blocks; equal for equal arguments."""
    contexts = tuple(contexts)
    queries = tuple(queries)
    luck = torch.Generator(device).manual_seed(len(contexts))
    size = shapes.block_size
    dim = shapes.head_dim
    dtype = getattr(torch, shapes.dtype)
    needs = [-(-length // size) for length in contexts]
    pool = torch.full(
        (sum(needs) + 1, shapes.kv_heads, LAYERS, 2, size, dim),
        float("nan"),
        dtype=dtype,
        device=device,
    )
    order = 1 + torch.randperm(sum(needs), generator=luck, device=device)
    tables = torch.zeros(len(needs), max(needs) + 2, dtype=torch.int32, device=device)
    for row, (blocks, length) in enumerate(
        zip(order.split(needs), contexts, strict=True)
    ):
        tables[row, : len(blocks)] = blocks
        positions = torch.arange(length, device=device)
        kv = torch.randn(
            length, shapes.kv_heads, LAYERS, 2, dim, generator=luck, device=device
        )
        owners = blocks[positions // size]
        pool[owners, :, :, :, positions % size] = kv.to(dtype)
    # Queries are a slice of a packed projection, as a layer's are.
    width = shapes.num_heads + 2 * shapes.kv_heads
    packed = torch.randn(
        sum(queries) + PADDING, width, dim, generator=luck, device=device
    )
    sinks = 3 * torch.randn(shapes.num_heads, generator=luck, device=device)
    return AttentionCase(
        contexts=contexts,
        queries=queries,
        q=packed.to(dtype)[:, : shapes.num_heads],
        pool=reference.in_fp8(pool) if shapes.pool_dtype == FP8_POOL else pool,
        block_tables=tables,
        scale=shapes.scale or dim**-0.5,
        softcap=shapes.softcap or None,
        sinks=sinks if shapes.has_sinks else None,
    )


def picked(case: AttentionCase) -> tuple[list[int], list[int]]:
    """Return rows to compare and their positions: at the borders of tiles, and some within."""
    rows = []
    positions = []
    first = 0
    for context, count in zip(case.contexts, case.queries, strict=True):
        near = {0, 1, 15, 16, 63, 64, 65, 127, 128, count // 2, count - 2, count - 1}
        for number in sorted(number for number in near if 0 <= number < count):
            rows.append(first + number)
            positions.append(context - count + number)
        first += count
    return rows, positions


def fault_in(out: Tensor, wanted: Tensor) -> str:
    """Return where `out` is not close to `wanted`; empty if it is everywhere."""
    relative, absolute = TOLERANCE[out.dtype]
    wrong = ~out.float().isclose(wanted.float(), relative, absolute)
    if not wrong.any():
        return ""
    row, head, column = wrong.nonzero()[0].tolist()
    return (
        f"{int(wrong.sum())} of {wrong.numel()} numbers are wrong, the first in row {row}, "
        f"head {head}, column {column}"
    )


def difference(out: Tensor, other: Tensor) -> str:
    """Return where two results differ in bits; empty if they are equal."""
    wrong = out.view(torch.int16) != other.view(torch.int16)
    if not wrong.any():
        return ""
    row, head, _ = wrong.nonzero()[0].tolist()
    count = int(wrong.sum())
    return f"{count} of {wrong.numel()} numbers, the first in row {row}, head {head}"
