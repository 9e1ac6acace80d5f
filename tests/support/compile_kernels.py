"""A process that compiles what the launchers launch for a GPU, without one, and reads the cubins.

A launcher runs on CPU tensors while Triton's `run` only records the call, so constants,
specialisation and options are those of service. A process of its own, because Triton must not
interpret and must not be left patched. Its arguments are capabilities, such as 90, and names of
cases, if not all are wanted. Writes one JSON list.
"""

import dataclasses
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import msgspec
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from baton.kernels.cuda import decode_attention, fixed_product, paged
from baton.kernels.cuda.decode_attention import paged_decode_attention
from baton.kernels.cuda.paged import DECODE, PREFILL, Row
from baton.kernels.cuda.prefill_attention import paged_prefill_attention
from baton.kernels.cuda.states import functions as states
from baton.kernels.cuda.states.state_proof import StateTrial
from baton.kernels.state_layout import StateShape
from tools.gpu.kernel_cases import (
    AttentionShape,
    Batch,
    attention_batch,
    in_fp8,
    rotation_table,
)

Launch = tuple[triton.JITFunction, tuple[object, ...], dict[str, object]]
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
# Bytes of shared memory that a block may use, that a multiprocessor has, and its threads.
GPUS = {
    "80": (163 << 10, 164 << 10, 2048),
    "89": (99 << 10, 100 << 10, 1536),
    "90": (227 << 10, 228 << 10, 2048),
    "100": (227 << 10, 228 << 10, 2048),
    "120": (99 << 10, 100 << 10, 1536),
}
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion", "maxnreg", "launch_pdl")
# What a kernel that overlaps may not do before it waits, but for loads of weights.
EFFECTS = ("LDG", "LD", "STG", "ST", "RED", "ATOMG", "EXIT", "BRA")
# A block takes 1 KiB of shared memory more than it asks for.
REGISTERS = 65_536
RESERVED_BYTES = 1024
HEADS = 32
ROWS = (7, 128, 256)  # each with another width of tiles
# Of Qwen3-Next, Kimi-Linear, Nemotron-H 8B and LFM2 1.2B, on one rank.
STATES = {
    "delta": StateShape(2, 16, 8, 128, 128, 4096, 4),
    "key_delta": StateShape(1, 32, 32, 128, 128, 12288, 4, by_key=True),
    "mamba": StateShape(8, 16, 1, 128, 64, 1280, 4),
    "conv": StateShape(8, 0, 256, 0, 0, 256, 3),
}
CAPS, SINKS = (100, 50.0), (100, None, torch.zeros(HEADS))  # with a window
TYPES = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


def main() -> None:
    warnings.simplefilter("error")
    # Triton makes a syntax tree in a way that Python 3.13 and later frown upon.
    warnings.filterwarnings("ignore", message="AnnAssign", category=DeprecationWarning)
    wanted = [name for name in sys.argv[1:] if name not in GPUS] or cases()
    reports = [
        {
            "case": case,
            **msgspec.structs.asdict(cubin),
            "blocks": cubin.blocks,
            "fits": cubin.fits,
        }
        for gpu in sys.argv[1:]
        if gpu in GPUS
        for case, call in cases().items()
        if case in wanted and (int(gpu) >= 90 or not case.startswith("overlapped"))
        for cubin in compiled(call, gpu)
    ]
    print(msgspec.json.encode(reports).decode())


