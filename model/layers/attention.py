"""The interface of a decoder to the device it runs on, the batch of one step, and plain torch.

The decoder is the same on every device. A backend provides attention over the paged pool and the
few operations that are fused differently. It never sees requests, keys or plans, and never decides
which token is computed. `PlainBackend` is correct on every device that torch knows, but slow, and a
token's bits may depend on the rest of the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import msgspec
import torch
from torch import Tensor

from baton.kernels import reference, sparse_reference, state_reference
from baton.kernels.constants import SILU, Gate
from baton.kernels.state_layout import StateLayout
from baton.kernels.state_reference import StateBytes, StateTables, StateWeights


class Chunk(msgspec.Struct, frozen=True, gc=False):
    """Tokens [start, start + length) of one sequence, in rows [row, row + length) of the batch.

    The pool holds the keys and values of every position below `start`, but not yet those of the
    chunk. The state is that after the position before `start`.
    """

    row: int
    start: int
    length: int
    block_table: tuple[int, ...]
    # The blocks of the sequence's state, if the model has one.
    state: tuple[int, ...] = ()
    num_held: int = 0  # the first tokens, which the state has already
    num_guesses: int = 0  # the last tokens, without which the state is kept
    num_prompt_tokens: int = 0  # of the sequence

    @property
    def end(self) -> int:
        return self.start + self.length


def within(chunks: Sequence[Chunk], size: int, block_size: int) -> list[Chunk]:
    """Return the rows of `chunks` as chunks of sequences that begin at multiples of `size` tokens.

    `block_size` divides `size`. A `size` of 0 leaves sequences whole.
    """
    if not size:
        return list(chunks)
    parts = []
    for chunk in chunks:
        start = chunk.start
        while start < chunk.end:
            first = start // size * size
            end = min(first + size, chunk.end)
            blocks = chunk.block_table[first // block_size :]
            row = chunk.row + start - chunk.start
            parts.append(Chunk(row, start - first, end - start, blocks))
            start = end
    return parts


def most_parts(num_tokens: int, size: int) -> int:
    """Return in how many chunks of `size` tokens so many of a sequence may lie."""
    return 1 + -(-(num_tokens - 1) // size)


@dataclass(slots=True, frozen=True)
class Tables:
    """The sequences of a batch as kernels read them on the device.

    The first `num_decoding` sequences decode, and have one row each or those that `decode_starts`
    counts. `query_starts` counts the rows of the others, beginning with their first row.
    """

    blocks: Tensor  # [num_sequences, num_blocks] int32
    context_lens: Tensor  # [num_sequences] int32; 0 is padding
    query_starts: Tensor  # [num_sequences - num_decoding + 1] int32, or empty
    num_decoding: int
    states: StateTables | None = None
    decode_starts: Tensor | None = None  # [num_decoding + 1] int32
    num_more_rows: int = 0  # of those, beside one each; padding included

    @property
    def num_decode_rows(self) -> int:
        return self.num_decoding + self.num_more_rows


@dataclass(slots=True, frozen=True)
class DecodeRows:
    """Rows of sequences that decode, in pieces of a few successive ones.

    Each piece has one row, or those that `starts` counts.
    """

    blocks: Tensor  # [num_pieces, num_blocks] int32
    # [num_pieces] int32: the keys that the last row sees; padding has 0.
    context_lens: Tensor
    starts: Tensor | None  # [num_pieces + 1] int32


def decode_rows(tables: Tables, most: int) -> DecodeRows:
    """Return the rows of the sequences that decode in pieces of at most `most`.

    There are as many pieces as so many sequences and rows can need. Those left over come last, and
    have length 0. With one row each, padding behind all rows has a piece, too.
    """
    decoding = tables.num_decoding
    blocks = tables.blocks[:decoding]
    lens = tables.context_lens[:decoding]
    starts = tables.decode_starts
    if starts is None:
        return DecodeRows(blocks, lens, None)
    counts = (starts[1:] - starts[:-1] + most - 1) // most
    ends = counts.cumsum(0, dtype=starts.dtype)
    numbers = torch.arange(
        decoding + tables.num_more_rows // most, dtype=ends.dtype, device=lens.device
    )
    owners = torch.searchsorted(ends, numbers, right=True, out_int32=True)
    owners = owners.clamp(max=decoding - 1)
    last = starts[1:][owners]
    firsts = starts[:-1][owners] + (numbers - ends[owners] + counts[owners]) * most
    stops = torch.minimum(firsts + most, last)
    seen = (lens[owners] - (last - stops)).where(numbers < ends[-1], 0)
    if most > 1:
        starts = torch.cat((torch.minimum(firsts, last), starts[-1:]))
    return DecodeRows(blocks[owners], seen, starts if most > 1 else None)


@dataclass(slots=True, frozen=True)
class AdaptedRows:
    """The rows that adapters change, in the order of the adapters."""

    order: Tensor  # [num_adapted] int64
    ends: Tensor  # [num_adapters] int32: counts the rows up to the last one of each

    @classmethod
    def all_of(cls, number: int, num_adapters: int, rows: Tensor) -> "AdaptedRows":
        """Return `rows`, all of one adapter."""
        ends = torch.zeros(num_adapters, dtype=torch.int32, device=rows.device)
        ends[number:] = len(rows)
        return cls(torch.arange(len(rows), device=rows.device), ends)


@dataclass(slots=True, frozen=True)
class Batch:
    """The tokens of one step, packed: a row for each.

    `chunks` on the host and `tables` on the device describe the same; a backend reads one of them.
    """

    token_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64
    slots: Tensor  # [num_tokens] int64: block * block_size + offset, -1: not stored
    chunks: tuple[Chunk, ...]
    tables: Tables | None = None
    # Of all rows, of those alone of which the step wants the output, and of those among them from
    # which it samples; None if there are none.
    adapted: AdaptedRows | None = None
    adapted_outputs: AdaptedRows | None = None
    adapted_samples: AdaptedRows | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.slots)


class Scoring(NamedTuple):
    """How a layer turns products of queries and keys into weights, as the kernels take it."""

    scale: float
    window: int | None = None  # keys that a query sees, itself included
    softcap: float | None = None  # a score becomes softcap * tanh(score / softcap)
    # [num_heads] fp32: scores of a key whose value is zeros.
    sinks: Tensor | None = None


class Keys(NamedTuple):
    """How a layer rotates, which keys it sees, and where they are."""

    rotation: int = 0  # the number of the backend's rotary table
    # Tokens of the chunks in which it attends; 0: it sees all before a query.
    chunk_size: int = 0
    are_wide: bool = False  # its heads are those of `WideHeads`
    # False: it has queries alone, and reads what an earlier layer stored.
    are_stored: bool = True


PLAIN_KEYS = Keys()


class WideHeads(NamedTuple):
    """Layers with fewer and wider KV heads than the pool is made for, in the pool's own blocks.

    A part of a block, which is one KV head of the other layers, has these layers behind the others,
    and an equal share of a block's tokens of one wide head. So a rank that has some of the parts
    has whole wide heads.
    """

    kv_heads: int  # on this rank; divides that of the pool
    head_dim: int
    num_layers: int
    num_before: int  # other layers in a part

    def pieces(self, pool: Tensor) -> int:
        """Return among how many parts of a block the tokens of a wide head are shared."""
        return pool.shape[1] // self.kv_heads

    def view(self, pool: Tensor) -> Tensor:
        """Return these layers as a pool whose blocks are the pieces of blocks.

        Piece `i` of block `b` is block `b * pool.shape[1] + i` of it. Only the first `pieces` of
        each block are apart; the others overlap them.
        """
        num_blocks, num_parts, _, planes, block_size, _ = pool.shape
        size = block_size // self.pieces(pool)
        part = pool.stride(1)
        plane = size * self.head_dim
        return pool.as_strided(
            (
                num_blocks * num_parts - num_parts + self.pieces(pool),
                self.kv_heads,
                self.num_layers,
                planes,
                size,
                self.head_dim,
            ),
            (part, self.pieces(pool) * part, planes * plane, plane, self.head_dim, 1),
            pool.storage_offset() + self.num_before * pool.stride(2),
        )

    def slots(self, pool: Tensor, slots: Tensor) -> Tensor:
        """Return where tokens are in `view`, of where they are in the pool; -1 stays."""
        block_size = pool.shape[4]
        size = pool.shape[4] // self.pieces(pool)
        blocks = slots // block_size
        offsets = slots % block_size
        placed = (blocks * pool.shape[1] + offsets // size) * size + offsets % size
        return placed.where(slots >= 0, slots)

    def block_table(self, pool: Tensor, blocks: Sequence[int]) -> tuple[int, ...]:
        """Return the blocks of `view` that hold a sequence."""
        num_parts = pool.shape[1]
        pieces = range(self.pieces(pool))
        return tuple(block * num_parts + piece for block in blocks for piece in pieces)


class IndexPool(NamedTuple):
    """What a backend knows of the indexes of sparse attention."""

    # [num_blocks, 1, num_layers, 1, block_size, head_dim], in the pool's blocks.
    keys: Tensor
    num_heads: int
    num_chosen: int


class PoolParts(NamedTuple):
    """What the blocks of a pool hold beside keys and values of plain layers."""

    states: StateLayout | None = None
    wide: WideHeads | None = None
    sparse: IndexPool | None = None


class Expansion(Protocol):
    """The matrices of a layer with latent attention, of this rank's heads."""

    def keys_and_values(self, rows: Tensor) -> Tensor:
        """Return of `[num_rows, latent]` rows each head's key, then its value, side by side."""
        ...

    def expanded(self, mixed: Tensor) -> Tensor:
        """Return values, `[num_rows, num_heads * value_dim]`, of what was mixed of latent rows."""
        ...


