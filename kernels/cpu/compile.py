"""Compile the CPU kernels to object code for this machine, with numba.

Compiling takes seconds. A process that finds object code in the cache imports neither this file nor
numba, and the object code calls nothing of either.
"""

from __future__ import annotations

from collections.abc import Callable

import llvmlite.binding as llvm
from numba import types

from baton.kernels.cpu import (
    attention,
    fp8_pool,
    int8_products,
    narrow_products,
    pair_attention,
    products,
    rows,
    sampling,
)
from baton.kernels.cpu.sparse import kernels as sparse
from baton.kernels.cpu.states import kernels as states
from baton.kernels.cpu.vectors import FEATURES

# The kernels that depend on `in_pairs`, and those that depend on `fp8_pool` as well.
PRODUCTS: dict[bool, tuple[Callable[..., None], ...]] = {
    False: (),
    True: (products.multiply, narrow_products.multiply_narrow),
}
OVER_POOL: dict[tuple[bool, bool], tuple[Callable[..., None], ...]] = {
    (False, False): (attention.attend,),
    (True, False): (pair_attention.attend,),
    (False, True): (fp8_pool.attend, fp8_pool.store_fp8),
    (True, True): (fp8_pool.attend_pairs, fp8_pool.store_fp8),
}
if FEATURES.get("avx512vnni"):
    PRODUCTS[True] += int8_products.round_rows, int8_products.multiply_bytes
KERNELS = (
    rows.rope_and_store,
    rows.add_rms_norm,
    rows.gate_mul,
    rows.sigmoid_mul,
    rows.soft_cap,
    states.convolve,
    states.gate_steps,
    states.advance_states,
    states.gated_norm,
    sparse.layer_norm,
    sparse.choose_keys,
    sparse.gather_rows,
    sampling.sample,
)
POINTED = {
    "Doubles": types.float64,
    "Floats": types.float32,
    "Int32s": types.int32,
    "Int64s": types.int64,
}
SCALARS = {"int": types.int64, "float": types.float32}


def compile_kernels(
    *,
    is_bf16: bool,
    in_pairs: bool,
    fp8_pool: bool,
    progress: Callable[[int, int], None],
) -> tuple[dict[str, list[str]], bytes]:
    """Return the arguments of each kernel ("pointer", "int" or "float") and the object code.

    With `in_pairs`, kernels multiply bf16 numbers directly. Otherwise attention multiplies in fp32,
    and the object code has no kernel for linear layers. A kernel's symbol is its name. Before its
    own arguments it takes two pointers for numba, to 8 bytes for a result and to 8 bytes for an
    exception, which kernels never write.
    """
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=FEATURES.flatten(), opt=3, jit=True
    )
    arguments: dict[str, list[str]] = {}
    whole = llvm.parse_assembly("")
    kernels = (*OVER_POOL[in_pairs, fp8_pool], *PRODUCTS[in_pairs], *KERNELS)
    pointed = _pointed(is_bf16=is_bf16, fp8_pool=fp8_pool)
    for done, kernel in enumerate(kernels):
        progress(done, len(kernels))
        name = kernel.py_func.__name__
        annotations = dict(kernel.py_func.__annotations__)
        annotations.pop("return")
        arguments[name] = [
            word if word in SCALARS else "pointer" for word in annotations.values()
        ]
        whole.link_in(
            _module(kernel, name, _types(list(annotations.values()), pointed))
        )
    passes = llvm.create_new_module_pass_manager()
    passes.add_global_dead_code_eliminate_pass()
    options = llvm.create_pipeline_tuning_options(speed_level=0)
    passes.run(whole, llvm.create_pass_builder(machine, options))
    code = machine.emit_object(whole)
    progress(len(kernels), len(kernels))
    return arguments, code


def _pointed(*, is_bf16: bool, fp8_pool: bool) -> dict[str, types.Type]:
    numbers = types.uint16 if is_bf16 else types.float32
    return POINTED | {
        "Numbers": numbers,
        "Pooled": types.uint8 if fp8_pool else numbers,
    }


def _types(
    annotations: list[str], pointed: dict[str, types.Type]
) -> tuple[types.Type, ...]:
    return tuple(
        SCALARS[word] if word in SCALARS else types.CPointer(pointed[word])
        for word in annotations
    )


def _module(
    kernel: object, name: str, signature: tuple[types.Type, ...]
) -> llvm.ModuleRef:
    """Return the kernel's optimised module, which exports only the kernel itself, as `name`."""
    kernel.compile(signature)  # type: ignore[attr-defined]
    module = llvm.parse_assembly(kernel.inspect_llvm(signature))  # type: ignore[attr-defined]
    defined = [function for function in module.functions if not function.is_declaration]
    # numba adds a wrapper for Python and one for C, whose name ends in that of the kernel's
    # function.
    wrapped = next(f.name for f in defined if f.name.startswith("cfunc."))
    entry = module.get_function(wrapped.removeprefix("cfunc."))
    for value in (*defined, *module.global_variables):
        if value.name != entry.name and not value.is_declaration:
            value.linkage = "internal"
    entry.name = name
    return module
