"""What `kernels/hopper/attention/order.py` promises, in plain torch: the order of each sum in fp32.

A row is a query of one head at its own position. Nothing here depends on other rows, chunks, the
batch or the number of programs.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.kernels.constants import LOG2_E, in_powers_of_2
from baton.model.layers.attention import Scoring

Sums = tuple[
    Tensor, Tensor, Tensor
]  # maximum [rows], sum [rows], output [rows, head_dim]


def exact_fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return `a * b + c`, rounded once: exact in fp64, rounded to odd, then to fp32."""
    a, b, c = torch.broadcast_tensors(a.double(), b.double(), c.double())
    product = a * b
    total = product + c
    other = total - product
    error = (product - (total - other)) + (c - other)
    is_even = (total.view(torch.int64) & 1) == 0
    is_inexact = is_even & (error != 0) & total.isfinite()
    towards = torch.where(error > 0, torch.inf, -torch.inf)
    return torch.where(is_inexact, torch.nextafter(total, towards), total).float()


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """How a machine multiplies, raises, adds products, and rounds to a pool's type."""

    dot: Callable[[Tensor, Tensor], Tensor] = torch.matmul
    exp2: Callable[[Tensor], Tensor] = torch.exp2
    fma: Callable[[Tensor, Tensor, Tensor], Tensor] = exact_fma
    narrow: Callable[[Tensor, torch.dtype], Tensor] = Tensor.to

    def merge(self, sums: Sums, after: Sums) -> Sums:
        m, norm, acc = sums
        m_next, norm_next, acc_next = after
        m_new = torch.maximum(m, m_next)
        top = torch.where(m_new.isinf(), 0.0, m_new)
        old = self.exp2(m - top)
        new = self.exp2(m_next - top)
        norm = self.fma(norm, old, norm_next * new)
        acc = self.fma(acc, old[:, None], acc_next * new[:, None])
        return m_new, norm, acc


def tile_keys(head_dim: int) -> int:
    """Return how many keys a tile has."""
    return 128 if head_dim <= 128 else 64


def opens_cut(key: int) -> bool:
    """Return whether a key is the first of a cut."""
    if key < 2048:
        return key % 256 == 0
    return key % (512 if key < 8192 else 2048) == 0


def row_sum(weights: Tensor) -> Tensor:
    """Return the sums of `[rows, keys]`: pairs that differ in bit 0, then 5, 6, 3, 4, 1 and 2."""
    num_bits = weights.shape[1].bit_length() - 1
    bits = [*reversed(range(num_bits))]
    x = weights.reshape(-1, *[2] * num_bits)
    for bit in (0, 5, 6, 3, 4, 1, 2):
        if bit >= num_bits:
            continue
        at = 1 + bits.index(bit)
        bits.remove(bit)
        first, second = x.unbind(at)
        x = first + second
    return x


def attend(
    q: Tensor,  # [rows, head_dim]
    k: Tensor,  # [num_keys, head_dim]
    v: Tensor,
    positions: Tensor,  # [rows], each below num_keys
    scoring: Scoring,  # with sinks of the rows, `[rows]`
    machine: Arithmetic,
) -> Tensor:
    """Return the attention of rows of one head in the type of the pool."""
    rows, head_dim = q.shape
    num_keys = tile_keys(head_dim)
    # Tiles are as wide as the next power of 2.
    dim = 1 << (head_dim - 1).bit_length()
    q, k, v = (F.pad(part, (0, dim - head_dim)) for part in (q, k, v))
    scale, window, softcap, sinks = scoring
    scale_log2, cap_log2 = (
        torch.tensor(number, dtype=torch.float64).float()
        for number in in_powers_of_2(scale, softcap)
    )
    factor = scale_log2 if softcap is None else torch.tensor(1.0)
    lowest = torch.full((rows,), -torch.inf)
    none = lowest, torch.zeros(rows), torch.zeros(rows, dim)
    total = sums = none
    for first in range(0, int(positions.max()) + 1, num_keys):
        if opens_cut(first):
            total = machine.merge(total, sums) if first else total
            sums = none
        m, norm, acc = sums
        own = slice(first, first + num_keys)
        padding = (0, 0, 0, num_keys - len(k[own]))
        keys, values = (F.pad(part[own].float(), padding) for part in (k, v))
        s = machine.dot(q.float(), keys.T)
        if softcap is not None:
            share = 1.0 / (1.0 + machine.exp2(s * scale_log2))
            s = machine.fma(share, -2 * cap_log2, cap_log2)
        numbers = first + torch.arange(num_keys)
        seen = numbers <= positions[:, None]
        if window is not None:
            seen &= numbers > positions[:, None] - window
        s = torch.where(seen, s, -torch.inf)
        m_new = torch.maximum(m, s.max(1).values * factor)
        top = torch.where(m_new.isinf(), 0.0, m_new)
        w = machine.exp2(machine.fma(s, factor, -top[:, None]))
        shrink = machine.exp2(m - top)
        norm = machine.fma(norm, shrink, row_sum(w))
        # A product adds in the order of the keys, 16 at a time.
        product = machine.dot(machine.narrow(w, v.dtype).float(), values)
        sums = m_new, norm, acc * shrink[:, None] + product
    m, norm, acc = machine.merge(total, sums)
    if sinks is not None:
        sink = sinks * torch.tensor(LOG2_E)
        m_new = torch.maximum(m, sink)
        shrink = machine.exp2(m - m_new)
        norm = machine.fma(norm, shrink, machine.exp2(sink - m_new))
        acc = acc * shrink[:, None]
    out = machine.narrow(acc * (1.0 / norm)[:, None], v.dtype)
    return out[:, :head_dim]
