"""Compare every Triton kernel with its torch reference on this GPU, in shapes of Qwen3-0.6B and 8B.

This is a section of the GPU benchmark. The checks are those of the kernels' own tests: where the
reference promises bits, bits are compared; elsewhere the largest error is held to the rounding of
bf16.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import msgspec
import torch
import triton

from baton.kernels import reference
from baton.kernels.cuda.decode_attention import paged_decode_attention
from baton.kernels.cuda.fixed_product import fixed_product, has_warpgroup_products
from baton.kernels.cuda.pool_writes import move_blocks, rope_and_store
from baton.kernels.cuda.prefill_attention import paged_prefill_attention
from baton.kernels.hopper.products.product import load_product
from baton.kernels.proofs import (
    FP8_POOL,
    LATENT_PREFILL,
    ONE_ORDER,
    Candidate,
    LatentDims,
    ModelShapes,
    NarrowExperts,
    Proof,
    ProofRequest,
    possible,
)
from baton.kernels.state_layout import StateShape
from baton.model.batch_invariance.device_linears import keeps_bits
from baton.model.layers.linear import Product
from baton.model.runner.cuda_start import keep_sums_whole
from baton.model.runner.kernel_proofs import tried
from tools.gpu import kernel_cases as cases
from tools.gpu.floors import QWEN3_8B
from tools.gpu.kernel_cases import (
    AttentionShape,
    assert_close,
    assert_equal_bits,
    rotation_table,
)
from tools.gpu.rows import Check
from tools.gpu.section import Desk

BLOCK_SIZES = (16, 64)
GUESS_ROWS = 4  # of a sequence
KEEPS_BITS = "rows keep their bits"
BY_HEADS = {ONE_ORDER, LATENT_PREFILL}  # what depends on heads, windows and caps
PROOF_SHARE = 0.8  # of the section's time
FAR = "kernels beyond 2^31 elements"
BF16 = torch.bfloat16
# What kernels are proven for: the sizes of Qwen3-8B, and the states of Qwen3-Next.
SHAPES = ModelShapes(
    (*QWEN3_8B.linears, (QWEN3_8B.vocab_size, QWEN3_8B.hidden_size)),
    QWEN3_8B.num_heads,
    QWEN3_8B.num_kv_heads,
    QWEN3_8B.head_dim,
    BLOCK_SIZES[0],
    scale=QWEN3_8B.head_dim**-0.5,
    narrow="int4",
    narrow_group=128,
    # Those of Qwen3-30B-A3B.
    narrow_experts=NarrowExperts(128, ((1536, 2048), (2048, 768)), "int4", 128),
    max_model_len=40_960,
    state=StateShape(2, 16, 8, 128, 128, 4096, 4),
    state_kind="delta",
)
# Attention with other heads, with windows, sinks and caps, to latent rows, and over an FP8 pool.
OTHER_SHAPES = {
    "FP8 pool": msgspec.structs.replace(SHAPES, pool_dtype=FP8_POOL),
    "gpt-oss-20b": msgspec.structs.replace(
        SHAPES, num_heads=64, head_dim=64, scale=0.125, windows=(128,), has_sinks=True
    ),
    "Gemma-2-27B": msgspec.structs.replace(
        SHAPES, kv_heads=16, scale=144**-0.5, windows=(4096,), softcap=50.0
    ),
    "Gemma-2-9B": msgspec.structs.replace(
        SHAPES, num_heads=16, head_dim=256, scale=1 / 16, windows=(4096,), softcap=50.0
    ),
    "Qwen3-Next": msgspec.structs.replace(
        SHAPES, num_heads=16, kv_heads=2, head_dim=256, scale=1 / 16
    ),
    "DeepSeek-V2-Lite": msgspec.structs.replace(
        SHAPES,
        num_heads=16,
        kv_heads=1,
        head_dim=576,
        scale=192**-0.5,
        is_latent=True,
        latent=LatentDims(512, 128, 64, 128),
    ),
    "Phi-3-mini": msgspec.structs.replace(
        SHAPES, kv_heads=32, head_dim=96, scale=96**-0.5, windows=(2047,)
    ),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Model:
    """The sizes that kernels are checked at."""

    name: str
    heads: tuple[int, int, int]  # those of queries, those of keys, and their size
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    block_values: int
    decode_contexts: tuple[int, ...] = (1, 15, 16, 17, 255, 256, 257, 1000, 4097, 0)
    long_contexts: tuple[int, ...] = (40_000, 3)  # more than 64 splits
    prompts: tuple[tuple[int, int], ...] = (
        (1000, 700),
        (5, 5),
        (2049, 300),
        (129, 129),
        (64, 1),
    )

    def shape(self, block_size: int) -> AttentionShape:
        """Return the batch of its prompts."""
        contexts, queries = zip(*self.prompts, strict=True)
        return AttentionShape(contexts, queries, *self.heads, block_size, BF16)


def _decoding(shape: AttentionShape, contexts: tuple[int, ...]) -> AttentionShape:
    return dataclasses.replace(shape, contexts=contexts, queries=(1,) * len(contexts))


def _guessing(shape: AttentionShape, contexts: tuple[int, ...]) -> AttentionShape:
    queries = tuple(min(GUESS_ROWS, context) for context in contexts)
    return dataclasses.replace(shape, contexts=contexts, queries=queries)


def _latent(shape: AttentionShape) -> AttentionShape:
    """Return the same prompts over latent rows, which are DeepSeek's for heads of 128."""
    row = 4 * shape.head_dim + shape.head_dim // 2
    return dataclasses.replace(shape, kv_heads=1, head_dim=row, planes=1)


