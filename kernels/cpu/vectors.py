"""Vectors of 16 floats for the compiled CPU kernels, as operations that numba can compile.

A kernel says which lanes are added to which, so the kernel and not the optimizer decides the order
of a sum. The bits are the same whether a vector fills one register or four. A bf16 number is its
bits as uint16: loads widen it, and stores round to the nearest even.
"""

# ruff: noqa: ARG001, ARG005  (numba asks for the parameters of `intrinsic` functions)

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import llvmlite.binding as llvm
import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, overload, register_model

# The types of a kernel's pointers: Numbers are in the model's dtype, and so are Pooled, unless they
# are the bytes of an FP8 pool; Factors and Sums are floats or words.
from numba.types import CPointer as Doubles
from numba.types import CPointer as Factors
from numba.types import CPointer as Floats
from numba.types import CPointer as Int32s
from numba.types import CPointer as Int64s
from numba.types import CPointer as Numbers
from numba.types import CPointer as Pooled
from numba.types import CPointer as Sums

from baton.kernels.constants import (
    EXP2,
    LN_2_HIGH,
    LN_2_LOW,
    LOG,
    ROOT_HALF,
    ROUNDER,
    WIDTH,
)

__all__ = [
    "Doubles",
    "Factors",
    "Floats",
    "Int32s",
    "Int64s",
    "Numbers",
    "Pooled",
    "Sums",
]

FLOAT, BYTE, HALF, INT32, INT64 = ir.FloatType(), *map(ir.IntType, (8, 16, 32, 64))
FLOATS, HALVES, WORDS = (
    ir.VectorType(element, WIDTH) for element in (FLOAT, HALF, INT32)
)
POINTER = ir.PointerType()
NOTHING = ir.Constant(POINTER, None)
FEATURES = llvm.get_host_cpu_features()

kernel = numba.njit(error_model="numpy")
inlined = numba.njit(error_model="numpy", forceinline=True)

Emit = Callable[..., ir.Value]
Operation = Callable[..., types.Type]


class Lanes(types.Type):  # type: ignore[misc]
    """The numba type of a vector of 16 floats."""


LANES = Lanes("lanes")


@register_model(Lanes)
class LanesModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: object, lanes: types.Type) -> None:
        super().__init__(manager, lanes, FLOATS)


def instruction(signature: types.Type, emit: Emit) -> object:
    """Return what an `intrinsic` function returns: its types, and the code that `emit` writes."""
    return signature, lambda context, builder, _, args: emit(builder, *args)


# --- arithmetic ------------------------------------------------------------------------------


def constant(typ: ir.Type, value: float) -> ir.Constant:
    """Return a vector with `value` in all lanes."""
    return ir.Constant(typ, [ir.Constant(typ.element, value)] * WIDTH)


def spread(builder: ir.IRBuilder, value: ir.Value, typ: ir.Type) -> ir.Value:
    one = builder.insert_element(ir.Constant(typ, ir.Undefined), value, INT32(0))
    return builder.shuffle_vector(one, one, constant(WORDS, 0))


def call(
    builder: ir.IRBuilder, name: str, result: ir.Type, *args: ir.Value
) -> ir.Value:
    typ = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, typ, name), args)


