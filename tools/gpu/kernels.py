"""Measure the speed of each Triton kernel on this GPU, at the shapes of Qwen3-8B.

This is a section of the GPU benchmark; sizes and keys come from `cases`, and `rows` adds
floors to the events. Pools have several layers, calls go from one layer to the next, and staging
buffers rotate: each call reads cold memory, as in service. Cases of 64 tokens stay warm, as there.
"""

from functools import partial

import torch
import torch.nn.functional as F

from baton.engine.compute.sampler import SampleRow, SamplingTensors
from baton.kernels.decode_attention import paged_decode_attention
from baton.kernels.device_sampling import sample_tokens
from baton.kernels.pool_writes import move_blocks, rope_and_store
from baton.kernels.prefill_attention import paged_prefill_attention
from baton.kernels.rows import add_rms_norm, silu_mul
from baton.protocol.sampling import Sampling
from tools.gpu.batches import Batch, Heads, Layout, paged_batch, rotation_table
from tools.gpu.cases import (
    GATHER,
    KERNELS,
    SCATTER,
    CopyCase,
    DecodeCase,
    KernelCases,
    PrefillCase,
    SamplingCase,
    TokensCase,
)
from tools.gpu.floors import Work, causal_flops
from tools.gpu.rows import Measured
from tools.gpu.section import Desk
from tools.gpu.timing import Call

VALUE_BYTES = 2
WARM_CALLS = 20
EPS = 1e-6


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
        for copy in cases.copies:
            for way in (GATHER, SCATTER):
                blank = Measured(f"{way} {copy.key}", copy.unit)
                measure(blank, partial(self.copy, copy, way))
        for fused in cases.fused:
            measure(Measured(fused.key, fused.unit), partial(self.fused, fused))
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

    def copy(self, case: CopyCase, way: str) -> Measured:
        """Copy blocks of all layers of a model, scattered over a pool."""
        values, device = self.cases.block_values, self.desk.device
        payload = case.num_blocks * values * VALUE_BYTES
        num_calls, num_buffers = case.rotation(values * VALUE_BYTES)
        num_blocks = num_calls * case.num_blocks
        pool = torch.empty(num_blocks, values, dtype=self._dtype, device=device).normal_()
        staging = [
            torch.empty(case.num_blocks, values, dtype=self._dtype, device=device).normal_()
            for _ in range(num_buffers)
        ]
        order = torch.randperm(num_blocks).to(device, torch.int32).view(num_calls, -1)
        first = torch.arange(case.num_blocks, device=device, dtype=torch.int32)
        calls: list[Call] = []
        for number, ids in enumerate(order):
            staged = staging[number % len(staging)]
            if way == GATHER:
                calls.append(partial(move_blocks, pool, ids, staged, first))
            else:
                calls.append(partial(move_blocks, staged, first, pool, ids))
        timing = self.desk.watch.kernels(calls)
        work = Work(2 * payload)
        return Measured(f"{way} {case.key}", case.unit, work, timing, payload_bytes=payload)

    def fused(self, case: TokensCase) -> Measured:
        make = {"norm": self._norm_call, "rope": self._rope_call, "silu": self._silu_call}
        call, num_bytes = make[case.kernel](case.num_tokens)
        if case.unit == "µs":
            calls = [call] * WARM_CALLS
        else:
            others = [make[case.kernel](case.num_tokens)[0] for _ in range(3)]
            calls = [call, *others]
        return Measured(case.key, case.unit, Work(num_bytes), self.desk.watch.kernels(calls))

    def _norm_call(self, tokens: int) -> tuple[Call, int]:
        hidden, weight = self.cases.hidden_size, self._random(self.cases.hidden_size)
        x, residual = self._random(tokens, hidden), self._random(tokens, hidden)
        num_bytes = 4 * tokens * hidden * VALUE_BYTES
        return lambda: add_rms_norm(x, residual, weight, EPS), num_bytes

    def _rope_call(self, tokens: int) -> tuple[Call, int]:
        heads = self.heads
        counts = [heads.num_heads, heads.num_kv_heads, heads.num_kv_heads]
        packed = self._random(tokens, sum(counts), heads.head_dim)
        q, k, v = torch.split(packed, counts, dim=1)
        layers, size = 2, 16
        pool = self._random(-(-tokens // size), heads.num_kv_heads, layers, 2, size, heads.head_dim)
        table = rotation_table(tokens, heads.head_dim, self.desk.device)
        positions = torch.arange(tokens, device=self.desk.device)
        norms = self._random(2, heads.head_dim)
        num_bytes = 2 * packed.numel() * VALUE_BYTES + table.numel() * table.element_size()
        return (
            lambda: rope_and_store(
                q, k, v, positions, table, pool, 1, positions, norms[0], norms[1], EPS
            ),
            num_bytes,
        )

    def _silu_call(self, tokens: int) -> tuple[Call, int]:
        gate_up = self._random(tokens, 2 * self.cases.intermediate_size)
        num_bytes = 3 * tokens * self.cases.intermediate_size * VALUE_BYTES
        return lambda: silu_mul(gate_up), num_bytes

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
                sample_tokens, case.spread * torch.randn(shape, device=self.desk.device),
                samples.ints, samples.reals, samples.held_back,
            )
            for _ in range(2)
        ]  # fmt: skip
        timing = self.desk.watch.kernels(calls)
        return Measured(case.key, case.unit, Work(4 * shape[0] * shape[1]), timing)

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self.desk.device, dtype=self._dtype)

    @property
    def _dtype(self) -> torch.dtype:
        return torch.bfloat16
