"""Launch Triton kernels with less of the host's time.

At each call, Triton's own launch finds out anew which variant of a kernel the arguments need: it
took 23 to 37 us on the host of an H200, of which the call of the driver was 7 to 10. A `Launcher`
asks Triton once for each kind of arguments and then calls what Triton has chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import triton
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction

# Others may want something else of a compiled kernel, so Triton itself launches there.
KNOWN_VERSIONS = ("3.6.", "3.7.")
ALIGNMENT = 16  # of addresses and of numbers, which Triton tells apart


class Bound(NamedTuple):
    """A compiled kernel on a device, and the constants that follow its arguments."""

    device: int
    run: Callable[..., None]
    function: int
    metadata: object
    constants: tuple[object, ...]


class Launcher:
    """Launches one kernel on the current stream. Triton's hooks see its first launch only.

    Constants come by name and all else by position. Otherwise, with an argument of which `kind`
    knows nothing, and in the interpreter, Triton launches each time.
    """

    def __init__(self, kernel: JITFunction[Any]) -> None:
        self._kernel = kernel
        is_compiled = isinstance(kernel, JITFunction)
        self._is_known = is_compiled and triton.__version__.startswith(KNOWN_VERSIONS)
        self._bound: dict[tuple[object, ...], Bound] = {}

    def __call__(
        self, grid: tuple[int, int, int], *arguments: object, **constants: object
    ) -> None:
        if not self._is_known:
            self._kernel[grid](*arguments, **constants)
            return
        try:
            key = (*map(kind, arguments), *constants, *constants.values())
            bound = self._bound.get(key)
        except TypeError:  # an unknown type, or a constant without a hash
            self._kernel[grid](*arguments, **constants)
            return
        if bound is None:
            compiled = self._kernel[grid](*arguments, **constants)
            found = self._bind(compiled, len(arguments), constants)
            if found is not None:
                self._bound[key] = found
            return
        driver = triton.runtime.driver.active
        device = driver.get_current_device()
        if bound.device != device:
            self._kernel[grid](*arguments, **constants)
            return
        bound.run(
            *grid,
            driver.get_current_stream(device),
            bound.function,
            bound.metadata,
            None,
            None,
            None,
            *arguments,
            *bound.constants,
        )

    def _bind(
        self, compiled: Any, num_arguments: int, constants: dict[str, object]
    ) -> Bound | None:
        """Return what Triton has just launched; None if `kind` may not tell its variants apart."""
        parameters = self._kernel.params
        if compiled is None or any(
            one.is_constexpr for one in parameters[:num_arguments]
        ):
            return None
        others = parameters[num_arguments:]
        if not all(one.is_constexpr and one.name in constants for one in others):
            return None
        return Bound(
            triton.runtime.driver.active.get_current_device(),
            compiled.run,
            compiled.function,
            compiled.packed_metadata,
            tuple(constants[one.name] for one in others),
        )


def kind(value: object) -> object:
    """Return what decides how Triton specialises a kernel for an argument.

    Arguments of one kind have one specialisation; those of one specialisation may have several
    kinds. Raises `TypeError` for a type of which that is not known.
    """
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % ALIGNMENT == 0
    if type(value) is int:
        # The last number tells the widths apart in which Triton passes it.
        return value == 1, value % ALIGNMENT == 0, value >> 31
    if value is None or type(value) is float or type(value) is bool:
        return type(value)
    if isinstance(value, TensorDescriptor):
        block = tuple(value.block_shape)
        return TensorDescriptor, value.base.dtype, block, value.layout
    raise TypeError(f"an argument of {type(value)}")


def next_power_of_2(number: int) -> int:
    """Return the least power of 2 that is not below a number.

    Triton's works in kernels, too, and so takes as long as some launches; as does its `cdiv`.
    """
    return 1 << (number - 1).bit_length()


def cdiv(number: int, divisor: int) -> int:
    return -(-number // divisor)
