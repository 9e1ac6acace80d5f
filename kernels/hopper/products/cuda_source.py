"""The CUDA C++ of the products: `product.cu`, its instruction for each width, and the kernels."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from baton.kernels.hopper.products.variants import CUDA, Variant

SHARES = {"": 0, "x": 1, "weight": 2}


def source(variants: Mapping[str, Variant] = CUDA) -> str:
    """Return the whole source, with one kernel for each of the names."""
    body = (Path(__file__).parent / "product.cu").read_text(encoding="utf-8")
    widths = sorted({variant.columns for variant in variants.values()})
    instructions = [_instruction(width) for width in widths]
    kernels = [_kernel(name, variant) for name, variant in variants.items()]
    return "\n".join((body, *instructions, *kernels))


def _instruction(columns: int) -> str:
    """Return `Mma` for one width: 64 rows of sums += 16 inputs of x by 16 of the weight."""
    count = columns // 2
    sums = ", ".join(f"%{i}" for i in range(count))
    operands = ", ".join(f'"+f"(sums[{i}])' for i in range(count))
    return f"""\
template <> struct Mma<{columns}> {{
    static __device__ __forceinline__ void add(float (&sums)[{count}], u64 a, u64 b, int adds) {{
        asm volatile(
            "{{\\n"
            ".reg .pred p;\\n"
            "setp.ne.b32 p, %{count + 2}, 0;\\n"
            "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16 "
            "{{{sums}}}, %{count}, %{count + 1}, p, 1, 1, 0, 0;\\n"
            "}}\\n"
            : {operands}
            : "l"(a), "l"(b), "r"(adds));
    }}
}};
"""


def _kernel(name: str, variant: Variant) -> str:
    values = (
        variant.groups,
        variant.columns,
        variant.stored_rows,
        variant.panels,
        variant.stages,
        SHARES[variant.shares],
        variant.cluster,
    )
    arguments = ", ".join(map(str, values))
    bounds = f"{variant.threads}, {variant.per_multiprocessor}"
    return f"""\
extern "C" __global__ void __cluster_dims__({variant.cluster}, 1, 1) __launch_bounds__({bounds})
{name}(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap weight, u16* out,
       int rows, int columns, int steps, int tiles_m, int tiles_n, int band) {{
    product<{arguments}>(x, weight, out, rows, columns, steps, tiles_m, tiles_n, band);
}}
"""
