"""The compiled sampling kernel as a function of logits, on as many threads as torch uses.

Threads take slices of the rows, and a row is one thread's, so their number cannot change a token.
Called by the engine's `Sampler`, which says what the parameters mean.
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

NS_PER_LOGIT = 1.5  # measured on a Zen 5 core; it decides how rows are shared and nothing else
MIN_SLICE_NS = 150_000  # waking a thread takes up to 100 µs


class CpuSampler:
    """One rank's sampling kernel, its memory and its threads. One caller at a time."""

    def __init__(self, library: CpuLibrary) -> None:
        self._library = library  # the code is gone when it is
        self._threads = CpuThreads()
        self._scratch = torch.empty(0)

    def sample(
        self,
        logits: Tensor,  # [num_rows, vocab] fp32, contiguous
        ints: NDArray[np.int64],  # [num_rows, ROW_INTS]: seed, choice, position, top_k
        reals: NDArray[np.float64],  # [num_rows, ROW_REALS]: temperature, log of min_p, top_p
    ) -> list[int]:
        """One token id for each row."""
        num_rows, vocab = logits.shape
        assert logits.is_contiguous()
        assert logits.dtype == torch.float32
        assert ints.shape == (num_rows, ROW_INTS)
        assert reals.shape == (num_rows, ROW_REALS)
        tokens = np.empty(num_rows, np.int64)
        most = int(num_rows * vocab * NS_PER_LOGIT) // MIN_SLICE_NS
        count = max(1, min(most, torch.get_num_threads(), num_rows))
        floats = -(-vocab // WIDTH) * WIDTH + 2 * SUMS  # a sum is as large as two
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
