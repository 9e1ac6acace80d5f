"""Attention by the kernels for Hopper in one step, with plans that its layers share.

Plans are made on the device at a step's first layer that needs them. A captured step holds what
makes them, too, and so plans anew for the lengths with which it is replayed.
"""

from torch import Tensor

from baton.kernels.hopper.attention.decode import one_decode_attention, plan_decode
from baton.kernels.hopper.attention.prefill import (
    PrefillPlan,
    paged_prefill_attention,
    prefill_plan,
)
from baton.model.layers.attention import Scoring, Tables


class HopperAttention:
    def __init__(self, pool: Tensor, tables: Tables, *, has_one_order: bool) -> None:
        """Serve one step. With one order, prefill and decode give a token the same bits."""
        self._pool = pool
        self.has_one_order = has_one_order
        decoding = tables.num_decoding
        self._starts = tables.query_starts
        self._decode_tables = tables.blocks[:decoding]
        self._decode_lens = tables.context_lens[:decoding]
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
        """Return the attention of a token for each sequence, in the one order."""
        window = scoring.window
        plan = self._decode_plans.get(window)
        if plan is None:
            heads = self._pool.shape[1], self._pool.shape[5]
            plan = plan_decode(self._decode_lens, *heads, window)
            self._decode_plans[window] = plan
        return one_decode_attention(
            q,
            self._pool,
            layer,
            self._decode_tables,
            self._decode_lens,
            plan,
            *scoring,
        )
