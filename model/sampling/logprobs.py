"""Log probabilities of tokens, from logits before rules, penalties and temperature.

A row has the same bits in any batch, because its sum is added element by element in a fixed order.
A step's results are one tensor of integers, each of which holds a pair of an int32 and an fp32: the
rank and log probability of a row's token, then ids and log probabilities of the likeliest tokens.
"""

import struct
from array import array
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from baton.protocol.messages import TokenLogprobs

# Rows at a time, which bounds memory: of logits, and of their weights in fp64.
_LOGITS_ROWS = 64
_ROWS = 8


def packed_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> Tensor:
    """Return the pairs `[num_rows, 1 + num_top]` of logits `[num_rows, vocab]`."""
    parts = zip(torch.split(logits, _ROWS), torch.split(token_ids, _ROWS), strict=True)
    return torch.cat([_packed(part, ids, num_top) for part, ids in parts])


def packed_prompt(
    logits_of: Callable[[Tensor], Tensor],
    hidden: Tensor,
    token_ids: Tensor,
    num_top: int,
) -> Tensor:
    """Return the same of `hidden`, of which few rows at a time have logits."""
    pieces = torch.split(hidden, _LOGITS_ROWS), torch.split(token_ids, _LOGITS_ROWS)
    parts = zip(*pieces, strict=True)
    return torch.cat(
        [packed_logprobs(logits_of(part), ids, num_top) for part, ids in parts]
    )


def unpacked_logprobs(words: Sequence[int]) -> TokenLogprobs:
    """Read one row."""
    (rank, logprob), *top = struct.iter_unpack("if", array("q", words))
    return TokenLogprobs(logprob, rank, tuple(top))


def _packed(logits: Tensor, token_ids: Tensor, num_top: int) -> Tensor:
    token_ids = token_ids[:, None]
    logits = logits.float()
    largest = logits.amax(dim=1, keepdim=True)
    total = largest + _sum((logits - largest).exp().double()).log()
    chosen = logits.gather(1, token_ids)
    rank = (logits > chosen).count_nonzero(dim=1)[:, None] + 1
    top = _likeliest(logits, num_top)
    found = torch.cat([chosen, logits.gather(1, top)], dim=1) - total
    pairs = torch.stack(
        [torch.cat([rank, top], dim=1).int(), found.float().view(torch.int32)], 2
    )
    return pairs.view(torch.int64).squeeze(2)


def _sum(values: Tensor) -> Tensor:
    """Return the sums of rows `[num_rows, 1]`, halves added to halves."""
    while (width := values.shape[1]) > 1:
        if width % 2:
            values = F.pad(values, (0, 1))
        values = values[:, : (width + 1) // 2] + values[:, (width + 1) // 2 :]
    return values


def _likeliest(logits: Tensor, num_top: int) -> Tensor:
    """Return their ids in order; of equal ones, the lower id comes first."""
    ids = logits.topk(num_top, dim=1).indices.sort(dim=1).values
    order = logits.gather(1, ids).sort(dim=1, descending=True, stable=True).indices
    return ids.gather(1, order)