Work = Callable[[Model, AttentionShape, str], str]
ATTENTION: dict[str, Work] = {
    "decode attention": lambda model, shape, device: cases.check_decode(
        _decoding(shape, model.decode_contexts), device
    ),
    "prefill attention": lambda _, shape, device: cases.check_prefill(shape, device),
}
KERNELS: dict[str, Work] = {
    "decode attention, long context": lambda model, shape, device: cases.check_decode(
        _decoding(shape, model.long_contexts), device
    ),
    "ordered decode attention: bits in any batch": lambda model, shape, device: (
        cases.check_decode_alone(_decoding(shape, model.decode_contexts), device)
    ),
    "ordered attention: guesses = each row alone": lambda model, shape, device: (
        cases.check_decode_rows(_guessing(shape, model.decode_contexts), device)
    ),
    "ordered attention: decode = prefill": lambda _, shape, device: (
        cases.check_decode_as_prefill(shape, device, 37)
    ),
    "prefill attention: bits in any chunking": lambda _, shape, device: (
        cases.check_prefill_chunks(shape, device)
    ),
    "QK norm + rotation + store": lambda _, shape, device: cases.check_rope_store(
        shape, device, qk_norm=True
    ),
    "add + norm": lambda model, _, device: cases.check_add_rms_norm(
        model.hidden_size, BF16, device, residual=True
    ),
    "SiLU · mul": lambda model, _, device: cases.check_gate_mul(
        model.intermediate_size, BF16, device
    ),
    "products of experts": lambda model, _, device: cases.check_grouped_product(
        (1, 0, 70, 5), model.hidden_size, model.hidden_size // 4, BF16, device
    ),
    "products in four bits": lambda model, _, device: cases.check_narrow_product(
        67, model.hidden_size, model.hidden_size // 4, 64, device
    ),
    "products in FP8": lambda model, _, device: cases.check_narrow_product(
        67, model.hidden_size, model.hidden_size // 4, 64, device, is_fp8=True
    ),
    "adapters": lambda model, _, device: cases.check_adapters(
        64, model.hidden_size, model.hidden_size, device
    ),
    "sums of experts": lambda model, _, device: cases.check_add_experts(
        38, 2, model.hidden_size, BF16, device
    ),
    "latent attention": lambda _, shape, device: cases.check_latent(
        _latent(shape), device, shape.head_dim // 2, 37
    ),
    "sparse attention": lambda _, shape, device: cases.check_sparse(
        _latent(shape), device, shape.head_dim // 2, cases.IndexShape(64, 128, 256), 37
    ),
    "gather and scatter of blocks": lambda model, _, device: cases.check_block_copy(
        model.block_values, BF16, device
    ),
    "sampling: device = CPU": lambda model, _, device: cases.check_sampling(
        model.vocab_size, 3.0, BF16, device, 8
    ),
    "penalties": lambda model, _, device: cases.check_penalties(
        model.vocab_size, BF16, device
    ),
}
MODELS = (
    Model("0.6B", (16, 8, 128), 1024, 3072, 151_936, 8 * 28 * 2 * 16 * 128),
    Model("8B", (32, 8, 128), 4096, 12_288, 151_936, 8 * 36 * 2 * 16 * 128),
)


def run(
    desk: Desk,
    models: tuple[Model, ...] = MODELS,
    block_sizes: tuple[int, ...] = BLOCK_SIZES,
    weights: Mapping[str, tuple[int, int]] | None = None,
) -> None:
    """Run the section.

    `weights` are the shapes whose products are asked whether they keep the bits of a row, with the
    library as `engine.deterministic` sets it up.
    """
    torch.manual_seed(0)
    if desk.device.type == "cuda":
        keep_sums_whole()
    device = desk.device.type
    with ThreadPoolExecutor() as trying:
        proofs = _proofs(desk, trying)
        for block_size in block_sizes:
            for model in models:
                own = ATTENTION if block_size != block_sizes[0] else ATTENTION | KERNELS
                for name, work in own.items():
                    key = f"{name}, {model.name}, blocks of {block_size}"
                    shape = model.shape(block_size)
                    desk.check(
                        key, partial(_passed, key, partial(work, model, shape, device))
                    )
        for name, tries in proofs.items():
            for proof in tries.result():
                key = f"proof of {proof.name}{name}"
                desk.emit(Check(key, not proof.problem, proof.problem or "proven"))
    if desk.device.type == "cuda":
        desk.check(FAR, partial(_far, desk.device))
    for check in resources():
        desk.emit(check)
    for name, sizes in (weights or {}).items():
        for product in products(desk.device):
            key = f"{KEEPS_BITS}: {product}, {name} {sizes[0]} x {sizes[1]}"
            desk.check(key, partial(keeps, desk.device, key, product, sizes))


