"""Attention and the fused operations on CPUs: baton's compiled kernels behind `Backend`.

A token's bits depend on its own sequence alone, because every kernel adds its terms in an order
that does not depend on the batch, the chunk or the number of threads.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.kernels import reference
from baton.kernels.constants import SILU, Gate
from baton.kernels.cpu.functions import AttentionWork, CpuKernels
from baton.kernels.cpu.library import CpuLibrary, KernelsUnavailable, load_library
from baton.kernels.cpu.sparse.functions import CpuSparse
from baton.kernels.cpu.states.functions import CpuStates, state_work
from baton.kernels.state_reference import StateWeights, gated_inputs, gated_outputs
from baton.model.layers.attention import (
    PLAIN_KEYS,
    PLAIN_PARTS,
    Batch,
    Expansion,
    PoolParts,
    Scoring,
    pool_suffix,
    within,
)
from baton.protocol.config import KernelChoice
from baton.protocol.errors import ConfigError
from baton.runtime.log import logger

log = logger("attention")


def cpu_library(
    dtype: torch.dtype,
    pool_dtype: torch.dtype,
    wanted: KernelChoice,
    progress: Callable[[int, int], None],
) -> CpuLibrary | None:
    """Return the compiled kernels, or None where plain torch replaces them.

    While they are compiled, (kernels done, total) is reported to `progress`. Raises `ConfigError`
    if the settings ask for kernels that cannot be compiled.
    """
    if wanted == "torch":
        return None
    try:
        is_bf16 = dtype == torch.bfloat16
        fp8_pool = pool_dtype == torch.uint8
        library = load_library(is_bf16=is_bf16, progress=progress, fp8_pool=fp8_pool)
    except KernelsUnavailable as error:
        if wanted == "compiled":
            raise ConfigError(
                f"engine.kernels: {error}; auto computes with plain torch"
            ) from error
        log.warning("computing with plain torch, which is slower", reason=str(error))
        return None
    if library.not_kept:
        log.warning(
            "the compiled kernels cannot be kept, so every start compiles them: let XDG_CACHE_HOME "
            "name a folder that this user can write to",
            reason=library.not_kept,
        )
    return library


@dataclass(slots=True, frozen=True)
class _View:
    """What the queries of a step see, as the kernels take it."""

    kernels: CpuKernels
    slots: Tensor  # [num_tokens] int64
    tables: NDArray[np.int32]  # the block tables one after the other
    # [num_chunks, 4]: row, tokens, first position, start of a table.
    chunks: NDArray[np.int64]
    work: AttentionWork
    is_decoding: bool  # every sequence has one row

    def are_all(self, rows: NDArray[np.int64]) -> bool:
        """Return whether these are all rows of a step in which every sequence has one."""
        return self.is_decoding and np.array_equal(rows, self.chunks[:, 0])

    def chunks_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the queries of some rows, each as a chunk of one token."""
        chunks = self.chunks[np.searchsorted(self.chunks[:, 0], rows, side="right") - 1]
        chunks[:, 2] += rows - chunks[:, 0]
        chunks[:, 0] = np.arange(len(rows))
        chunks[:, 1] = 1
        return chunks


