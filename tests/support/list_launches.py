"""A process that launches every kernel through its `Launcher`, and some at random, without a GPU.

A driver without a device stands under Triton, and what it would compile only notes its launches. So
the variant and the arguments that a `Launcher` takes can be compared with those that Triton itself
takes for the same arguments. `tests/unit/kernels/test_launch.py` starts this one. It prints as JSON
the launches that were left to Triton when they came again, and the differences.
"""

# ruff: noqa: N803, PLR0913, PLR0917  (the probe is a kernel)

import json
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction

from baton.kernels.launch import Launcher
from tests.support import compile_hopper, compile_kernels
from tests.support.list_variants import NoDriver

NUM_LAUNCHES = 6000
# Where Triton's choice changes: 1, multiples of 16, and the widths of numbers.
EDGES = (0, 1, 16, 1 << 31, 1 << 32, 1 << 40, 1 << 63)
DTYPES = (torch.bfloat16, torch.uint8, torch.int64)
GRID = (3, 2, 1)
NUM_BEFORE = 9  # what `run` takes before a kernel's arguments

Noted = tuple[str, tuple[object, ...]]


@triton.jit(do_not_specialize=["count", "other_ptr"])
def _probe_kernel(
    some_ptr: tl.tensor,
    other_ptr: tl.tensor,
    count: tl.tensor,
    stride: tl.tensor,
    more: tl.tensor,
    WIDTH: tl.constexpr,
    HAS_MORE: tl.constexpr,
) -> None:
    pass


class Machine:
    """Triton over no device."""

    def __init__(self) -> None:
        self.num_by_triton = 0
        self.noted: list[Noted] = []
        triton.runtime.driver.set_active(NoDriver())
        machine = self
        launch = JITFunction.run

        class Compiled:
            function = 5
            packed_metadata = (4, 1, 0)

            def __init__(self, key: str) -> None:
                self.key = key

            def launch_metadata(self, *_: object) -> None:
                return None

            def run(self, *arguments: object) -> None:
                machine.noted.append((self.key, arguments))

        def compiled(kernel: Any, key: str, *_: object) -> Compiled:
            _ = kernel.cache_key  # its globals are known from then on
            caches = kernel.device_caches[0]
            return caches[0].setdefault(key, Compiled(key))  # type: ignore[no-any-return]

        def counted(kernel: Any, *arguments: object, **given: object) -> object:
            self.num_by_triton += 1
            return launch(kernel, *arguments, **given)

        JITFunction._do_compile = compiled
        JITFunction.run = counted

    def launched(self, call: Callable[[], object]) -> list[Noted]:
        self.noted = []
        call()
        return self.noted


def differences(left: list[Noted], right: list[Noted]) -> list[str]:
    """Return where two lists of launches differ, but for the hooks and in what tensors hold."""

    def shown(launch: Noted) -> tuple[object, ...]:
        key, arguments = launch
        kernel = arguments[NUM_BEFORE:]
        kept = (*arguments[: NUM_BEFORE - 3], *kernel)
        found = (one.base if isinstance(one, TensorDescriptor) else one for one in kept)
        return key, *(one.shape if isinstance(one, Tensor) else one for one in found)

    if len(left) != len(right):
        return [f"{len(left)} launches and {len(right)}"]
    pairs = zip(map(shown, left), map(shown, right), strict=True)
    return [f"{one} and {other}" for one, other in pairs if one != other]


def number(luck: random.Random) -> int:
    found = luck.choice((-1, 1)) * luck.choice(EDGES) + luck.randint(-1, 1)
    return max(found, -(1 << 63))  # the least that a kernel can take


def descriptor(luck: random.Random) -> TensorDescriptor:
    dtype, bits = luck.choice(((torch.bfloat16, 16), (torch.int32, 32)))
    layout = gl.NVMMASharedLayout(
        swizzle_byte_width=luck.choice((64, 128)), element_bitwidth=bits, rank=2
    )
    base = torch.empty(64, luck.choice((64, 256)), dtype=dtype)
    block = [luck.choice((16, 32)), 64]
    return TensorDescriptor(base, [*base.shape], [*base.stride()], block, layout)


def random_launch(luck: random.Random) -> tuple[tuple[object, ...], dict[str, object]]:
    """Return arguments and constants that differ from the usual ones in two places."""
    memory = torch.zeros(256, dtype=torch.uint8)

    def tensor() -> Tensor | None:
        start = luck.choice((0, 16, 8, 24))
        dtype = luck.choice(DTYPES)
        return luck.choice((memory[start : start + 64].view(dtype), None))

    usual = memory.view(torch.bfloat16)
    arguments = [usual, usual, 64, 64, None]
    kinds = (
        tensor,
        tensor,
        lambda: number(luck),
        lambda: number(luck),
        lambda: luck.choice(
            (2.5, 1.0, True, False, number(luck), tensor(), descriptor(luck))
        ),
    )
    for place in luck.sample(range(len(kinds)), 2):
        arguments[place] = kinds[place]()  # type: ignore[call-overload]
    constants = {"WIDTH": luck.choice((16, 32)), "HAS_MORE": luck.choice((0, 1))}
    return tuple(arguments), constants | {"num_warps": 4}


def main() -> None:
    torch.set_num_threads(1)
    machine = Machine()
    again: dict[str, int] = {}
    found: list[str] = []
    num_launches = 0
    for name, case in (compile_kernels.cases() | compile_hopper.cases()).items():
        first = machine.launched(case)
        machine.num_by_triton = 0
        second = machine.launched(case)
        again[name] = machine.num_by_triton
        num_launches += len(second)
        found += differences(first, second)
    luck = random.Random(1)
    probe = Launcher(_probe_kernel)
    num_bound = 0
    for _ in range(NUM_LAUNCHES):
        arguments, constants = random_launch(luck)
        machine.num_by_triton = 0
        ours = machine.launched(partial(probe, GRID, *arguments, **constants))
        num_bound += not machine.num_by_triton
        theirs = machine.launched(partial(_probe_kernel[GRID], *arguments, **constants))
        found += differences(ours, theirs)
    said = {
        "launches": num_launches,
        "by Triton again": {name: count for name, count in again.items() if count},
        "bound": num_bound,
        "kinds": len(probe._bound),
        "variants": len(_probe_kernel.device_caches[0][0]),
        "differences": found[:20],
    }
    print(json.dumps(said))


if __name__ == "__main__":
    main()