def _proofs(desk: Desk, trying: ThreadPoolExecutor) -> dict[str, Future[list[Proof]]]:
    """Prove what a node would, beside the other checks: most of that is compiling."""
    limit_s = PROOF_SHARE * desk.left_s()
    proofs = {}
    for name, shapes in {"": SHAPES, **OTHER_SHAPES}.items():
        candidates = provable(desk.device, shapes)
        if name:
            candidates = tuple(one for one in candidates if one.name in BY_HEADS)
        if candidates:
            request = ProofRequest(shapes, str(desk.device), candidates)
            of_shapes = f", {name}" if name else ""
            proofs[of_shapes] = trying.submit(_proven, request, limit_s)
    return proofs


def _proven(request: ProofRequest, limit_s: float) -> list[Proof]:
    return [*tried(request, lambda *_: None, limit_s)]


def _passed(key: str, work: Callable[[], str]) -> Check:
    return Check(key, True, work())  # what fails raises, and `desk.check` reports it


def _far(device: torch.device) -> Check:
    """Compare attention, stores and copies in the last blocks of a pool of 2.4e9 elements."""
    pool = torch.empty(2000, 8, 36, 2, 16, 128, dtype=torch.bfloat16, device=device)
    ids = [1999, 1890, 1950]
    layer = 35
    scale = 128**-0.5
    pool[ids] = torch.randn(3, *pool.shape[1:], device=device).to(pool.dtype)
    tables = torch.tensor([ids], dtype=torch.int32, device=device)
    starts, lens = (
        torch.tensor(one, dtype=torch.int32, device=device) for one in ([0, 5], [40])
    )
    q, k, v = torch.randn(3, 5, 8, 128, device=device).to(pool.dtype)
    one = (q[:1], pool, layer, tables)
    chunk = (q, pool, layer, tables, starts)
    assert_close(
        paged_decode_attention(*one, lens, scale),
        reference.paged_decode_attention(*one, lens, scale),
    )
    assert_close(
        paged_prefill_attention(*chunk, lens, scale),
        reference.paged_prefill_attention(*chunk, lens, scale),
    )
    slots = torch.tensor(
        [1999 * 16 + 3, 1890 * 16, 1950 * 16 + 15, -1, 7], device=device
    )
    table = rotation_table(16, 128, device)
    rope_and_store(q, k, v, torch.arange(5, device=device), table, pool, layer, slots)
    blocks = slots[:3] // 16
    places = slots[:3] % 16
    assert_equal_bits(pool[blocks, :, layer, 1, places], v[:3])
    whole = pool.view(len(pool), -1)
    source, target = (
        torch.tensor([one], dtype=torch.int32, device=device) for one in (1999, 1888)
    )
    move_blocks(whole, source, whole, target)
    assert_equal_bits(whole[1888], whole[1999])
    return Check(FAR, True, "decode, prefill, stores and copies")


def resources() -> list[Check]:
    """Return what the driver says of each kernel that was compiled for this GPU."""
    modules = [
        one for name, one in sys.modules.items() if name.startswith("baton.kernels.")
    ]
    kernels = {
        one
        for module in modules
        for one in vars(module).values()
        if isinstance(one, triton.JITFunction)
    }
    checks = []
    for kernel in sorted(kernels, key=lambda one: str(one.__name__)):
        built = [
            one for cache in kernel.device_caches.values() for one in cache[0].values()
        ]
        if built:
            spilled = max(one.n_spills for one in built)
            text = ", ".join(
                f"{one.n_regs} registers x {32 * one.metadata.num_warps} threads, "
                f"{one.metadata.shared} B"
                for one in built[:4]
            )
            key = f"spills of {kernel.__name__}"
            text = f"{spilled} B; {len(built)} variants: {text}"
            checks.append(Check(key, not spilled, text, required=False))
    return checks


def provable(
    device: torch.device, shapes: ModelShapes = SHAPES
) -> tuple[Candidate, ...]:
    """Return the kernels that a node would prove here before it uses them."""
    if device.type != "cuda":
        return ()
    return possible(shapes, torch.cuda.get_device_capability(device))


@functools.cache
def products(device: torch.device) -> dict[str, Product]:
    """Return the products that linear layers can take; the interpreter is too slow for ours."""
    library: dict[str, Product] = {"library": torch.nn.functional.linear}
    if device.type != "cuda":
        return library
    ours: dict[str, Product] = {"fixed order": fixed_product}
    if has_warpgroup_products(device):
        ours["fixed order on warpgroups"] = load_product(device)
    return library | ours


def keeps(
    device: torch.device, key: str, product: str, sizes: tuple[int, int]
) -> Check:
    """Return whether a row has the same bits among any number of rows: ours must, cuBLAS may."""
    weight = torch.randn(sizes, dtype=torch.bfloat16, device=device)
    holds = keeps_bits(products(device)[product], weight)
    return Check(
        key,
        holds,
        "in every batch" if holds else "not in every batch",
        required=product != "library",
    )
