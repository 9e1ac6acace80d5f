"""A process that compiles the attention of `kernels/hopper` for its GPUs, without one.

It prints, as JSON, what the machine code of each launch holds. Its arguments are patterns of names
of cases.
"""

import fnmatch
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import torch
import triton

from baton.kernels.hopper.attention.decode import one_decode_attention, plan_decode
from baton.kernels.hopper.attention.latent_prefill import (
    PLAIN_DIM,
    TURNED_DIM,
    Prompt,
    expanded_prefill_attention,
    latent_plan,
)
from baton.kernels.hopper.attention.prefill import (
    DTYPES,
    paged_prefill_attention,
    prefill_plan,
)
from tests.support.compile_kernels import build, record
from tools.gpu.kernel_cases import AttentionShape, attention_batch, in_fp8

GPU = "90"
# Of models that the one order takes: Mistral's, Gemma's, and those of gpt-oss.
OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    " in fp16": {"dtype": torch.float16},
    ", window": {"window": 100},
    ", cap": {"softcap": 50.0},
    ", window and cap": {"window": 100, "softcap": 50.0},
    ", sinks": {"has_sinks": True},
    ", window and sinks": {"window": 100, "has_sinks": True},
    ", all options": {"window": 100, "softcap": 50.0, "has_sinks": True},
}
# What is compiled over a pool of FP8, too.
IN_FP8 = (
    "plain",
    "few, group of 7",
    "few, all options",
    "cuts",
    "few, cuts",
    "cuts, heads of 64",
    "few, cuts, heads of 64",
    *(
        f"{form}, heads of {head_dim}{option}"
        for form in ("cuts", "few, cuts", "decode")
        for head_dim in (64, 128, 256)
        for option in (" in fp16", ", window", ", all options")
    ),
    *(f"decode, heads of {head_dim}" for head_dim in (64, 128, 256)),
    *(f"guesses, heads of {head_dim}, all options" for head_dim in (64, 128, 256)),
)
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
SPILL = re.compile(r"\b(LDL|STL)\b")
PRODUCT = re.compile(r"\b(HGMMA|HMMA)\b")
WIDENED = "E4M3.UNPACK"
FEW = 8  # products, or widened codes, that a loop of a kernel has at least


class Machine(msgspec.Struct, frozen=True):
    """What the machine code of a kernel holds."""

    case: str
    kernel: str
    registers: int
    shared_bytes: int
    loops: int  # that multiply
    widening_loops: int  # that widen codes and do not multiply
    # Of the innermost loops alone: what is spilled around them costs little.
    spills_in_loops: int
    spills: int
    warnings: list[str]  # of the assembler
    # Numbers that a thread holds side by side of an operand of a product on warps: with 2, products
    # add in the order that those on warpgroups have.
    k_widths: list[int]


Cases = dict[str, Callable[[], object]]


def main() -> None:
    warnings.simplefilter("error")
    # Triton makes a syntax tree in a way that Python 3.13 and later frown upon.
    warnings.filterwarnings("ignore", message="AnnAssign", category=DeprecationWarning)
    found = cases()
    names = [
        name for pattern in sys.argv[1:] for name in fnmatch.filter(found, pattern)
    ]
    reports = [
        machine_code(name, build(launch, GPU), launch[0].__name__)
        for name in names
        for launch in record(found[name])
    ]
    print(msgspec.json.encode(reports).decode())


