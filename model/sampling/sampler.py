"""Sample tokens from logits: filters, then the Gumbel-max trick with noise that can be replayed.

A row's token is a pure function of its own logits and of (seed, choice, position). It is the same
in any batch, order, process or node, so a resumed sequence gets the same tokens as an uninterrupted
one.

Sums are integers, because an integer sum is the same in every order of addition. The kernels of
`kernels.cpu.sampling` and `kernels.cuda.sampling` replace the torch code here, which defines what
they compute.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from torch import Tensor

from baton.kernels.constants import (
    GOLDEN,
    LARGEST_UNIFORM,
    MIN_TEMPERATURE,
    MIX_1,
    MIX_2,
    WEIGHT_SCALE,
)
from baton.kernels.cpu.functions import CpuSampler
from baton.model.sampling.device_counts import DeviceCounts
from baton.model.sampling.penalties import penalize
from baton.model.sampling.token_masks import TokenMasks
from baton.protocol.sampling import Sampling

MASK_64 = (1 << 64) - 1
NUCLEUS_CANDIDATES = 1024
# Numbers (rows x vocabulary) at a time on a CPU: as many as its caches hold.
CHUNK_ELEMENTS = 1 << 18
SEED, CHOICE, POSITION, TOP_K = range(4)  # the columns of `SamplingTensors.ints`
TEMPERATURE, LOG_MIN_P, TOP_P = range(3)  # the columns of `SamplingTensors.reals`


class SampleRow(msgspec.Struct, frozen=True):
    """One sample. `position` is the place of the sampled token, counted from the prompt's start."""

    sampling: Sampling
    choice: int
    position: int
    num_output_tokens: int  # before this one

    @property
    def ints(self) -> tuple[int, int, int, int]:
        return self.sampling.seed, self.choice, self.position, self.sampling.top_k

    @property
    def reals(self) -> tuple[float, float, float]:
        sampling = self.sampling
        return sampling.temperature, _log(sampling.min_p), sampling.top_p

    def held_back(self, eos_token_ids: Sequence[int]) -> tuple[int, ...]:
        """Return the ids that may not be sampled yet, which are all that would end the sequence."""
        if self.num_output_tokens >= self.sampling.min_tokens:
            return ()
        return (*eos_token_ids, *self.sampling.stop_token_ids)


@dataclass(slots=True, frozen=True)
class SamplingTensors:
    """The samples of a step as tensors, a row for each."""

    ints: Tensor  # [num_samples, 4] int64: seed, choice, position, top_k
    reals: Tensor  # [num_samples, 3] float64: temperature, log of min_p, top_p
    # [num_samples, width] int32: ids that may not be sampled; -1 names none.
    held_back: Tensor
    masked: Tensor | None = None  # [num_masks] int64: the samples that have masks
    # [num_masks, words] int32: a bit for each id that may be sampled.
    masks: Tensor | None = None
    penalties: Sequence[Tensor] = ()  # the places and changes that `penalize` takes
    # The rows and tokens that `DeviceCounts.penalize` takes.
    counted: Sequence[Tensor] = ()

    @classmethod
    def of(
        cls,
        rows: Sequence[SampleRow],
        eos_token_ids: Sequence[int],
        device: torch.device,
    ) -> "SamplingTensors":
        held_back = [row.held_back(eos_token_ids) for row in rows]
        width = max(map(len, held_back))
        filled = [[*ids, *[-1] * (width - len(ids))] for ids in held_back]
        return cls(
            torch.tensor([row.ints for row in rows], device=device),
            torch.tensor(
                [row.reals for row in rows], dtype=torch.float64, device=device
            ),
            torch.tensor(filled, dtype=torch.int32, device=device),
        )

    def picked(self, rows: Sequence[int]) -> "SamplingTensors":
        return SamplingTensors(self.ints[rows], self.reals[rows], self.held_back[rows])


# Samples as `Sampler` does, from logits, the fields of `SamplingTensors`, and what
# `DeviceCounts.penalize` returns.
SampleKernel = Callable[
    [Tensor, Tensor, Tensor, Tensor, tuple[Tensor, Tensor] | None], Tensor
]