def cases() -> dict[str, Callable[[], object]]:
    """Every row of the tilings, windows and ordered sums, and what else a model of 8B launches."""
    bf16 = torch.bfloat16
    fp32 = torch.float32
    names = {bf16: "bf16", fp32: "fp32", paged.FP8: "fp8"}
    found: dict[str, Callable[[], object]] = {}
    for name, row in (
        *(("decode", row) for row in DECODE),
        *(("prefill", row) for row in PREFILL),
    ):
        key = f"{name} {names[row[0]]} {row[1]}"
        found[key] = launch(name, row)
        found[f"ordered {key}"] = launch(name, row, ordered=True)
    # Of Gemma 2 and of gpt-oss.
    for head_dim, how in ((256, CAPS), (128, CAPS), (64, SINKS)):
        for name in ("decode", "prefill"):
            key = f"{name} bf16 {head_dim} {'sinks' if head_dim == 64 else 'caps'}"
            found[key] = launch(name, (bf16, head_dim), how)
            found[f"ordered {key}"] = launch(name, (bf16, head_dim), how, ordered=True)
    for head_dim in (80, 128, 256):
        found[f"prefill bf16 {head_dim} window"] = launch(
            "prefill", (bf16, head_dim), (100,)
        )
        found[f"decode bf16 {head_dim} group of 32"] = launch(
            "decode", (bf16, head_dim), group=32
        )
    # The rows of guesses, which share a tile.
    for dtype, head_dim, how in (
        (bf16, 64, SINKS),
        (bf16, 128, ()),
        (bf16, 256, CAPS),
        (paged.FP8, 128, ()),
    ):
        key = f"decode {names[dtype]} {head_dim} guesses"
        found[key] = launch("decode", (dtype, head_dim), how, rows=4)
        found[f"ordered {key}"] = launch(
            "decode", (dtype, head_dim), how, ordered=True, rows=4
        )
    for heads in (16, 20, 128):
        found[f"latent bf16 {heads}"] = partial(_latent, bf16, heads)
    return found | {
        "latent fp32 16": partial(_latent, fp32, 16),
        **{f"states {kind}": partial(_states, kind) for kind in STATES},
        "sparse bf16": partial(_sparse, bf16),
        "sparse fp32": partial(_sparse, fp32),
        "decode bf16 112": launch("decode", (bf16, 112)),
        "rope bf16": partial(_rope, bf16, norm=False),
        "rope bf16 norm": partial(_rope, bf16, norm=True),
        "rope fp8": partial(_rope, bf16, norm=True, fp8_pool=True),
        "norm bf16": _norm,
        "overlapped norm bf16": partial(_norm, overlaps=True),
        "overlapped silu bf16": partial(_silu, overlaps=True),
        "overlapped rope bf16": partial(_rope, bf16, norm=True, overlaps=True),
        "overlapped rope fp8": partial(
            _rope, bf16, norm=True, fp8_pool=True, overlaps=True
        ),
        "product bf16": partial(_product, bf16),
        "product fp32": partial(_product, fp32),
        **{f"product in one part, {n} rows": partial(_one_chain, n) for n in ROWS},
        "four bits bf16": partial(_narrow, is_fp8=False),
        "fp8 bf16": partial(_narrow, is_fp8=True),
        "experts bf16": partial(_experts, bf16),
        "experts fp32": partial(_experts, fp32),
        "sum of experts": _sum_of_experts,
        "silu bf16": _silu,
        "blocks": _blocks,
        "sums of blocks": _sums,
        "penalties fp32": partial(_penalties, fp32),
        "penalties bf16": partial(_penalties, bf16),
        "sampling bf16": partial(_sampling, bf16, 151_936),
        "sampling fp32": partial(_sampling, fp32, 128_256),
    }


def _rope(
    dtype: torch.dtype, *, norm: bool, fp8_pool: bool = False, overlaps: bool = False
) -> object:
    from baton.kernels.cuda.pool_writes import rope_and_store

    q, k, v = torch.split(torch.empty(9, 48, 128, dtype=dtype), [32, 8, 8], dim=1)
    weight = torch.ones(128, dtype=dtype) if norm else None
    positions = torch.arange(9)
    slots = torch.arange(9)
    table = rotation_table(16, 128)
    pool = torch.empty(2, 8, 2, 2, 16, 128, dtype=dtype)
    pool = in_fp8(pool)[0] if fp8_pool else pool
    weights = weight, weight
    return rope_and_store(
        q, k, v, positions, table, pool, 1, slots, *weights, overlaps=overlaps
    )


