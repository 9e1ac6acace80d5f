"""Every kernel against its torch reference on a real GPU, at the shapes of real models."""

from dataclasses import replace

import pytest
import torch

from baton.kernels import reference
from baton.kernels.cuda.rows import add_rms_norm
from baton.kernels.proofs import (
    CANDIDATES,
    FP8_POOL,
    LATENT_PREFILL,
    ONE_ORDER,
    PREFILL,
    LatentDims,
    ModelShapes,
    kernels_of,
)
from baton.model.loading.uploads import Uploads
from tools.gpu import kernel_cases as cases
from tools.gpu.correctness import SHAPES
from tools.gpu.kernel_cases import AttentionShape, check_sampling

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip(
        "no CUDA device: the interpreter tests stand in", allow_module_level=True
    )

BF16 = torch.bfloat16
FP32 = torch.float32
LENGTHS = (1, 15, 16, 17, 255, 256, 257, 1000, 4097, 0)
PROMPTS = AttentionShape(
    contexts=(1000, 5, 2049, 129, 64),
    queries=(700, 5, 300, 129, 1),
    num_heads=32,
    kv_heads=8,
    head_dim=128,
    dtype=BF16,
)
MODELS = {
    "8B": PROMPTS,
    "group of 7": replace(PROMPTS, num_heads=28, kv_heads=4),
    "group of 16": replace(PROMPTS, num_heads=32, kv_heads=2),
    "no groups": replace(PROMPTS, num_heads=8, kv_heads=8),
    "group of 32": replace(PROMPTS, num_heads=32, kv_heads=1),
    "heads of 80": replace(PROMPTS, head_dim=80),
    "heads of 112, window": replace(PROMPTS, head_dim=112, window=100),
    "heads of 256": replace(PROMPTS, head_dim=256, num_heads=16, kv_heads=8),
    "window": replace(PROMPTS, window=333),
    "heads of 64, blocks of 32": replace(PROMPTS, head_dim=64, block_size=32),
    "Gemma 2": replace(
        PROMPTS, head_dim=256, num_heads=8, kv_heads=4, softcap=2.0, window=333
    ),
    "gpt-oss": replace(PROMPTS, head_dim=64, num_heads=64, has_sinks=True, window=128),
    "blocks of 128": replace(PROMPTS, block_size=128),
    "fp32": replace(PROMPTS, dtype=FP32, num_heads=8, kv_heads=2),
}


@pytest.mark.parametrize("model", MODELS)
def test_decode_agrees_with_its_reference(model):
    cases.check_decode(_decode(LENGTHS, model), "cuda")


def test_a_context_of_more_than_64_splits_agrees_with_its_reference():
    cases.check_decode(_decode((40_000, 3), "8B"), "cuda")


@pytest.mark.parametrize("model", ["8B", "fp32"])
def test_a_decode_row_has_the_same_bits_in_any_batch(model):
    cases.check_decode_alone(_decode(LENGTHS, model), "cuda")


def test_a_large_decode_batch_agrees_with_its_reference():
    cases.check_decode(_decode(tuple(range(1, 513)), "8B"), "cuda")


@pytest.mark.parametrize("model", MODELS)
def test_rows_of_a_sequence_have_the_bits_of_each_alone(model):
    queries = tuple(min(length, 5) for length in LENGTHS)
    shape = replace(MODELS[model], contexts=LENGTHS, queries=queries)
    cases.check_decode_rows(shape, "cuda")


@pytest.mark.parametrize("model", MODELS)
def test_prefill_agrees_with_its_reference(model):
    cases.check_prefill(MODELS[model], "cuda")


@pytest.mark.parametrize("model", ["8B", "fp32"])
def test_a_prefill_row_has_the_same_bits_in_any_chunking(model):
    cases.check_prefill_chunks(MODELS[model], "cuda")


