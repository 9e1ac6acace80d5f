"""Calls of CUDA's driver for kernels that no library launches: tensor maps, functions, launches.

The driver is called directly, because tensor maps have to lie at multiples of 64 bytes, and those
of cuda-bindings do not.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from baton.kernels.hopper.products.variants import CUDA, PANEL_INPUTS, Grid

MAX_DYNAMIC_SHARED_BYTES = 8  # of CUfunction_attribute
BFLOAT16 = 9  # of CUtensorMapDataType
SWIZZLE_128_BYTES = 3
PROMOTE_256_BYTES = 3
VALUE_BYTES = 2
MAP_BYTES = 128
MAP_ALIGNMENT = 64
# Addresses of inputs change from step to step outside graphs; a map is 192 bytes.
MAX_MAPS = 16_384
# A kernel's arguments: two maps, the output, and six numbers.
Arguments = ctypes.c_void_p * 9
OUTPUT = 2


class DriverError(Exception):
    """A call of the driver failed. The text names it and says why."""


class Rows(NamedTuple):
    """Where a matrix in bf16 lies, whose rows are `stride` numbers apart."""

    address: int
    rows: int
    inner: int
    stride: int

    @property
    def is_readable(self) -> bool:
        """Return whether TMA can read it."""
        is_dense = self.stride >= self.inner
        return is_dense and self.stride % 8 == 0 and self.address % 16 == 0


@dataclass(slots=True, frozen=True)
class TensorMap:
    """An encoded matrix. The kernel gets a copy, so it may be dropped after a launch."""

    memory: ctypes.Array[ctypes.c_char]
    address: int


class Driver:
    """The driver of the thread's current context, or what stands in for it."""

    def __init__(self, library: Any = None) -> None:
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1") if library is None else library
        except OSError as error:
            raise DriverError(f"CUDA's driver cannot be loaded: {error}") from error

    def load(self, cubin: bytes) -> ctypes.c_void_p:
        module = ctypes.c_void_p()
        self._check(
            self._cuda.cuModuleLoadData(ctypes.byref(module), cubin), "loading kernels"
        )
        return module

    def function(
        self, module: ctypes.c_void_p, name: str, shared_bytes: int
    ) -> ctypes.c_void_p:
        """Return a kernel that may use so much dynamic shared memory."""
        function = ctypes.c_void_p()
        self._check(
            self._cuda.cuModuleGetFunction(
                ctypes.byref(function), module, name.encode()
            ),
            name,
        )
        self._check(
            self._cuda.cuFuncSetAttribute(
                function,
                ctypes.c_int(MAX_DYNAMIC_SHARED_BYTES),
                ctypes.c_int(shared_bytes),
            ),
            f"the shared memory of {name}",
        )
        return function

    def tensor_map(
        self, address: int, rows: int, inner: int, stride: int, box: int
    ) -> TensorMap:
        """Encode `[rows, inner]` in bf16, rows `stride` apart, loaded as `[box, 64]`, swizzled."""
        memory = ctypes.create_string_buffer(MAP_BYTES + MAP_ALIGNMENT)
        target = -(-ctypes.addressof(memory) // MAP_ALIGNMENT) * MAP_ALIGNMENT
        self._check(
            self._cuda.cuTensorMapEncodeTiled(
                ctypes.c_void_p(target),
                ctypes.c_int(BFLOAT16),
                ctypes.c_uint32(2),
                ctypes.c_void_p(address),
                (ctypes.c_uint64 * 2)(inner, rows),
                (ctypes.c_uint64 * 1)(stride * VALUE_BYTES),
                (ctypes.c_uint32 * 2)(PANEL_INPUTS, box),
                (ctypes.c_uint32 * 2)(1, 1),
                ctypes.c_int(0),  # not interleaved
                ctypes.c_int(SWIZZLE_128_BYTES),
                ctypes.c_int(PROMOTE_256_BYTES),
                ctypes.c_int(0),  # zeros beyond the matrix
            ),
            f"a tensor map of {rows} x {inner}",
        )
        return TensorMap(memory, target)

    def launch(
        self,
        function: ctypes.c_void_p,
        shape: tuple[int, int, int],
        stream: int,
        arguments: ctypes.Array[ctypes.c_void_p],
    ) -> None:
        """Launch programs, threads and bytes of shared memory, with addresses of arguments."""
        programs, threads, shared_bytes = shape
        result = self._cuda.cuLaunchKernel(
            *(function, programs, 1, 1, threads, 1, 1, shared_bytes),
            ctypes.c_void_p(stream),
            arguments,
            None,
        )
        if result:
            self._check(result, "launching a product")

    def _check(self, result: int, doing: str) -> None:
        if not result:
            return
        text = ctypes.c_char_p()
        self._cuda.cuGetErrorString(ctypes.c_int(result), ctypes.byref(text))
        reason = (text.value or b"unknown error").decode()
        raise DriverError(f"CUDA error {result} of {doing}: {reason}")


class CudaKernels:
    """All variants in CUDA C++, loaded into the current context."""

    def __init__(
        self, cubin: bytes, driver: Driver, stream: Callable[[], int] = lambda: 0
    ) -> None:
        """Load every kernel now: a captured step must not. Raises `DriverError`.

        `stream` returns the handle of the stream that work goes to.
        """
        self._driver = driver
        self._stream = stream
        module = driver.load(cubin)
        self._functions = {
            name: driver.function(module, name, variant.shared_bytes)
            for name, variant in CUDA.items()
        }
        # A map follows from its key alone, so it stays right when memory has another owner.
        self._tensor_map = functools.lru_cache(MAX_MAPS)(driver.tensor_map)

    def launcher(
        self, name: str, grid: Grid, x: Rows, weight: Rows
    ) -> Callable[[Tensor], None]:
        """Return what computes an output, `[x.rows, weight.rows]`, from these operands.

        All that a launch needs is made here: a step outside graphs launches some hundred.
        """
        variant = CUDA[name]
        maps = (
            self._tensor_map(*x, variant.x_box),
            self._tensor_map(*weight, variant.weight_box),
        )
        sizes = (x.rows, weight.rows, grid.steps, grid.tiles_m, grid.tiles_n)
        numbers = [ctypes.c_int(number) for number in (*sizes, variant.band)]
        addresses = [
            *(of.address for of in maps),
            0,  # of the output's address
            *(ctypes.addressof(number) for number in numbers),
        ]
        template = Arguments(*addresses)
        function = self._functions[name]
        shape = grid.programs, variant.threads, variant.shared_bytes
        launch, stream = self._driver.launch, self._stream
        # The template holds addresses of these.
        memory = maps, numbers

        def compute(out: Tensor, _memory: object = memory) -> None:
            # Threads may launch the same product at once, so each launch has its own arguments.
            pointer = ctypes.c_void_p(out.data_ptr())
            arguments = Arguments.from_buffer_copy(template)
            arguments[OUTPUT] = ctypes.addressof(pointer)
            launch(function, shape, stream(), arguments)

        return compute