class Backend(Protocol):
    """One device's attention and fused operations over one pool.

    `name` differs between backends that compute different bits. `is_batch_invariant` says that the
    bits of a token depend on its own sequence alone, and `has_two_orders` that those before a
    prompt's last token are others than those of equal tokens of a response. `table_blocks` is the
    number of blocks of the longest sequence if the backend reads `Batch.tables`, or 0 if it reads
    chunks. A decoder may set `scoring` and `keys` before each `attend`, and sets `expansion` if
    attention is latent.

    If a backend `expands_prompts`, tokens before a prompt's last one attend to expanded keys. Then
    `absorbed_rows` are the rows of a step whose queries have to be absorbed, `attend` takes the
    plain queries of all rows behind the rest, and returns values. None means that all are absorbed.
    """

    scoring: Scoring
    keys: Keys
    expansion: Expansion | None

    @property
    def expands_prompts(self) -> bool: ...

    @property
    def absorbed_rows(self) -> Tensor | None: ...

    @property
    def name(self) -> str: ...

    @property
    def is_batch_invariant(self) -> bool: ...

    @property
    def has_two_orders(self) -> bool: ...

    @property
    def table_blocks(self) -> int: ...

    def begin(self, batch: Batch) -> None:
        """Prepare what all layers of this step share."""
        ...

    def attend(
        self,
        layer: int,
        qkv: Tensor,
        head_norms: Tensor | None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Store the batch's keys and values, and return `[num_tokens, num_heads * head_dim]`.

        With `rows`, return those rows of it alone.

        `qkv` is the packed projection `[num_tokens, (num_heads + 2 * kv_heads) * head_dim]`, or
        without values where the pool has keys alone, which are then the values, too, or queries
        alone where `keys` are not stored. A backend may
        then write to it, and leave out the numbers of each result that the rotation turned.
        `head_norms`, one RMS norm weight for each query and key head
        `[num_heads + kv_heads, head_dim]`, is applied before the rotation.
        """
        ...

    def choose(self, layer: int, heads: Tensor, weights: Tensor) -> None:
        """Store the batch's index keys, and choose the keys that its queries see.

        The choice holds for each `attend` up to the next choice of the batch. `layer` counts the
        layers with an index. `heads` is `[num_tokens, (num_heads + 1) * head_dim]`, queries first,
        and `weights` `[num_tokens, num_heads]` in fp32.
        """
        ...

    def advance(
        self, layer: int, x: Tensor, weights: StateWeights, rows: Tensor | None = None
    ) -> Tensor:
        """Let the states go through the batch, and return `[num_tokens, heads * value_dim]`.

        With `rows`, return those rows of it alone. `layer` counts the layers with a state, and `x`
        is what `weights` describe.
        """
        ...

    def sigmoid_mul(self, x: Tensor, gates: Tensor) -> Tensor:
        """Return `x * sigmoid(gates)`, both `[num_rows, count]`."""
        ...

    def add_rms_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Return the RMS norm of `x + residual`, and that sum, both `[num_rows, hidden]`."""
        ...

    def layer_norm(self, x: Tensor, norm: Tensor, eps: float) -> Tensor:
        """Return the layer norm of `[num_rows, count]`; `norm` is `[2, count]`: weight and bias."""
        ...

    def gate_mul(self, gate_up: Tensor, gate: Gate = SILU) -> Tensor:
        """Return the gated numbers of `[num_rows, 2 * features]`, gates first."""
        ...

    def soft_cap(self, x: Tensor, softcap: float) -> None:
        """Replace the fp32 numbers of `[num_rows, count]` by `softcap * tanh(x / softcap)`."""
        ...

    def add_experts(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Return the sum of each token's experts, `[num_tokens, hidden]`, added in their order.

        `rows` is `[num_tokens, top_k, hidden]`, `weights` `[num_tokens, top_k]` in fp32.
        """
        ...


def pool_suffix(pool: Tensor) -> str:
    """Return what a backend's name says of the numbers in its pool."""
    return "-fp8" if pool.dtype == torch.uint8 else ""


PLAIN_PARTS = PoolParts()
# Queries of one sequence at a time, which bounds the memory for their scores.
QUERIES = 128


class PlainBackend:
    is_batch_invariant = False
    has_two_orders = False
    expands_prompts = False
    absorbed_rows = None
    expansion: Expansion | None = None
    table_blocks = 0

    def __init__(
        self,
        # [num_blocks, kv_heads, num_layers, 2 or 1, block_size, head_dim].
        pool: Tensor,
        num_heads: int,
        # Rotary: [max_position, rotary_dim], of a head's last numbers.
        tables: Sequence[Tensor],
        eps: float,
        parts: PoolParts = PLAIN_PARTS,
    ) -> None:
        self.name = "torch" + pool_suffix(pool)
        self.pool = pool
        self.num_heads = num_heads
        self.block_size, self.head_dim = pool.shape[4], reference.pool_head_dim(pool)
        self.eps = eps
        self.scoring = Scoring(self.head_dim**-0.5)
        self.keys = PLAIN_KEYS
        self._angles = tables
        states, self._wide, self._index = parts
        self._wide_pool = None if self._wide is None else self._wide.view(pool)
        self._states = None if states is None else StateBytes(pool, states)

    def begin(self, batch: Batch) -> None:
        self._batch = batch
        self._views: dict[tuple[int, bool], tuple[Tensor, Tensor, Tensor]] = {}
        # By a piece of a chunk: the keys of each query.
        self._seen: list[Tensor] | None = None

    def _view(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the tables, the starts and the lengths of what queries see."""
        which = self.keys.chunk_size, self.keys.are_wide
        if which not in self._views:
            parts = within(self._batch.chunks, self.keys.chunk_size, self.block_size)
            tables, starts, lengths = self._tables(parts)
            if self.keys.are_wide:
                assert self._wide is not None, "the layers are said to be wide"
                tables = torch.tensor(
                    [
                        self._wide.block_table(self.pool, blocks)
                        for blocks in tables.tolist()
                    ]
                )
            self._views[which] = tables, starts, lengths
        return self._views[which]

    def _tables(self, chunks: Sequence[Chunk]) -> tuple[Tensor, Tensor, Tensor]:
        width = max(-(-chunk.end // self.block_size) for chunk in chunks)
        tables = []
        starts = [0]
        lengths = []
        for chunk in chunks:
            blocks = chunk.block_table[:width]
            table = [*blocks, *[0] * (width - len(blocks))]
            for first in range(0, chunk.length, QUERIES):
                last = min(first + QUERIES, chunk.length)
                tables.append(table)
                starts.append(chunk.row + last)
                lengths.append(chunk.start + last)
        return torch.tensor(tables), torch.tensor(starts), torch.tensor(lengths)

    def attend(
        self,
        layer: int,
        qkv: Tensor,
        head_norms: Tensor | None,
        rows: Tensor | None = None,
    ) -> Tensor:
        batch = self._batch
        heads = self.num_heads
        pool = self.pool
        slots = self._batch.slots
        if self.keys.are_wide:
            assert self._wide is not None, "the layers are said to be wide"
            assert self._wide_pool is not None, "the layers are said to be wide"
            pool = self._wide_pool
            slots = self._wide.slots(self.pool, slots)
        own = qkv.view(len(qkv), -1, reference.pool_head_dim(pool))
        first_value = heads + pool.shape[1]
        q = own[:, :heads]
        k = own[:, heads:first_value]
        v = own[:, first_value:] if pool.shape[3] == 2 else None
        if not self.keys.are_stored:
            k = v = own[:, :1].expand(-1, pool.shape[1], -1)
            slots = torch.full_like(slots, -1)
        q_norm, k_norm = (
            (None, None) if head_norms is None else (head_norms[0], head_norms[-1])
        )
        q = reference.rope_and_store(
            q,
            k,
            v,
            batch.positions,
            self._angles[self.keys.rotation],
            pool,
            layer,
            slots,
            q_norm,
            k_norm,
            self.eps,
        )
        tables, starts, lengths = self._view()
        out = reference.paged_prefill_attention(
            q, pool, layer, tables, starts, lengths, *self.scoring, seen=self._seen
        )
        return out.flatten(1) if rows is None else out[rows].flatten(1)

    def choose(self, layer: int, heads: Tensor, weights: Tensor) -> None:
        batch = self._batch
        index = self._index
        assert index is not None, "the model has an index"
        own = heads.view(len(heads), index.num_heads + 1, -1)
        q = reference.rope_and_store(
            own[:, :-1],
            own[:, -1:],
            None,
            batch.positions,
            self._angles[0],
            index.keys,
            layer,
            batch.slots,
        )
        self._seen = []
        tables, starts, lengths = self._view()
        for table, length, first, end in zip(
            tables, lengths, starts, starts[1:], strict=False
        ):
            keys = sparse_reference.paged_keys(index.keys, layer, table, int(length))
            rows = slice(int(first), int(end))
            scores = sparse_reference.index_scores(q[rows], weights[rows], keys)
            self._seen.append(sparse_reference.chosen_keys(scores, index.num_chosen))

    def advance(
        self, layer: int, x: Tensor, weights: StateWeights, rows: Tensor | None = None
    ) -> Tensor:
        assert self._states is not None, "the pool has states"
        if weights.gates is None:
            inputs, gates = state_reference.gated_inputs(x)
            mixed = [
                self._states.convolve(
                    layer,
                    inputs[one.row : one.row + one.length],
                    weights,
                    one.state,
                    one.start,
                    one.num_guesses,
                )
                for one in self._batch.chunks
            ]
            return state_reference.gated_outputs(
                torch.cat(mixed).flatten(1), gates, rows
            )
        decays, betas = state_reference.gate_steps(x, weights.gates)
        parts = []
        for chunk in self._batch.chunks:
            own = slice(chunk.row, chunk.row + chunk.length)
            parts.append(
                self._states.advance(
                    layer,
                    x[own],
                    weights,
                    decays[own],
                    betas[own],
                    chunk.state,
                    chunk.start,
                    chunk.num_held,
                    chunk.num_guesses,
                )
            )
        out = torch.cat(parts)
        if rows is not None:
            out = out[rows]
            x = x[rows]
        return state_reference.gated_norm(out, x, weights, self.eps)

    def sigmoid_mul(self, x: Tensor, gates: Tensor) -> Tensor:
        return reference.sigmoid_mul(x, gates)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return reference.add_rms_norm(x, residual, weight, eps)

    def layer_norm(self, x: Tensor, norm: Tensor, eps: float) -> Tensor:
        return sparse_reference.layer_norm(x, norm, eps)

    def gate_mul(self, gate_up: Tensor, gate: Gate = SILU) -> Tensor:
        return reference.gate_mul(gate_up, gate)

    def soft_cap(self, x: Tensor, softcap: float) -> None:
        reference.soft_cap(x, softcap)

    def add_experts(self, rows: Tensor, weights: Tensor) -> Tensor:
        return reference.add_experts(rows, weights)