@pytest.mark.parametrize("model", MODELS)
def test_ordered_sums_give_decode_the_bits_of_prefill_in_any_chunking(model):
    cases.check_decode_as_prefill(MODELS[model], "cuda", 37)
    cases.check_prefill_chunks(MODELS[model], "cuda", ordered=True)
    cases.check_prefill(MODELS[model], "cuda", ordered=True)
    cases.check_decode(_decode(LENGTHS, model), "cuda", ordered=True)


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 333])
def test_rope_and_store_agrees_with_its_reference(dtype, qk_norm, num_tokens):
    shape = replace(PROMPTS, queries=(num_tokens,), dtype=dtype)
    cases.check_rope_store(shape, "cuda", qk_norm=qk_norm)


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("hidden", [48, 4096, 5120, 8192])
@pytest.mark.parametrize("residual", [False, True])
def test_add_rms_norm_agrees_with_its_reference(dtype, hidden, residual):
    cases.check_add_rms_norm(hidden, dtype, "cuda", residual=residual)


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("features", [96, 2048, 14336])
def test_gate_mul_agrees_with_its_reference(dtype, features):
    cases.check_gate_mul(features, dtype, "cuda")


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("rows", [9, 300, 2048])
def test_fixed_products_agree_with_their_reference_and_keep_their_bits(dtype, rows):
    cases.check_fixed_product(rows, 4096, 6144, dtype, "cuda")


@pytest.mark.parametrize("candidate", CANDIDATES, ids=lambda one: one.name)
def test_kernels_that_this_gpu_may_have_are_proven(candidate):
    kernels = kernels_of(candidate)
    if missing := kernels.missing_for(SHAPES, torch.cuda.get_device_capability()):
        pytest.skip(missing)
    assert kernels.prove(SHAPES, "cuda:0") == ""


# Heads, KV heads and their size, the block size, and what else the layers have.
ATTENTION_SHAPES = {
    "gpt-oss": ModelShapes((), 64, 8, 64, 16, windows=(128,), has_sinks=True),
    "Gemma 2": ModelShapes((), 8, 4, 256, 16, windows=(4096,), softcap=50.0),
    "Qwen3-Next": ModelShapes((), 16, 2, 256, 16),
    "DeepSeek-V2-Lite": ModelShapes(
        (), 16, 1, 576, 16, is_latent=True, latent=LatentDims(512, 128, 64, 128)
    ),
    "group of 7, blocks of 32": ModelShapes((), 28, 4, 128, 32),
    "no groups, blocks of 64": ModelShapes((), 8, 8, 128, 64),
    "heads of 80": ModelShapes((), 32, 8, 80, 16, windows=(100,)),
    "heads of 96 in fp16": ModelShapes((), 32, 8, 96, 16, "float16", "float16"),
    "FP8": ModelShapes((), 32, 8, 128, 16, pool_dtype=FP8_POOL, windows=(1000,)),
    "FP8, heads of 64": ModelShapes((), 64, 8, 64, 32, pool_dtype=FP8_POOL),
    "FP8, heads of 256": ModelShapes((), 8, 4, 256, 64, pool_dtype=FP8_POOL),
    "FP8 in fp16": ModelShapes((), 32, 8, 112, 16, "float16", FP8_POOL),
}


@pytest.mark.parametrize("name", [PREFILL, ONE_ORDER, LATENT_PREFILL])
@pytest.mark.parametrize("model", ATTENTION_SHAPES)
def test_attention_on_hopper_is_proven_for_other_models(model, name):
    shapes = ATTENTION_SHAPES[model]
    kernels = kernels_of(next(one for one in CANDIDATES if one.name == name))
    if missing := kernels.missing_for(shapes, torch.cuda.get_device_capability()):
        pytest.skip(missing)
    assert kernels.prove(shapes, "cuda:0") == ""


