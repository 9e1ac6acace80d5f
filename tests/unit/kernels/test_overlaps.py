"""Kernels that overlap are proven by a chain of them, which has the bits of one without."""

import json

import msgspec
import pytest

from baton.kernels.proofs import ModelShapes
from tests.support.module_process import said_by

pytest.importorskip("triton")

from baton.kernels.hopper.overlap_proof import missing_for

SHAPES = ModelShapes(
    linears=((6144, 4096), (4096, 4096), (24_576, 4096), (4096, 12_288)),
    num_heads=32,
    kv_heads=8,
    head_dim=128,
    block_size=16,
)


def test_the_proof_succeeds_in_order_and_finds_kernels_that_read_too_early():
    env = {"TRITON_INTERPRET": "1"}
    *_, line = said_by("tests.support.interpret_overlaps", env=env)
    whole, in_fp8, early = json.loads(line)
    assert whole == in_fp8 == ""
    assert early == "1 rows: replay 1 has other bits if kernels overlap"


@pytest.mark.parametrize(
    ("changed", "capability", "why"),
    [
        ({}, (9, 0), ""),
        ({}, (12, 0), ""),
        ({}, (8, 9), "compute capability (8, 9)"),
        ({"is_latent": True}, (9, 0), "latent attention"),
        ({"pool_dtype": "uint8"}, (10, 0), ""),
        ({"pool_dtype": "float16"}, (10, 0), "a pool of float16"),
        ({"linears": ((9, 9), (9, 9), (0, 9), (9, 0))}, (9, 0), "layers without"),
    ],
)
def test_it_is_tried_where_it_can_be(changed, capability, why):
    found = missing_for(msgspec.structs.replace(SHAPES, **changed), capability)
    assert found.startswith(why) if why else found == ""