def _latent(dtype: torch.dtype, heads: int) -> None:
    """The rows of all published models, and the heads of a rank or of a whole model."""
    from baton.kernels.cuda import latent_attention as kernels

    x = torch.empty(9, heads + 1, 576, dtype=dtype)
    pool = torch.empty(80, 1, 2, 1, 16, 576)
    pool = pool.to(dtype)
    tables = torch.zeros(1, 70, dtype=torch.int32)
    q = kernels.turn_and_store(
        x, torch.arange(9), rotation_table(16, 64), pool, 1, torch.arange(9)
    )
    starts, lens = (torch.tensor(one, dtype=torch.int32) for one in ([0, 9], [1100]))
    kernels.latent_decode_attention(q[:1], pool, 1, tables, lens, 0.1, 64)
    kernels.latent_prefill_attention(q, pool, 1, tables, starts, lens, 0.1, 64)


def _sparse(dtype: torch.dtype) -> None:
    """The index of DeepSeek-V3.2, and the attention of a rank's heads to what it has chosen."""
    from baton.kernels.cuda.latent_attention import latent_decode_attention
    from baton.kernels.cuda.sparse_attention import choose_keys

    rows, keys = (torch.empty(80, 1, 2, 1, 16, width).to(dtype) for width in (576, 128))
    q = torch.empty(9, 16, 576, dtype=dtype)
    of_index = torch.empty(9, 65, 128, dtype=dtype)
    tables = torch.zeros(1, 70, dtype=torch.int32)
    numbers = torch.zeros(9, dtype=torch.int32)
    slots = choose_keys(
        of_index[:, :-1], torch.empty(9, 64), keys, 1, tables, numbers, numbers, 2048
    )
    latent_decode_attention(q, rows, 1, slots, numbers, 0.1, 64, of_slots=True)


def _states(kind: str) -> None:
    """A prompt beside a token, and two tokens."""
    trial = StateTrial(STATES[kind], kind, 70, "cpu")
    trial._compute((0, 0, 70), (2, 0, 1))
    trial._compute((0, 69, 70), (2, 1, 2))


def _norm(*, overlaps: bool = False) -> object:
    from baton.kernels.cuda.rows import add_rms_norm

    x = torch.empty(4, 4096, dtype=torch.bfloat16)
    return add_rms_norm(x, x, x[0], 1e-5, overlaps=overlaps)


def _product(dtype: torch.dtype) -> object:
    from baton.kernels.cuda.fixed_product import fixed_product

    return fixed_product(
        torch.empty(7, 4096, dtype=dtype), torch.empty(6144, 4096, dtype=dtype)
    )


def _one_chain(rows: int) -> object:
    from baton.kernels.cuda.fixed_product import one_chain_product

    x, weight = (torch.empty(n, 4096, dtype=torch.bfloat16) for n in (rows, 4096))
    return one_chain_product(x, weight)


def _narrow(*, is_fp8: bool) -> object:
    from baton.kernels.cuda.fixed_product import NarrowProduct

    grid = torch.empty(32, 6144)
    x = torch.empty(7, 4096, dtype=torch.bfloat16)
    packed = torch.empty(6144, 4096 if is_fp8 else 2048, dtype=torch.uint8)
    return NarrowProduct(grid, grid.int(), 128, is_fp8)(x, packed)


def _experts(dtype: torch.dtype) -> object:
    """The first product of an expert of Qwen3-30B-A3B for one token."""
    from baton.kernels.cuda.grouped_product import grouped_product

    x = torch.empty(8, 2048, dtype=dtype)
    weight = torch.empty(128, 1536, 2048, dtype=dtype)
    return grouped_product(x, weight, torch.zeros(128, dtype=torch.int32))


def _sum_of_experts() -> object:
    from baton.kernels.cuda.grouped_product import add_experts

    rows = torch.empty(3, 8, 2048, dtype=torch.bfloat16)
    return add_experts(rows, torch.empty(3, 8))


def _silu(*, overlaps: bool = False) -> object:
    from baton.kernels.cuda.rows import gate_mul

    x = torch.empty(4, 2 * 14336, dtype=torch.bfloat16)
    return gate_mul(x, overlaps=overlaps)


