"""A process that runs the one order's decode kernel in Triton's interpreter beside its torch form.

It prints, as JSON, how many outputs were compared, how many have other bits than `one_order` says,
and which other plans and batches changed the bits of a row. Slots that no sequence owns hold NaN.
"""

import json
import sys

import numpy as np
import torch
from torch import Tensor

from baton.kernels.hopper.attention.decode import one_decode_attention, plan_decode
from tests.support.interpret_kernels import Interpreting
from tests.support.one_order import Arithmetic, attend
from tools.gpu.kernel_cases import LAYER, AttentionShape, Batch, attention_batch

# Around the borders of blocks, of tiles and of cuts.
QUICK = (600, 1, 0, 129, 256, 257)
OTHERS = (*QUICK, 700, 128, 16, 2, 127, 2048, 2049, 2177, 3000, 0, 8321)
PROGRAMS = (7, 1, 40)


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
        plan_decode(lens, case.pool.shape[1], programs),
        case.scale,
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
            want = attend(case.q[row, own], k, v, positions, case.scale, MACHINE)
            differing += int((want != out[row, own]).sum())
    return differing


def main() -> None:
    Interpreting()
    contexts = OTHERS if "others" in sys.argv else QUICK
    head_dim = 64 if "64" in sys.argv else 128
    shape = AttentionShape(
        contexts, (1,) * len(contexts), 6, 2, head_dim, dtype=torch.bfloat16
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
    said = {
        "compared": out.numel(),
        "differing": with_other_bits(case, contexts, out),
        "changed": changed,
    }
    print(json.dumps(said))


if __name__ == "__main__":
    main()
