"""Attention by the kernels for Hopper in one step, with plans that its layers share.

Plans are made on the device at a step's first layer that needs them. A captured step holds what
makes them, too, and so plans anew for the lengths with which it is replayed. Those of latent
attention are made on the host, which knows what there is to expand.
"""

import numpy as np
from torch import Tensor

from baton.kernels.cuda.latent_attention import latent_decode_attention
from baton.kernels.cuda.paged import MAX_BATCH
from baton.kernels.hopper.attention.decode import one_decode_attention, plan_decode
from baton.kernels.hopper.attention.latent_prefill import (
    PLAIN_DIM,
    TURNED_DIM,
    LatentPlan,
    Prompt,
    expanded_prefill_attention,
    latent_plan,
    sent,
)
from baton.kernels.hopper.attention.prefill import (
    PrefillPlan,
    paged_prefill_attention,
    prefill_plan,
)
from baton.model.layers.attention import (
    Batch,
    Chunk,
    DecodeRows,
    Expansion,
    Scoring,
    Tables,
)


class HopperAttention:
    def __init__(
        self, pool: Tensor, tables: Tables, decode: DecodeRows, *, has_one_order: bool
    ) -> None:
        """Serve one step. With one order, prefill and decode give a token the same bits."""
        self._pool = pool
        self.has_one_order = has_one_order
        decoding = tables.num_decoding
        self._starts = tables.query_starts
        self._decode = decode
        self._prefill_tables = tables.blocks[decoding:]
        self._prefill_lens = tables.context_lens[decoding:]
        # By window.
        self._decode_plans: dict[int | None, Tensor] = {}
        self._prefill_plans: dict[int | None, PrefillPlan] = {}

    def prefill(self, q: Tensor, layer: int, scoring: Scoring) -> Tensor:
        """Return the attention of chunks, shaped as `q`, `[num_tokens, num_heads, head_dim]`."""
        window = scoring.window
        plan = self._prefill_plans.get(window)
        if plan is None:
            plan = prefill_plan(
                q,
                self._pool,
                self._starts,
                self._prefill_lens,
                window,
                cuts=self.has_one_order,
            )
            self._prefill_plans[window] = plan
        return paged_prefill_attention(
            q,
            self._pool,
            layer,
            self._prefill_tables,
            plan,
            scoring.scale,
            scoring.softcap,
            scoring.sinks,
        )

    def decode(self, q: Tensor, layer: int, scoring: Scoring) -> Tensor:
        """Return the attention of the rows that decode, in the one order."""
        rows = self._decode
        window = scoring.window
        plan = self._decode_plans.get(window)
        if plan is None:
            lens = rows.context_lens
            plan = plan_decode(q, self._pool, lens, window, starts=rows.starts)
            self._decode_plans[window] = plan
        return one_decode_attention(
            q,
            self._pool,
            layer,
            rows.blocks,
            rows.context_lens,
            plan,
            *scoring,
            rows.starts,
        )


class HopperLatent:
    """Latent attention whose prompts attend to expanded keys.

    A row's position decides: those before a prompt's last token do, and the others are absorbed.
    """

    def __init__(self, pool: Tensor, num_heads: int) -> None:
        self._pool = pool
        self._num_heads = num_heads
        self._plan: LatentPlan | None = None
        # Of the present step; None: all.
        self.absorbed_rows: Tensor | None = None

    def begin(self, batch: Batch) -> None:
        """Plan a step. One that is padded only decodes."""
        assert batch.tables is not None, "the kernels read tables on the device"
        blocks = batch.tables.blocks
        prompts = []
        rows: list[int] = []
        sequences: list[int] = []
        lens: list[int] = []
        for sequence, chunk in enumerate(batch.chunks):
            count = _num_before_last(chunk)
            if count:
                prompts.append(Prompt(sequence, chunk.row, chunk.start, count))
            rows += range(chunk.row + count, chunk.row + chunk.length)
            sequences += [sequence] * (chunk.length - count)
            lens += range(chunk.start + count + 1, chunk.end + 1)
        self._plan = self.absorbed_rows = None
        if not prompts:
            return
        self._plan = latent_plan(prompts, self._pool, blocks, self._num_heads)
        absorbed = np.array([rows, sequences, lens], np.int32)
        self.absorbed_rows, sequences_of, self._lens = sent(absorbed, blocks.device)
        self._tables = blocks[sequences_of]

    def attend(
        self,
        q: Tensor,  # [num_tokens, num_heads, row_dim], absorbed where they have to be
        plain: Tensor,  # [num_tokens, num_heads, PLAIN_DIM]
        layer: int,
        scale: float,
        expansion: Expansion,
    ) -> Tensor:
        """Return values, `[num_tokens, num_heads, PLAIN_DIM]`."""
        rows = self.absorbed_rows
        assert self._plan is not None, "the step has tokens of a prompt"
        assert rows is not None, "so it is said which rows are absorbed"
        out = expanded_prefill_attention(
            plain,
            q[..., -TURNED_DIM:],
            self._pool,
            layer,
            self._plan,
            expansion.keys_and_values,
            scale,
        )
        for first in range(0, len(rows), MAX_BATCH):
            own = slice(first, first + MAX_BATCH)
            mixed = latent_decode_attention(
                q[rows[own]],
                self._pool,
                layer,
                self._tables[own],
                self._lens[own],
                scale,
                TURNED_DIM,
            )
            values = expansion.expanded(mixed.flatten(1))
            out[rows[own]] = values.view(-1, self._num_heads, PLAIN_DIM)
        return out


def _num_before_last(chunk: Chunk) -> int:
    """Return how many tokens of a chunk lie before its prompt's last one."""
    return min(max(chunk.num_prompt_tokens - 1 - chunk.start, 0), chunk.length)
