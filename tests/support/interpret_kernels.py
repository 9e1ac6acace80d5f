"""A process that runs kernels in Triton's interpreter and writes what came of it as JSON.

Triton decides at import whether it interprets, so it wants a process of its own, with
`TRITON_INTERPRET=1`. It is given the names of cases, and says their outcomes and which kernels ran.
"""

import json
import math
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable
from functools import partialmethod
from types import FunctionType, ModuleType

import numpy as np
import torch
import triton.language as tl
from numpy.typing import NDArray
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import (
    GridExecutor,
    InterpreterBuilder,
    TensorHandle,
)

from tests.support.interpreter_cases import interpreter_cases

# Which a kernel, or a function of the language, sees.
LANGUAGES = {"tl": tl, "core": core}
Conversion = Callable[[InterpreterBuilder, TensorHandle, tl.dtype], TensorHandle]


def dot(
    _builder: InterpreterBuilder,
    a: TensorHandle,
    b: TensorHandle,
    addend: TensorHandle,
    _input_precision: object,
    _max_num_imprecise_acc: object,
) -> TensorHandle:
    """The product of two tiles with every sum in one order, as a GPU computes it.

    The interpreter's own goes to numpy's BLAS, where the place of a row in its tile may change the
    row's bits on some CPUs, and multiplies the bits of bf16.
    """
    products = widened(a)[:, :, np.newaxis] * widened(b)[np.newaxis]
    return TensorHandle(
        products.sum(axis=1, dtype=addend.data.dtype) + addend.data, addend.dtype.scalar
    )


def widened(x: TensorHandle) -> NDArray[np.generic]:
    """The numbers of a tile; the interpreter keeps bf16 as its bits."""
    if x.dtype.scalar != tl.bfloat16:
        return x.data
    return (x.data.astype(np.uint32) << 16).view(np.float32)


def rounded(
    builder: InterpreterBuilder, convert: Conversion, source: TensorHandle, to: tl.dtype
) -> TensorHandle:
    """A conversion that rounds fp32 to the nearest bf16; the interpreter's own truncates."""
    if source.dtype.scalar != tl.float32 or to.scalar != tl.bfloat16:
        return convert(builder, source, to)
    bits = np.ascontiguousarray(source.data, np.float32).view(np.uint32)
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return TensorHandle(bits.astype(np.uint16), tl.bfloat16)


def fma(
    _builder: InterpreterBuilder, a: TensorHandle, b: TensorHandle, c: TensorHandle
) -> TensorHandle:
    """`a * b + c` of floats, rounded once as on a GPU; the interpreter's own rounds twice."""
    exact = a.data.astype(np.float64) * b.data + c.data
    return TensorHandle(exact.astype(np.float32), c.dtype.scalar)


def remember_types() -> None:
    """Make each type and each shape once, which the interpreter makes anew for every operation."""
    dtype_of = interpreter._get_np_dtype
    dtypes: dict[str, np.dtype] = {}
    blocks: dict[tuple[str, tuple[int, ...]], core.block_type] = {}
    shapes: dict[tuple[int, ...], tuple[core.constexpr, core.tuple]] = {}
    shape_of: dict[str, tuple[core.constexpr, core.tuple]] = {}
    unwrap = core._unwrap_if_constexpr
    broadcast = TritonSemantic.broadcast_impl_value

    def known_dtype(kind: core.dtype) -> np.dtype:
        if kind.name not in dtypes:
            dtypes[kind.name] = dtype_of(kind)
        return dtypes[kind.name]

    def block_of(element: core.dtype, shape: Iterable[int]) -> core.block_type:
        key = (element.name, tuple(shape))
        if key not in blocks:
            blocks[key] = core.block_type(element, list(shape))
        return blocks[key]

    def begin(self: core.tensor, handle: TensorHandle, kind: core.dtype) -> None:
        if kind.name not in shape_of:
            shape = tuple(kind.shape) if kind.is_block() else ()
            sizes = core.tuple([core.constexpr(size) for size in shape])
            known = shapes.setdefault(shape, (core.constexpr(math.prod(shape)), sizes))
            shape_of[kind.name] = known
        self.handle = handle
        self.type = kind
        self.dtype = kind.scalar
        self.numel, self.shape = shape_of[kind.name]

    def unwrapped(value: object) -> object:
        kind = type(value)
        if kind is core.constexpr:
            return value.value
        return value if kind is core.tensor or kind is int else unwrap(value)

    def broadcasted(
        self: TritonSemantic, a: core.tensor, b: core.tensor
    ) -> tuple[core.tensor, core.tensor]:
        return (a, b) if a.shape is b.shape else broadcast(self, a, b)

    interpreter._get_np_dtype = known_dtype
    InterpreterBuilder.get_block_ty = lambda _, *of: block_of(*of)
    core.block_type.with_element_ty = lambda self, kind: block_of(kind, self.shape)
    core.tensor.__init__ = begin
    core._unwrap_if_constexpr = unwrapped
    TritonSemantic.broadcast_impl_value = broadcasted


class PatchesOnce:
    """Gives kernels the interpreter's language once in a launch.

    The interpreter itself looks through the whole language at every call of a function in a kernel,
    which takes half of its time and changes nothing.
    """

    def __init__(self) -> None:
        self._patch = interpreter._patch_lang
        self._is_done: set[tuple[str, ...]] = set()

    def begin(self) -> None:
        """Begin a launch, at whose end the language is restored."""
        self._is_done.clear()

    def __call__(self, fn: FunctionType) -> object:
        modules = {
            value for value in fn.__globals__.values() if isinstance(value, ModuleType)
        }
        key = tuple(name for name, module in LANGUAGES.items() if module in modules)
        if key in self._is_done:
            return None
        self._is_done.add(key)
        return self._patch(fn)


class Interpreting:
    """Triton's interpreter as a GPU computes, and quicker; notes which kernels ran."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        InterpreterBuilder.create_dot = dot
        InterpreterBuilder.create_fma = fma
        # The interpreter computes whether integers overflow, and then says so only with `debug`.
        TritonSemantic.binary_op_sanitize_overflow_impl = lambda *_: None
        remember_types()
        for name in ("cast_impl", "create_fp_trunc"):
            convert = getattr(InterpreterBuilder, name)
            setattr(InterpreterBuilder, name, partialmethod(rounded, convert))
        warnings.simplefilter("error")
        # Logits may be NaN, and infinity less infinity is; a warm-up reads states of nothing.
        np.seterr(invalid="ignore", over="ignore")
        warnings.filterwarnings("ignore", message="All-NaN")
        self.ran: set[str] = set()
        run = GridExecutor.__call__
        patches = PatchesOnce()
        interpreter._patch_lang = patches

        def noting(grid: GridExecutor, *arguments: object, **named: object) -> object:
            self.ran.add(grid.fn.__name__)
            patches.begin()
            return run(grid, *arguments, **named)

        GridExecutor.__call__ = noting


def main() -> None:
    interpreting = Interpreting()
    outcomes: dict[str, str | None] = {}
    cases = interpreter_cases()
    for name in sys.argv[1:]:
        try:
            cases[name]()
            outcomes[name] = None
        except Exception:  # noqa: BLE001  (whatever it is, it is that case's outcome)
            outcomes[name] = traceback.format_exc()
    print(json.dumps({"outcomes": outcomes, "ran": sorted(interpreting.ran)}))


if __name__ == "__main__":
    main()
