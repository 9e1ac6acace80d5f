"""A process that compiles what the launchers launch for sm_90, without a GPU, and reads the cubins.

The launchers run on CPU tensors of model shapes while Triton's `run` only records the call, so what
is compiled is what they would launch: constants, specialisation and options included. A process of
its own, because Triton must not interpret and must not be left patched. Writes one JSON list.
"""

import json
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.support.kernel_cases import rotation_table

Launch = tuple[triton.JITFunction, tuple[object, ...], dict[str, object]]
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")
TYPES = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


def main(folder: Path) -> None:
    warnings.simplefilter("error")
    reports = []
    for case, launch in cases().items():
        for number, recorded in enumerate(record(launch)):
            cubin = folder / f"{case.replace(' ', '_')}-{number}.cubin"
            reports.append({"case": case, **compile_one(recorded, cubin)})
    print(json.dumps(reports))


def record(launch: Callable[[], object]) -> list[Launch]:
    """The kernel launches of a call, none of them made."""
    launches: list[Launch] = []
    real = triton.JITFunction.run

    def note(kernel: triton.JITFunction, *args: object, **given: object) -> None:
        launches.append((kernel, args, given))

    triton.JITFunction.run = note
    try:
        launch()
    finally:
        triton.JITFunction.run = real
    return launches


def compile_one(launch: Launch, cubin: Path) -> dict[str, object]:
    """Compile as Triton's own launch would on a Hopper GPU; what the cubin says of itself."""
    kernel, args, given = launch
    options = {name: given[name] for name in OPTIONS}
    values = dict(zip(kernel.arg_names, args, strict=False))
    values |= given
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        constant = parameter.is_constexpr or value is None
        if constant or (isinstance(value, int) and value == 1 and not parameter.do_not_specialize):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
            continue
        signature[parameter.name] = _type_name(value)
        aligned = value.data_ptr() if isinstance(value, torch.Tensor) else value
        if isinstance(aligned, int) and aligned % 16 == 0 and not parameter.do_not_specialize:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    cubin.write_bytes(built.asm["cubin"])
    return {
        "kernel": kernel.__name__,
        "shared_bytes": built.metadata.shared,
        **_read(cubin, built.asm["ptx"]),
    }


def _type_name(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    assert isinstance(value, int)
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _read(cubin: Path, ptx: str) -> dict[str, int]:
    """Registers and local memory from the cubin: what a spill needs shows in STACK or LOCAL."""
    usage = subprocess.run(
        [CUOBJDUMP, "--dump-resource-usage", cubin],
        capture_output=True, text=True, check=True, timeout=30,
    ).stdout  # fmt: skip
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    assert found, usage
    registers, stack, local = map(int, found.groups())
    # Masked loads are inline assembly with a predicate in front; copies to shared are `cp.async`.
    return {
        "registers": registers,
        "local_bytes": stack + local,
        "wgmma": ptx.count("wgmma.mma_async"),
        "mma": ptx.count("mma.sync"),
        "tf32": ptx.count("tf32"),
        "wide_loads": len(re.findall(r"ld\.global\S*\.v4\.b32|cp\.async\.cg\S* .*, 0x10,", ptx)),
    }


def cases() -> dict[str, Callable[[], object]]:
    """What a model of 8B launches in bf16, smaller heads and blocks, and fp32 for parity."""
    bf16, fp32 = torch.bfloat16, torch.float32
    return {
        "decode bf16": lambda: _decode(bf16, 128, 16),
        "decode bf16 small heads": lambda: _decode(bf16, 64, 32),
        "decode bf16 big blocks": lambda: _decode(bf16, 128, 64),
        "decode fp32": lambda: _decode(fp32, 128, 16),
        "prefill bf16": lambda: _prefill(bf16, 128, 16),
        "prefill bf16 small heads": lambda: _prefill(bf16, 64, 16),
        "prefill bf16 big blocks": lambda: _prefill(bf16, 128, 64),
        "prefill fp32": lambda: _prefill(fp32, 128, 16),
        "rope bf16": lambda: _rope(bf16, norm=False),
        "rope bf16 norm": lambda: _rope(bf16, norm=True),
        "norm bf16": _norm,
        "silu bf16": _silu,
        "blocks": _blocks,
        "sampling bf16": lambda: _sampling(bf16, 151_936),
        "sampling fp32": lambda: _sampling(fp32, 128_256),
    }


def _pool(dtype: torch.dtype, head_dim: int, block_size: int) -> torch.Tensor:
    return torch.empty(2, 8, 2, 2, block_size, head_dim, dtype=dtype)


def _decode(dtype: torch.dtype, head_dim: int, block_size: int) -> object:
    from baton.kernels.decode_attention import paged_decode_attention

    q, pool = torch.empty(4, 32, head_dim, dtype=dtype), _pool(dtype, head_dim, block_size)
    tables, lens = torch.zeros(4, 64, dtype=torch.int32), torch.ones(4, dtype=torch.int32)
    return paged_decode_attention(q, pool, 1, tables, lens, 0.1)


def _prefill(dtype: torch.dtype, head_dim: int, block_size: int) -> object:
    from baton.kernels.prefill_attention import paged_prefill_attention

    q, pool = torch.empty(100, 32, head_dim, dtype=dtype), _pool(dtype, head_dim, block_size)
    tables, lens = torch.zeros(1, 64, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    starts = torch.zeros(2, dtype=torch.int32)
    return paged_prefill_attention(q, pool, 1, tables, starts, lens, 0.1)


def _rope(dtype: torch.dtype, *, norm: bool) -> object:
    from baton.kernels.rope_store import rope_and_store

    q, k, v = torch.split(torch.empty(9, 48, 128, dtype=dtype), [32, 8, 8], dim=1)
    weight = torch.ones(128, dtype=dtype) if norm else None
    positions, slots = torch.arange(9), torch.arange(9)
    table = rotation_table(16, 128)
    return rope_and_store(
        q, k, v, positions, table, _pool(dtype, 128, 16), 1, slots, weight, weight
    )


def _norm() -> object:
    from baton.kernels.rms_norm import add_rms_norm

    x = torch.empty(4, 4096, dtype=torch.bfloat16)
    return add_rms_norm(x, x, x[0], 1e-5)


def _silu() -> object:
    from baton.kernels.silu_mul import silu_mul

    return silu_mul(torch.empty(4, 2 * 14336, dtype=torch.bfloat16))


def _blocks() -> None:
    from baton.kernels.block_copy import gather_blocks, scatter_blocks

    pool = torch.empty(3, 4096, dtype=torch.bfloat16)
    ids = torch.zeros(2, dtype=torch.int32)
    gather_blocks(pool, ids, pool)
    scatter_blocks(pool, ids, pool)


def _sampling(dtype: torch.dtype, vocab: int) -> object:
    from baton.kernels.cpu_shapes import ROW_INTS, ROW_REALS
    from baton.kernels.device_sampling import sample_tokens

    ints = torch.zeros(4, ROW_INTS, dtype=torch.int64)
    reals = torch.zeros(4, ROW_REALS, dtype=torch.float64)
    held_back = torch.full((4, 16), -1, dtype=torch.int32)
    return sample_tokens(torch.empty(4, vocab, dtype=dtype), ints, reals, held_back)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
