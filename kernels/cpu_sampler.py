"""The compiled sampling kernel as a function of logits, on as many threads as torch uses.

Threads take slices of the rows, and one thread computes a whole row, so their number cannot change
a token. The engine's `Sampler` calls it and defines the parameters.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.kernels.cpu_library import CpuLibrary
from baton.kernels.cpu_shapes import ROW_INTS, ROW_REALS, SUMS, WIDTH
from baton.kernels.cpu_threads import CpuThreads

NS_PER_LOGIT = 1.5  # measured on a Zen 5 core; it only decides how threads share the rows
MIN_SLICE_NS = 150_000  # because waking a thread takes up to 100 µs


class CpuSampler:
    """One rank's sampling kernel, with its memory and threads. Only one thread may call it."""

    def __init__(self, library: CpuLibrary) -> None:
        self._library = library  # keeps the code in memory
        self._threads = CpuThreads()
        self._scratch = torch.empty(0)

    def sample(
        self,
        logits: Tensor,  # [num_rows, vocab] fp32, contiguous
        ints: NDArray[np.int64],  # [num_rows, ROW_INTS]: seed, choice, position, top_k
        reals: NDArray[np.float64],  # [num_rows, ROW_REALS]: temperature, log of min_p, top_p
    ) -> list[int]:
        """Return one token id for each row, `[num_rows]`."""
        num_rows, vocab = logits.shape
        assert logits.is_contiguous()
        assert logits.dtype == torch.float32
        assert ints.shape == (num_rows, ROW_INTS)
        assert reals.shape == (num_rows, ROW_REALS)
        tokens = np.empty(num_rows, np.int64)
        most = int(num_rows * vocab * NS_PER_LOGIT) // MIN_SLICE_NS
        count = max(1, min(most, torch.get_num_threads(), num_rows))
        floats = -(-vocab // WIDTH) * WIDTH + 2 * SUMS  # a sum takes the room of two counters
        if len(self._scratch) < count * floats:
            self._scratch = torch.empty(count * floats)
        arguments = (
            logits.data_ptr(), vocab, ints.ctypes.data, reals.ctypes.data, tokens.ctypes.data,
        )  # fmt: skip
        cuts = [num_rows * i // count for i in range(count + 1)]
        sums = range(self._scratch.data_ptr(), 1 << 64, 4 * floats)
        slices = [
            (first, end, sums[i] + 8 * SUMS, sums[i] + 8 * SUMS, sums[i], *arguments)
            for i, (first, end) in enumerate(pairwise(cuts))
        ]
        self._threads.run(self._library.kernels["sample"], slices)
        return list(tokens.tolist())
