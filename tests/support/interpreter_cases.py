"""Small cases of every kernel's check, for Triton's interpreter."""

import dataclasses
import math
from collections.abc import Callable
from functools import partial

import torch

from baton.kernels.constants import GELU_TANH, Gate
from baton.kernels.proofs import ModelShapes
from baton.kernels.state_layout import StateShape
from baton.model.sampling.sampler import Sampler, SampleRow
from baton.protocol.sampling import Sampling
from tools.gpu.kernel_cases import (
    AttentionShape,
    IndexShape,
    check_adapters,
    check_add_experts,
    check_add_rms_norm,
    check_block_copy,
    check_block_sums,
    check_decode,
    check_decode_alone,
    check_decode_as_prefill,
    check_decode_rows,
    check_fixed_product,
    check_fp8_pool,
    check_gate_mul,
    check_grouped_product,
    check_latent,
    check_narrow_product,
    check_on_warps,
    check_penalties,
    check_prefill,
    check_prefill_chunks,
    check_proof,
    check_rope_store,
    check_sampling,
    check_sparse,
    check_turn_store,
    drawn,
)


def interpreter_cases() -> dict[str, Callable[[], str]]:
    """Small cases by name: the interpreter takes some 3 ms per program and loop iteration."""
    fp32 = torch.float32
    bf16 = torch.bfloat16
    decode = AttentionShape(contexts=(37, 1, 0, 16), queries=(1, 1, 1, 1))
    # 3 splits of 256 tokens, the last one short; a group of 3 heads leaves rows of the tile unused.
    split = AttentionShape(contexts=(600, 256), queries=(1, 1), num_heads=3, kv_heads=1)
    prefill = AttentionShape(contexts=(70, 5, 33), queries=(40, 5, 1))
    wide = AttentionShape(
        contexts=(150,), queries=(140,), num_heads=1, kv_heads=1, dtype=bf16
    )
    # Three ordered splits, and tokens on both sides of the end of one.
    one = AttentionShape(contexts=(1060,), queries=(70,), num_heads=2, kv_heads=1)
    cut = AttentionShape(contexts=(71, 9), queries=(53, 9), num_heads=2, kv_heads=1)
    # On both sides of the end of a split, more than a tile has, and one alone.
    rows = AttentionShape(
        contexts=(515, 9, 0, 1026, 1), queries=(4, 9, 0, 3, 1), num_heads=8, kv_heads=2
    )
    # Three splits, and tiles of four tokens on both sides of the end of one.
    latent = AttentionShape(
        (1060, 5), (45, 5), num_heads=4, kv_heads=1, head_dim=40, planes=1
    )
    rope = AttentionShape(contexts=(), queries=(13,), num_heads=6)
    caps: dict[str, object] = {"softcap": 1.5, "has_sinks": True, "window": 530}
    return {
        "decode fp32": lambda: check_decode(decode, "cpu"),
        "decode fp32 splits": lambda: check_decode(split, "cpu"),
        "decode bf16": lambda: check_decode(
            _with(decode, dtype=bf16, block_size=32), "cpu"
        ),
        "decode heads of 80": lambda: check_decode(_with(decode, head_dim=80), "cpu"),
        "decode group of 20": lambda: check_decode(
            _with(decode, num_heads=20, kv_heads=1), "cpu"
        ),
        "decode window": lambda: check_decode(_with(split, window=70), "cpu"),
        "decode ordered": lambda: check_decode(split, "cpu", ordered=True),
        "decode alone": lambda: check_decode_alone(
            _with(decode, contexts=(600, 3, 0, 17)), "cpu"
        ),
        "decode rows short": lambda: check_decode_rows(
            _with(rows, contexts=(514, 3, 0), queries=(4, 2, 0), **caps), "cpu"
        ),
        "decode rows": lambda: check_decode_rows(rows, "cpu"),
        "decode rows bf16": lambda: check_decode_rows(
            _with(rows, dtype=bf16, head_dim=80, num_heads=5, kv_heads=1), "cpu"
        ),
        "decode rows, one head": lambda: check_decode_rows(
            _with(rows, num_heads=1, kv_heads=1, window=50, has_sinks=True), "cpu"
        ),
        "decode rows, group of 16": lambda: check_decode_rows(
            _with(rows, num_heads=16, kv_heads=1, **caps), "cpu"
        ),
        "prefill fp32": lambda: check_prefill(prefill, "cpu"),
        "prefill bf16 tiles": lambda: check_prefill(wide, "cpu"),
        "prefill bf16 short ahead": lambda: check_prefill(
            _with(prefill, dtype=bf16, head_dim=112), "cpu"
        ),
        "prefill empty chunk": lambda: check_prefill(
            _with(prefill, queries=(40, 0, 1)), "cpu"
        ),
        "prefill window": lambda: check_prefill(_with(cut, window=37), "cpu"),
        "prefill chunks bf16": lambda: check_prefill_chunks(
            _with(cut, dtype=bf16, head_dim=80), "cpu"
        ),
        "prefill chunks far window bf16": lambda: check_prefill_chunks(
            _with(wide, contexts=(330,), window=200, head_dim=128), "cpu"
        ),
        "prefill chunks window": lambda: check_prefill_chunks(
            _with(cut, window=20), "cpu"
        ),
        "ordered": lambda: check_decode_as_prefill(one, "cpu", 9),
        "ordered chunks": lambda: check_prefill_chunks(
            _with(one, queries=(45,)), "cpu", ordered=True
        ),
        "ordered window": lambda: check_decode_as_prefill(
            _with(one, window=530), "cpu", 9
        ),
        "ordered bf16": lambda: check_decode_as_prefill(
            _with(one, dtype=bf16, head_dim=80, queries=(45,)), "cpu", 9
        ),
        "caps and sinks": lambda: check_decode_as_prefill(_with(one, **caps), "cpu", 9),
        "caps and sinks short": lambda: check_decode_as_prefill(
            _with(one, contexts=(521,), queries=(18,), **(caps | {"window": 509})),
            "cpu",
            5,
        ),
        "decode caps and sinks": lambda: check_decode(
            _with(split, contexts=(600, 0), **caps), "cpu"
        ),
        "decode few keys, caps and sinks": lambda: check_decode(
            _with(decode, **caps), "cpu"
        ),
        "prefill caps and sinks": lambda: check_prefill(_with(cut, **caps), "cpu"),
        "prefill ahead, caps and sinks": lambda: check_prefill(
            _with(prefill, dtype=bf16, head_dim=112, **caps), "cpu"
        ),
        "pieces of blocks": lambda: check_prefill(
            _with(cut, dtype=bf16, head_dim=512, block_size=4), "cpu"
        ),
        "pieces of blocks, ordered": lambda: check_decode_as_prefill(
            _with(one, dtype=bf16, head_dim=512, block_size=8, queries=(20,)), "cpu", 9
        ),
        "tiles for warps": lambda: check_on_warps(
            _with(one, dtype=bf16, head_dim=256, queries=(20,)), "cpu"
        ),
        "fp8 pool": lambda: check_fp8_pool(_with(cut, block_size=32), "cpu"),
        "fp8 pool, ahead": lambda: check_fp8_pool(
            _with(prefill, dtype=bf16, head_dim=112), "cpu"
        ),
        "fp8 pool, ordered": lambda: check_fp8_pool(
            _with(one, dtype=bf16, head_dim=80, queries=(9,)), "cpu", ordered=True
        ),
        "fp8 pool, caps and sinks": lambda: check_fp8_pool(_with(cut, **caps), "cpu"),
        "latent fp32": lambda: check_latent(latent, "cpu", 8, 9),
        "latent fp32 short": lambda: check_latent(
            _with(latent, contexts=(516, 5), queries=(8, 5), num_heads=2), "cpu", 8, 3
        ),
        "latent bf16": lambda: check_latent(
            _with(
                latent,
                dtype=bf16,
                num_heads=20,
                contexts=(533, 9),
                queries=(3, 9),
                head_dim=48,
                block_size=64,
            ),
            "cpu",
            16,
            2,
        ),
        "sparse fp32": lambda: check_sparse(
            _with(latent, contexts=(1060, 23), queries=(3, 7)),
            "cpu",
            8,
            IndexShape(6, 24, 20),
            2,
        ),
        "sparse fp32 short": lambda: check_sparse(
            _with(latent, contexts=(518, 23), queries=(2, 5), num_heads=2),
            "cpu",
            8,
            IndexShape(6, 24, 20),
            2,
        ),
        "sparse bf16": lambda: check_sparse(
            _with(
                latent,
                dtype=bf16,
                num_heads=20,
                contexts=(1100, 9),
                queries=(2, 1),
                head_dim=48,
                block_size=64,
            ),
            "cpu",
            16,
            IndexShape(64, 128, 600),
            1,
        ),
        **{
            f"states {kind}": partial(check_states, kind, shape)
            for kind, shape in STATES.items()
        },
        "latent store": lambda: check_turn_store(_with(rope, head_dim=40), "cpu", 8),
        "latent store bf16": lambda: check_turn_store(
            _with(rope, dtype=bf16, head_dim=48, num_heads=5), "cpu", 16
        ),
        "rope fp32 norm": lambda: check_rope_store(rope, "cpu", qk_norm=True),
        "rope bf16 norm": lambda: check_rope_store(
            _with(rope, dtype=bf16), "cpu", qk_norm=True
        ),
        "rope heads of 80": lambda: check_rope_store(
            _with(rope, head_dim=80, kv_heads=3), "cpu", qk_norm=True
        ),
        "norm fp32": lambda: check_add_rms_norm(48, fp32, "cpu", residual=True),
        "norm first": lambda: check_add_rms_norm(64, fp32, "cpu", residual=False),
        "silu bf16": lambda: check_gate_mul(96, bf16, "cpu"),
        "gelu fp32": lambda: check_gate_mul(96, fp32, "cpu", GELU_TANH),
        "clamped gate": lambda: check_gate_mul(
            96, fp32, "cpu", Gate(1.702, 0.0, 7.0, 1.0)
        ),
        "sampling every filter": lambda: check_sampling(301, 2.0, fp32, "cpu", 2),
        "sampling equals": lambda: check_sampling(16, 0.0, bf16, "cpu", 8),
        "sampling peaked": lambda: check_sampling(4100, 9.0, bf16, "cpu", 8),
        # More tokens than are gathered, and more wanted than there are maxima.
        "sampling flat": lambda: check_sampling(9001, 0.3, fp32, "cpu", 8),
        "sampling flat at once": check_nucleus,
        "penalties fp32": lambda: check_penalties(1500, fp32, "cpu"),
        "penalties bf16": lambda: check_penalties(1500, bf16, "cpu"),
        "product fp32": lambda: check_fixed_product(70, 72, 65, fp32, "cpu"),
        "product in parts": lambda: check_fixed_product(300, 1580, 100, fp32, "cpu", 4),
        "product in parts short": lambda: check_fixed_product(
            20, 1580, 35, fp32, "cpu", 4
        ),
        "product in parts bf16": lambda: check_fixed_product(
            130, 1580, 100, bf16, "cpu", 3
        ),
        "product bf16": lambda: check_fixed_product(67, 130, 129, bf16, "cpu"),
        "four bits": lambda: check_narrow_product(67, 1160, 129, 128, "cpu"),
        "four bits in short groups": lambda: check_narrow_product(
            70, 72, 65, 32, "cpu"
        ),
        "four bits by channel": lambda: check_narrow_product(9, 88, 20, 88, "cpu"),
        "fp8": lambda: check_narrow_product(67, 1160, 129, 128, "cpu", is_fp8=True),
        "fp8 short": lambda: check_narrow_product(19, 264, 20, 128, "cpu", is_fp8=True),
        "experts fp32": lambda: check_grouped_product(
            (3, 0, 70, 1, 0), 72, 65, fp32, "cpu"
        ),
        "experts bf16": lambda: check_grouped_product(
            (0, 129, 2), 130, 129, bf16, "cpu"
        ),
        "adapters": lambda: check_adapters(16, 72, 144, "cpu"),
        "adapters of high rank": lambda: check_adapters(256, 130, 129, "cpu"),
        "sum of experts": lambda: check_add_experts(3, 4, 1100, bf16, "cpu"),
        "proof of a pool": lambda: check_proof(24, "cpu"),
        "blocks bf16": lambda: check_block_copy(64, bf16, "cpu"),
        "sums of blocks": lambda: check_block_sums(9000, "cpu"),
    }


