"""Latent attention (MLA of DeepSeek-V2, arXiv 2405.04434) in its absorbed form.

A layer stores one row of a token: a latent row, from which the keys and values of all heads follow
by a matrix of each head, and a rotated key that they share. Instead of expanding the rows, a head's
query is multiplied by its key matrix, so that it attends to latent rows, and what it mixes of them
is multiplied by its value matrix. Prompts are computed in the same form, so a token has the same
bits in chunks of any length.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from baton.model.config.latent_config import LatentConfig
from baton.model.layers.attention import Backend
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

    def packed(self, x: Tensor, backend: Backend) -> Tensor:
        """Return what `Backend.attend` takes: a token's queries by head, then the row to store.

        `x`, `[num_tokens, (q_lora_rank or num_heads * qk_head_dim) + row_dim]`, is the projection
        of the hidden state.
        """
        sizes, heads, rank = self.sizes, self.num_heads, self.sizes.kv_lora_rank
        q, row = x[:, : -sizes.row_dim], x[:, -sizes.row_dim :]
        if self.q_norm is not None and self.q_expand is not None:
            q = self.q_expand(backend.add_rms_norm(q, None, self.q_norm, LATENT_EPS)[0])
        latent, _ = backend.add_rms_norm(row[:, :rank], None, self.row_norm, LATENT_EPS)
        q = q.reshape(len(x), heads, sizes.qk_head_dim)
        absorbed = self._by_head(self.keys, q[..., : sizes.qk_nope_head_dim])
        out = x.new_empty(len(x), heads + 1, sizes.row_dim)
        out[:, :heads, :rank], out[:, :heads, rank:] = absorbed, q[..., sizes.qk_nope_head_dim :]
        out[:, heads, :rank], out[:, heads, rank:] = latent, row[:, rank:]
        return out.flatten(1)

    def expanded(self, mixed: Tensor) -> Tensor:
        """Return values, `[num_rows, num_heads * v_head_dim]`, for rows that attention mixed."""
        rows = mixed.view(len(mixed), self.num_heads, -1)
        return self._by_head(self.values, rows[..., : self.sizes.kv_lora_rank]).flatten(1)

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


class ReadTensor(Protocol):
    def __call__(self, name: str, /, *, rows: slice | None = None) -> Tensor: ...


def load_latent(
    sizes: LatentConfig,
    heads: slice,
    read: ReadTensor,
    make: Callable[[Tensor], Linear],
    group: Callable[[Iterator[Tensor]], GroupedLinear],
) -> tuple[Linear, LatentAttention]:
    """Return a layer's first projection and the rest of its attention for some of its heads.

    `read` takes a tensor's name within the attention, `make` and `group` one and several weights.
    """
    count, nope = heads.stop - heads.start, sizes.qk_nope_head_dim
    is_latent = sizes.q_lora_rank is not None

    def of_heads(name: str, width: int) -> Tensor:  # [count, width, inputs]
        rows = slice(heads.start * width, heads.stop * width)
        return read(name, rows=rows).view(count, width, -1)

    def turned(weight: Tensor, plain: int) -> Tensor:
        """Put what is rotated together half a row apart, as the kernels rotate it."""
        if not sizes.is_interleaved:
            return weight
        ones, others = weight[..., plain::2, :], weight[..., plain + 1 :: 2, :]
        return torch.cat((weight[..., :plain, :], ones, others), dim=-2)

    queries = of_heads("q_b_proj.weight" if is_latent else "q_proj.weight", sizes.qk_head_dim)
    queries = turned(queries, nope).flatten(0, 1)
    row = turned(read("kv_a_proj_with_mqa.weight"), sizes.kv_lora_rank)
    expand = of_heads("kv_b_proj.weight", nope + sizes.v_head_dim)
    first = make(torch.cat((read("q_a_proj.weight") if is_latent else queries, row)))
    return first, LatentAttention(
        sizes=sizes,
        num_heads=count,
        q_norm=read("q_a_layernorm.weight").float() if is_latent else None,
        q_expand=make(queries) if is_latent else None,
        row_norm=read("kv_a_layernorm.weight").float(),
        keys=group(one[:nope].T.contiguous() for one in expand),
        values=group(one[nope:].contiguous() for one in expand),
    )
