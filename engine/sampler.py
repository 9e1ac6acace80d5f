"""Draw tokens from logits: filters, then the Gumbel-max trick with noise that can be replayed.

The runner calls it once a step. A row's token is a pure function of its own logits and of (seed,
choice, position): the same in any batch, order, process or node, so a resumed sequence draws what
the uninterrupted one would have drawn. There is no generator, and no draw depends on another.

Sums are integers, because an integer sum is the same in every order of addition. On CPUs the kernel
of `kernels.cpu_sampling` takes the place of the torch code here, which says what it computes.
"""

import math
from collections.abc import Sequence

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.kernels.cpu_sampler import CpuSampler
from baton.kernels.draws import (
    GOLDEN,
    LARGEST_UNIFORM,
    MIN_TEMPERATURE,
    MIX_1,
    MIX_2,
    WEIGHT_SCALE,
)
from baton.protocol.sampling import Sampling

MASK_64 = (1 << 64) - 1
NUCLEUS_CANDIDATES = 1024
CHUNK_ELEMENTS = 1 << 18  # rows x vocabulary at a time on a CPU: as many as its caches hold


class SampleRow(msgspec.Struct, frozen=True):
    """One draw. `position` is the place of the sampled token, counted from the prompt's start."""

    sampling: Sampling
    choice: int
    position: int
    num_output_tokens: int  # before this one

    @property
    def is_greedy(self) -> bool:
        return self.sampling.temperature < MIN_TEMPERATURE


