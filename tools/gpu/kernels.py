"""Measure the speed of attention and of the sampler on this GPU, at the shapes of Qwen3-8B.

This is a section of the GPU benchmark; sizes and keys come from `cases`, and `rows` adds
floors to the events. Pools have several layers and calls go from one to the next: each reads cold
memory, as in service. What else a step launches is in the steps of the engine.
"""

from functools import partial

import torch
import torch.nn.functional as F

from baton.engine.compute.sampler import SampleRow, SamplingTensors
from baton.kernels.decode_attention import paged_decode_attention
from baton.kernels.device_sampling import sample_tokens
from baton.kernels.prefill_attention import paged_prefill_attention
from baton.protocol.sampling import Sampling
from tools.gpu.batches import Batch, Heads, Layout, paged_batch
from tools.gpu.cases import KERNELS, DecodeCase, KernelCases, PrefillCase, SamplingCase
from tools.gpu.floors import Work, causal_flops
from tools.gpu.rows import Measured
from tools.gpu.section import Desk
from tools.gpu.timing import Call

VALUE_BYTES = 2


def run(desk: Desk, cases: KernelCases = KERNELS) -> None:
    """Run the section."""
    torch.manual_seed(0)
    Kernels(desk, cases).run()


class Kernels:
    """One pass over all cases."""

    def __init__(self, desk: Desk, cases: KernelCases) -> None:
        self.desk = desk
        self.cases = cases
        self.heads = Heads(cases.num_heads, cases.num_kv_heads, cases.head_dim)

    def run(self) -> None:
        """Measure the kernels that matter most first: a section may be cut short."""
        measure, cases = self.desk.measure, self.cases
        for decode in cases.decode:
            measure(Measured(decode.key, decode.unit), partial(self.decode, decode))
        for prefill in cases.prefill:
            measure(Measured(prefill.key, prefill.unit), partial(self.prefill, prefill), 10.0)
        for sampling in cases.sampling:
            measure(Measured(sampling.key, sampling.unit), partial(self.sample, sampling))

    def decode(self, case: DecodeCase) -> Measured:
        token_bytes = 2 * self.heads.num_kv_heads * self.heads.head_dim * VALUE_BYTES
        total = sum(case.contexts)
        needs = total * token_bytes * case.num_layers
        if needs > 0.8 * self.desk.watch.free_bytes():
            return Measured(case.key, case.unit, note=f"needs {needs >> 30} GiB of free memory")
        layout = Layout(self.desk.device, self._dtype, case.block_size, case.num_layers)
        batch = paged_batch(self.heads, case.contexts, (1,) * len(case.contexts), layout)
        timing = self.desk.watch.kernels(
            [self._decode_call(batch, layer) for layer in range(case.num_layers)]
        )
        flops = 4 * total * self.heads.num_heads * self.heads.head_dim
        return Measured(case.key, case.unit, Work(total * token_bytes, flops), timing)

    @staticmethod
    def _decode_call(batch: Batch, layer: int) -> Call:
        return lambda: paged_decode_attention(
            batch.q, batch.pool, layer, batch.block_tables, batch.context_lens, batch.scale
        )

    def prefill(self, case: PrefillCase) -> Measured:
        """Measure prefill beside torch's own attention, which reads contiguous keys."""
        heads, tokens = self.heads, case.num_tokens
        work = Work(
            2 * tokens * (heads.num_heads + heads.num_kv_heads) * heads.head_dim * VALUE_BYTES,
            causal_flops(tokens, heads.num_heads * heads.head_dim),
        )
        layout = Layout(self.desk.device, self._dtype)
        batch = paged_batch(heads, (tokens,), (tokens,), layout)
        ours = self.desk.watch.kernels(
            [self._prefill_call(batch, layer) for layer in range(layout.num_layers)]
        )
        size = case.key.removeprefix("prefill attention ")
        measured = Measured(case.key, case.unit, work, ours)
        self.desk.measure(
            Measured(f"torch SDPA {size}", case.unit, work), partial(self._sdpa, measured)
        )
        return measured

    def _sdpa(self, ours: Measured) -> Measured:
        """Measure the same work in torch."""
        size = ours.key.removeprefix("prefill attention ")
        tokens = next(case.num_tokens for case in self.cases.prefill if case.key == ours.key)
        theirs = self.desk.watch.kernels([self._sdpa_call(tokens) for _ in range(2)])
        return Measured(f"torch SDPA {size}", ours.unit, ours.work, theirs)

    @staticmethod
    def _prefill_call(batch: Batch, layer: int) -> Call:
        return lambda: paged_prefill_attention(
            batch.q, batch.pool, layer, batch.block_tables, batch.query_starts,
            batch.context_lens, batch.scale,
        )  # fmt: skip

    def _sdpa_call(self, tokens: int) -> Call:
        heads = self.heads
        q, k, v = (
            torch.randn(1, count, tokens, heads.head_dim, device=self.desk.device,
                        dtype=self._dtype)
            for count in (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)
        )  # fmt: skip
        return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def sample(self, case: SamplingCase) -> Measured:
        """Measure the device's sampler as a step has it: the ids stay on the device."""
        rows = [
            SampleRow(
                Sampling(seed, 8, temperature=case.temperature, top_k=case.top_k,
                         top_p=case.top_p),
                0, 100, 0,
            )
            for seed in range(case.batch)
        ]  # fmt: skip
        shape = (case.batch, self.cases.vocab_size)
        samples = SamplingTensors.of(rows, (), self.desk.device)
        calls = [
            partial(
                sample_tokens,
                case.spread * torch.randn(shape, dtype=self._dtype, device=self.desk.device),
                samples.ints, samples.reals, samples.held_back,
            )
            for _ in range(2)
        ]  # fmt: skip
        timing = self.desk.watch.kernels(calls)
        return Measured(case.key, case.unit, Work(VALUE_BYTES * shape[0] * shape[1]), timing)

    @property
    def _dtype(self) -> torch.dtype:
        return torch.bfloat16
