"""Decode steps that a device replays, captured once for each bucket of rows.

The runner captures them before the first plan and replays the one that a step was padded to. All
buckets read their inputs from one piece of device memory. A replay runs the same kernels as an
eager step of its bucket, so it gives the same bits. Mixed and prefill steps are never replayed.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from baton.engine.compute.packing import PackedStep, StepInputs
from baton.engine.compute.step_queue import StepWork

SPARE_WORDS = 1 << 16  # room for changes of block tables; a step with more changes runs eagerly


def buckets_up_to(num_sequences: int) -> tuple[int, ...]:
    """Return the sizes to capture so that steps of up to `num_sequences` rows fit, at most 256."""
    sizes = (1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 257, 32))
    last = next((size for size in sizes if size >= num_sequences), sizes[-1])
    return tuple(size for size in sizes if size <= last)


class DecodeGraphs:
    """The captured steps of one runner, which share `words` on its device."""

    def __init__(self, largest: PackedStep, device: torch.device) -> None:
        num_words = len(largest.inputs.words) + SPARE_WORDS
        self._words = torch.zeros(num_words, dtype=torch.int64, device=device)
        self._replays: dict[int, StepWork] = {}

    def capture(
        self,
        step: PackedStep,
        capture: Callable[[StepWork], StepWork],
        forward: Callable[[PackedStep, StepInputs], Tensor],
    ) -> None:
        """Capture the bucket of `step`, which consists of padding."""
        inputs = self._filled(step)
        self._replays[step.bucket] = capture(lambda: forward(step, inputs))

    def takes(self, step: PackedStep) -> bool:
        return step.bucket in self._replays and len(step.inputs.words) <= len(self._words)

    def replay(self, step: PackedStep, write_tables: Callable[[StepInputs], None]) -> Tensor:
        """Run a step, and return the ids of its rows without the padding."""
        write_tables(self._filled(step))
        return self._replays[step.bucket]()[: len(step.plan.slices)]

    def _filled(self, step: PackedStep) -> StepInputs:
        """Copy the inputs to where the graphs read them, which is the only copy of a step."""
        words = step.inputs.words
        self._words[: len(words)].copy_(words, non_blocking=True)
        return replace(step.inputs, words=self._words)
