"""The product of a linear layer on compute capability 9.0, with one order of sums.

Each number is one chain over the whole inner dimension, whatever the number of rows. CUDA C++ and
Gluon share the work by the table in `variants.py`; without NVRTC, Gluon does all of it. Weights
whose sizes do not fit take Triton's kernel, which has the same bits where they would fit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from baton.kernels.cuda.fixed_product import fixed_product, has_fitting_sizes
from baton.kernels.hopper.cubin import CompilerMissing, load_cubin
from baton.kernels.hopper.driver import CudaKernels, Driver, DriverError
from baton.kernels.hopper.gluon_product import describe, launch
from baton.kernels.hopper.variants import (
    CUDA,
    VARIANTS,
    Grid,
    choose,
    grid_of,
    names_for,
)
from baton.runtime.log import logger

CAPABILITY = (9, 0)
MAX_DESCRIPTORS = 16_384
MAX_CHOICES = 65_536

log = logger("products")


class HopperProduct:
    """Computes `x @ weight.T`, `[rows, out]`, of `[rows, in]` and `[out, in]`."""

    def __init__(
        self,
        kernels: CudaKernels | None,
        multiprocessors: int,
        stream: Callable[[], int],
    ) -> None:
        """Take what launches CUDA C++, without which all variants are Gluon's.

        `stream` returns the handle of the stream that work goes to.
        """
        self.kernels = kernels
        self._multiprocessors = multiprocessors
        self._stream = stream
        self._prepared: set[tuple[int, int]] = set()
        self._choice = functools.lru_cache(MAX_CHOICES)(self._choose)
        # Making one takes longer than a launch, and it follows from its key alone.
        self._descriptor = functools.lru_cache(MAX_DESCRIPTORS)(describe)

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        if not fits(weight):
            return fixed_product(x, weight)
        columns, inner = weight.shape
        if (columns, inner) not in self._prepared:
            self._prepare(weight)
        out = x.new_empty((len(x), columns))
        if len(x):
            name, grid = self._choice(len(x), columns, inner)
            self.launch(name, grid, aligned(x), weight, out)
        return out

    @property
    def has_cuda(self) -> bool:
        return self.kernels is not None

    def compute(self, name: str, x: Tensor, weight: Tensor, out: Tensor) -> None:
        """Compute `out` by the variant of this name."""
        (rows, columns), inner = out.shape, x.shape[1]
        grid = self._grid(name, rows, columns, inner)
        self.launch(name, grid, aligned(x), weight, out)

    def launch(
        self, name: str, grid: Grid, x: Tensor, weight: Tensor, out: Tensor
    ) -> None:
        variant = VARIANTS[name]
        of_x = (*_rows_of(x), variant.x_box)
        of_weight = (*_rows_of(weight), variant.weight_box)
        if name not in CUDA:
            described = self._descriptor(*of_x), self._descriptor(*of_weight)
            launch(variant, grid, *described, out)
            return
        assert self.kernels is not None, "the table is told what is missing"
        maps = self.kernels.tensor_map(*of_x), self.kernels.tensor_map(*of_weight)
        rows, columns = out.shape
        target = out.data_ptr(), rows, columns
        self.kernels.launch(name, grid, maps, target, self._stream())

    def _choose(self, rows: int, columns: int, inner: int) -> tuple[str, Grid]:
        name = choose(rows, columns, inner, has_cuda=self.has_cuda)
        return name, self._grid(name, rows, columns, inner)

    def _grid(self, name: str, rows: int, columns: int, inner: int) -> Grid:
        sizes = rows, columns, inner, self._multiprocessors
        return grid_of(VARIANTS[name], *sizes)

    def _prepare(self, weight: Tensor) -> None:
        """Launch each variant that weights of this shape may need: a captured step loads none."""
        columns, inner = weight.shape
        x = weight.new_zeros((1, inner))
        out = weight.new_empty((1, columns))
        for name in names_for(columns, inner, has_cuda=self.has_cuda):
            self.compute(name, x, weight, out)
        self._prepared.add((columns, inner))


def load_product(device: torch.device) -> HopperProduct:
    """Return the product of a GPU of compute capability 9.0, whose kernels are loaded.

    The first call compiles CUDA C++ for about ten seconds, or reads what an earlier one has kept.
    """
    torch.empty(1, device=device)  # makes the context current
    properties = torch.cuda.get_device_properties(device)
    return HopperProduct(
        load_kernels(Driver),
        properties.multi_processor_count,
        lambda: torch.cuda.current_stream(device).cuda_stream,
    )


def load_kernels(driver: Callable[[], Driver]) -> CudaKernels | None:
    """Return the kernels in CUDA C++; None, with a line in the log, where they cannot be had."""
    try:
        return CudaKernels(load_cubin(), driver())
    except (CompilerMissing, DriverError) as error:
        log.warning(
            "products are computed in Gluon alone, which takes up to 1.3 times as long",
            reason=str(error),
        )
    return None


def fits(weight: Tensor) -> bool:
    """Return whether the kernels take a weight, `[out, in]`."""
    columns, inner = weight.shape
    is_aligned = weight.data_ptr() % 16 == 0 and weight.stride(0) % 8 == 0
    return (
        weight.dtype == torch.bfloat16
        and has_fitting_sizes(columns, inner)
        and weight.stride(1) == 1
        and is_aligned
    )


def aligned(x: Tensor) -> Tensor:
    """Return rows that TMA can read, which are copied only if they lie in an odd way."""
    _, _, inner, stride = _rows_of(x)
    is_dense = x.stride(1) == 1 and stride >= inner
    if is_dense and stride % 8 == 0 and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _rows_of(matrix: Tensor) -> tuple[int, int, int, int]:
    """Return the address, rows, inner size and stride of rows; of one row, any stride is right."""
    rows, inner = matrix.shape
    stride = matrix.stride(0) if rows > 1 else inner
    return matrix.data_ptr(), rows, inner, stride
