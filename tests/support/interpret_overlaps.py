"""A process that makes the proof of overlapping kernels in Triton's interpreter.

There, kernels follow each other, so the proof has to succeed. With kernels that read what the
replay before has left, it has to fail. `tests/unit/kernels/test_overlaps.py` starts this one, which
prints both results as JSON.
"""

import json
from typing import Any

import msgspec
import torch
from torch import Tensor

from baton.kernels.cuda import pool_writes, rows
from baton.kernels.hopper import overlap_proof
from baton.kernels.proofs import FP8_POOL, ModelShapes

SHAPES = ModelShapes(
    linears=((4 * 32, 64), (64, 64), (96, 64), (64, 48), (512, 64)),
    num_heads=2,
    kv_heads=1,
    head_dim=32,
    block_size=16,
    dtype="float32",
    pool_dtype="float32",
)


def main() -> None:
    torch.set_num_threads(1)
    for place in (rows, pool_writes):
        place.gdc_wait = lambda: None
    overlap_proof.ROWS = (1, 5)
    overlap_proof.LAYERS = 2
    overlap_proof.REPLAYS = 3
    whole = overlap_proof.prove(SHAPES, "cpu")
    in_fp8 = msgspec.structs.replace(SHAPES, pool_dtype=FP8_POOL)
    narrow = overlap_proof.prove(in_fp8, "cpu")
    usual = overlap_proof.add_rms_norm
    seen: dict[int, Tensor] = {}

    def too_early(x: Tensor, *given: Any, overlaps: bool) -> tuple[Tensor, Tensor]:
        before = seen.get(len(x), x)
        if overlaps:
            seen[len(x)] = x.clone()
        return usual(before if overlaps else x, *given, overlaps=overlaps)

    overlap_proof.add_rms_norm = too_early
    print(json.dumps([whole, narrow, overlap_proof.prove(SHAPES, "cpu")]))


if __name__ == "__main__":
    main()
