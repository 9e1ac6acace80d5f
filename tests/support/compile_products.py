"""A process that compiles the products for compute capability 9.0, and reads their machine code.

Gluon goes through its real launch, with a driver that stops before the GPU. Arguments are names of
variants, of which those in CUDA C++ need NVRTC; or, for products with narrow weights, "dense" or
"experts", a number of rows, of each expert if there are any, and kinds of weights. Writes one JSON
list.
"""

import sys
import warnings
from collections.abc import Callable

import msgspec
import torch
import triton
from triton.backends.compiler import GPUTarget

from baton.kernels.hopper.narrow.narrow_proof import weights_of
from baton.kernels.hopper.narrow.product import streamed, streamed_experts
from baton.kernels.hopper.products.cubin import compiled
from baton.kernels.hopper.products.cuda_source import source
from baton.kernels.hopper.products.gluon_product import describe, launch
from baton.kernels.hopper.products.variants import CUDA, VARIANTS, grid_of
from baton.kernels.reference import NarrowWeight
from tests.support.compile_kernels import dumped, usages

ROWS, COLUMNS, INNER = 8, 4096, 4096
# Codes, the inputs that share a scale, and which of the weights that a proof tries.
KINDS = {
    "int4 fp16": ("int4", 128, 0),
    "int4 bf16": ("int4", 128, 1),
    "int4 in groups of 64": ("int4", 64, 0),
    "int4 in groups of 32": ("int4", 32, 0),
    "int4 by rows": ("int4", 0, 0),
    "int8 by rows": ("int8", 128, 0),
    "int8 in groups of 128": ("int8", 128, 1),
    "int8 in groups of 32": ("int8", 32, 1),
    "fp8 in blocks": ("fp8", 128, 0),
    "fp8 by rows": ("fp8", 128, 1),
    "mxfp4": ("fp4", 32, 0),
}
OUTPUTS, INPUTS = 512, 2048
EXPERTS = 32


class Report(msgspec.Struct, frozen=True):
    """What a compiled variant says of itself. A spill needs local memory."""

    name: str
    registers: int
    local_bytes: int
    products: int  # instructions of a warpgroup
    waits: int  # that leave the last products in flight
    zero_sums: int  # additions to +0
    shared_bytes: int


class NoGpu:
    """Stands in for Triton's driver until a kernel would be loaded."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def main() -> None:
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message="AnnAssign", category=DeprecationWarning)
    match sys.argv[1:]:
        case ["dense", rows, *kinds]:
            reports = [of_kind(kind, int(rows)) for kind in kinds]
        case ["experts", rows, *kinds]:
            reports = [of_experts(kind, int(rows)) for kind in kinds]
        case names:
            reports = of_variants(names)
    print(msgspec.json.encode(reports).decode())


def of_variants(names: list[str]) -> list[Report]:
    in_cuda = {name: CUDA[name] for name in names if name in CUDA}
    reports = [of_gluon(name) for name in names if name not in CUDA]
    if in_cuda:
        cubin = compiled(source(in_cuda))
        reports += [report(name, cubin, CUDA[name].shared_bytes) for name in in_cuda]
    return reports


def of_gluon(name: str) -> Report:
    variant = VARIANTS[name]
    bf16 = torch.bfloat16
    x = torch.empty(ROWS, INNER, dtype=bf16)
    weight = torch.empty(COLUMNS, INNER, dtype=bf16)
    out = torch.empty(ROWS, COLUMNS, dtype=bf16)
    of_x = describe(x.data_ptr(), ROWS, INNER, INNER, variant.x_box)
    of_weight = describe(weight.data_ptr(), COLUMNS, INNER, INNER, variant.weight_box)
    grid = grid_of(variant, ROWS, COLUMNS, INNER, 132)
    (kernel,) = without_gpu(lambda: launch(variant, grid, of_x, of_weight, out))
    return report("product_kernel", kernel.asm["cubin"], kernel.metadata.shared, name)


def weight_of(kind: str, outputs: int, inputs: int) -> NarrowWeight:
    narrow, group, number = KINDS[kind]
    weights = weights_of(narrow, group, outputs, inputs, torch.device("cpu"))
    return [*weights][number]


def of_kind(kind: str, rows: int) -> Report:
    made = streamed(weight_of(kind, OUTPUTS, INPUTS), torch.device("cpu"))
    assert made is not None
    codes, product = made
    x = torch.zeros(rows, INPUTS, dtype=torch.bfloat16)
    (kernel,) = without_gpu(lambda: product(x, codes))
    shared_bytes = kernel.metadata.shared
    return report("streaming_kernel", kernel.asm["cubin"], shared_bytes, kind)


def of_experts(kind: str, rows: int) -> Report:
    weights = [weight_of(kind, 128, INPUTS)] * EXPERTS
    made = streamed_experts(weights, torch.device("cpu"))
    assert made is not None
    codes, product = made
    x = torch.zeros(EXPERTS * rows, INPUTS, dtype=torch.bfloat16)
    ends = torch.zeros(EXPERTS, dtype=torch.int32)
    biases = torch.zeros(EXPERTS, 128, dtype=torch.bfloat16)
    (kernel,) = without_gpu(lambda: product(x, codes, ends, biases))
    shared_bytes = kernel.metadata.shared
    return report("streaming_kernel", kernel.asm["cubin"], shared_bytes, kind)


def without_gpu(call: Callable[[], object]) -> list[triton.compiler.CompiledKernel]:
    """Return the kernels that a call launches, compiled and not loaded."""
    kernels = []
    real = triton.runtime.jit.JITFunction.run
    triton.runtime.driver.set_active(NoGpu())

    def compile_(self, *args, grid, warmup, **given):  # type: ignore[no-untyped-def]  # noqa: ARG001
        kernel = real(self, *args, grid=grid, warmup=True, **given)
        kernels.append(kernel)

    triton.runtime.jit.JITFunction.run = compile_
    try:
        call()
    finally:
        triton.runtime.jit.JITFunction.run = real
    return kernels


def report(function: str, cubin: bytes, shared_bytes: int, name: str = "") -> Report:
    registers, local_bytes = usages(cubin)[function]
    code = dumped(cubin, "-sass", "-fun", function)
    return Report(
        name or function,
        registers,
        local_bytes,
        code.count("HGMMA"),
        code.count("WARPGROUP.DEPBAR.LE gsb0, 0x1 "),
        code.count("FADD"),
        shared_bytes,
    )


if __name__ == "__main__":
    main()