def _blocks() -> None:
    from baton.kernels.cuda.pool_writes import move_blocks

    pool = torch.empty(3, 4096, dtype=torch.bfloat16)
    ids = torch.zeros(2, dtype=torch.int32)
    move_blocks(pool, ids, pool, ids)


def _sums() -> object:
    from baton.kernels.cuda.pool_writes import sum_blocks

    return sum_blocks(
        torch.empty(3, 4096, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.int32)
    )


def _sampling(dtype: torch.dtype, vocab: int) -> object:
    from baton.kernels.constants import ROW_INTS, ROW_REALS
    from baton.kernels.cuda.sampling import sample_tokens

    ints = torch.zeros(4, ROW_INTS, dtype=torch.int64)
    reals = torch.zeros(4, ROW_REALS, dtype=torch.float64)
    held_back = torch.full((4, 16), -1, dtype=torch.int32)
    return sample_tokens(torch.empty(4, vocab, dtype=dtype), ints, reals, held_back)


def _penalties(dtype: torch.dtype) -> object:
    from baton.kernels.cuda.token_counts import penalize_counted

    words = torch.zeros(8, 151_936, dtype=torch.int32)
    factors = torch.ones(8, 3).double()
    counted = torch.zeros(4, 2, dtype=torch.int32)
    token_ids = torch.zeros(4, dtype=torch.int64)
    logits = torch.empty(4, 151_936, dtype=dtype)
    return penalize_counted(
        logits, words, factors, torch.zeros(8, 1024).double(), counted, token_ids
    )