def cases() -> Cases:
    """Every tile, option and pool that the launchers take."""
    few = {"queries": 5}
    found: Cases = {
        "plain": partial(_prefill),
        "few, group of 4": partial(_prefill, **few),
        "few, group of 7": partial(_prefill, group=7, **few),
        "few, group of 1": partial(_prefill, group=1, **few),
        "window": partial(_prefill, window=100),
        "cap": partial(_prefill, softcap=50.0),
        "sinks": partial(_prefill, has_sinks=True),
        "few, all options": partial(
            _prefill, window=100, softcap=50.0, has_sinks=True, **few
        ),
        "fp16": partial(_prefill, dtype=torch.float16),
        "cuts": partial(_prefill, cuts=True),
        "few, cuts": partial(_prefill, cuts=True, **few),
        "cuts, heads of 64": partial(_prefill, head_dim=64, cuts=True),
        "few, cuts, heads of 64": partial(_prefill, head_dim=64, cuts=True, **few),
    }
    for head_dim in (64, 128, 256):
        for name, options in OPTIONS.items():
            found[f"decode, heads of {head_dim}{name}"] = partial(
                _decode, head_dim=head_dim, **options
            )
            found[f"guesses, heads of {head_dim}{name}"] = partial(
                _decode, head_dim=head_dim, rows=4, **options
            )
            if options:
                found[f"cuts, heads of {head_dim}{name}"] = partial(
                    _prefill, head_dim=head_dim, cuts=True, **options
                )
                found[f"few, cuts, heads of {head_dim}{name}"] = partial(
                    _prefill, head_dim=head_dim, cuts=True, **few, **options
                )
    found["guesses, group of 3"] = partial(_decode, head_dim=128, rows=5, group=3)
    found |= {f"FP8 {name}": partial(found[name], is_fp8=True) for name in IN_FP8}
    for head_dim in (80, 96, 112):
        found[f"cuts, heads of {head_dim}"] = partial(
            _prefill, head_dim=head_dim, cuts=True
        )
        found[f"decode, heads of {head_dim}"] = partial(
            _decode, head_dim=head_dim, has_sinks=True
        )
        found[f"guesses, heads of {head_dim}"] = partial(
            _decode, head_dim=head_dim, rows=4, has_sinks=True
        )
    for head_dim in (64, 80, 96, 112, 256):
        found[f"head of {head_dim}"] = partial(_prefill, head_dim=head_dim)
    found["cuts, heads of 256"] = partial(_prefill, head_dim=256, cuts=True)
    found["few, cuts, heads of 256"] = partial(_prefill, head_dim=256, cuts=True, **few)
    for name in ("cuts, heads of 256", "few, cuts, heads of 256"):
        found[f"FP8 {name}"] = partial(found[name], is_fp8=True)
    found["latent"] = _latent
    found["head of 64, all options"] = partial(
        _prefill, head_dim=64, window=100, has_sinks=True
    )
    found["head of 256, all options"] = partial(
        _prefill, head_dim=256, window=100, softcap=50.0
    )
    for block_size in (32, 64):
        found[f"blocks of {block_size}"] = partial(_prefill, block_size=block_size)
        for head_dim in (128, 256):
            name = f"cuts, heads of {head_dim}, blocks of {block_size}"
            found[name] = partial(
                _prefill, head_dim=head_dim, block_size=block_size, cuts=True
            )
            found[f"FP8 {name}"] = partial(found[name], is_fp8=True)
    return found


def _prefill(
    *,
    queries: int = 100,
    group: int = 4,
    head_dim: int = 128,
    dtype: torch.dtype = DTYPES[0],
    cuts: bool = False,
    is_fp8: bool = False,
    **options: Any,
) -> None:
    shape = AttentionShape(
        (300,), (queries,), 8 * group, 8, head_dim, dtype=dtype, **options
    )
    case = attention_batch(shape, "cpu")
    pool = in_fp8(case.pool)[0] if is_fp8 else case.pool
    window, softcap, sinks = case.how
    lens = case.query_starts, case.context_lens
    plan = prefill_plan(case.q, pool, *lens, window, cuts=cuts)
    paged_prefill_attention(
        case.q,
        pool,
        1,
        case.block_tables,
        plan,
        case.scale,
        softcap,
        sinks,
    )


