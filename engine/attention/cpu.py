"""Attention on CPUs, batch-invariant: a token's bits depend on its own sequence alone.

Three things see to that. Products get enough rows for one code path of the library
(`PRODUCT_ROWS`). Values are mixed in tiles of keys cut at absolute positions, each a product of its
own, added in order. And rows of weights are padded with zeros only, which change no sum. So decode,
chunked and whole prompts agree bit for bit.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.attention.backend import Batch, Span

# Keys of one product at most: up to here any padding with zeros leaves the bits alone (measured).
TILE = {torch.float32: 128, torch.bfloat16: 512}
LANES = 16  # contexts are padded to whole vectors of keys, for the sums of the softmax
# Rows of an attention product come in multiples of these. Measured with 1 to 8 threads: every such
# count up to 600 gives the bits of the largest, while few rows, or few for a thread, take other
# paths (fp32: 1 to 3, two threads also 5 to 7 and 9 to 11; bf16: 1 at times).
PRODUCT_ROWS = {torch.float32: 4, torch.bfloat16: 1}
HIDDEN = float("-inf")
QUERIES = 128  # of one prompt at a time, so that keys which none of them sees are skipped
# What one product may take at most; longer contexts get fewer queries or sequences at a time.
MAX_SCORES = 8 << 20
MAX_GATHERED_BYTES = 32 << 20


@dataclass(slots=True, frozen=True)
class Gather:
    """Where the keys and values of some sequences lie, padded to `num_keys` each.

    Keys come first, then the values of one tile of keys after the other: whatever goes into one
    product must be contiguous, or the library copies it.
    """

    blocks: Tensor  # [batch * kv_heads * 2 * num_blocks]: rows of layer 0 in `CpuBackend._blocks`
    dead: Tensor  # rows of the gathered values that nobody wrote
    batch: int
    num_keys: int


@dataclass(slots=True, frozen=True)
class DecodeGroup:
    """Sequences that decode one token over contexts of about equal length."""

    rows: Tensor | slice  # which rows of the batch
    gather: Gather
    hidden: Tensor  # [batch, 1, 1, num_keys]


@dataclass(slots=True, frozen=True)
class PromptPart:
    """A few queries of one prompt: their rows and which of the first `num_keys` keys they see."""

    first: int  # row within the prompt's span
    last: int
    num_keys: int
    hidden: Tensor  # [last - first, 1, some], for the last keys only


@dataclass(slots=True, frozen=True)
class Prompt:
    span: Span
    gather: Gather
    parts: tuple[PromptPart, ...]


class CpuBackend:
    """Attention over a host pool, and the plain forms of the fused operations."""

    name = "torch"
    is_batch_invariant = False  # the sizes above were measured on one CPU, not on this one

    def __init__(
        self,
        pool: Tensor,  # [num_blocks, kv_heads, num_layers, 2, block_size, head_dim]
        num_heads: int,
        cos_sin: Tensor,  # [max_position, head_dim]
        eps: float,
        window: int | None = None,  # keys that a query sees, itself included
    ) -> None:
        _, self.kv_heads, self.num_layers, _, self.block_size, self.head_dim = pool.shape
        self.num_heads = num_heads
        self.group = num_heads // self.kv_heads
        self.eps = eps
        self.window = window
        self.dtype = pool.dtype
        self._blocks = pool.view(-1, self.block_size * self.head_dim)
        self._tile = max(1, TILE[self.dtype] // self.block_size) * self.block_size
        self._lanes = math.lcm(LANES, self.block_size)
        self._gathered = self._blocks.new_empty(0, self._blocks.shape[1])
        self._slots = pool.view(-1, self.head_dim)
        cos, sin = cos_sin.chunk(2, dim=-1)
        self._cos = torch.cat((cos, cos), dim=-1)  # [max_position, head_dim]
        self._sin = torch.cat((-sin, sin), dim=-1)
        # The scale of the scores goes into the rotation of the queries: [heads, 1].
        self._scale = torch.ones(num_heads + self.kv_heads, 1)
        self._scale[:num_heads] = self.head_dim**-0.5

    # --- once per step -------------------------------------------------------------------------

    def begin(self, batch: Batch) -> None:
        positions = batch.positions[: batch.num_tokens]
        self._cos_now = self._cos[positions][:, None] * self._scale  # [num_tokens, heads, head_dim]
        self._sin_now = self._sin[positions][:, None] * self._scale
        self._targets = self._slot_rows(batch.slots)
        self._num_tokens = batch.num_tokens
        decoding = [span for span in batch.spans if span.length == 1]
        self._groups = [self._decode_group(spans) for spans in self._by_length(decoding)]
        self._prompts = [self._prompt(span) for span in batch.spans if span.length > 1]

    def _slot_rows(self, slots: Tensor) -> Tensor:
        """Rows of `_slots` for keys and values of layer 0: `[num_tokens * 2 * kv_heads]`."""
        block, offset = slots // self.block_size, slots % self.block_size
        heads = torch.arange(self.kv_heads)
        first = (block[:, None] * self.kv_heads + heads) * self.num_layers * 2  # [tokens, heads]
        rows = first[:, None] + torch.tensor([0, 1])[:, None]  # [tokens, 2, heads]
        return (rows * self.block_size + offset[:, None, None]).flatten()

    def _num_keys(self, end: int) -> int:
        return -(-end // self._lanes) * self._lanes

    def _by_length(self, spans: list[Span]) -> list[list[Span]]:
        """Groups in which padding to the longest context wastes a third at most."""
        max_keys = MAX_GATHERED_BYTES // (2 * self.kv_heads * self.head_dim * self.dtype.itemsize)
        ends = [span.end for span in spans]
        if spans and max(ends) * 2 <= min(ends) * 3 and max(ends) * len(spans) <= max_keys:
            return [spans]  # as they are: their rows may be neighbours
        groups: list[list[Span]] = []
        for span in sorted(spans, key=lambda span: span.end):
            is_alike = bool(groups) and span.end * 2 <= groups[-1][0].end * 3
            if is_alike and span.end * (len(groups[-1]) + 1) <= max_keys:
                groups[-1].append(span)
            else:
                groups.append([span])
        return groups

    def _gather(self, spans: list[Span]) -> Gather:
        num_keys = max(self._num_keys(span.end) for span in spans)
        tables = torch.empty(len(spans), num_keys // self.block_size, dtype=torch.int64)
        live = torch.tensor([span.end for span in spans])  # keys
        for i, span in enumerate(spans):
            used = span.block_table[: -(-span.end // self.block_size)]
            tables[i, : len(used)] = torch.tensor(used)
            # Some block of its own: whatever follows the context gets weight zero.
            tables[i, len(used) :] = used[0]
        heads = torch.arange(self.kv_heads)[:, None]
        rows = (tables[:, None] * self.kv_heads + heads) * self.num_layers * 2
        values = _in_tiles(rows + 1, self._tile // self.block_size)
        # A slot that nobody wrote may hold NaN, and 0 x NaN is NaN. Those are the slots past the
        # end in the last block, and in every copy of a block that is the only one.
        keys = torch.arange(num_keys)
        is_only = live < self.block_size
        last = torch.where(is_only, num_keys, -(-live // self.block_size) * self.block_size)
        dead = (keys >= live[:, None]) & (keys < last[:, None])
        dead &= (keys % self.block_size >= live[:, None]) | ~is_only[:, None]
        dead = dead[:, None].expand(-1, self.kv_heads, -1)
        at = _in_tiles(dead, self._tile).nonzero()[:, 0]
        return Gather(torch.cat((rows.flatten(), values)), at, len(spans), num_keys)

    def _decode_group(self, spans: list[Span]) -> DecodeGroup:
        gather = self._gather(spans)
        positions = torch.tensor([span.start for span in spans])[:, None, None, None]
        hidden = self._hidden(positions, torch.arange(gather.num_keys))
        rows = [span.row for span in spans]
        if rows == list(range(rows[0], rows[0] + len(rows))):
            return DecodeGroup(slice(rows[0], rows[0] + len(rows)), gather, hidden)
        return DecodeGroup(torch.tensor(rows), gather, hidden)

    def _prompt(self, span: Span) -> Prompt:
        parts = []
        first = 0
        while first < span.length:
            position = span.start + first
            room = MAX_SCORES // (self.num_heads * (position + QUERIES))
            last = min(span.length, first + max(1, min(QUERIES, room)))
            num_keys = self._num_keys(span.start + last)
            own = torch.arange(position, span.start + last)[:, None, None]
            # Without a window every query sees all keys before the first one's.
            first_hidden = 0 if self.window else position
            hidden = self._hidden(own, torch.arange(first_hidden, num_keys))
            parts.append(PromptPart(first, last, num_keys, hidden))
            first = last
        return Prompt(span, self._gather([span]), tuple(parts))

    def _hidden(self, positions: Tensor, keys: Tensor) -> Tensor:
        """Where a query at `positions` must not see a key."""
        hidden = keys > positions
        if self.window is not None:
            hidden |= keys <= positions - self.window
        return hidden

    # --- once per layer ------------------------------------------------------------------------

    def attend(self, layer: int, qkv: Tensor, head_norms: Tensor | None) -> Tensor:
        num_tokens, heads, kv_heads = self._num_tokens, self.num_heads, self.kv_heads
        qkv = qkv.view(len(qkv), heads + 2 * kv_heads, self.head_dim)
        qk = self._rotate(qkv[:num_tokens, : heads + kv_heads], head_norms)
        kv = torch.stack((qk[:, heads:], qkv[:num_tokens, heads + kv_heads :]), dim=1)
        slots = self._slots[layer * 2 * self.block_size :]
        slots.index_copy_(0, self._targets, kv.view(-1, self.head_dim))
        out = qkv.new_zeros(len(qkv), heads, self.head_dim)
        q = qk[:, :heads].view(num_tokens, kv_heads, self.group, self.head_dim)
        for group in self._groups:
            out[group.rows] = self._decode(layer, q[group.rows], group)
        for prompt in self._prompts:
            self._prefill(layer, q, prompt, out)
        return out.flatten(1)

    def _rotate(self, qk: Tensor, head_norms: Tensor | None) -> Tensor:
        """Norm and rotation of query and key heads in fp32; queries come scaled."""
        x = qk.float()  # [num_tokens, num_heads + kv_heads, head_dim]
        if head_norms is not None:
            x = F.rms_norm(x, (self.head_dim,), None, self.eps).mul_(head_norms)
        turned = x.roll(self.head_dim // 2, -1).mul_(self._sin_now)
        return turned.add_(x * self._cos_now).to(self.dtype)

    def _read(self, layer: int, gather: Gather) -> tuple[Tensor, list[Tensor]]:
        """Keys `[batch * kv_heads, num_keys, head_dim]`, and values likewise in tiles of keys."""
        size = len(gather.blocks)
        if size > len(self._gathered):
            self._gathered = self._blocks.new_empty(size, self._blocks.shape[1])
        kv = self._gathered[:size]
        torch.index_select(self._blocks[layer * 2 :], 0, gather.blocks, out=kv)
        batch, num_keys, head_dim = gather.batch * self.kv_heads, gather.num_keys, self.head_dim
        keys, flat = kv.view(2, -1, head_dim)
        if len(gather.dead):
            flat.index_fill_(0, gather.dead, 0.0)
        cuts = range(0, num_keys, self._tile)
        values = [
            flat[batch * first : batch * min(first + self._tile, num_keys)].view(
                batch, -1, head_dim
            )
            for first in cuts
        ]
        return keys.view(batch, num_keys, head_dim), values

    def _decode(self, layer: int, q: Tensor, group: DecodeGroup) -> Tensor:
        """Attention of one token per sequence; `q` is `[batch, kv_heads, group, head_dim]`."""
        batch, kv_heads, num_rows, head_dim = q.shape
        keys, values = self._read(layer, group.gather)
        q = self._pad_rows(q.flatten(0, 1))
        scores = torch.bmm(q, keys.transpose(1, 2))
        scores.view(batch, kv_heads, q.shape[1], -1).masked_fill_(group.hidden, HIDDEN)
        out = self._mix(scores.softmax(-1), values)[:, :num_rows]
        return out.reshape(batch, kv_heads * num_rows, head_dim)

    def _prefill(self, layer: int, q: Tensor, prompt: Prompt, out: Tensor) -> None:
        """Attention of a chunk into `out`; `q` is `[num_tokens, kv_heads, group, head_dim]`."""
        span = prompt.span
        keys, values = self._read(layer, prompt.gather)  # [kv_heads, num_keys, head_dim]
        q = q[span.row : span.row + span.length].transpose(0, 1)
        for part in prompt.parts:
            rows = q[:, part.first : part.last].flatten(1, 2)  # [kv_heads, queries, head_dim]
            num_rows = rows.shape[1]
            rows = self._pad_rows(rows)
            scores = torch.bmm(rows, keys[:, : part.num_keys].transpose(1, 2))
            seen = scores[:, :num_rows].view(len(rows), -1, self.group, part.num_keys)
            seen[..., -part.hidden.shape[-1] :].masked_fill_(part.hidden, HIDDEN)
            mixed = self._mix(scores.softmax(-1), values)[:, :num_rows]
            mixed = mixed.view(len(rows), -1, self.group, self.head_dim)
            own = out[span.row + part.first : span.row + part.last]
            own.view(-1, len(rows), self.group, self.head_dim).copy_(mixed.transpose(0, 1))

    def _mix(self, weights: Tensor, values: list[Tensor]) -> Tensor:
        """`weights @ values`, a tile of keys after the other, summed in fp32."""
        tile, num_keys = self._tile, weights.shape[-1]
        mixed = torch.bmm(weights[..., :tile], values[0][:, :num_keys])
        if num_keys <= tile:
            return mixed
        mixed = mixed.float()
        for first in range(tile, num_keys, tile):
            here = weights[..., first : first + tile]
            mixed += torch.bmm(here, values[first // tile][:, : num_keys - first])
        return mixed.to(self.dtype)

    def _pad_rows(self, q: Tensor) -> Tensor:
        missing = -q.shape[1] % PRODUCT_ROWS[self.dtype]
        return F.pad(q, (0, 0, 0, missing)) if missing else q

    # --- the rest ------------------------------------------------------------------------------

    def add_rms_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        stream = x if residual is None else x + residual
        return F.rms_norm(stream, (stream.shape[-1],), weight, eps), stream

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)


def _in_tiles(rows: Tensor, tile: int) -> Tensor:
    """Cut along the last dimension; the tiles one after the other, each flat."""
    cuts = range(0, rows.shape[-1], tile)
    return torch.cat([rows[..., first : first + tile].flatten() for first in cuts])
