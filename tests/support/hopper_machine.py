"""A stand-in for CUDA's driver that computes what the products in CUDA C++ compute, on CPU tensors.

It takes the calls that service makes: it encodes tensor maps, and a launch follows the plan of
`product.cu` tile by tile with what a program would load: boxes, zeros beyond a matrix, parts that
the programs of a cluster load for one another. The order of sums is not that of a GPU.
"""

import ctypes
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from baton.kernels.hopper.products.variants import CUDA, PANEL_INPUTS, Variant

INVALID_VALUE = 1
NUM_NUMBERS = 6


@dataclass(slots=True)
class Matrix:
    """What a tensor map says, and the numbers that it names, as fp32."""

    address: int
    inner: int
    rows: int
    stride_bytes: int
    box_inner: int
    box_rows: int
    values: NDArray[np.float32] = field(init=False)

    def __post_init__(self) -> None:
        stride = self.stride_bytes // 2
        size = (self.rows - 1) * stride + self.inner
        words = np.ctypeslib.as_array(
            (ctypes.c_uint16 * size).from_address(self.address)
        )
        strided = np.lib.stride_tricks.as_strided(
            words, (self.rows, self.inner), (self.stride_bytes, 2), writeable=False
        )
        self.values = (strided.astype(np.uint32) << 16).view(np.float32)

    def box(self, row: int, inner: int) -> NDArray[np.float32]:
        """Return what a copy of one box brings: zeros beyond the matrix."""
        box = np.zeros((self.box_rows, self.box_inner), np.float32)
        part = self.values[row : row + self.box_rows, inner : inner + self.box_inner]
        box[: part.shape[0], : part.shape[1]] = part
        return box


FORMAT = "6Q"


class HopperMachine:
    """Has the driver's functions that are called. `launches` are the names of kernels, in order."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.shared_bytes: dict[str, int] = {}
        self.num_maps = 0
        self.launches: list[str] = []
        self.fails = ""  # the function that is to fail

    def cuModuleLoadData(self, module: Any, _cubin: bytes) -> int:  # noqa: N802
        return INVALID_VALUE if self.fails == "load" else 0

    def cuModuleGetFunction(self, function: Any, _module: Any, name: bytes) -> int:  # noqa: N802
        self.names.append(name.decode())
        function._obj.value = len(self.names)
        return 0

    def cuFuncSetAttribute(self, function: Any, attribute: Any, value: Any) -> int:  # noqa: N802
        assert attribute.value == 8
        self.shared_bytes[self.names[function.value - 1]] = value.value
        return 0

    def cuGetErrorString(self, result: Any, text: Any) -> int:  # noqa: N802
        text._obj.value = b"invalid argument"
        return 0

    def cuTensorMapEncodeTiled(self, target: Any, *of: Any) -> int:  # noqa: N802
        dtype, rank, address, sizes, strides, box, steps, *rest = of
        assert target.value % 64 == 0
        assert (dtype.value, rank.value, list(steps)) == (9, 2, [1, 1])
        assert [number.value for number in rest] == [0, 3, 3, 0]
        is_right = address.value % 16 == 0 and strides[0] % 16 == 0
        is_right &= strides[0] >= 2 * sizes[0] and max(box) <= 256
        if not is_right:
            return INVALID_VALUE
        values = address.value, *sizes, strides[0], *box
        ctypes.memmove(target.value, struct.pack(FORMAT, *values), 48)
        self.num_maps += 1
        return 0

    def cuLaunchKernel(self, function: Any, *of: Any) -> int:  # noqa: N802
        programs, _, _, threads, _, _, shared_bytes, _stream, arguments, _ = of
        name = self.names[function.value - 1]
        variant = CUDA[name]
        assert threads == variant.threads
        assert shared_bytes == self.shared_bytes[name]
        x, weight = (
            Matrix(*struct.unpack(FORMAT, ctypes.string_at(arguments[i], 48)))
            for i in (0, 1)
        )
        out = ctypes.c_void_p.from_address(arguments[2]).value
        numbers = [
            ctypes.c_int.from_address(arguments[3 + i]).value
            for i in range(NUM_NUMBERS)
        ]
        assert out is not None
        Launch(variant, x, weight, programs, *numbers).run(out)
        self.launches.append(name)
        return 0


class Launch(NamedTuple):
    """One launch of a kernel, with the names that `product.cu` has."""

    variant: Variant
    x: Matrix
    weight: Matrix
    programs: int
    rows: int
    columns: int
    steps: int
    tiles_m: int
    tiles_n: int
    band: int

    def run(self, out: int) -> None:
        """Write each number of the output, an address, once."""
        shape = self.rows, self.columns
        words = (ctypes.c_uint16 * (self.rows * self.columns)).from_address(out)
        target = np.ctypeslib.as_array(words).reshape(shape)
        written = np.zeros(shape, np.int8)
        for m, n in self._tiles():
            sums = self._operand("x", m) @ self._operand("weight", n).T
            rows = slice(m * self.variant.rows, self.rows)
            columns = slice(n * self.variant.columns, self.columns)
            live = sums[: max(0, self.rows - rows.start)]
            live = live[:, : max(0, self.columns - columns.start)]
            area = np.s_[
                rows.start : rows.start + live.shape[0],
                columns.start : columns.start + live.shape[1],
            ]
            written[area] += 1
            target[area] = (live.view(np.uint32) >> 16).astype(np.uint16)
        assert (written == 1).all(), "each number has one tile"

    def _tiles(self) -> Iterator[tuple[int, int]]:
        """Yield the tiles of all programs, those of a cluster together."""
        size = self.variant.cluster
        shares = self.variant.shares
        assert self.programs % size == 0
        units_m = -(-self.tiles_m // size) if shares == "weight" else self.tiles_m
        units_n = -(-self.tiles_n // size) if shares == "x" else self.tiles_n
        clusters = self.programs // size
        for cluster in range(clusters):
            for unit in range(cluster, units_m * units_n, clusters):
                number = unit // (self.band * units_n)
                height = min(units_m - number * self.band, self.band)
                rest = unit - number * self.band * units_n
                m = number * self.band + rest % height
                n = rest // height
                for rank in range(size):
                    yield (
                        m * size + rank if shares == "weight" else m,
                        n * size + rank if shares == "x" else n,
                    )

    def _operand(self, name: str, tile: int) -> NDArray[np.float32]:
        """Return a tile's rows of an operand, as they come to lie in shared memory.

        Rows of x beyond the box are other data there.
        """
        is_x = name == "x"
        matrix = self.x if is_x else self.weight
        height = self.variant.rows if is_x else self.variant.columns
        stored = self.variant.stored_rows if is_x else height
        parts = self.variant.cluster if self.variant.shares == name else 1
        assert matrix.box_rows * parts == stored
        assert matrix.box_inner == PANEL_INPUTS
        first = tile * height
        panels = [
            np.concatenate(
                [
                    matrix.box(first + part * matrix.box_rows, panel * PANEL_INPUTS)
                    for part in range(parts)
                ]
            )
            for panel in range(self.steps * self.variant.panels)
        ]
        loaded = np.concatenate(panels, axis=1)
        rest = np.full((height - stored, loaded.shape[1]), np.nan, np.float32)
        return np.concatenate((loaded, rest))