def _latent() -> None:
    num_heads = 16
    shape = AttentionShape((300,), (300,), num_heads, 1, 576, dtype=DTYPES[0], planes=1)
    case = attention_batch(shape, "cpu")
    plan = latent_plan([Prompt(0, 0, 0, 299)], case.pool, case.block_tables, num_heads)
    q = case.q[..., :PLAIN_DIM]
    weight = torch.zeros(2 * num_heads * PLAIN_DIM, 512, dtype=DTYPES[0])
    expanded_prefill_attention(
        q,
        case.q[..., -TURNED_DIM:],
        case.pool,
        1,
        plan,
        lambda rows: rows @ weight.T,
        case.scale,
    )


def _decode(
    *,
    head_dim: int,
    rows: int = 1,
    dtype: torch.dtype = DTYPES[0],
    group: int = 4,
    is_fp8: bool = False,
    **options: Any,
) -> None:
    shape = AttentionShape(
        (300,), (rows,), 8 * group, 8, head_dim, dtype=dtype, **options
    )
    case = attention_batch(shape, "cpu")
    starts = case.query_starts if rows > 1 else None
    pool = in_fp8(case.pool)[0] if is_fp8 else case.pool
    plan = plan_decode(case.q, pool, case.context_lens, case.how[0], starts=starts)
    one_decode_attention(
        case.q,
        pool,
        1,
        case.block_tables,
        case.context_lens,
        plan,
        case.scale,
        *case.how,
        starts,
    )


def machine_code(case: str, built: Any, kernel: str) -> Machine:
    with TemporaryDirectory() as folder:
        ptx = Path(folder, "kernel.ptx")
        cubin = Path(folder, "kernel.cubin")
        ptx.write_text(built.asm["ptx"])
        cubin.write_bytes(built.asm["cubin"])
        usage = _said(TOOLS / "cuobjdump", "--dump-resource-usage", cubin)
        code = _said(TOOLS / "nvdisasm", "-c", cubin)
        notes = _said(TOOLS / "ptxas", "-v", "-arch=sm_90a", ptx, "-o", cubin)
    registers = re.search(r"REG:(\d+)", usage)
    assert registers is not None, usage
    instructions, loops = _read(code)
    multiplying = [
        loop
        for loop in loops
        if sum(bool(PRODUCT.search(line)) for line in loop) >= FEW
    ]
    inner = _innermost(multiplying)
    widening = [
        loop
        for loop in _innermost(
            [loop for loop in loops if sum(WIDENED in line for line in loop) >= FEW]
        )
        if not any(PRODUCT.search(line) for line in loop)
    ]
    return Machine(
        case,
        kernel,
        int(registers[1]),
        built.metadata.shared,
        len(inner),
        len(widening),
        sum(bool(SPILL.search(line)) for loop in inner + widening for line in loop),
        sum(bool(SPILL.search(line)) for line in instructions),
        sorted(set(re.findall(r"C75\d\d|[Ss]erializ\w+", notes))),
        sorted(
            set(
                map(
                    int, re.findall(r"opIdx = \d, .*?kWidth = (\d)", built.asm["ttgir"])
                )
            )
        ),
    )


def _innermost(loops: list[list[str]]) -> list[list[str]]:
    return [
        loop for loop in loops if not any(set(other) < set(loop) for other in loops)
    ]


def _said(*command: str | Path) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout + done.stderr


def _read(code: str) -> tuple[list[str], list[list[str]]]:
    """Return the instructions, numbered, and the body of each loop."""
    instructions: list[str] = []
    labels: dict[str, int] = {}
    loops = []
    for line in code.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        elif found := re.match(r"\s*/\*[0-9a-f]+\*/\s+(.*?);", line):
            instructions.append(f"{len(instructions)} {found[1]}")
    for number, instruction in enumerate(instructions):
        target = re.search(r"BRA.*`\((\.L_x_\d+)\)", instruction)
        # Waits go on far behind the loop that they are in, and return to it.
        if "PHASECHK" in instructions[max(number - 2, 0)]:
            continue
        if target and labels.get(target[1], number) < number:
            loops.append(instructions[labels[target[1]] : number + 1])
    return instructions, loops


if __name__ == "__main__":
    main()