@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize("rows", [9, 300])
def test_products_with_narrow_weights_agree_with_their_reference_and_keep_their_bits(
    rows, is_fp8
):
    cases.check_narrow_product(rows, 4096, 6144, 128, "cuda", is_fp8=is_fp8)


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("tokens", [1, 300])
def test_products_of_experts_agree_with_their_reference_and_keep_their_bits(
    dtype, tokens
):
    cases.check_grouped_product(
        (tokens, 0, 5, 0, tokens // 2, 64), 2048, 1536, dtype, "cuda"
    )
    cases.check_add_experts(tokens + 1, 8, 2048, dtype, "cuda")


@pytest.mark.parametrize("rank", [16, 256])
def test_adapters_agree_with_their_reference_and_keep_their_bits(rank):
    cases.check_adapters(rank, 4096, 6144, "cuda")


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("heads", [16, 20, 128])
def test_latent_attention_agrees_with_its_reference_and_keeps_its_bits(dtype, heads):
    shape = replace(
        PROMPTS, num_heads=heads, kv_heads=1, head_dim=576, dtype=dtype, planes=1
    )
    cases.check_latent(shape, "cuda", 64, 37)
    cases.check_turn_store(replace(shape, queries=(333,)), "cuda", 64)


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("num_chosen", [100, 2048])
def test_sparse_attention_agrees_with_its_reference_and_keeps_its_bits(
    dtype, num_chosen
):
    shape = replace(
        PROMPTS, num_heads=16, kv_heads=1, head_dim=576, dtype=dtype, planes=1
    )
    cases.check_sparse(shape, "cuda", 64, cases.IndexShape(64, 128, num_chosen), 37)


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("numel", [64, 4100, 1 << 19])
def test_gathered_and_scattered_blocks_are_bit_equal(dtype, numel):
    cases.check_block_copy(numel, dtype, "cuda")


def test_sums_of_blocks_are_those_of_the_reference():
    cases.check_block_sums(1 << 19, "cuda")


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("spread", [0.3, 3.0, 9.0])
@pytest.mark.parametrize("vocab", [1, 301, 50_257, 151_936])
def test_sampling_gives_the_tokens_that_a_cpu_gives(vocab, spread, dtype):
    check_sampling(vocab, spread, dtype, "cuda", 1)


def test_a_pool_is_proven_by_its_last_bytes():
    cases.check_proof(4096, "cuda")


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_penalties_are_what_torch_computes(dtype):
    cases.check_penalties(151_936, dtype, "cuda")


def test_attention_runs_under_a_captured_graph_for_other_lengths():
    from baton.kernels.cuda.decode_attention import paged_decode_attention

    case = cases.attention_batch(_decode((300, 2000, 700), "8B"), "cuda")
    lens = torch.tensor([1, 16, 257], dtype=torch.int32, device="cuda")
    call = (case.q, case.pool, cases.LAYER, case.block_tables)
    paged_decode_attention(*call, lens, case.scale)  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = paged_decode_attention(*call, lens, case.scale)
    lens.copy_(case.context_lens)
    graph.replay()
    torch.cuda.synchronize()  # the replay wrote `out`
    cases.assert_equal_bits(
        out, paged_decode_attention(*call, case.context_lens, case.scale)
    )


def test_a_kernel_that_is_bound_takes_addresses_that_are_not_aligned():
    weight = torch.ones(4096, device="cuda")
    memory = torch.randn(9 * 4096 + 16, device="cuda").to(BF16)
    for start in (0, 8, 1, 0, 3, 16):
        x = memory[start : start + 9 * 4096].view(9, 4096)
        normed, _ = add_rms_norm(x, None, weight, 1e-6)
        expected, _ = reference.add_rms_norm(x, None, weight, 1e-6)
        torch.testing.assert_close(normed, expected, rtol=1e-2, atol=1e-2)


def _decode(lengths: tuple[int, ...], model: str) -> AttentionShape:
    queries = (1,) * len(lengths)
    return replace(MODELS[model], contexts=lengths, queries=queries)


def test_a_gpu_has_read_weights_before_their_buffer_is_filled_again():
    uploads = Uploads(torch.device("cuda", 0), 1 << 20)
    sources = [torch.randn(900_000 + n) for n in range(40)]
    copies = [uploads.copy(source) for source in sources]
    assert all(torch.equal(a.cpu(), b) for a, b in zip(copies, sources, strict=True))