class Sampler:
    """Samples for one model. `eos_token_ids` and stop ids are not sampled before `min_tokens`.

    With a `kernel`, the kernel samples instead of torch. A packer takes `masks` and `counts` from
    here.
    """

    def __init__(
        self,
        eos_token_ids: tuple[int, ...] = (),
        kernel: SampleKernel | None = None,
        masks: TokenMasks | None = None,
        counts: DeviceCounts | None = None,
    ) -> None:
        """`counts` takes the place of the penalties that a packer would compute."""
        self.eos_token_ids = eos_token_ids
        self.masks = masks
        self.counts = counts
        self._kernel = kernel
        self._steps: dict[tuple[int, torch.device], Tensor] = {}

    def sample_rows(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[int]:
        """Sample for rows that are still on the host."""
        assert logits.shape[0] == len(rows), "one row per sample"
        if not rows:
            return []
        samples = SamplingTensors.of(rows, self.eos_token_ids, logits.device)
        ids: list[int] = self.sample(logits, samples).tolist()
        return ids

    def sample(self, logits: Tensor, samples: SamplingTensors) -> Tensor:
        """Return one id per row. `logits`, [num_samples, vocab], may be overwritten.

        Greedy takes the lowest id among equals. Other rows apply temperature, min_p (relative to
        the likeliest token), top_k, then top_p of the rest; equals at an edge stay together.
        """
        if logits.device.type == "cpu":
            logits = logits.float()
        if samples.penalties:
            penalize(logits, *samples.penalties)
        if samples.masked is not None and samples.masks is not None:
            apply_masks(logits, samples.masked, samples.masks)
        if self._kernel is not None:
            changed = None
            if self.counts is not None and samples.counted:
                changed = self.counts.penalize(logits, *samples.counted)
            return self._kernel(
                logits, samples.ints, samples.reals, samples.held_back, changed
            )
        _hold_back(logits, samples.held_back)
        warm = samples.reals[:, TEMPERATURE] >= MIN_TEMPERATURE
        random: list[int] = warm.nonzero().flatten().tolist()
        if len(random) == len(logits):
            return self._sample(logits, samples)
        tokens = logits.argmax(dim=-1)
        if random:
            tokens[random] = self._sample(logits[random], samples.picked(random))
        return tokens

    def _sample(self, logits: Tensor, samples: SamplingTensors) -> Tensor:
        vocab = logits.shape[1]
        at_once = len(logits) if logits.is_cuda else max(1, CHUNK_ELEMENTS // vocab)
        tokens: list[Tensor] = []
        for first in range(0, len(logits), at_once):
            rows = range(first, min(first + at_once, len(logits)))
            part = samples.picked(rows)
            weights = _weights(logits[first : rows.stop], part)
            # With exponential noise e, p / e has its maximum where log p plus Gumbel noise has it.
            weights /= self._exponentials(part, vocab, logits.device)
            tokens.append(weights.argmax(dim=-1))
        return torch.cat(tokens)

    def _exponentials(
        self, samples: SamplingTensors, vocab: int, device: torch.device
    ) -> Tensor:
        """Return standard exponential noise [rows, vocab], by splitmix64 of (row key, token id)."""
        row_keys = [
            [_signed(_row_key(*ints[:TOP_K]))] for ints in samples.ints.tolist()
        ]
        bits = torch.tensor(row_keys, device=device) + self._counter_steps(
            vocab, device
        )
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


def compiled(kernel: CpuSampler) -> SampleKernel:
    """Return the kernel for logits on a CPU."""

    def sample(
        logits: Tensor, ints: Tensor, reals: Tensor, held_back: Tensor, _changed: object
    ) -> Tensor:
        _hold_back(logits, held_back)
        return torch.tensor(
            kernel.sample(logits.contiguous(), ints.numpy(), reals.numpy())
        )

    return sample


def apply_masks(logits: Tensor, masked: Tensor, masks: Tensor) -> None:
    """Make it impossible to sample the ids whose bits are 0."""
    if logits.is_cuda:
        apply_masks_on_device(logits, masked, masks)
        return
    vocab = logits.shape[1]
    for row, words in zip(masked.tolist(), masks.numpy().view(np.uint8), strict=True):
        allowed = np.unpackbits(words, count=vocab, bitorder="little").view(np.bool_)
        np.copyto(logits[row].numpy(), -np.inf, where=~allowed)


def apply_masks_on_device(logits: Tensor, masked: Tensor, masks: Tensor) -> None:
    """Do the same without waiting for the device."""
    bits = masks[:, :, None] >> torch.arange(32, dtype=torch.int32, device=masks.device)
    hidden = (bits & 1).flatten(1)[:, : logits.shape[1]] == 0
    logits[masked] = logits[masked].masked_fill_(hidden, -math.inf)


def _hold_back(logits: Tensor, held_back: Tensor) -> None:
    """Make it impossible to sample these ids; ids outside the vocabulary are ignored."""
    if not held_back.shape[1]:
        return
    for index, ids in enumerate(held_back.tolist()):
        if known := [token for token in ids if 0 <= token < logits.shape[1]]:
            logits[index, known] = -math.inf


def _weights(logits: Tensor, samples: SamplingTensors) -> Tensor:
    """Return exp(logit / temperature) where the filters pass, 0 elsewhere; the largest is 1."""
    scaled = logits / samples.reals[:, TEMPERATURE, None].float()
    scaled -= scaled.amax(dim=-1, keepdim=True)
    floors = samples.reals[:, LOG_MIN_P, None].float()
    if bool((floors > -math.inf).any()):
        scaled.masked_fill_(scaled < floors, -math.inf)
    _keep_top_k(scaled, samples.ints[:, TOP_K].tolist())
    weights = scaled.exp_()
    _keep_top_p(weights, samples.reals[:, TOP_P].tolist())
    return weights


def _keep_top_k(scaled: Tensor, limits: Sequence[int]) -> None:
    vocab = scaled.shape[1]
    limited = [index for index, k in enumerate(limits) if 0 < k < vocab]
    if not limited:
        return
    picked = torch.tensor(limited, device=scaled.device)
    largest = (
        scaled[picked].topk(max(limits[index] for index in limited), dim=-1).values
    )
    last = torch.tensor(
        [[limits[index] - 1] for index in limited], device=scaled.device
    )
    part = scaled[picked]
    scaled[picked] = part.masked_fill_(part < largest.gather(1, last), -math.inf)


def _keep_top_p(weights: Tensor, shares: Sequence[float]) -> None:
    """Keep the likeliest tokens until their probabilities add up to the share."""
    limited = [index for index, share in enumerate(shares) if share < 1.0]
    if not limited:
        return
    picked = torch.tensor(limited, device=weights.device)
    part = weights[picked]
    total = (part * WEIGHT_SCALE).to(torch.int64).sum(dim=-1, keepdim=True)
    share = torch.tensor(
        [[shares[index]] for index in limited],
        dtype=torch.float64,
        device=weights.device,
    )
    wanted = (total * share).to(torch.int64)
    vocab = weights.shape[1]
    count = min(NUCLEUS_CANDIDATES, vocab)
    largest, before = _descending(part, count)
    # A few hundred tokens nearly always hold the nucleus; a flat row must be sorted as a whole.
    if count < vocab and bool((before[:, -1:] < wanted).any()):
        largest, before = _descending(part, vocab)
    num_kept = (before < wanted).sum(dim=-1, keepdim=True).clamp_(min=1)
    edge = largest.gather(1, num_kept - 1)
    weights[picked] = part.masked_fill_(part < edge, 0.0)


def _descending(weights: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` largest of each row, and for each one the sum of all larger ones."""
    largest = weights.topk(count, dim=-1).values
    scaled = (largest * WEIGHT_SCALE).to(torch.int64)
    return largest, scaled.cumsum(dim=-1) - scaled


def _row_key(seed: int, choice: int, position: int) -> int:
    key = _mix(seed & MASK_64)
    key = _mix(key ^ (choice + 1) * GOLDEN & MASK_64)
    return _mix(key ^ (position + 1) * MIX_2 & MASK_64)


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
