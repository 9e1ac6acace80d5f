"""The device sampler held to torch, on any device.

Like `kernel_cases`, nothing here imports a Triton kernel until a check runs.
"""

import itertools
import math

import torch
from torch import Tensor

from baton.engine.compute.sampler import Sampler, SampleRow, SamplingTensors
from baton.protocol.sampling import Sampling

FILTERS = tuple(
    itertools.product([0.0, 0.3, 1.7], [0, 1, 40], [0.0, 0.02, 1.0], [0.05, 0.9, 1.0])
)  # temperature, top_k, min_p, top_p


def check_sampling(vocab: int, spread: float, dtype: torch.dtype, device: str, every: int) -> None:
    """Every n-th combination of filters draws what torch draws.

    bf16 gives equal logits, some tokens cannot be drawn, a row of NaN and a row of minus infinity
    stand among the others, and held-back ids lie anywhere in a row.
    """
    rows = [
        SampleRow(Sampling(number - 9, 9, 0, heat, k, top_p, min_p), number % 5, number, 5)
        for number, (heat, k, min_p, top_p) in enumerate(FILTERS)
    ][::every]
    generator = torch.Generator().manual_seed(5)
    whole = torch.randn(len(rows), vocab + 3, generator=generator) * spread
    logits = whole.to(dtype)[:, :vocab]
    logits[:, 1::5] = -math.inf
    logits[0], logits[-1] = math.nan, -math.inf
    held_back = torch.randint(-vocab, vocab, (len(rows), 19), generator=generator)
    held_back = held_back.clamp(min=-1).to(torch.int32)
    held_back[0] = -1
    seen = logits.float()
    for row, ids in zip(seen, held_back, strict=True):
        row[ids[ids >= 0].long()] = -math.inf
    expected = Sampler().sample_rows(seen, rows)
    got = drawn(logits.to(device), rows, held_back)
    assert got == expected, f"{got} instead of {expected}"
    # Alone, with other numbers of held-back ids.
    for number in range(0, len(rows), 7):
        one = slice(number, number + 1)
        ids = held_back[one][held_back[one] >= 0][None]
        assert drawn(logits[one].to(device), rows[one], ids) == expected[one]


def drawn(logits: Tensor, rows: list[SampleRow], held_back: Tensor) -> list[int]:
    from baton.kernels.device_sampling import sample_tokens

    samples = SamplingTensors.of(rows, (), logits.device)
    on_device = held_back.to(logits.device)
    tokens: list[int] = sample_tokens(logits, samples.ints, samples.reals, on_device).tolist()
    return tokens
