"""A process that compiles what the launchers launch for sm_90, without a GPU, and reads the cubins.

A process of its own, because Triton must not interpret and must not be left patched. Writes one
JSON list.
"""

import warnings
from collections.abc import Callable
from functools import partial

import msgspec
import torch

from baton.kernels.paged import DECODE, PREFILL
from tests.support.kernel_cases import rotation_table
from tools.gpu.cubins import compiled, launch


def main() -> None:
    warnings.simplefilter("error")
    reports = [
        {"case": case, **msgspec.structs.asdict(cubin), "blocks": cubin.blocks}
        for case, call in cases().items()
        for cubin in compiled(call)
    ]
    print(msgspec.json.encode(reports).decode())


def cases() -> dict[str, Callable[[], object]]:
    """Every row of the tilings, windows and ordered sums, and what else a model of 8B launches."""
    bf16, fp32 = torch.bfloat16, torch.float32
    names = {bf16: "bf16", fp32: "fp32"}
    found: dict[str, Callable[[], object]] = {}
    for name, row in (
        *(("decode", row) for row in DECODE), *(("prefill", row) for row in PREFILL),
    ):  # fmt: skip
        key = f"{name} {names[row[0]]} {row[1]}"
        found[key] = launch(name, row)
        found[f"ordered {key}"] = launch(name, row, ordered=True)
    for head_dim in (80, 128, 256):
        found[f"prefill bf16 {head_dim} window"] = launch("prefill", (bf16, head_dim), 100)
    return found | {
        "decode bf16 112": launch("decode", (bf16, 112)),
        "rope bf16": partial(_rope, bf16, norm=False),
        "rope bf16 norm": partial(_rope, bf16, norm=True),
        "norm bf16": _norm,
        "product bf16": partial(_product, bf16),
        "product fp32": partial(_product, fp32),
        "silu bf16": _silu,
        "blocks": _blocks,
        "sampling bf16": partial(_sampling, bf16, 151_936),
        "sampling fp32": partial(_sampling, fp32, 128_256),
    }


def _rope(dtype: torch.dtype, *, norm: bool) -> object:
    from baton.kernels.pool_writes import rope_and_store

    q, k, v = torch.split(torch.empty(9, 48, 128, dtype=dtype), [32, 8, 8], dim=1)
    weight = torch.ones(128, dtype=dtype) if norm else None
    positions, slots = torch.arange(9), torch.arange(9)
    table = rotation_table(16, 128)
    return rope_and_store(
        q,
        k,
        v,
        positions,
        table,
        torch.empty(2, 8, 2, 2, 16, 128, dtype=dtype),
        1,
        slots,
        weight,
        weight,
    )


def _norm() -> object:
    from baton.kernels.rows import add_rms_norm

    x = torch.empty(4, 4096, dtype=torch.bfloat16)
    return add_rms_norm(x, x, x[0], 1e-5)


def _product(dtype: torch.dtype) -> object:
    from baton.kernels.fixed_product import fixed_product

    return fixed_product(torch.empty(7, 4096, dtype=dtype), torch.empty(6144, 4096, dtype=dtype))


def _silu() -> object:
    from baton.kernels.rows import silu_mul

    return silu_mul(torch.empty(4, 2 * 14336, dtype=torch.bfloat16))


def _blocks() -> None:
    from baton.kernels.pool_writes import gather_blocks, move_blocks, scatter_blocks

    pool = torch.empty(3, 4096, dtype=torch.bfloat16)
    ids = torch.zeros(2, dtype=torch.int32)
    gather_blocks(pool, ids, pool)
    scatter_blocks(pool, ids, pool)
    move_blocks(pool, ids, pool, ids)


def _sampling(dtype: torch.dtype, vocab: int) -> object:
    from baton.kernels.cpu_shapes import ROW_INTS, ROW_REALS
    from baton.kernels.device_sampling import sample_tokens

    ints = torch.zeros(4, ROW_INTS, dtype=torch.int64)
    reals = torch.zeros(4, ROW_REALS, dtype=torch.float64)
    held_back = torch.full((4, 16), -1, dtype=torch.int32)
    return sample_tokens(torch.empty(4, vocab, dtype=dtype), ints, reals, held_back)


if __name__ == "__main__":
    main()
