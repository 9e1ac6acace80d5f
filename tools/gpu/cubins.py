"""Compile what a launcher would launch for a Hopper GPU, on any machine, and read the cubin.

A launcher runs on CPU tensors while Triton's `run` only records the call, so constants,
specialisation and options are those of service. The tests hold every row
of the table of tilings to the facts. Triton must not interpret here.
"""

import dataclasses
import re
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from baton.kernels.decode_attention import paged_decode_attention
from baton.kernels.paged import Row
from baton.kernels.prefill_attention import paged_prefill_attention
from tools.gpu.batches import Batch, Heads, Layout, paged_batch

Launch = tuple[triton.JITFunction, tuple[object, ...], dict[str, object]]
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion", "maxnreg")
# Of a Hopper multiprocessor. A block takes 1 KiB of shared memory more than it asks for.
REGISTERS, SHARED_BYTES, MAX_THREADS, RESERVED_BYTES = 65_536, 228 * 1024, 2048, 1024
HEADS, KV_HEADS = 32, 8
TYPES = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


class Cubin(msgspec.Struct, frozen=True):
    """What a compiled kernel says of itself. A spill needs local memory."""

    kernel: str
    registers: int
    local_bytes: int
    shared_bytes: int
    num_warps: int
    wgmma: int  # products on warpgroups
    waits: int  # for products on warpgroups
    mma: int  # products on warps
    tf32: int
    wide_loads: int  # of 16 bytes

    @property
    def blocks(self) -> int:
        """Return how many blocks share a multiprocessor."""
        threads = 32 * self.num_warps
        registers = -(-self.registers // 8) * 8 * threads
        shared = -(-(self.shared_bytes + RESERVED_BYTES) // 128) * 128
        return min(REGISTERS // registers, SHARED_BYTES // shared, MAX_THREADS // threads)


def compiled(launch: Callable[[], object]) -> list[Cubin]:
    """Return one cubin for each kernel that a call launches."""
    return [_compile(recorded) for recorded in record(launch)]


def record(launch: Callable[[], object]) -> list[Launch]:
    """Return the kernel launches of a call, none of them made."""
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


def _compile(launch: Launch) -> Cubin:
    """Compile as Triton's own launch would on a Hopper GPU."""
    kernel, args, given = launch
    options = {name: given[name] for name in OPTIONS if name in given}
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
    registers, local_bytes = _usage(built.asm["cubin"])
    ptx = built.asm["ptx"]
    # Masked loads are inline assembly with a predicate in front; copies to shared are `cp.async`.
    wide = re.findall(r"ld\.global\S*\.v4\.b32|cp\.async\.cg\S* .*, 0x10,", ptx)
    wgmma, waits = ptx.count("wgmma.mma_async"), ptx.count("wgmma.wait_group")
    return Cubin(
        kernel.__name__, registers, local_bytes, built.metadata.shared, built.metadata.num_warps,
        wgmma, waits, ptx.count("mma.sync"), ptx.count("tf32"), len(wide),
    )  # fmt: skip


def _type_name(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    assert isinstance(value, int)
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _usage(cubin: bytes) -> tuple[int, int]:
    """Return the registers of a thread and its local memory in bytes."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        usage = subprocess.run(
            [CUOBJDUMP, "--dump-resource-usage", path],
            capture_output=True, text=True, check=True, timeout=30,
        ).stdout  # fmt: skip
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    if found is None:
        raise RuntimeError(f"cuobjdump tells no registers: {usage}")
    registers, stack, local = map(int, found.groups())
    return registers, stack + local


def launch(
    name: str, row: Row, window: int | None = None, *, ordered: bool = False
) -> Callable[[], object]:
    """Return a call of a kernel on CPU tensors, to be compiled and not made."""
    dtype, head_dim = row
    layout = Layout(torch.device("cpu"), dtype)
    batch = paged_batch(Heads(HEADS, KV_HEADS, head_dim), (1100,), (100,), layout)
    if name == "prefill":
        return partial(_prefill, batch, 1, window, ordered=ordered)
    batch = dataclasses.replace(batch, q=batch.q[:1])
    return partial(_decode, batch, 1, window, ordered=ordered)


def _decode(batch: Batch, layer: int, window: int | None = None, *, ordered: bool = False) -> None:
    paged_decode_attention(
        batch.q, batch.pool, layer, batch.block_tables, batch.context_lens, batch.scale, window,
        ordered=ordered,
    )  # fmt: skip


def _prefill(batch: Batch, layer: int, window: int | None = None, *, ordered: bool = False) -> None:
    paged_prefill_attention(
        batch.q, batch.pool, layer, batch.block_tables, batch.query_starts, batch.context_lens,
        batch.scale, window, ordered=ordered,
    )  # fmt: skip
