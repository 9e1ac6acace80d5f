"""The plain-torch reference of the kernels of sparse attention, in fp32.

An index scores all keys that a query may see, and the query sees those with the best scores
(DeepSeek-V3.2, arXiv 2512.02556). The reference of attention takes the choice as a mask.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def layer_norm(x: Tensor, norm: Tensor, eps: float) -> Tensor:
    """Return the layer norm of `[num_rows, count]`; `norm`, `[2, count]`, is weight and bias."""
    weight, bias = norm.float()
    return F.layer_norm(x.float(), weight.shape, weight, bias, eps).to(x.dtype)


def index_scores(
    q: Tensor,  # [num_tokens, num_heads, head_dim]
    weights: Tensor,  # [num_tokens, num_heads]
    keys: Tensor,  # [num_keys, head_dim]
) -> Tensor:
    """Return the score of each key for each token, `[num_tokens, num_keys]`."""
    products = torch.einsum("nhd,kd->nhk", q.float(), keys.float()).relu()
    return torch.einsum("nh,nhk->nk", weights.float(), products)


def chosen_keys(scores: Tensor, num_chosen: int) -> Tensor:
    """Return whether a query sees a key, shaped as `scores`.

    The queries are those of the last keys, and each chooses among the keys up to its own. Of equal
    scores, those of the first keys are better.
    """
    num_tokens, num_keys = scores.shape
    own = torch.arange(num_keys - num_tokens, num_keys, device=scores.device)
    is_later = torch.arange(num_keys, device=scores.device) > own[:, None]
    order = (
        scores.masked_fill(is_later, float("-inf"))
        .sort(descending=True, stable=True)
        .indices
    )
    is_chosen = torch.zeros_like(is_later).scatter(1, order[:, :num_chosen], value=True)
    return is_chosen & ~is_later


def paged_keys(pool: Tensor, layer: int, block_table: Tensor, num_keys: int) -> Tensor:
    """Return the first keys of a sequence, `[num_keys, head_dim]`.

    The pool is `[num_blocks, 1, num_layers, 1, block_size, head_dim]`.
    """
    num_blocks = -(-num_keys // pool.shape[4])
    blocks = pool[block_table[:num_blocks].long(), 0, layer, 0]
    return blocks.flatten(0, 1)[:num_keys]