class Cubin(msgspec.Struct, frozen=True):
    """What a compiled kernel says of itself. A spill needs local memory."""

    gpu: str
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
    # Before it waits for the kernel in front; None if it does not.
    early: tuple[str, ...] | None = None

    @property
    def blocks(self) -> int:
        """Return how many blocks share a multiprocessor."""
        threads = 32 * self.num_warps
        registers = -(-self.registers // 8) * 8 * threads
        shared = -(-(self.shared_bytes + RESERVED_BYTES) // 128) * 128
        _, shared_bytes, max_threads = GPUS[self.gpu]
        return min(
            REGISTERS // registers, shared_bytes // shared, max_threads // threads
        )

    @property
    def fits(self) -> bool:
        """Return whether such a GPU can launch it."""
        return self.shared_bytes <= GPUS[self.gpu][0]


def compiled(launch: Callable[[], object], gpu: str) -> list[Cubin]:
    """Return one cubin for each kernel that a call launches on a GPU of that capability."""
    tilings = paged.tilings_for((int(gpu) // 10, int(gpu) % 10))
    places = (paged, decode_attention, fixed_product, states)
    with ExitStack() as stack:
        for place in places:
            stack.enter_context(patch.object(place, "tilings_of", lambda _: tilings))
        launches = record(launch)
    return [_compile(recorded, gpu) for recorded in launches]


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


def build(launch: Launch, gpu: str) -> Any:
    """Compile as Triton's own launch would on such a GPU, and return what Triton has made."""
    kernel, args, given = launch
    options = {name: given[name] for name in OPTIONS if name in given}
    values = dict(zip(kernel.arg_names, args, strict=False))
    values |= given
    signature = {}
    constants = {}
    attributes = {}
    for index, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        constant = parameter.is_constexpr or value is None
        if constant or (
            isinstance(value, int) and value == 1 and not parameter.do_not_specialize
        ):
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
            continue
        signature[parameter.name] = _type_name(value)
        aligned = value.data_ptr() if isinstance(value, torch.Tensor) else value
        if (
            isinstance(aligned, int)
            and aligned % 16 == 0
            and not parameter.do_not_specialize
        ):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    return triton.compile(
        source(fn=kernel, signature=signature, constexprs=constants, attrs=attributes),
        target=GPUTarget("cuda", int(gpu), 32),
        options=options,
    )


def _compile(launch: Launch, gpu: str) -> Cubin:
    built = build(launch, gpu)
    registers, local_bytes = _usage(built.asm["cubin"])
    ptx = built.asm["ptx"]
    # Masked loads are inline assembly with a predicate in front; copies to shared are `cp.async`.
    wide = re.findall(r"ld\.global\S*\.v4\.b32|cp\.async\.cg\S* .*, 0x10,", ptx)
    wgmma = ptx.count("wgmma.mma_async")
    waits = ptx.count("wgmma.wait_group")
    return Cubin(
        gpu,
        launch[0].__name__,
        registers,
        local_bytes,
        built.metadata.shared,
        built.metadata.num_warps,
        wgmma,
        waits,
        ptx.count("mma.sync"),
        ptx.count("tf32"),
        len(wide),
        _early(built.asm["cubin"]) if "griddepcontrol.wait" in ptx else None,
    )


def _early(cubin: bytes) -> tuple[str, ...]:
    """Return the `EFFECTS` of a kernel before it waits for the one in front."""
    code = re.findall(
        r"/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\d+ +)?([A-Z][A-Z0-9]*)",
        dumped(cubin, "--dump-sass"),
    )
    before = code[: code.index("ACQBULK")]
    return tuple(name for name in before if name in EFFECTS)


def _type_name(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    if isinstance(value, TensorDescriptor):
        dtype = TYPES[value.base.dtype].removeprefix("*")
        return f"tensordesc<{dtype}{value.block_shape},{value.layout!r}>"
    assert isinstance(value, int)
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _usage(cubin: bytes) -> tuple[int, int]:
    """Return the registers of a thread and its local memory in bytes."""
    (usage,) = usages(cubin).values()
    return usage


def usages(cubin: bytes) -> dict[str, tuple[int, int]]:
    """Return the registers of a thread and its local memory in bytes, by kernel."""
    text = dumped(cubin, "--dump-resource-usage")
    found = re.findall(
        r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text
    )
    if not found:
        raise RuntimeError(f"cuobjdump tells no registers: {text}")
    return {
        name: (int(registers), int(stack) + int(local))
        for name, registers, stack, local in found
    }


def dumped(cubin: bytes, *options: str) -> str:
    """Return what cuobjdump says of machine code."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        return subprocess.run(
            [CUOBJDUMP, *options, path],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout


def launch(
    name: str,
    row: Row,
    how: Sequence[Any] = (),
    *,
    ordered: bool = False,
    group: int = 4,
    rows: int = 1,
) -> Callable[[], None]:
    """Return a call of a kernel on CPU tensors, to be compiled and not made."""

    def call() -> None:
        batch = _batch(row, group)
        if name == "prefill":
            _prefill(batch, (batch.scale, *how), ordered=ordered)
        else:
            _decode(batch, (batch.scale, *how), rows, ordered=ordered)

    return call


def _batch(row: Row, group: int) -> Batch:
    dtype, head_dim = row
    is_fp8 = dtype == paged.FP8
    dtype = paged.BF16 if is_fp8 else dtype
    shape = AttentionShape(
        (1100,), (100,), HEADS, HEADS // group, head_dim, dtype=dtype
    )
    batch = attention_batch(shape, "cpu")
    pool = in_fp8(batch.pool)[0] if is_fp8 else batch.pool
    return dataclasses.replace(batch, pool=pool)


def _decode(batch: Batch, how: Sequence[Any], rows: int, *, ordered: bool) -> None:
    paged_decode_attention(
        batch.q[:rows],
        batch.pool,
        1,
        batch.block_tables,
        batch.context_lens,
        *how,
        starts=batch.query_starts.clamp(max=rows) if rows > 1 else None,
        ordered=ordered,
    )


def _prefill(batch: Batch, how: Sequence[Any], *, ordered: bool) -> None:
    paged_prefill_attention(
        batch.q,
        batch.pool,
        1,
        batch.block_tables,
        batch.query_starts,
        batch.context_lens,
        *how,
        ordered=ordered,
    )


if __name__ == "__main__":
    main()
