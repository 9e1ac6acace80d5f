"""The index of sparse attention (DSA of DeepSeek-V3.2), which chooses the keys that a query sees.

A layer's index has a few narrow heads, whose queries meet one key of each token. A key's score is
the sum over the heads of `max(query · key, 0)`, weighted by the token that asks. The index's keys
are stored in the blocks of the tokens, after their rows.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from baton.model.layers.attention import Backend
from baton.model.layers.linear import Linear

INDEX_EPS = 1e-6  # of the norm of keys, for which config.json has no field


@dataclass(slots=True, frozen=True)
class KeyIndex:
    """One layer's index, which each rank has as a whole.

    A head's rotated numbers are its last ones, and those that are rotated together are half of
    them apart.
    """

    number: int  # among the layers with an index
    num_heads: int
    head_dim: int
    queries: Linear  # [num_heads * head_dim, q_lora_rank]
    key_norm: Tensor  # [2, head_dim] in fp32: the weight and the bias
    weights: Linear  # [num_heads, hidden] in fp32

    def packed(
        self, q_row: Tensor, key: Tensor, hidden: Tensor, backend: Backend
    ) -> Tensor:
        """Return queries, key and the bits of the heads' weights side by side, `[num_tokens, …]`.

        `q_row` is `[num_tokens, q_lora_rank]`, and `key`, `[num_tokens, head_dim]`, has no norm
        yet. The weights stay in fp32, so each takes the room of two bf16 numbers.
        """
        normed = backend.layer_norm(key, self.key_norm, INDEX_EPS)
        weights = (
            self.weights(hidden.float()) * (self.num_heads * self.head_dim) ** -0.5
        )
        return torch.cat((self.queries(q_row), normed, weights.view(key.dtype)), dim=1)

    def parted(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the part of `x` before what `packed` has made, then what `Backend.choose` takes.

        That is `[num_tokens, (num_heads + 1) * head_dim]`, queries first, and the weights,
        `[num_tokens, num_heads]` in fp32.
        """
        heads = (self.num_heads + 1) * self.head_dim
        bits = self.num_heads * torch.float32.itemsize // x.dtype.itemsize
        end = x.shape[1] - bits
        before = x[:, : end - heads]
        queries = x[:, end - heads : end]
        weights = x[:, end:]
        weights = weights.contiguous().view(torch.float32)
        return before.contiguous(), queries.contiguous(), weights

    def linears(self) -> Iterator[Linear]:
        yield self.queries
        yield self.weights


class IndexWeights(NamedTuple):
    """The weights of a layer's index, as the files have them."""

    number: int
    queries: Tensor  # [num_heads, head_dim, q_lora_rank]
    key: Tensor  # [head_dim, hidden]
    key_norm: Tensor  # [2, head_dim]
    weights: Tensor  # [num_heads, hidden] in fp32
    rotated: int  # the first numbers of a head
    is_interleaved: bool


def make_index(
    weights: IndexWeights, make: Callable[[Tensor], Linear]
) -> tuple[Tensor, KeyIndex]:
    """Return the weight that makes keys of hidden states, and the rest of the index."""
    num_heads, head_dim, _ = weights.queries.shape
    order = _order(head_dim, weights.rotated, is_interleaved=weights.is_interleaved)
    order = order.to(weights.key.device)
    return weights.key[order], KeyIndex(
        number=weights.number,
        num_heads=num_heads,
        head_dim=head_dim,
        queries=make(weights.queries[:, order].flatten(0, 1)),
        key_norm=weights.key_norm[:, order].contiguous(),
        weights=make(weights.weights),
    )


def _order(head_dim: int, rotated: int, *, is_interleaved: bool) -> Tensor:
    """Return the numbers of a head of the files in the order in which kernels rotate them."""
    turning = torch.arange(rotated)
    if is_interleaved:
        turning = torch.cat((turning[::2], turning[1::2]))
    return torch.cat((torch.arange(rotated, head_dim), turning))
