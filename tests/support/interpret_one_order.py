"""A process that runs the one order's decode kernel in Triton's interpreter beside its torch form.

Its arguments are the head size and names of `OPTIONS`. It prints what `compare` returns, as JSON.
"""

import json
import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor

from baton.kernels.hopper.attention.decode import one_decode_attention, plan_decode
from baton.model.layers.attention import Scoring
from tests.support.interpret_kernels import Interpreting
from tests.support.one_order import Arithmetic, attend
from tools.gpu.kernel_cases import LAYER, AttentionShape, Batch, attention_batch

# Around the borders of blocks, of tiles and of cuts.
QUICK = (385, 1, 0, 129, 256, 257)
OTHERS = (*QUICK, 700, 128, 16, 2, 127, 2048, 2049, 2177, 3000, 0, 8321)
PROGRAMS = (7, 1, 13)
# Windows begin inside a tile, inside a cut and at its border; some contexts are shorter.
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 256},
    "sinks": {"has_sinks": True},
    "all": {"window": 200, "softcap": 3.0, "has_sinks": True},
}


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Multiply as `interpret_kernels.dot`, where a row's bits do not depend on its tile."""
    products = a.numpy()[:, :, np.newaxis] * b.numpy()[np.newaxis]
    return torch.from_numpy(products.sum(axis=1, dtype=np.float32))


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return (a.double() * b.double() + c.double()).float()


def exp2(x: Tensor) -> Tensor:
    return torch.from_numpy(np.exp2(x.numpy()))


MACHINE = Arithmetic(dot, exp2, fma)


def decode(case: Batch, rows: list[int], programs: int) -> Tensor:
    picked = torch.tensor(rows)
    lens = case.context_lens[picked]
    return one_decode_attention(
        case.q[picked],
        case.pool,
        LAYER,
        case.block_tables[picked],
        lens,
        plan_decode(lens, case.pool.shape[1], case.how[0], programs),
        case.scale,
        *case.how,
    )


def with_other_bits(case: Batch, contexts: tuple[int, ...], out: Tensor) -> int:
    """Return how many outputs differ in bits from those that the specification has."""
    kv_heads = case.pool.shape[1]
    group = case.q.shape[1] // kv_heads
    differing = 0
    for row, length in enumerate(contexts):
        if not length:
            differing += int(out[row].count_nonzero())
            continue
        blocks = case.block_tables[row, : -(-length // case.pool.shape[4])].long()
        kv = case.pool[blocks, :, LAYER].permute(2, 1, 0, 3, 4).flatten(2, 3)
        for head in range(kv_heads):
            own = slice(head * group, (head + 1) * group)
            positions = torch.full((group,), length - 1)
            k, v = kv[:, head, :length]
            window, softcap, sinks = case.how
            scoring = Scoring(
                case.scale, window, softcap, None if sinks is None else sinks[own]
            )
            want = attend(case.q[row, own], k, v, positions, scoring, MACHINE)
            differing += int((want != out[row, own]).sum())
    return differing


def compare(contexts: tuple[int, ...], head_dim: int, option: str) -> dict[str, object]:
    """Return how many outputs were compared, and how many have other bits than `one_order` says.

    `changed` are the other plans and batches that changed the bits of a row. Slots that no sequence
    owns hold NaN.
    """
    shape = AttentionShape(
        contexts,
        (1,) * len(contexts),
        6,
        2,
        head_dim,
        dtype=torch.bfloat16,
        **OPTIONS[option],
    )
    case = attention_batch(shape, "cpu")
    everything = list(range(len(contexts)))
    out = decode(case, everything, 7)
    changed = [
        f"{programs} programs"
        for programs in PROGRAMS[1:]
        if not torch.equal(decode(case, everything, programs), out)
    ]
    for rows in ([4], everything[::-1]):
        if not torch.equal(decode(case, rows, 6), out[rows]):
            changed.append(f"rows {rows}")
    return {
        "compared": out.numel(),
        "differing": with_other_bits(case, contexts, out),
        "changed": changed,
    }


def main() -> None:
    Interpreting()
    said = {
        option: compare(OTHERS, int(sys.argv[1]), option) for option in sys.argv[2:]
    }
    print(json.dumps(said))


if __name__ == "__main__":
    main()
