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
from baton.kernels.hopper.products.cubin import CompilerMissing, load_cubin
from baton.kernels.hopper.products.driver import CudaKernels, Driver, DriverError, Rows
from baton.kernels.hopper.products.gluon_product import describe, launch
from baton.kernels.hopper.products.variants import (
    CUDA,
    VARIANTS,
    choose,
    grid_of,
    names_for,
)
from baton.runtime.log import logger

CAPABILITY = (9, 0)
# Inputs outside graphs change their addresses from step to step.
MAX_LAUNCHERS = 16_384

Launcher = Callable[[Tensor], None]

log = logger("products")


class HopperProduct:
    """Computes `x @ weight.T`, `[rows, out]`, of `[rows, in]` and `[out, in]`."""

    def __init__(self, kernels: CudaKernels | None, multiprocessors: int) -> None:
        """Take what launches CUDA C++, without which all variants are Gluon's."""
        self.has_cuda = kernels is not None
        self._kernels = kernels
        self._multiprocessors = multiprocessors
        self._prepared: set[tuple[int, int]] = set()
        # Making one takes longer than a launch, and it follows from its key alone.
        self._launchers = functools.lru_cache(MAX_LAUNCHERS)(self._chosen_launcher)
        self._descriptor = functools.lru_cache(MAX_LAUNCHERS)(describe)

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        of_weight = rows_of(weight)
        if not fits(weight, of_weight):
            return fixed_product(x, weight)
        if (of_weight.rows, of_weight.inner) not in self._prepared:
            self._prepare(weight)
        out = x.new_empty((x.shape[0], of_weight.rows))
        if x.shape[0]:
            x, of_x = readable(x)
            self._launchers(of_x, of_weight)(out)
        return out

    def compute(self, name: str, x: Tensor, weight: Tensor, out: Tensor) -> None:
        """Compute `out` by the variant of this name."""
        x, of_x = readable(x)
        self._launcher(name, of_x, rows_of(weight))(out)

    def _chosen_launcher(self, x: Rows, weight: Rows) -> Launcher:
        name = choose(x.rows, weight.rows, x.inner, has_cuda=self.has_cuda)
        return self._launcher(name, x, weight)

    def _launcher(self, name: str, x: Rows, weight: Rows) -> Launcher:
        variant = VARIANTS[name]
        sizes = x.rows, weight.rows, x.inner, self._multiprocessors
        grid = grid_of(variant, *sizes)
        if name in CUDA:
            assert self._kernels is not None, "the table is told what is missing"
            return self._kernels.launcher(name, grid, x, weight)
        of_x = self._descriptor(*x, variant.x_box)
        of_weight = self._descriptor(*weight, variant.weight_box)
        return functools.partial(launch, variant, grid, of_x, of_weight)

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
    kernels = load_kernels(
        Driver, lambda: torch.cuda.current_stream(device).cuda_stream
    )
    properties = torch.cuda.get_device_properties(device)
    return HopperProduct(kernels, properties.multi_processor_count)


def load_kernels(
    driver: Callable[[], Driver], stream: Callable[[], int]
) -> CudaKernels | None:
    """Return the kernels in CUDA C++; None, with a line in the log, where they cannot be had."""
    try:
        return CudaKernels(load_cubin(), driver(), stream)
    except (CompilerMissing, DriverError) as error:
        log.warning(
            "products are computed in Gluon alone, which takes up to 1.3 times as long",
            reason=str(error),
        )
    return None


def fits(weight: Tensor, rows: Rows) -> bool:
    """Return whether the kernels take a weight, `[out, in]`, that lies so."""
    return (
        weight.dtype == torch.bfloat16
        and has_fitting_sizes(rows.rows, rows.inner)
        and weight.stride(1) == 1
        and rows.is_readable
    )


def readable(x: Tensor) -> tuple[Tensor, Rows]:
    """Return rows that TMA can read, which are copied only if they lie in an odd way."""
    rows = rows_of(x)
    if rows.is_readable and x.stride(1) == 1:
        return x, rows
    x = x.clone(memory_format=torch.contiguous_format)
    return x, rows_of(x)


def rows_of(matrix: Tensor) -> Rows:
    """Return where rows lie; of a single row, any stride is right."""
    rows, inner = matrix.shape
    stride = matrix.stride(0) if rows > 1 else inner
    return Rows(matrix.data_ptr(), rows, inner, stride)
