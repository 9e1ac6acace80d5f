"""Linear layers in bf16 that use the compiled kernel, on as many threads as torch uses.

Threads take rows or outputs and share no sum, so neither their number nor the other rows of a batch
can change a bit. The engine's layers call it where the library multiplies pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.kernels.cpu_library import CpuLibrary
from baton.kernels.cpu_shapes import PANEL, SHEET
from baton.kernels.cpu_threads import MIN_SHARED_NS, CpuThreads

# Measured on a Zen 5 core. Elsewhere the number of threads of a product may be a poor choice; no
# bit changes.
NS_PER_WEIGHT, NS_PER_MULTIPLICATION = 0.03, 0.0044
MIN_ROWS = 32  # per thread; of fewer rows, the outputs are divided instead


class CpuLinears:
    """One rank's products, and the threads that they work with.

    Calls with torch set to one thread may run side by side; of other calls, one at a time.
    """

    def __init__(self, library: CpuLibrary) -> None:
        assert library.in_pairs
        self._library = library  # keeps the code in memory
        self._threads = CpuThreads()

    def layer(self, weight: Tensor, bias: Tensor | None) -> CpuLinear:
        """Return a layer with its own copy of `weight`, `[outputs, inputs]` with even `inputs`."""
        outputs, inputs = weight.shape
        words = F.pad(weight, (0, 0, 0, -outputs % PANEL)).contiguous().view(torch.int32)
        panels = words.view(-1, PANEL, inputs // 2).transpose(1, 2).contiguous()
        return CpuLinear(self, panels, bias, outputs)

    def multiply(self, x: Tensor, layer: CpuLinear) -> Tensor:
        """Return the layer's outputs, `[num_rows, outputs]`, for `[num_rows, inputs]`."""
        x, bias, panels = x.contiguous(), layer.bias, layer.panels
        num_rows, out = len(x), x.new_empty(len(x), layer.outputs)
        slices = self._slices(num_rows, panels)
        size = SHEET * PANEL * 4
        memory = torch.empty(size // 4 * len(slices))
        arguments = (
            x.data_ptr(), panels.data_ptr(), 0 if bias is None else bias.data_ptr(),
            bias is not None, panels.shape[1], layer.outputs, out.data_ptr(),
        )  # fmt: skip
        sums = range(memory.data_ptr(), 1 << 64, size)
        calls = [(*part, sums[i], *arguments) for i, part in enumerate(slices)]
        self._threads.run(self._library.kernels["multiply"], calls)
        return out

    def _slices(self, num_rows: int, panels: Tensor) -> list[tuple[int, int, int, int]]:
        """Return the first and last row, and the first and last panel, of each thread."""
        num_panels, whole = len(panels), (0, num_rows, 0, len(panels))
        cost_ns = 2 * panels.numel() * (NS_PER_WEIGHT + NS_PER_MULTIPLICATION * num_rows)
        if cost_ns < MIN_SHARED_NS or (count := torch.get_num_threads()) == 1:
            return [whole]
        if num_rows >= MIN_ROWS * count:
            cuts = [num_rows * i // count for i in range(count + 1)]
            return [(first, end, 0, num_panels) for first, end in pairwise(cuts)]
        count = min(count, num_panels)
        cuts = [num_panels * i // count for i in range(count + 1)]
        return [(0, num_rows, first, end) for first, end in pairwise(cuts)]


@dataclass(slots=True, frozen=True)
class CpuLinear:
    """One layer's weight, packed in the order in which the kernel reads it."""

    of: CpuLinears
    panels: Tensor  # [num_panels, inputs / 2, PANEL] words of two inputs; missing outputs are 0
    bias: Tensor | None
    outputs: int

    def __call__(self, x: Tensor) -> Tensor:
        return self.of.multiply(x, self)