def fused(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """Return `a * b + c`, rounded once."""
    return call(builder, "llvm.fma.v16f32", FLOATS, a, b, c)


def _root(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    return call(builder, "llvm.sqrt.v16f32", FLOATS, x)


def _larger(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _smaller(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    return builder.select(builder.fcmp_ordered("<", a, b), a, b)


def _exp2(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """Return 2**x; 0 below 2**-126, and infinity from 2**128 on."""
    is_huge = builder.fcmp_ordered(">", x, constant(FLOATS, 128.0))
    return power(builder, builder.select(is_huge, constant(FLOATS, 128.0), x), EXP2)


def power(builder: ir.IRBuilder, x: ir.Value, factors: Sequence[float]) -> ir.Value:
    """Return 2**x for x up to 128 by a polynomial (see `constants.EXP2`); 0 below 2**-126."""
    is_tiny = builder.fcmp_ordered("<", x, constant(FLOATS, -126.0))
    shifted = builder.fadd(x, constant(FLOATS, ROUNDER))
    rest = builder.fsub(x, builder.fsub(shifted, constant(FLOATS, ROUNDER)))
    value = constant(FLOATS, factors[0])
    for factor in (*factors[1:], 1.0):
        value = fused(builder, value, rest, constant(FLOATS, factor))
    bits = builder.shl(builder.bitcast(shifted, WORDS), constant(WORDS, 23))
    whole = builder.bitcast(builder.add(bits, constant(WORDS, 127 << 23)), FLOATS)
    return builder.select(is_tiny, constant(FLOATS, 0.0), builder.fmul(value, whole))


def minus_log_of_rest(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """Return -log(1 - x) of numbers above 0 and below 1; small numbers keep all their bits."""
    rest = builder.bitcast(builder.fsub(constant(FLOATS, 1.0), x), WORDS)
    above = builder.sub(rest, constant(WORDS, ROOT_HALF))
    power = builder.ashr(above, constant(WORDS, 23))
    near_one = builder.bitcast(
        builder.sub(rest, builder.shl(power, constant(WORDS, 23))), FLOATS
    )
    is_near = builder.icmp_signed("==", power, constant(WORDS, 0))
    f = builder.fsub(near_one, constant(FLOATS, 1.0))
    f = builder.select(is_near, builder.fsub(constant(FLOATS, 0.0), x), f)
    exponent = builder.sitofp(power, FLOATS)
    square = builder.fmul(f, f)
    value = constant(FLOATS, LOG[0])
    for factor in LOG[1:]:
        value = fused(builder, value, f, constant(FLOATS, factor))
    value = builder.fmul(builder.fmul(value, square), f)
    value = fused(builder, exponent, constant(FLOATS, LN_2_LOW), value)
    value = fused(builder, square, constant(FLOATS, -0.5), value)
    value = fused(
        builder, exponent, constant(FLOATS, LN_2_HIGH), builder.fadd(f, value)
    )
    return builder.fsub(constant(FLOATS, 0.0), value)


def _folded(fold: Emit) -> Emit:
    """Reduce all lanes to one: fold the upper half onto the lower half until one lane is left."""

    def emit(builder: ir.IRBuilder, lanes: ir.Value) -> ir.Value:
        half = WIDTH // 2
        while half:
            other = ir.Constant(WORDS, [(lane + half) % WIDTH for lane in range(WIDTH)])
            lanes = fold(builder, lanes, builder.shuffle_vector(lanes, lanes, other))
            half //= 2
        return builder.extract_element(lanes, INT32(0))

    return emit


def _of_one(emit: Emit, result: types.Type = LANES) -> Operation:
    @intrinsic
    def operation(context: object, a: types.Type) -> object:
        return instruction(result(LANES), emit)

    return operation


def _of_two(emit: Emit) -> Operation:
    @intrinsic
    def operation(context: object, a: types.Type, b: types.Type) -> object:
        return instruction(LANES(LANES, LANES), emit)

    return operation


def _define(sign: Callable[..., object], operation: Operation) -> None:
    """Define the operator, so that kernels can write the operation with its sign."""

    @overload(sign)
    def typed(a: types.Type, b: types.Type) -> object:
        def compute(a: types.Type, b: types.Type) -> object:
            return operation(a, b)

        return compute if a == b == LANES else None


_define(operator.add, _of_two(ir.IRBuilder.fadd))
_define(operator.sub, _of_two(ir.IRBuilder.fsub))
_define(operator.mul, _of_two(ir.IRBuilder.fmul))
_define(operator.truediv, _of_two(ir.IRBuilder.fdiv))
# Where the first is NaN, the second is returned; the second may be NaN, too.
larger = _of_two(_larger)
smaller = _of_two(_smaller)
exp2 = _of_one(_exp2)
root = _of_one(_root)
log_of_rest = _of_one(minus_log_of_rest)
total = _of_one(_folded(ir.IRBuilder.fadd), types.float32)
largest = _of_one(_folded(_larger), types.float32)


@intrinsic
def fma(context: object, a: types.Type, b: types.Type, c: types.Type) -> object:
    return instruction(LANES(LANES, LANES, LANES), fused)


@intrinsic
def every(context: object, value: types.Type) -> object:
    """Return a vector with one number in all lanes."""
    return instruction(
        LANES(types.float32), lambda builder, one: spread(builder, one, FLOATS)
    )


@intrinsic
def hide(
    context: object, lanes: types.Type, first: types.Type, end: types.Type
) -> object:
    """Return the vector with minus infinity in all lanes but `first:end`."""

    def emit(
        builder: ir.IRBuilder, lanes: ir.Value, first: ir.Value, end: ir.Value
    ) -> ir.Value:
        seen = builder.and_(below(builder, end), builder.not_(below(builder, first)))
        return builder.select(seen, lanes, constant(FLOATS, float("-inf")))

    return instruction(LANES(LANES, types.int64, types.int64), emit)


def below(builder: ir.IRBuilder, count: ir.Value) -> ir.Value:
    """Return a mask of the lanes below `count`."""
    counts = spread(builder, builder.trunc(count, INT32), WORDS)
    return builder.icmp_signed("<", ir.Constant(WORDS, list(range(WIDTH))), counts)


# --- memory ----------------------------------------------------------------------------------


def element_of(pointer: types.Type) -> ir.Type:
    return {
        types.float32: FLOAT,
        types.uint8: BYTE,
        types.uint16: HALF,
        types.int32: INT32,
        types.int64: INT64,
    }[pointer.dtype]


def place(
    builder: ir.IRBuilder, pointer: ir.Value, index: ir.Value, element: ir.Type
) -> ir.Value:
    at = builder.gep(pointer, [index], source_etype=element)
    # Numba's pointers have element types; vectors are stored through an untyped one.
    at.type = POINTER
    return at


def widened(builder: ir.IRBuilder, halves: ir.Value) -> ir.Value:
    words = builder.shl(builder.zext(halves, WORDS), constant(WORDS, 16))
    return builder.bitcast(words, FLOATS)


def _rounded(builder: ir.IRBuilder, floats: ir.Value) -> ir.Value:
    """Return the nearest bf16 numbers, ties to even; NaN stays NaN."""
    words = builder.bitcast(floats, WORDS)
    odd = builder.and_(builder.lshr(words, constant(WORDS, 16)), constant(WORDS, 1))
    up = builder.add(words, builder.add(odd, constant(WORDS, 0x7FFF)))
    halves = builder.lshr(up, constant(WORDS, 16))
    is_nan = builder.fcmp_unordered("uno", floats, floats)
    return builder.trunc(
        builder.select(is_nan, constant(WORDS, 0x7FC0), halves), HALVES
    )


@intrinsic
def load(context: object, pointer: types.Type, index: types.Type) -> object:
    """Return the 16 numbers from `pointer[index]` on."""
    element = element_of(pointer)

    def emit(builder: ir.IRBuilder, pointer: ir.Value, index: ir.Value) -> ir.Value:
        at = place(builder, pointer, index, element)
        if element is FLOAT:
            return builder.load(at, align=4, typ=FLOATS)
        return widened(builder, builder.load(at, align=2, typ=HALVES))

    return instruction(LANES(pointer, types.int64), emit)


@intrinsic
def load_first(
    context: object, pointer: types.Type, index: types.Type, count: types.Type
) -> object:
    """Return the first `count` of 16 numbers and 0 in the other lanes; nothing else is read."""
    element = element_of(pointer)
    typ, suffix = (FLOATS, "v16f32") if element is FLOAT else (HALVES, "v16i16")

    def emit(
        builder: ir.IRBuilder, pointer: ir.Value, index: ir.Value, count: ir.Value
    ) -> ir.Value:
        at = place(builder, pointer, index, element)
        flags = below(builder, count)
        name = f"llvm.masked.load.{suffix}.p0"
        zero = ir.Constant(typ, None)
        loaded = call(builder, name, typ, at, INT32(1), flags, zero)
        return loaded if element is FLOAT else widened(builder, loaded)

    return instruction(LANES(pointer, types.int64, types.int64), emit)


@intrinsic
def store(
    context: object, pointer: types.Type, index: types.Type, lanes: types.Type
) -> object:
    element = element_of(pointer)

    def emit(
        builder: ir.IRBuilder, pointer: ir.Value, index: ir.Value, lanes: ir.Value
    ) -> ir.Value:
        value = lanes if element is FLOAT else _rounded(builder, lanes)
        builder.store(value, place(builder, pointer, index, element), align=2)
        return NOTHING

    return instruction(types.none(pointer, types.int64, LANES), emit)


@intrinsic
def store_first(
    context: object,
    pointer: types.Type,
    index: types.Type,
    lanes: types.Type,
    count: types.Type,
) -> object:
    """Store the first `count` lanes; nothing else is written."""
    element = element_of(pointer)
    suffix = "v16f32" if element is FLOAT else "v16i16"

    def emit(
        builder: ir.IRBuilder,
        pointer: ir.Value,
        index: ir.Value,
        lanes: ir.Value,
        count: ir.Value,
    ) -> ir.Value:
        value = lanes if element is FLOAT else _rounded(builder, lanes)
        at = place(builder, pointer, index, element)
        flags = below(builder, count)
        name = f"llvm.masked.store.{suffix}.p0"
        call(builder, name, ir.VoidType(), value, at, INT32(1), flags)
        return NOTHING

    return instruction(types.none(pointer, types.int64, LANES, types.int64), emit)


@intrinsic
def shift(context: object, pointer: types.Type, count: types.Type) -> object:
    """Return the pointer to `pointer[count]`."""
    element = element_of(pointer)
    return instruction(
        pointer(pointer, types.int64),
        lambda builder, address, index: place(builder, address, index, element),
    )


@intrinsic
def prefetch(context: object, pointer: types.Type, index: types.Type) -> object:
    """Begin to load the cache line of `pointer[index]` into the first-level cache."""
    element = element_of(pointer)

    def emit(builder: ir.IRBuilder, pointer: ir.Value, index: ir.Value) -> ir.Value:
        at = place(builder, pointer, index, element)
        call(
            builder, "llvm.prefetch.p0", ir.VoidType(), at, INT32(0), INT32(3), INT32(1)
        )
        return NOTHING

    return instruction(types.none(pointer, types.int64), emit)


@intrinsic
def per_line(context: object, pointer: types.Type) -> object:
    """Return how many numbers a cache line of 64 bytes holds."""
    count = INT64(16 if element_of(pointer) is FLOAT else 32)
    return instruction(types.int64(pointer), lambda builder, address: count)
