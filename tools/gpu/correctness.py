"""Compare every Triton kernel with its torch reference on this GPU, in shapes of Qwen3-0.6B and 8B.

This is a section of the GPU benchmark. Where the twin promises bits (copies, rounded sums,
independence of batch and chunking) bits are compared; elsewhere the largest error is reported and
held to the rounding of bf16, with the rounding of the kernels' own tests.
"""

import dataclasses
import sys
from collections.abc import Mapping
from functools import partial

import torch
import triton
from torch import Tensor

from baton.engine.compute.cuda_start import keep_sums_whole
from baton.engine.compute.linear import Product, keeps_bits
from baton.engine.compute.sampler import Sampler, SampleRow
from baton.kernels import reference
from baton.kernels.decode_attention import paged_decode_attention
from baton.kernels.device_sampling import sample_tokens
from baton.kernels.fixed_product import fixed_product
from baton.kernels.grouped_product import add_experts, grouped_product
from baton.kernels.latent_attention import latent_decode_attention, latent_prefill_attention
from baton.kernels.pool_writes import move_blocks, rope_and_store
from baton.kernels.prefill_attention import paged_prefill_attention
from baton.kernels.rows import add_rms_norm, gate_mul
from baton.protocol.sampling import Sampling
from tools.gpu.batches import Batch, Heads, Layout, paged_batch, rotation_table
from tools.gpu.rows import Check
from tools.gpu.section import Desk

LAYER = 1
RELATIVE, ABSOLUTE = 2e-2, 1.6e-2  # four units in the last place of bf16, and what cancels
EPS = 1e-6
BLOCK_SIZES = (16, 64)
KEEPS_BITS = "rows keep their bits"
FAR = "kernels beyond 2^31 elements"


@dataclasses.dataclass(frozen=True, slots=True)
class Model:
    """The sizes that kernels are checked at."""

    name: str
    heads: Heads
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    block_values: int
    decode_contexts: tuple[int, ...] = (1, 15, 16, 17, 255, 256, 257, 1000, 4097, 0)
    long_contexts: tuple[int, ...] = (40_000, 3)  # more than 64 splits
    prompts: tuple[tuple[int, int], ...] = ((1000, 700), (5, 5), (2049, 300), (129, 129), (64, 1))
    fused_tokens: int = 333


