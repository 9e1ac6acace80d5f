"""Measure the speed of attention and of the sampler on this GPU, at the shapes of Qwen3-8B.

This is a section of the GPU benchmark; sizes and keys come from `cases`, and `rows` adds
floors to the events. Attention is measured in each form that the GPU takes. Pools have several
layers and calls go from one to the next: each reads cold memory, as in service. What else a step
launches is in the steps of the engine.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor

from baton.kernels.cuda.decode_attention import paged_decode_attention
from baton.kernels.cuda.fixed_product import (
    fixed_product,
    has_warpgroup_products,
    packed,
)
from baton.kernels.cuda.latent_attention import (
    latent_decode_attention,
    latent_prefill_attention,
)
from baton.kernels.cuda.prefill_attention import paged_prefill_attention
from baton.kernels.cuda.sampling import sample_tokens
from baton.kernels.hopper.attention import latent_prefill
from baton.kernels.hopper.attention import prefill as hopper
from baton.kernels.hopper.attention.decode import one_decode_attention, plan_decode
from baton.kernels.hopper.narrow.narrow_proof import weights_of
from baton.kernels.hopper.narrow.product import streamed
from baton.kernels.hopper.products.product import load_product
from baton.kernels.reference import NarrowWeight, in_fp8
from baton.model.layers.linear import Product
from baton.model.loading.layer_weights import NarrowLinear, PackNarrow
from baton.model.sampling.sampler import SampleRow, SamplingTensors
from baton.protocol.sampling import Sampling
from tools.gpu.cases import (
    KERNELS,
    DecodeCase,
    Heads,
    KernelCases,
    LatentCase,
    PrefillCase,
    ProductCase,
    SamplingCase,
)
from tools.gpu.floors import NARROW_BYTES, NARROW_GROUP, Work, causal_flops
from tools.gpu.kernel_cases import (
    AttentionShape,
    Batch,
    attention_batch,
    rows_in_tiles,
)
from tools.gpu.rows import Measured
from tools.gpu.section import Desk
from tools.gpu.timing import Call

VALUE_BYTES = 2
# Half of DeepSeek's keys of 192 and values of 128, whose operations count: those on latent rows are
# 3.4 times as many.
EXPANDED_DIM = 160
ORDERED = ", ordered"
ON_HOPPER = ", on Hopper"
IN_ONE_ORDER = ", on Hopper in one order"
AS_A_CHUNK = ", as a chunk of a prompt"
# What a key's end says of a kernel, and the call of it that one layer makes.
Forms = Mapping[str, Callable[[Batch, int], Call]]


def run(desk: Desk, cases: KernelCases = KERNELS) -> None:
    """Run the section."""
    torch.manual_seed(0)
    Kernels(desk, cases).run()


class Kernels:
    """One pass over all cases."""

    def __init__(self, desk: Desk, cases: KernelCases) -> None:
        self.desk = desk
        self.cases = cases

    def run(self) -> None:
        """Measure the kernels that matter most first: a section may be cut short."""
        measure = self.desk.measure
        cases = self.cases
        for decode in cases.decode:
            for form in self.forms(DECODES):
                if form == IN_ONE_ORDER and decode.block_size not in hopper.BLOCK_SIZES:
                    continue
                measure(
                    Measured(decode.key + form, decode.unit),
                    partial(self.decode, decode, form, DECODES),
                )
            for form in self.forms(PREFILLS) if decode.rows > 1 else ():
                measure(
                    Measured(decode.key + AS_A_CHUNK + form, decode.unit),
                    partial(self.decode, decode, form, PREFILLS, AS_A_CHUNK),
                )
        for prefill in cases.prefill:
            for form in self.forms(PREFILLS):
                measure(
                    Measured(prefill.key + form, prefill.unit),
                    partial(self.prefill, prefill, form),
                    10.0,
                )
            blank = Measured(
                prefill.key.replace("prefill attention", "torch SDPA"), prefill.unit
            )
            if prefill.window is None and not prefill.is_fp8:
                measure(blank, partial(self.sdpa, blank, prefill))
        for latent in cases.latent:
            for form in self.forms(LATENTS):
                if form == ON_HOPPER and set(latent.queries) == {1}:
                    continue  # those of a response are absorbed
                key = latent.key + form
                work = partial(self.latent, latent, form)
                measure(Measured(key, latent.unit), work)
        if cases.products:
            ours = ordered_product(self.desk.device)
            for product in cases.products:
                for name, multiply in (("ordered", ours), ("cuBLAS", F.linear)):
                    blank = Measured(product.key(name), product.unit)
                    measure(blank, partial(self.products, product, blank, multiply))
                for narrow, num_bytes in NARROW_BYTES.items():
                    blank = Measured(product.key(narrow), product.unit)
                    work = partial(self.narrow_products, product, blank, num_bytes)
                    measure(blank, partial(work, narrow))
        for sampling in cases.sampling:
            measure(
                Measured(sampling.key, sampling.unit), partial(self.sample, sampling)
            )

    def forms(self, forms: Iterable[str]) -> list[str]:
        """Return the kinds of kernels that this GPU takes."""
        if self.desk.device.type != "cuda":
            return [""]
        capability = torch.cuda.get_device_capability(self.desk.device)
        is_hopper = capability == hopper.CAPABILITY
        return [form for form in forms if is_hopper or "Hopper" not in form]

    def decode(
        self, case: DecodeCase, form: str, forms: Forms, name: str = ""
    ) -> Measured:
        key = case.key + name + form
        num_heads, kv_heads, head_dim = self._heads(case)
        row_bytes = head_dim + 1 if case.is_fp8 else head_dim * VALUE_BYTES
        token_bytes = 2 * kv_heads * row_bytes
        needs = sum(case.contexts) * token_bytes * case.num_layers
        if needs > 0.8 * self.desk.watch.free_bytes():
            return Measured(
                key, case.unit, note=f"needs {needs >> 30} GiB of free memory"
            )
        queries = (case.rows,) * len(case.contexts)
        batch = self._batch(
            case, case.contexts, queries, case.block_size, case.num_layers
        )
        total = case.num_seen
        timing = self.desk.watch.kernels(
            [forms[form](batch, layer) for layer in range(case.num_layers)]
        )
        flops = 4 * case.rows * total * num_heads * head_dim
        return Measured(key, case.unit, Work(total * token_bytes, flops), timing)

    def _heads(self, case: DecodeCase | PrefillCase) -> Heads:
        return case.heads or self.cases.heads

    def _batch(
        self,
        case: DecodeCase | PrefillCase,
        contexts: tuple[int, ...],
        queries: tuple[int, ...],
        block_size: int,
        layers: int,
    ) -> Batch:
        shape = AttentionShape(
            contexts,
            queries,
            *self._heads(case),
            block_size,
            torch.bfloat16,
            case.window,
            num_layers=layers,
        )
        batch = attention_batch(shape, self.desk.device.type)
        if not case.is_fp8:
            return batch
        return replace(batch, pool=in_fp8(batch.pool))

    def prefill(self, case: PrefillCase, form: str) -> Measured:
        tokens = (case.num_tokens,)
        batch = self._batch(case, tokens, tokens, 16, 2)
        ours = self.desk.watch.kernels(
            [PREFILLS[form](batch, layer) for layer in range(2)]
        )
        return Measured(case.key + form, case.unit, self._prefill_work(case), ours)

    def _prefill_work(self, case: PrefillCase) -> Work:
        (num_heads, kv_heads, head_dim), tokens = self._heads(case), case.num_tokens
        return Work(
            2 * tokens * (num_heads + kv_heads) * head_dim * VALUE_BYTES,
            causal_flops(tokens, num_heads * head_dim, case.window),
        )

    def latent(self, case: LatentCase, form: str) -> Measured:
        """Measure attention to latent rows, or to what they are expanded to within the call."""
        num_heads, latent, rotated = self.cases.latent_sizes
        shape = AttentionShape(
            case.contexts,
            case.queries,
            num_heads,
            1,
            latent + rotated,
            dtype=torch.bfloat16,
            planes=1,
            num_layers=case.num_layers,
        )
        batch = attention_batch(shape, self.desk.device.type)
        is_decode = set(case.queries) == {1}
        call = _latent_decode_call if is_decode else LATENTS[form]
        timing = self.desk.watch.kernels(
            [call(batch, layer, rotated) for layer in range(case.num_layers)]
        )
        total = sum(case.contexts)
        flops = 2 * total * num_heads * (2 * latent + rotated)
        if not is_decode:
            width = num_heads * EXPANDED_DIM
            flops = sum(causal_flops(count, width) for count in case.queries)
        work = Work(VALUE_BYTES * total * (latent + rotated), flops)
        return Measured(case.key + form, case.unit, work, timing)

    def sdpa(self, blank: Measured, case: PrefillCase) -> Measured:
        """Measure the same work in torch's own attention, which reads contiguous keys."""
        theirs = self.desk.watch.kernels([self._sdpa_call(case) for _ in range(2)])
        work = self._prefill_work(case)
        return msgspec.structs.replace(blank, work=work, timing=theirs)

    def _sdpa_call(self, case: PrefillCase) -> Call:
        num_heads, kv_heads, head_dim = self._heads(case)
        q, k, v = (
            torch.randn(
                1,
                count,
                case.num_tokens,
                head_dim,
                device=self.desk.device,
                dtype=torch.bfloat16,
            )
            for count in (num_heads, kv_heads, kv_heads)
        )
        return lambda: F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        )

    def products(
        self, case: ProductCase, blank: Measured, multiply: Product
    ) -> Measured:
        """Measure a layer's products, whose weights are more than the L2 cache holds."""
        pairs = [
            (self._normal(case.rows, inner), self._normal(columns, inner))
            for columns, inner in case.linears
        ]
        values = sum(weight.numel() for _, weight in pairs)
        moved = values + sum(case.rows * (c + inner) for c, inner in case.linears)
        work = Work(VALUE_BYTES * moved, 2 * case.rows * values)
        timing = self.desk.watch.kernels(
            [lambda: [multiply(x, weight) for x, weight in pairs]]
        )
        return msgspec.structs.replace(blank, work=work, timing=timing)

    def narrow_products(
        self, case: ProductCase, blank: Measured, num_bytes: float, narrow: str
    ) -> Measured:
        """Measure a layer whose weights keep codes of `num_bytes` each."""
        device = self.desk.device
        pack = narrow_packing(device)
        layers = []
        for columns, inner in case.linears:
            weight = next(weights_of(narrow, NARROW_GROUP, columns, inner, device))
            made = pack(weight, device)
            assert made is not None
            layers.append((self._normal(case.rows, inner), *made))
        values = sum(columns * inner for columns, inner in case.linears)
        rows_moved = sum(case.rows * (c + inner) for c, inner in case.linears)
        moved = num_bytes * values + VALUE_BYTES * rows_moved
        timing = self.desk.watch.kernels(
            [lambda: [multiply(x, codes) for x, codes, multiply in layers]]
        )
        work = Work(moved, 2 * case.rows * values)
        return msgspec.structs.replace(blank, work=work, timing=timing)

    def _normal(self, *size: int) -> Tensor:
        return torch.randn(size, dtype=torch.bfloat16, device=self.desk.device)

    def sample(self, case: SamplingCase) -> Measured:
        """Measure the device's sampler as a step has it: the ids stay on the device."""
        rows = [
            SampleRow(
                Sampling(
                    seed,
                    8,
                    temperature=case.temperature,
                    top_k=case.top_k,
                    top_p=case.top_p,
                ),
                0,
                100,
                0,
            )
            for seed in range(case.batch)
        ]
        shape = (case.batch, self.cases.vocab_size)
        samples = SamplingTensors.of(rows, (), self.desk.device)
        calls = [
            partial(
                sample_tokens,
                case.spread
                * torch.randn(shape, dtype=torch.bfloat16, device=self.desk.device),
                samples.ints,
                samples.reals,
                samples.held_back,
            )
            for _ in range(2)
        ]
        timing = self.desk.watch.kernels(calls)
        return Measured(
            case.key, case.unit, Work(VALUE_BYTES * shape[0] * shape[1]), timing
        )


