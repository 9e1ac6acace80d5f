"""Log probabilities of tokens, from logits before rules, penalties and temperature.

A row has the same bits in any batch, because its sum is added element by element in a fixed order,
and equal logits rank by token id. A step's results are one tensor of integers, so a pair of an
int32 and an fp32 stands in each integer: the rank and log probability of a row's token, then ids
and log probabilities of the likeliest tokens.
"""

import struct
from array import array
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from baton.protocol.messages import TokenLogprobs

# Rows at a time, which bounds memory: of fp32 logits, and of fp64 values.
_LOGITS_ROWS, _ROWS = 64, 8


def packed_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> Tensor:
    """Return the pairs `[num_rows, 1 + num_top]` of logits `[num_rows, vocab]` in fp32."""
    parts = zip(torch.split(logits, _ROWS), torch.split(token_ids, _ROWS), strict=True)
    return torch.cat([_packed(part, ids, num_top) for part, ids in parts])


def packed_prompt(
    logits_of: Callable[[Tensor], Tensor], hidden: Tensor, token_ids: Tensor, num_top: int
) -> Tensor:
    """Return the same of `hidden`, of which few rows at a time have logits."""
    pieces = torch.split(hidden, _LOGITS_ROWS), torch.split(token_ids, _LOGITS_ROWS)
    parts = zip(*pieces, strict=True)
    return torch.cat([packed_logprobs(logits_of(part), ids, num_top) for part, ids in parts])


def unpacked_logprobs(words: Sequence[int]) -> TokenLogprobs:
    """Read one row."""
    (rank, logprob), *top = struct.iter_unpack("if", array("q", words))
    return TokenLogprobs(logprob, rank, tuple(top))


def bytes_of(words: Sequence[int], width: int, num_top: int) -> bytes:
    """Return rows of `width` pairs without those after the `num_top` likeliest."""
    return np.array(words, np.int64).reshape(-1, width)[:, : 1 + num_top].tobytes()


def _packed(logits: Tensor, token_ids: Tensor, num_top: int) -> Tensor:
    values, token_ids = logits.double(), token_ids[:, None]
    largest = values.amax(dim=1, keepdim=True)
    total = largest + _sum((values - largest).exp()).log()
    chosen = values.gather(1, token_ids)
    rank = (values > chosen).sum(dim=1, keepdim=True) + 1
    top = _ordered(logits).topk(num_top).indices
    found = torch.cat([chosen, values.gather(1, top)], dim=1) - total
    pairs = torch.stack([torch.cat([rank, top], dim=1).int(), found.float().view(torch.int32)], 2)
    return pairs.view(torch.int64).squeeze(2)


def _sum(values: Tensor) -> Tensor:
    """Return the sums of rows `[num_rows, 1]`, halves added to halves."""
    while (width := values.shape[1]) > 1:
        values = F.pad(values, (0, width % 2))
        half = values.shape[1] // 2
        values = values[:, :half] + values[:, half:]
    return values


def _ordered(logits: Tensor) -> Tensor:
    """Return different integers in the order of the logits, and of token ids where they equal."""
    bits = logits.view(torch.int32).long()
    values = torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
    return (values << 31) - torch.arange(logits.shape[1], device=logits.device)