# Two heads share a key; heads of several groups; a convolution alone.
STATES = {
    "delta": StateShape(1, 2, 1, 16, 32, 96, 4),
    "key_delta": StateShape(1, 1, 1, 16, 32, 64, 4, by_key=True),
    "mamba": StateShape(2, 1, 1, 16, 16, 48, 4),
    "conv": StateShape(2, 0, 32, 0, 0, 32, 3),
}


def check_nucleus() -> str:
    """Flat rows draw what torch draws, by one more pass and without a search of the row.

    One has equal logits, one two values, one a pattern, and one is longer than the sample.
    """
    from baton.kernels.cuda import sampling_kernels

    generator = torch.Generator().manual_seed(3)
    noise = torch.randn(9001, generator=generator)
    logits = torch.stack(
        [
            torch.zeros(9001),
            torch.where(noise > 0.2, 1.0, 0.5),
            torch.arange(9001) % 128 / 300,
            noise * 0.3,
            noise,
        ]
    )
    logits[:, 5::11] = -math.inf
    rows = [
        SampleRow(Sampling(seed, 9, top_p=0.9 - seed / 20), 0, seed, 5)
        for seed in range(len(logits))
    ]
    expected = Sampler().sample_rows(logits, rows)
    no_ids = torch.full((len(rows), 1), -1, dtype=torch.int32)
    search = sampling_kernels.draw
    sampling_kernels.draw = None  # what would search a row
    try:
        got = drawn(logits, rows, no_ids, None)
    finally:
        sampling_kernels.draw = search
    assert got == expected, f"{got} instead of {expected}"
    return f"{len(rows)} tokens"


def check_states(kind: str, shape: StateShape) -> str:
    """What a node proves before it serves a model whose layers keep a state."""
    from baton.kernels.cuda.states.state_proof import prove

    shapes = ModelShapes((), 2, 2, 32, 16, state=shape, state_kind=kind)
    assert prove(shapes, "cpu") == ""
    return "proven"


def _with(shape: AttentionShape, **changes: object) -> AttentionShape:
    return dataclasses.replace(shape, **changes)  # type: ignore[arg-type]
