"""Latent attention (MLA of DeepSeek-V2, arXiv 2405.04434) in its absorbed form.

A layer stores one row of a token: a latent row, from which the keys and values of all heads follow
by a matrix of each head, and a rotated key that they share. Instead of expanding the rows, a head's
query is multiplied by its key matrix, so that it attends to latent rows, and what it mixes of them
is multiplied by its value matrix. Where a backend says so, tokens of prompts attend to expanded
keys and values instead.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from baton.model.config.latent_config import LatentConfig
from baton.model.layers.attention import Backend
from baton.model.layers.key_index import IndexWeights, KeyIndex, make_index
from baton.model.layers.linear import Linear
from baton.model.layers.mlp import GroupedLinear

LATENT_EPS = 1e-6  # of the norms of latent rows, for which config.json has no field


@dataclass(slots=True, frozen=True)
class LatentAttention:
    """What lies between a layer's first projection and paged attention, and after it."""

    sizes: LatentConfig
    num_heads: int  # of this rank
    q_norm: Tensor | None  # [q_lora_rank]
    q_expand: Linear | None  # [num_heads * qk_head_dim, q_lora_rank]
    row_norm: Tensor  # [kv_lora_rank]
    keys: GroupedLinear  # of each head: [kv_lora_rank, qk_nope_head_dim]
    values: GroupedLinear  # of each head: [v_head_dim, kv_lora_rank]
    # None: the layer sees all keys, or those of the last index before it.
    index: KeyIndex | None
    # Each head's key, then its value: [num_heads * (qk_nope_head_dim + v_head_dim), kv_lora_rank].
    row_expand: Linear | None = None

    def packed(self, x: Tensor, hidden: Tensor, backend: Backend) -> Tensor:
        """Return what `Backend.attend` takes: a token's queries by head, then the row to store.

        `x`, `[num_tokens, (q_lora_rank or num_heads * qk_head_dim) + row_dim]`, is the projection
        of the hidden state. With an index, it ends with the index's key, and the result with what
        `KeyIndex.parted` takes. Where not all queries are absorbed, it ends with the plain ones.
        """
        sizes = self.sizes
        heads = self.num_heads
        rank = self.sizes.kv_lora_rank
        end = x.shape[1] - (0 if self.index is None else self.index.head_dim)
        q = x[:, : end - sizes.row_dim]
        row = x[:, end - sizes.row_dim : end]
        q_row = q
        if self.q_norm is not None and self.q_expand is not None:
            q_row, _ = backend.add_rms_norm(q, None, self.q_norm, LATENT_EPS)
            q = self.q_expand(q_row)
        latent, _ = backend.add_rms_norm(row[:, :rank], None, self.row_norm, LATENT_EPS)
        q = q.reshape(len(x), heads, sizes.qk_head_dim)
        plain = q[..., : sizes.qk_nope_head_dim]
        width = (heads + 1) * sizes.row_dim
        rows = backend.absorbed_rows
        if rows is None:
            packed = x.new_empty(len(x), width)
        else:
            packed = x.new_empty(len(x), width + heads * sizes.qk_nope_head_dim)
            packed[:, width:] = plain.flatten(1)
        out = packed[:, :width].view(len(x), heads + 1, sizes.row_dim)
        if rows is None:
            out[:, :heads, :rank] = self._by_head(self.keys, plain)
        elif len(rows):
            out[rows, :heads, :rank] = self._by_head(self.keys, plain[rows])
        out[:, :heads, rank:] = q[..., sizes.qk_nope_head_dim :]
        out[:, heads, :rank], out[:, heads, rank:] = latent, row[:, rank:]
        if self.index is None:
            return packed
        of_index = self.index.packed(q_row, x[:, end:], hidden, backend)
        return torch.cat((packed, of_index), dim=1)

    def keys_and_values(self, rows: Tensor) -> Tensor:
        assert self.row_expand is not None, (
            "the layer was loaded for a backend that expands"
        )
        return self.row_expand(rows)

    def expanded(self, mixed: Tensor) -> Tensor:
        """Return values, `[num_rows, num_heads * v_head_dim]`, for rows that attention mixed."""
        rows = mixed.view(len(mixed), self.num_heads, -1)
        return self._by_head(self.values, rows[..., : self.sizes.kv_lora_rank]).flatten(
            1
        )

    def _by_head(self, matrices: GroupedLinear, x: Tensor) -> Tensor:
        """Return `[num_rows, num_heads, outputs]` for `[num_rows, num_heads, inputs]`."""
        num_rows, heads, _ = x.shape
        ends = torch.arange(1, heads + 1, dtype=torch.int32, device=x.device) * num_rows
        y = matrices(x.transpose(0, 1).flatten(0, 1), ends)
        return y.view(heads, num_rows, -1).transpose(0, 1)

    def linears(self) -> Iterator[Linear]:
        if self.q_expand is not None:
            yield self.q_expand
        yield from self.keys.linears()
        yield from self.values.linears()
        if self.row_expand is not None:
            yield self.row_expand
        if self.index is not None:
            yield from self.index.linears()


class LatentWeights(NamedTuple):
    """The weights of latent attention, with this rank's heads of those that have any."""

    q_down: Tensor | None  # [q_lora_rank, hidden]; None: `q_up` takes the hidden state
    q_norm: Tensor | None  # [q_lora_rank]
    q_up: Tensor  # [num_heads, qk_head_dim, inputs]
    row_down: Tensor  # [row_dim, hidden]
    row_norm: Tensor  # [kv_lora_rank]
    row_up: Tensor  # [num_heads, qk_nope_head_dim + v_head_dim, kv_lora_rank]
    of_index: IndexWeights | None


def make_latent(
    sizes: LatentConfig,
    weights: LatentWeights,
    make: Callable[[Tensor], Linear],
    group: Callable[[Iterator[Tensor]], GroupedLinear],
    *,
    expands: bool = False,
) -> tuple[Linear, LatentAttention]:
    """Return a layer's first projection and the rest of its attention.

    `make` takes one weight, `group` several. `expands`: prompts attend to expanded keys.
    """
    nope = sizes.qk_nope_head_dim

    def in_halves(weight: Tensor, plain: int) -> Tensor:
        """Put what is rotated together half a row apart, as the kernels rotate it."""
        if not sizes.is_interleaved:
            return weight
        firsts = weight[..., plain::2, :]
        seconds = weight[..., plain + 1 :: 2, :]
        return torch.cat((weight[..., :plain, :], firsts, seconds), dim=-2)

    queries = in_halves(weights.q_up, nope).flatten(0, 1)
    row = in_halves(weights.row_down, sizes.kv_lora_rank)
    firsts = [queries if weights.q_down is None else weights.q_down, row]
    index = None
    if weights.of_index is not None:
        index_key, index = make_index(weights.of_index, make)
        firsts.append(index_key)
    return make(torch.cat(firsts)), LatentAttention(
        sizes=sizes,
        num_heads=len(weights.q_up),
        q_norm=weights.q_norm,
        q_expand=None if weights.q_down is None else make(queries),
        row_norm=weights.row_norm,
        keys=group(head[:nope].T.contiguous() for head in weights.row_up),
        values=group(head[nope:].contiguous() for head in weights.row_up),
        index=index,
        row_expand=make(weights.row_up.flatten(0, 1)) if expands else None,
    )
