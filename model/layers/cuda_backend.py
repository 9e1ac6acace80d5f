"""Attention and the fused operations on GPUs: baton's Triton kernels behind the `Backend` protocol.

Only ranks that compute on CUDA import this file, because it imports Triton. Sequences at the head
of a batch that decode share a split-context kernel, with all rows of their guesses. From the first
slice of a prompt on, rows go through the prefill kernel, which is exact for single tokens too.
Kernels for one kind of GPU take the place of these where they are proven.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from baton.kernels import reference, sparse_reference
from baton.kernels.constants import SILU, Gate
from baton.kernels.cuda.decode_attention import paged_decode_attention
from baton.kernels.cuda.grouped_product import add_experts
from baton.kernels.cuda.latent_attention import (
    MAX_LATENT,
    MAX_ROTATED,
    latent_decode_attention,
    latent_prefill_attention,
    turn_and_store,
)
from baton.kernels.cuda.paged import (
    BLOCK_SIZES,
    HEAD_DIMS,
    LEAST_CAPABILITY,
    MAX_GROUP,
    PIECE_SIZES,
    WIDE_HEAD_DIMS,
    rows_of_tile,
)
from baton.kernels.cuda.pool_writes import rope_and_store
from baton.kernels.cuda.prefill_attention import paged_prefill_attention
from baton.kernels.cuda.rows import add_rms_norm, gate_mul
from baton.kernels.cuda.sparse_attention import MAX_HEAD_DIM, MAX_HEADS, choose_keys
from baton.kernels.cuda.states.functions import DeviceStates
from baton.kernels.hopper.attention.latent_prefill import PLAIN_DIM
from baton.kernels.proofs import LATENT_PREFILL, ONE_ORDER, OVERLAPS, PREFILL
from baton.kernels.state_layout import StateLayout
from baton.kernels.state_reference import StateWeights, gated_inputs, gated_outputs
from baton.model.layers.attention import (
    PLAIN_KEYS,
    Batch,
    Expansion,
    IndexPool,
    Scoring,
    Tables,
    WideHeads,
    decode_rows,
    pool_suffix,
)
from baton.model.layers.device_views import View, tables_of_pieces, tables_within
from baton.model.layers.hopper_attention import HopperAttention, HopperLatent


class CudaBackend:
    """The Triton kernels over a pool in device memory."""

    def __init__(  # noqa: PLR0913  (a rank makes it once)
        self,
        pool: Tensor,
        num_heads: int,
        tables: Sequence[Tensor],  # rotary: [max_position, rotary_dim]
        eps: float,
        *,
        is_ordered: bool = False,
        index: IndexPool | None = None,
        states: StateLayout | None = None,
        wide: WideHeads | None = None,
        proven: frozenset[str] = frozenset(),
    ) -> None:
        """`is_ordered` merges keys in one order, so a row's bits do not depend on the batch.

        `proven` names the candidates of `kernels/proofs.py` that may compute this model.
        """
        self._uses_hopper = (ONE_ORDER if is_ordered else PREFILL) in proven
        kind = "triton-ordered" if is_ordered else "triton"
        if self._uses_hopper:
            kind = "hopper-ordered" if is_ordered else "triton-hopper"
        self._latent: HopperLatent | None = None
        if LATENT_PREFILL in proven:
            self._latent = HopperLatent(pool, num_heads)
            kind += "-expanded"
        self.expands_prompts = self._latent is not None
        self.expansion: Expansion | None = None
        self.name = kind + pool_suffix(pool)
        self._is_ordered = is_ordered
        self._overlaps = OVERLAPS in proven
        self.is_batch_invariant = is_ordered
        # Tokens of a prompt go through a state's matrices in chunks, others one by one.
        has_chunks = states is not None and states.shape.chunked == "prompt"
        self.has_two_orders = has_chunks or self.expands_prompts
        # [num_blocks, kv_heads, num_layers, 2 or 1, block_size, head_dim].
        self.pool = pool
        self._wide = wide
        self._wide_pool = None if wide is None else wide.view(pool)
        self.num_heads = num_heads
        self.block_size = pool.shape[4]
        self.eps = eps
        self.scoring = Scoring(reference.pool_head_dim(pool) ** -0.5)
        self.table_blocks = -(-len(tables[0]) // self.block_size)
        self.keys = PLAIN_KEYS
        self._index = index
        self._states = None if states is None else DeviceStates(pool, states)
        self._angles = [table.to(pool.device).contiguous() for table in tables]

    def begin(self, batch: Batch) -> None:
        assert batch.tables is not None, "the kernels read tables on the device"
        self._positions = batch.positions
        self._slots = batch.slots
        self._tables = batch.tables
        self._views: dict[tuple[int, bool], View] = {}
        if self._latent is not None:
            self._latent.begin(batch)
        if self._index is not None:
            self._sequences = _sequences(batch.tables, batch.num_tokens)
            self._num_seen = _num_seen(batch.tables, batch.positions)

    def attend(
        self,
        layer: int,
        qkv: Tensor,
        head_norms: Tensor | None,
        rows: Tensor | None = None,
    ) -> Tensor:
        view = self._view()
        if self.absorbed_rows is not None:
            return self._attend_expanded(layer, qkv, rows, view)
        q = self._stored(layer, qkv, head_norms, view)
        if self._index is not None:
            return self._attend_chosen(q, layer, self._index.num_chosen, rows)
        parts: list[Tensor] = []
        tables = view.tables
        rows_of_decode = tables.num_decode_rows
        if rows_of_decode:
            parts.append(self._decode(q[:rows_of_decode], layer, view))
        if tables.num_decoding < len(tables.blocks):
            parts.append(self._prefill(q[rows_of_decode:], layer, view))
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out.flatten(1) if rows is None else out[rows].flatten(1)

    def _view(self) -> View:
        """Return what the queries of a layer with such `keys` see in this step."""
        size, are_wide = which = self.keys.chunk_size, self.keys.are_wide
        if which not in self._views:
            pool = self.pool
            tables = self._tables
            slots = self._slots
            if size:
                tables = tables_within(tables, size, self.block_size, len(slots))
            if are_wide:
                assert self._wide is not None, "the layers are said to be wide"
                assert self._wide_pool is not None, "the layers are said to be wide"
                tables = tables_of_pieces(self._wide, pool, tables)
                slots = self._wide.slots(pool, slots)
                pool = self._wide_pool
            most = 1
            if pool.shape[3] == 2:
                most = rows_of_tile(self.num_heads // pool.shape[1])
            decode = decode_rows(tables, most)
            view = self._views[which] = View(pool, tables, slots, decode)
            if self._uses_hopper and not are_wide:
                view.hopper = HopperAttention(
                    pool, tables, decode, has_one_order=self._is_ordered
                )
        return self._views[which]

    @property
    def absorbed_rows(self) -> Tensor | None:
        return None if self._latent is None else self._latent.absorbed_rows

    def _attend_expanded(
        self, layer: int, x: Tensor, rows: Tensor | None, view: View
    ) -> Tensor:
        """Return the values of a step in which tokens of prompts attend to expanded keys."""
        assert self._latent is not None, "it says which rows are absorbed"
        assert self.expansion is not None, "attention is latent"
        width = (self.num_heads + 1) * self.pool.shape[5]
        q = self._stored(layer, x[:, :width], None, view)
        plain = x[:, width:].view(len(x), self.num_heads, PLAIN_DIM)
        scale = self.scoring.scale
        out = self._latent.attend(q, plain, layer, scale, self.expansion)
        return out.flatten(1) if rows is None else out[rows].flatten(1)

    def _decode(self, q: Tensor, layer: int, view: View) -> Tensor:
        """Return the attention of the sequences that decode."""
        if view.hopper is not None and view.hopper.has_one_order:
            return view.hopper.decode(q, layer, self.scoring)
        rows = view.decode
        if view.pool.shape[3] == 1:
            rotated = self._angles[0].shape[1]
            scale = self.scoring.scale
            return latent_decode_attention(
                q, view.pool, layer, rows.blocks, rows.context_lens, scale, rotated
            )
        return paged_decode_attention(
            q,
            view.pool,
            layer,
            rows.blocks,
            rows.context_lens,
            *self.scoring,
            rows.starts,
            ordered=self._is_ordered,
        )

    def _prefill(self, q: Tensor, layer: int, view: View) -> Tensor:
        """Return the attention of the sequences from the first slice of a prompt on."""
        if view.hopper is not None:
            return view.hopper.prefill(q, layer, self.scoring)
        tables = view.tables
        blocks = tables.blocks[tables.num_decoding :]
        lens = tables.context_lens[tables.num_decoding :]
        if view.pool.shape[3] == 1:
            rotated = self._angles[0].shape[1]
            scale = self.scoring.scale
            return latent_prefill_attention(
                q, view.pool, layer, blocks, tables.query_starts, lens, scale, rotated
            )
        return paged_prefill_attention(
            q,
            view.pool,
            layer,
            blocks,
            tables.query_starts,
            lens,
            *self.scoring,
            ordered=self._is_ordered,
        )

    def _stored(
        self, layer: int, qkv: Tensor, head_norms: Tensor | None, view: View
    ) -> Tensor:
        """Store keys and values, and return the rotated queries."""
        pool = view.pool
        angles = self._angles[self.keys.rotation]
        own = qkv.view(len(qkv), -1, reference.pool_head_dim(pool))
        if pool.shape[3] == 1:
            return turn_and_store(own, self._positions, angles, pool, layer, view.slots)
        q = own[:, : self.num_heads]
        k = v = None
        if self.keys.are_stored:
            k, v = own[:, self.num_heads :].chunk(2, dim=1)
        q_norm, k_norm = (
            (None, None) if head_norms is None else (head_norms[0], head_norms[-1])
        )
        return rope_and_store(
            q,
            k,
            v,
            self._positions,
            angles,
            pool,
            layer,
            view.slots,
            q_norm,
            k_norm,
            self.eps,
            overlaps=self._overlaps,
        )

    def advance(
        self, layer: int, x: Tensor, weights: StateWeights, rows: Tensor | None = None
    ) -> Tensor:
        states = self._states
        tables = self._tables.states
        assert states is not None, "the pool has states"
        assert tables is not None, "so the step has them"
        if weights.gates is None:
            inputs, gates = gated_inputs(x)
            mixed = states.advance(inputs, layer, tables, weights)
            return gated_outputs(mixed, gates, rows)
        out = states.advance(x, layer, tables, weights)
        return states.gated_norm(out, x, weights, self.eps, rows)

    def choose(self, layer: int, heads: Tensor, weights: Tensor) -> None:
        index = self._index
        assert index is not None, "the model has an index"
        own = heads.view(len(heads), index.num_heads + 1, -1)
        q = turn_and_store(
            own, self._positions, self._angles[0], index.keys, layer, self._slots
        )
        self._chosen = choose_keys(
            q,
            weights,
            index.keys,
            layer,
            self._tables.blocks,
            self._sequences,
            self._num_seen,
            index.num_chosen,
        )

    def _attend_chosen(
        self, q: Tensor, layer: int, num_chosen: int, rows: Tensor | None
    ) -> Tensor:
        """Return the attention of queries to the keys that were chosen last, each by itself."""
        chosen = self._chosen
        num_seen = self._num_seen.clamp(max=num_chosen)
        if rows is not None:
            q = q[rows]
            chosen = chosen[rows]
            num_seen = num_seen[rows]
        out = latent_decode_attention(
            q,
            self.pool,
            layer,
            chosen,
            num_seen,
            self.scoring.scale,
            self._angles[0].shape[1],
            of_slots=True,
        )
        return out.flatten(1)

    def layer_norm(self, x: Tensor, norm: Tensor, eps: float) -> Tensor:
        return sparse_reference.layer_norm(x, norm, eps)

    def sigmoid_mul(self, x: Tensor, gates: Tensor) -> Tensor:
        return reference.sigmoid_mul(x, gates)  # as in `soft_cap`

    def add_rms_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return add_rms_norm(x, residual, weight, eps, overlaps=self._overlaps)

    def gate_mul(self, gate_up: Tensor, gate: Gate = SILU) -> Tensor:
        return gate_mul(gate_up, gate, overlaps=self._overlaps)

    def soft_cap(self, x: Tensor, softcap: float) -> None:
        reference.soft_cap(x, softcap)  # an element's bits do not depend on the others

    def add_experts(self, rows: Tensor, weights: Tensor) -> Tensor:
        return add_experts(rows, weights)


def _sequences(tables: Tables, num_tokens: int) -> Tensor:
    """Return the sequence of each row of a batch, `[num_tokens]` int32; padding has any."""
    rows = torch.arange(num_tokens, dtype=torch.int32, device=tables.blocks.device)
    decoding = tables.num_decoding
    num_rows = tables.num_decode_rows
    alone = rows[:num_rows]
    if tables.decode_starts is not None:
        alone = _owners(alone, tables.decode_starts)
    if decoding == len(tables.blocks):
        return alone
    later = _owners(rows[num_rows:] - num_rows, tables.query_starts) + decoding
    return torch.cat((alone, later))


def _owners(rows: Tensor, starts: Tensor) -> Tensor:
    owners = torch.searchsorted(starts[1:], rows, right=True, out_int32=True)
    return owners.clamp(max=len(starts) - 2)


def _num_seen(tables: Tables, positions: Tensor) -> Tensor:
    """Return how many keys each row of a batch sees, `[num_tokens]` int32; padding sees none."""
    num_rows = tables.num_decode_rows
    alone = tables.context_lens[: tables.num_decoding]
    if tables.decode_starts is not None:
        alone = _seen(positions[:num_rows], tables.decode_starts)
    if tables.num_decoding == len(tables.blocks):
        return alone
    return torch.cat((alone, _seen(positions[num_rows:], tables.query_starts)))


def _seen(positions: Tensor, starts: Tensor) -> Tensor:
    rows = torch.arange(len(positions), device=positions.device)
    return torch.where(rows < starts[-1], positions + 1, 0).int()


def missing_for_index(num_heads: int, head_dim: int) -> str:
    """Return why the kernels cannot serve this index of sparse attention; empty if they can."""
    if num_heads <= MAX_HEADS and head_dim <= MAX_HEAD_DIM:
        return ""
    return (
        f"an index of {num_heads} heads of {head_dim} has no CUDA kernel (index_n_heads and "
        f"index_head_dim may be up to {MAX_HEADS} and {MAX_HEAD_DIM})"
    )


def missing_for_wide(
    wide: WideHeads, pool_shape: tuple[int, ...], num_heads: int
) -> str:
    """Return why the kernels cannot serve the wide heads of a model; empty if they can."""
    if wide.head_dim not in WIDE_HEAD_DIMS:
        sizes = _listed(WIDE_HEAD_DIMS)
        return (
            f"heads of {wide.head_dim} have no CUDA kernel (those of {sizes} have one)"
        )
    block_size = pool_shape[4]
    pieces = pool_shape[1] // wide.kv_heads
    if block_size // pieces not in PIECE_SIZES:
        return (
            f"cache.block_size: pieces of {block_size // pieces} tokens have no CUDA kernel; raise "
            f"it, because a block of wide heads has {pieces} pieces"
        )
    if (group := num_heads // wide.kv_heads) > MAX_GROUP:
        return (
            f"{group} query heads share a KV head; CUDA kernels take up to {MAX_GROUP}"
        )
    return ""


def missing_for(
    pool_shape: tuple[int, ...],
    num_heads: int,
    rotary_dim: int,
    capability: tuple[int, int],
) -> str:
    """Return why the kernels cannot serve this model and pool; empty if they can.

    Every row of the tables fits GPUs of `LEAST_CAPABILITY` and newer ones.
    """
    _, kv_heads, _, planes, block_size, head_dim = pool_shape
    if capability < LEAST_CAPABILITY:
        least, found = (
            ".".join(map(str, one)) for one in (LEAST_CAPABILITY, capability)
        )
        return f"the GPU has compute capability {found}; CUDA kernels need {least} (Ampere)"
    is_latent = planes == 1
    if is_latent and (head_dim - rotary_dim > MAX_LATENT or rotary_dim > MAX_ROTATED):
        return (
            f"latent rows of {head_dim - rotary_dim} and {rotary_dim} numbers have no CUDA kernel "
            f"(kv_lora_rank and qk_rope_head_dim may be up to {MAX_LATENT} and {MAX_ROTATED})"
        )
    if not is_latent and head_dim not in HEAD_DIMS:
        return f"heads of {head_dim} have no CUDA kernel (those of {_listed(HEAD_DIMS)} have one)"
    if block_size not in BLOCK_SIZES:
        sizes = _listed(BLOCK_SIZES)
        return f"cache.block_size: {block_size} has no CUDA kernel; set it to {sizes}"
    if (group := num_heads // kv_heads) > MAX_GROUP and not is_latent:
        return (
            f"{group} query heads share a KV head; CUDA kernels take up to {MAX_GROUP}"
        )
    return ""


def _listed(sizes: tuple[int, ...]) -> str:
    return f"{', '.join(map(str, sizes[:-1]))} or {sizes[-1]}"