def ordered_product(device: torch.device) -> Product:
    """Return the product of nodes whose sums have one order."""
    return load_product(device) if has_warpgroup_products(device) else fixed_product


def _decode_call(batch: Batch, layer: int, *, ordered: bool) -> Call:
    rows = rows_in_tiles(batch, len(batch.q))
    return lambda: paged_decode_attention(
        batch.q,
        batch.pool,
        layer,
        rows.blocks,
        rows.context_lens,
        batch.scale,
        *batch.how,
        rows.starts,
        ordered=ordered,
    )


def _latent_decode_call(batch: Batch, layer: int, rotated: int) -> Call:
    return lambda: latent_decode_attention(
        batch.q,
        batch.pool,
        layer,
        batch.block_tables,
        batch.context_lens,
        batch.scale,
        rotated,
    )


def _latent_prefill_call(batch: Batch, layer: int, rotated: int) -> Call:
    return lambda: latent_prefill_attention(
        batch.q,
        batch.pool,
        layer,
        batch.block_tables,
        batch.query_starts,
        batch.context_lens,
        batch.scale,
        rotated,
    )


def _expanded_prefill_call(batch: Batch, layer: int, rotated: int) -> Call:
    """Return the call of a layer for whole prompts; a step makes one plan for all of them."""
    num_heads = batch.q.shape[1]
    starts = batch.query_starts.tolist()
    prompts = [
        latent_prefill.Prompt(number, first, 0, end - first)
        for number, (first, end) in enumerate(pairwise(starts))
    ]
    plan = latent_prefill.latent_plan(
        prompts, batch.pool, batch.block_tables, num_heads
    )
    latent = batch.pool.shape[5] - rotated
    width = 2 * num_heads * latent_prefill.PLAIN_DIM
    expansion = torch.randn(
        width, latent, device=batch.q.device, dtype=batch.q.dtype
    ).div_(latent**0.5)
    return lambda: latent_prefill.expanded_prefill_attention(
        batch.q[..., : latent_prefill.PLAIN_DIM],
        batch.q[..., -rotated:],
        batch.pool,
        layer,
        plan,
        lambda rows: F.linear(rows, expansion),
        batch.scale,
    )


