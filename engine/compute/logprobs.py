"""Log probabilities of sampled tokens, from logits before rules, penalties and temperature.

Each row is computed alone, and its sum is added in blocks of a fixed size, so the values are the
same in any batch and with any number of threads. A step's results are one tensor of integers, in
which the bits of real numbers stand.
"""

import struct
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from baton.protocol.messages import TokenLogprobs

_BLOCK = 1024


def packed_logprobs(logits: Tensor, token_id: Tensor, num_top: int) -> Tensor:
    """Return the results for one row of logits [vocab], as `unpacked_logprobs` reads them."""
    values = logits.to(torch.float64)
    largest = values.max()
    weights = F.pad((values - largest).exp(), (0, -len(values) % _BLOCK))
    total = largest + weights.view(-1, _BLOCK).sum(dim=1).sum().log()
    top = values.topk(num_top)
    chosen = values[token_id]
    rank = (values > chosen).sum() + 1
    found = torch.cat([chosen.view(1), top.values]) - total
    return torch.cat([rank.view(1), top.indices, found.view(torch.int64)])


def unpacked_logprobs(words: Iterator[int], num_top: int) -> TokenLogprobs:
    """Read the results of one row."""
    rank, ids = next(words), [next(words) for _ in range(num_top)]
    chosen, *rest = (_real(next(words)) for _ in range(num_top + 1))
    return TokenLogprobs(chosen, rank, tuple(zip(ids, rest, strict=True)))


def _real(word: int) -> float:
    """Return the real number with these bits, as precise as a logit is."""
    (value,) = struct.unpack("d", struct.pack("q", word))
    return struct.unpack("f", struct.pack("f", value))[0]  # type: ignore[no-any-return]