class Sampler:
    """Samples for one model. `eos_token_ids` are kept back, like stop ids, until `min_tokens`.

    With `compiled`, logits lie on a CPU and its kernel draws.
    """

    def __init__(
        self, eos_token_ids: tuple[int, ...] = (), compiled: CpuSampler | None = None
    ) -> None:
        self._eos_token_ids = eos_token_ids
        self._compiled = compiled
        self._steps: dict[tuple[int, torch.device], Tensor] = {}

    def sample(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[int]:
        """Return one id per row; `logits` is [len(rows), vocab] in float32, may be overwritten.

        Greedy takes the lowest id among equals. Other rows apply temperature, min_p (relative to
        the likeliest token), top_k, then top_p of the rest; equals at an edge stay together.
        """
        assert logits.shape[0] == len(rows), "one row per draw"
        if not rows:
            return []
        self._hold_back_ends(logits, rows)
        if self._compiled is not None:
            return self._compiled.sample(logits.contiguous(), *parameters(rows))
        drawn = [index for index, row in enumerate(rows) if not row.is_greedy]
        if not drawn:
            return _ids(logits.argmax(dim=-1))
        if len(drawn) == len(rows):
            return self._draw(logits, rows)
        tokens = _ids(logits.argmax(dim=-1))
        picked = torch.tensor(drawn, device=logits.device)
        for index, token in zip(
            drawn, self._draw(logits[picked], [rows[index] for index in drawn]), strict=True
        ):
            tokens[index] = token
        return tokens

    def _hold_back_ends(self, logits: Tensor, rows: Sequence[SampleRow]) -> None:
        for index, row in enumerate(rows):
            if row.num_output_tokens < row.sampling.min_tokens:
                ends = {*self._eos_token_ids, *row.sampling.stop_token_ids}
                known = [token for token in ends if 0 <= token < logits.shape[1]]
                logits[index, known] = -math.inf

    def _draw(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[int]:
        vocab = logits.shape[1]
        at_once = len(rows) if logits.is_cuda else max(1, CHUNK_ELEMENTS // vocab)
        tokens: list[Tensor] = []
        for first in range(0, len(rows), at_once):
            part = rows[first : first + at_once]
            weights = _weights(logits[first : first + at_once], part)
            # p / e with exponential e has its maximum where log p + Gumbel noise has it.
            weights /= self._exponentials(part, vocab, logits.device)
            tokens.append(weights.argmax(dim=-1))
        return _ids(torch.cat(tokens))

    def _exponentials(self, rows: Sequence[SampleRow], vocab: int, device: torch.device) -> Tensor:
        """Return standard exponential noise [rows, vocab], by splitmix64 of (row key, token id)."""
        keys = torch.tensor([[_signed(_row_key(row))] for row in rows], device=device)
        bits = keys + self._counter_steps(vocab, device)
        bits ^= (bits >> 30) & ((1 << 34) - 1)
        bits *= _signed(MIX_1)
        bits ^= (bits >> 27) & ((1 << 37) - 1)
        bits *= _signed(MIX_2)
        bits ^= (bits >> 31) & ((1 << 33) - 1)
        bits = (bits >> 32).bitwise_and_((1 << 32) - 1)
        # Map into (0, 1). Small values, which win, keep the full precision of a float.
        uniform = bits.to(torch.float32).add_(0.5).mul_(2.0**-32)
        return uniform.clamp_(max=LARGEST_UNIFORM).neg_().log1p_().neg_()

    def _counter_steps(self, vocab: int, device: torch.device) -> Tensor:
        steps = self._steps.get((vocab, device))
        if steps is None:
            steps = torch.arange(1, vocab + 1, device=device) * _signed(GOLDEN)
            self._steps[vocab, device] = steps
        return steps


def parameters(rows: Sequence[SampleRow]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return what the compiled kernels take for each row."""
    ints = [(row.sampling.seed, row.choice, row.position, row.sampling.top_k) for row in rows]
    reals = [
        (row.sampling.temperature, _log(row.sampling.min_p), row.sampling.top_p) for row in rows
    ]
    return np.array(ints, np.int64), np.array(reals, np.float64)


def _weights(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Return exp(logit / temperature) where the filters pass, 0 elsewhere; the largest is 1."""
    device = logits.device
    scale = torch.tensor([[row.sampling.temperature] for row in rows], device=device)
    scaled = logits / scale
    scaled -= scaled.amax(dim=-1, keepdim=True)
    if any(row.sampling.min_p > 0 for row in rows):
        floors = [[_log(row.sampling.min_p)] for row in rows]
        _drop_below(scaled, torch.tensor(floors, device=device))
    _keep_top_k(scaled, [row.sampling.top_k for row in rows])
    weights = scaled.exp_()
    _keep_top_p(weights, [row.sampling.top_p for row in rows])
    return weights


def _keep_top_k(scaled: Tensor, limits: Sequence[int]) -> None:
    vocab = scaled.shape[1]
    limited = [index for index, k in enumerate(limits) if 0 < k < vocab]
    if not limited:
        return
    picked = torch.tensor(limited, device=scaled.device)
    largest = scaled[picked].topk(max(limits[index] for index in limited), dim=-1).values
    last = torch.tensor([[limits[index] - 1] for index in limited], device=scaled.device)
    part = scaled[picked]
    _drop_below(part, largest.gather(1, last))
    scaled[picked] = part


def _keep_top_p(weights: Tensor, shares: Sequence[float]) -> None:
    """Keep the likeliest tokens until their probabilities add up to the share."""
    limited = [index for index, share in enumerate(shares) if share < 1.0]
    if not limited:
        return
    picked = torch.tensor(limited, device=weights.device)
    part = weights[picked]
    total = (part * WEIGHT_SCALE).to(torch.int64).sum(dim=-1, keepdim=True)
    share = torch.tensor(
        [[shares[index]] for index in limited], dtype=torch.float64, device=weights.device
    )
    wanted = (total * share).to(torch.int64)
    vocab = weights.shape[1]
    count = min(NUCLEUS_CANDIDATES, vocab)
    largest, before = _descending(part, count)
    # A few hundred tokens nearly always hold the nucleus; a flat row needs the whole order.
    if count < vocab and bool((before[:, -1:] < wanted).any()):
        largest, before = _descending(part, vocab)
    num_kept = (before < wanted).sum(dim=-1, keepdim=True).clamp_(min=1)
    edge = largest.gather(1, num_kept - 1)
    weights[picked] = part.masked_fill_(part < edge, 0.0)


def _descending(weights: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` largest of each row, and for each the sum of all before it."""
    largest = weights.topk(count, dim=-1).values
    scaled = (largest * WEIGHT_SCALE).to(torch.int64)
    return largest, scaled.cumsum(dim=-1) - scaled


def _drop_below(scaled: Tensor, floors: Tensor) -> None:
    scaled.masked_fill_(scaled < floors, -math.inf)


def _row_key(row: SampleRow) -> int:
    key = _mix(row.sampling.seed & MASK_64)
    key = _mix(key ^ (row.choice + 1) * GOLDEN & MASK_64)
    return _mix(key ^ (row.position + 1) * MIX_2 & MASK_64)


def _mix(value: int) -> int:
    """Apply the output function of splitmix64 (Steele, Lea, Flood 2014)."""
    value = (value + GOLDEN) & MASK_64
    value = ((value ^ value >> 30) * MIX_1) & MASK_64
    value = ((value ^ value >> 27) * MIX_2) & MASK_64
    return value ^ value >> 31


def _signed(value: int) -> int:
    """Return torch's signed 64-bit integer with these bits."""
    return value - (1 << 64) if value >= 1 << 63 else value


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf


def _ids(tokens: Tensor) -> list[int]:
    """Copy the ids, with which the host streams and plans: the one synchronisation of a step."""
    ids: list[int] = tokens.tolist()
    return ids