class CpuBackend:
    """The compiled kernels over a host pool."""

    is_batch_invariant = True
    has_two_orders = False
    expands_prompts = False
    absorbed_rows = None
    expansion: Expansion | None = None
    table_blocks = 0

    def __init__(
        self,
        library: CpuLibrary,
        # [num_blocks, kv_heads, num_layers, 2 or 1, block_size, head_dim].
        pool: Tensor,
        num_heads: int,
        # Rotary: [max_position, rotary_dim], of a head's last numbers.
        tables: Sequence[Tensor],
        eps: float,
        parts: PoolParts = PLAIN_PARTS,
    ) -> None:
        # Attention with bf16 products has other bits, which also depend on the CPU. The rules of
        # linear layers, which use the same instruction, tell such CPUs apart.
        self.name = ("compiled-bf16" if library.in_pairs else "compiled") + pool_suffix(
            pool
        )
        self.block_size, self.head_dim = pool.shape[4], reference.pool_head_dim(pool)
        self.eps = eps
        self.scoring = Scoring(self.head_dim**-0.5)
        self.library = library
        self._kernels = CpuKernels(library, pool, num_heads)
        self._pool = pool
        states, self._wide, index = parts
        self._wide_kernels = None
        if self._wide is not None:
            self._wide_kernels = CpuKernels(library, self._wide.view(pool), num_heads)
        self._states = None if states is None else CpuStates(library, pool, states)
        self._sparse = (
            None if index is None else CpuSparse(library, self._kernels, pool, *index)
        )
        self.keys = PLAIN_KEYS
        self._angles = [table.contiguous() for table in tables]

    def begin(self, batch: Batch) -> None:
        self._batch = batch
        self._views: dict[tuple[int, bool], _View] = {}
        if self._sparse is not None:
            self.keys = PLAIN_KEYS
            view = self._view()
            self._sparse.begin(view.tables, view.chunks)
        if self._states is not None:
            self._state_work = state_work(
                [
                    (
                        chunk.row,
                        chunk.length,
                        chunk.start,
                        chunk.num_held,
                        chunk.num_guesses,
                    )
                    for chunk in batch.chunks
                ],
                [*chain.from_iterable(one.state for one in batch.chunks)],
            )

    def attend(
        self,
        layer: int,
        qkv: Tensor,
        head_norms: Tensor | None,
        rows: Tensor | None = None,
    ) -> Tensor:
        view = self._view()
        q = view.kernels.rope_and_store(
            qkv,
            layer,
            self._batch.positions,
            view.slots,
            self._angles[self.keys.rotation],
            head_norms,
            self.eps,
            are_stored=self.keys.are_stored,
        )
        wanted = None
        if rows is not None and not view.are_all(rows.numpy()):
            q = q[rows]
            wanted = rows.numpy()
            if not len(q):
                return q.flatten(1)
        if self._sparse is not None:
            chunks = view.chunks if wanted is None else view.chunks_of(wanted)
            return self._sparse.attend(
                q, layer, wanted, chunks, self.scoring.scale
            ).flatten(1)
        work = view.work
        if wanted is not None:
            work = view.kernels.attention_work(view.tables, view.chunks_of(wanted))
        out = torch.empty_like(q)
        view.kernels.attend(q, layer, work, out, *self.scoring)
        return out.flatten(1)

    def choose(self, layer: int, heads: Tensor, weights: Tensor) -> None:
        assert self._sparse is not None, "the model has an index"
        positions = self._batch.positions
        slots = self._batch.slots
        self._sparse.choose(layer, heads, weights, positions, slots, self._angles[0])

    def layer_norm(self, x: Tensor, norm: Tensor, eps: float) -> Tensor:
        assert self._sparse is not None, "an index norms its keys"
        return self._sparse.layer_norm(x, norm, eps)

    def advance(
        self, layer: int, x: Tensor, weights: StateWeights, rows: Tensor | None = None
    ) -> Tensor:
        states = self._states
        work = self._state_work
        assert states is not None, "the pool has states"
        if weights.gates is None:
            inputs, gates = gated_inputs(x)
            mixed = states.convolve(inputs, layer, work, weights)
            return gated_outputs(mixed, gates, rows)
        mixed = states.convolve(x, layer, work, weights)
        decays, betas = states.gate_steps(x, weights.gates)
        out = states.advance(mixed, layer, work, weights, decays, betas)
        if rows is not None:
            out = out[rows]
            x = x[rows]
        return states.gated_norm(out, x, weights, self.eps)

    def sigmoid_mul(self, x: Tensor, gates: Tensor) -> Tensor:
        return self._kernels.sigmoid_mul(x, gates)

    def _view(self) -> _View:
        """Return what the queries of a layer with such `keys` see in this step."""
        which = self.keys.chunk_size, self.keys.are_wide
        if which not in self._views:
            parts = within(self._batch.chunks, self.keys.chunk_size, self.block_size)
            used = [
                part.block_table[: -(-part.end // self.block_size)] for part in parts
            ]
            kernels = self._kernels
            slots = self._batch.slots
            if self.keys.are_wide:
                assert self._wide is not None, "the layers are said to be wide"
                assert self._wide_kernels is not None, "the layers are said to be wide"
                kernels = self._wide_kernels
                slots = self._wide.slots(self._pool, slots)
                used = [self._wide.block_table(self._pool, blocks) for blocks in used]
            starts = accumulate((len(blocks) for blocks in used), initial=0)
            chunks = np.array(
                [
                    (part.row, part.length, part.start, start)
                    for part, start in zip(parts, starts, strict=False)
                ],
                np.int64,
            )
            tables = np.fromiter(chain.from_iterable(used), np.int32)
            work = kernels.attention_work(tables, chunks)
            is_decoding = len(chunks) == self._batch.num_tokens
            self._views[which] = _View(
                kernels, slots, tables, chunks, work, is_decoding
            )
        return self._views[which]

    def add_rms_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return self._kernels.add_rms_norm(x, residual, weight, eps)

    def gate_mul(self, gate_up: Tensor, gate: Gate = SILU) -> Tensor:
        return self._kernels.gate_mul(gate_up, gate)

    def soft_cap(self, x: Tensor, softcap: float) -> None:
        self._kernels.soft_cap(x, softcap)

    def add_experts(self, rows: Tensor, weights: Tensor) -> Tensor:
        # Far less work than the experts' products.
        return reference.add_experts(rows, weights)