def _one_decode_call(batch: Batch, layer: int) -> Call:
    """Return the call of a layer; a step makes one plan for all of them."""
    rows = rows_in_tiles(batch, len(batch.q))
    plan = plan_decode(
        batch.q, batch.pool, rows.context_lens, batch.how[0], starts=rows.starts
    )
    return lambda: one_decode_attention(
        batch.q,
        batch.pool,
        layer,
        rows.blocks,
        rows.context_lens,
        plan,
        batch.scale,
        *batch.how,
        rows.starts,
    )


def _prefill_call(batch: Batch, layer: int, *, ordered: bool) -> Call:
    return lambda: paged_prefill_attention(
        batch.q,
        batch.pool,
        layer,
        batch.block_tables,
        batch.query_starts,
        batch.context_lens,
        batch.scale,
        *batch.how,
        ordered=ordered,
    )


def _hopper_prefill_call(batch: Batch, layer: int, *, cuts: bool) -> Call:
    """Return the call of a layer; a step makes one plan for all of them."""
    window, softcap, sinks = batch.how
    plan = hopper.prefill_plan(
        batch.q, batch.pool, batch.query_starts, batch.context_lens, window, cuts=cuts
    )
    return lambda: hopper.paged_prefill_attention(
        batch.q,
        batch.pool,
        layer,
        batch.block_tables,
        plan,
        batch.scale,
        softcap,
        sinks,
    )


LATENTS: Mapping[str, Callable[[Batch, int, int], Call]] = {
    "": _latent_prefill_call,
    ON_HOPPER: _expanded_prefill_call,
}
DECODES: Forms = {
    "": partial(_decode_call, ordered=False),
    ORDERED: partial(_decode_call, ordered=True),
    IN_ONE_ORDER: _one_decode_call,
}
PREFILLS: Forms = {
    "": partial(_prefill_call, ordered=False),
    ORDERED: partial(_prefill_call, ordered=True),
    ON_HOPPER: partial(_hopper_prefill_call, cuts=False),
    IN_ONE_ORDER: partial(_hopper_prefill_call, cuts=True),
}


def narrow_packing(device: torch.device) -> PackNarrow:
    """Return what packs narrow weights as nodes on such a GPU would."""
    if not has_warpgroup_products(device):
        return packed

    def pack(
        weight: NarrowWeight, device: torch.device
    ) -> tuple[Tensor, NarrowLinear] | None:
        return streamed(weight, device) or packed(weight, device)

    return pack