MODELS = (
    Model("0.6B", Heads(16, 8, 128), 1024, 3072, 151_936, 8 * 28 * 2 * 16 * 128),
    Model("8B", Heads(32, 8, 128), 4096, 12_288, 151_936, 8 * 36 * 2 * 16 * 128),
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
    for block_size in block_sizes:
        layout = Layout(desk.device, block_size=block_size)
        for model in models:
            name = f"{model.name}, blocks of {block_size}"
            desk.check(f"decode attention, {name}", partial(_decode, model, layout))
            desk.check(f"prefill attention, {name}", partial(_prefill, model, layout))
            if block_size == block_sizes[0]:
                for key, work in OTHERS.items():
                    desk.check(f"{key}, {model.name}", partial(work, model, layout))
    if desk.device.type == "cuda":
        desk.check(FAR, partial(_far, desk.device))
    for check in resources():
        desk.emit(check)
    for name, sizes in (weights or {}).items():
        for product in products(desk.device):
            key = f"{KEEPS_BITS}: {product}, {name} {sizes[0]} x {sizes[1]}"
            desk.check(key, partial(keeps, desk.device, key, product, sizes))


def _far(device: torch.device) -> Check:
    """Compare attention, stores and copies in the last blocks of a pool of 2.4e9 elements."""
    pool = torch.empty(2000, 8, 36, 2, 16, 128, dtype=torch.bfloat16, device=device)
    ids, layer, scale = [1999, 1890, 1950], 35, 128**-0.5
    pool[ids] = torch.randn(3, *pool.shape[1:], device=device).to(pool.dtype)
    tables = torch.tensor([ids], dtype=torch.int32, device=device)
    starts, lens = (torch.tensor(one, dtype=torch.int32, device=device) for one in ([0, 5], [40]))
    q, k, v = torch.randn(3, 5, 8, 128, device=device).to(pool.dtype)
    one, chunk = (q[:1], pool, layer, tables), (q, pool, layer, tables, starts)
    found = [
        _close(FAR, paged_decode_attention(*one, lens, scale),
               reference.paged_decode_attention(*one, lens, scale)),
        _close(FAR, paged_prefill_attention(*chunk, lens, scale),
               reference.paged_prefill_attention(*chunk, lens, scale)),
    ]  # fmt: skip
    slots = torch.tensor([1999 * 16 + 3, 1890 * 16, 1950 * 16 + 15, -1, 7], device=device)
    table = rotation_table(16, 128, device)
    rope_and_store(q, k, v, torch.arange(5, device=device), table, pool, layer, slots)
    blocks, places = slots[:3] // 16, slots[:3] % 16
    found.append(_equal(FAR, pool[blocks, :, layer, 1, places], v[:3]))
    whole = pool.view(len(pool), -1)
    source, target = (torch.tensor([one], dtype=torch.int32, device=device) for one in (1999, 1888))
    move_blocks(whole, source, whole, target)
    found.append(_equal(FAR, whole[1888], whole[1999]))
    failed = [check for check in found if not check.passed]
    return failed[0] if failed else Check(FAR, True, "decode, prefill, stores and copies")


def resources() -> list[Check]:
    """Return what the driver says of each kernel that was compiled for this GPU."""
    modules = [one for name, one in sys.modules.items() if name.startswith("baton.kernels.")]
    kernels = {
        one for module in modules for one in vars(module).values()
        if isinstance(one, triton.JITFunction)
    }  # fmt: skip
    checks = []
    for kernel in sorted(kernels, key=lambda one: str(one.__name__)):
        built = [one for cache in kernel.device_caches.values() for one in cache[0].values()]
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


def products(device: torch.device) -> dict[str, Product]:
    """Return the products that linear layers can take; the interpreter is too slow for ours."""
    library: dict[str, Product] = {"library": torch.nn.functional.linear}
    return library | {"fixed order": fixed_product} if device.type == "cuda" else library


def keeps(device: torch.device, key: str, product: str, sizes: tuple[int, int]) -> Check:
    """Return whether a row has the same bits among any number of rows: ours must, cuBLAS may."""
    weight = torch.randn(sizes, dtype=torch.bfloat16, device=device)
    holds = keeps_bits(products(device)[product], weight)
    return Check(key, holds, "in every batch" if holds else "not in every batch",
                 required=product != "library")  # fmt: skip


def _decode(model: Model, layout: Layout, contexts: tuple[int, ...] = ()) -> Check:
    contexts = contexts or model.decode_contexts
    batch = paged_batch(model.heads, contexts, (1,) * len(contexts), layout, poison=True)
    call = (batch.q, batch.pool, LAYER, batch.block_tables, batch.context_lens, batch.scale)
    key = f"decode attention, {model.name}, blocks of {layout.block_size}"
    return _close(key, paged_decode_attention(*call), reference.paged_decode_attention(*call))


def _decode_long(model: Model, layout: Layout) -> Check:
    found = _decode(model, layout, model.long_contexts)
    return Check(f"decode attention, long context, {model.name}", found.passed, found.detail)


def _decode_alone(model: Model, layout: Layout) -> Check:
    """Compare a row alone, and behind a wider table, with the same row in its batch."""
    contexts = model.decode_contexts
    batch = paged_batch(model.heads, contexts, (1,) * len(contexts), layout, poison=True)
    tables, lens = batch.block_tables, batch.context_lens
    call = partial(paged_decode_attention, ordered=True)
    whole = call(batch.q, batch.pool, LAYER, tables, lens, batch.scale)
    wide = torch.cat([tables, tables, tables], dim=1)
    parts = [call(batch.q, batch.pool, LAYER, wide, lens, batch.scale)]
    for i in range(len(contexts)):
        one = slice(i, i + 1)
        parts.append(call(batch.q[one], batch.pool, LAYER, tables[one], lens[one], batch.scale))
    key = f"ordered decode attention: bits in any batch, {model.name}"
    return _equal(key, torch.cat(parts), torch.cat([whole, whole]))


def _decode_as_prefill(model: Model, layout: Layout) -> Check:
    """Compare the last token of each prompt as decode and as prefill compute it, both ordered."""
    batch = _prompt_batch(model, layout)
    whole = paged_prefill_attention(
        batch.q, batch.pool, LAYER, batch.block_tables, batch.query_starts, batch.context_lens,
        batch.scale, ordered=True,
    )  # fmt: skip
    last = batch.query_starts[1:].long() - 1
    decoded = paged_decode_attention(
        batch.q[last], batch.pool, LAYER, batch.block_tables, batch.context_lens, batch.scale,
        ordered=True,
    )  # fmt: skip
    return _equal(f"ordered attention: decode = prefill, {model.name}", decoded, whole[last])


def _prefill(model: Model, layout: Layout) -> Check:
    batch = _prompt_batch(model, layout)
    call = (
        batch.q, batch.pool, LAYER, batch.block_tables, batch.query_starts, batch.context_lens,
        batch.scale,
    )  # fmt: skip
    key = f"prefill attention, {model.name}, blocks of {layout.block_size}"
    return _close(key, paged_prefill_attention(*call), reference.paged_prefill_attention(*call))


def _prefill_chunks(model: Model, layout: Layout) -> Check:
    """Compare each prompt, cut at a third and computed alone, with all prompts at once."""
    batch = _prompt_batch(model, layout)
    whole = paged_prefill_attention(
        batch.q, batch.pool, LAYER, batch.block_tables, batch.query_starts, batch.context_lens,
        batch.scale,
    )  # fmt: skip
    parts, start = [], 0
    for i, (length, count) in enumerate(model.prompts):
        cut = count // 3
        for first, last in ((0, cut), (cut, count)):
            if first == last:
                continue
            starts = torch.tensor([0, last - first], dtype=torch.int32, device=layout.device)
            seen = torch.tensor([length - count + last], dtype=torch.int32, device=layout.device)
            parts.append(
                paged_prefill_attention(
                    batch.q[start + first : start + last], batch.pool, LAYER,
                    batch.block_tables[i : i + 1], starts, seen, batch.scale,
                )
            )  # fmt: skip
        start += count
    return _equal(f"prefill attention: bits in any chunking, {model.name}", torch.cat(parts), whole)


def _prompt_batch(model: Model, layout: Layout) -> Batch:
    contexts, queries = zip(*model.prompts, strict=True)
    return paged_batch(model.heads, contexts, queries, layout, poison=True)


def _rope(model: Model, layout: Layout) -> Check:
    """Compare queries and keys within rounding, values and all unnamed slots to the bit."""
    heads, device, tokens = model.heads, layout.device, model.fused_tokens
    width = heads.num_heads + 2 * heads.num_kv_heads
    packed = torch.randn(tokens, width, heads.head_dim, device=device, dtype=layout.dtype)
    q, k, v = torch.split(packed, [heads.num_heads, heads.num_kv_heads, heads.num_kv_heads], dim=1)
    blocks = -(-tokens // layout.block_size) + 1
    pool = torch.randn(
        (blocks, heads.num_kv_heads, 2, 2, layout.block_size, heads.head_dim), device=device
    ).to(layout.dtype)
    slots = torch.randperm(blocks * layout.block_size)[:tokens]
    slots[1::4] = -1  # padding
    weights = torch.randn(2, heads.head_dim, device=device).to(layout.dtype)
    ours, theirs = pool.clone(), pool.clone()
    start = (q, k, v, torch.arange(tokens, device=device), rotation_table(tokens, heads.head_dim,
             device))  # fmt: skip
    end = (LAYER, slots.to(device), weights[0], weights[1], EPS)
    got = rope_and_store(*start, ours, *end)
    wanted = reference.rope_and_store(*start, theirs, *end)
    key = f"QK norm + rotation + store, {model.name}"
    values = _equal(key, ours[:, :, LAYER, 1], theirs[:, :, LAYER, 1])
    others = _equal(key, ours[:, :, 0], theirs[:, :, 0])
    return next(
        (found for found in (values, others) if not found.passed),
        _close(key, torch.cat([got.flatten(), ours.flatten()]),
               torch.cat([wanted.flatten(), theirs.flatten()])),
    )  # fmt: skip


def _norm(model: Model, layout: Layout) -> Check:
    """Compare the rounded sum to the bit, its norm within rounding."""
    shape, device = (model.fused_tokens, model.hidden_size), layout.device
    x, residual = (torch.randn(shape, device=device, dtype=layout.dtype) for _ in range(2))
    weight = torch.randn(model.hidden_size, device=device, dtype=layout.dtype)
    normed, stream = add_rms_norm(x, residual, weight, EPS)
    wanted, wanted_stream = reference.add_rms_norm(x, residual, weight, EPS)
    key = f"add + norm, {model.name}"
    sums = _equal(key, stream, wanted_stream)
    return sums if not sums.passed else _close(key, normed, wanted)


def _silu(model: Model, layout: Layout) -> Check:
    shape = (model.fused_tokens, 2 * model.intermediate_size)
    gate_up = 4 * torch.randn(shape, device=layout.device, dtype=layout.dtype)
    return _close(f"SiLU · mul, {model.name}", gate_mul(gate_up), reference.gate_mul(gate_up))


def _experts(model: Model, layout: Layout) -> Check:
    """Compare experts with one row, none and several tiles; then the sums of pairs of rows."""
    counts = torch.tensor([1, 0, 70, 5], device=layout.device)
    ends, rows = counts.cumsum(0).to(torch.int32), int(counts.sum())
    sizes = (len(counts), model.hidden_size // 4, model.hidden_size)
    x = torch.randn(rows, model.hidden_size, device=layout.device, dtype=layout.dtype)
    weight = torch.randn(sizes, device=layout.device, dtype=layout.dtype)
    weight /= model.hidden_size**0.5
    key = f"products of experts, {model.name}"
    found = grouped_product(x, weight, ends)
    products = _close(key, found, reference.grouped_product(x, weight, ends))
    pairs = found.view(-1, 2, sizes[1])
    shares = torch.rand(len(pairs), 2, device=layout.device)
    sums = _close(key, add_experts(pairs, shares), reference.add_experts(pairs, shares))
    return products if not products.passed else sums


def _latent(model: Model, layout: Layout) -> Check:
    """Compare results within rounding; decoded tokens and chunks to the bit."""
    latent, rotated = 4 * model.heads.head_dim, model.heads.head_dim // 2  # DeepSeek's for 128
    heads = Heads(model.heads.num_heads, 1, latent + rotated)
    batch = _prompt_batch(dataclasses.replace(model, heads=heads), layout)
    device, key = layout.device, f"latent attention, {model.name}"
    pool = batch.pool[:, :, :, :1].contiguous()
    tables, starts, lens = batch.block_tables, batch.query_starts, batch.context_lens
    tail, last = (batch.scale, rotated), starts[1:].long() - 1
    whole = latent_prefill_attention(batch.q, pool, LAYER, tables, starts, lens, *tail)
    decoded = latent_decode_attention(batch.q[last], pool, LAYER, tables, lens, *tail)
    one, count = slice(0, 1), model.prompts[0][1]
    parts = []
    for first, end in ((0, count // 3), (count // 3, count)):
        cut, seen = (
            torch.tensor(numbers, dtype=torch.int32, device=device)
            for numbers in ([0, end - first], [model.prompts[0][0] - count + end])
        )
        chunk = batch.q[first:end]
        parts.append(latent_prefill_attention(chunk, pool, LAYER, tables[one], cut, seen, *tail))
    bits = _equal(key, torch.cat([decoded, *parts]), torch.cat([whole[last], whole[:count]]))
    call = (batch.q, pool, LAYER, tables, starts, lens, batch.scale)
    twin = reference.paged_prefill_attention(*call)[..., :latent]
    return bits if not bits.passed else _close(key, whole, twin)


def _copy(model: Model, layout: Layout) -> Check:
    """Check that copies keep every bit, NaN included, and that unnamed blocks stay."""
    bits = torch.randint(-(2**31), 2**31 - 1, (9, model.block_values // 2), dtype=torch.int32)
    pool = bits.to(layout.device).view(layout.dtype)
    ids = torch.tensor([5, 0, 8, 3], dtype=torch.int32, device=layout.device)
    places = torch.tensor([2, 6, 1, 4], dtype=torch.int32, device=layout.device)
    target = pool.flip(0).contiguous()
    expected = target.clone()
    move_blocks(pool, ids, target, places)
    expected[places.long()] = pool[ids.long()]
    return _equal(f"gather and scatter of blocks, {model.name}", target, expected)


def _sample_rows() -> list[SampleRow]:
    kinds = ((0.0, 0, 1.0), (0.8, 50, 0.9), (1.0, 0, 0.95), (0.7, 20, 1.0))
    return [
        SampleRow(Sampling(seed, 8, temperature=heat, top_k=k, top_p=p), 0, 100 + seed, 0)
        for seed, (heat, k, p) in enumerate(kinds)
    ]


def _sampling(model: Model, layout: Layout) -> Check:
    """Compare greedy and drawn rows alone with the same rows in a batch."""
    sampler, rows = Sampler((), sample_tokens), _sample_rows()
    logits = 3 * torch.randn(len(rows), model.vocab_size, device=layout.device)
    together = sampler.sample_rows(logits.clone(), rows)
    alone = [sampler.sample_rows(logits[i : i + 1].clone(), [row])[0] for i, row in enumerate(rows)]
    key = f"sampling: tokens in any batch, {model.name}"
    same = together == alone and together[0] == int(logits[0].argmax())
    return Check(key, same, f"{together} together, {alone} alone")


def _sampling_on_host(model: Model, layout: Layout) -> Check:
    """Compare what the device's kernels draw with what torch samples on a CPU."""
    rows = _sample_rows()
    logits = 3 * torch.randn(len(rows), model.vocab_size, device=layout.device)
    ours = Sampler((), sample_tokens).sample_rows(logits.clone(), rows)
    theirs = Sampler().sample_rows(logits.cpu(), rows)
    return Check(f"sampling: device = CPU, {model.name}", ours == theirs, f"{ours} and {theirs}")


def _close(key: str, ours: Tensor, twin: Tensor) -> Check:
    """Check that values agree within the rounding of bf16; NaN is never close."""
    difference = (ours.float() - twin.float()).abs()
    allowed = ABSOLUTE + RELATIVE * twin.float().abs()
    passed = bool((difference <= allowed).all())
    worst = float((difference / allowed).max())
    detail = f"max error {float(difference.max()):.2e}, {100 * worst:.0f} % of what is allowed"
    return Check(key, passed, detail)


def _equal(key: str, ours: Tensor, twin: Tensor) -> Check:
    words = torch.int16 if ours.element_size() == 2 else torch.int32
    different = int((ours.contiguous().view(words) != twin.contiguous().view(words)).sum())
    detail = f"{ours.numel()} values bit-equal" if not different else f"{different} values differ"
    return Check(key, different == 0, detail)


OTHERS = {
    "decode attention, long context": _decode_long,
    "ordered decode attention: bits in any batch": _decode_alone,
    "ordered attention: decode = prefill": _decode_as_prefill,
    "prefill attention: bits in any chunking": _prefill_chunks,
    "QK norm + rotation + store": _rope,
    "add + norm": _norm,
    "SiLU · mul": _silu,
    "products of experts": _experts,
    "latent attention": _latent,
    "gather and scatter of blocks": _copy,
    "sampling: tokens in any batch": _sampling,
    "sampling: device = CPU": _sampling_on_host,
}
