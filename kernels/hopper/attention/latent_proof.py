"""What prefill of latent attention on Hopper can compute, and the proof that it does on a GPU."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from baton.kernels.hopper.attention.cases import difference, fault_in
from baton.kernels.hopper.attention.latent_prefill import (
    PLAIN_DIM,
    TURNED_DIM,
    LatentPlan,
    Prompt,
    expanded_prefill_attention,
    latent_plan,
)
from baton.kernels.hopper.attention.prefill import CAPABILITY, DTYPES
from baton.kernels.proofs import ModelShapes

LAYERS = 2
LAYER = 1
# Contexts and new tokens of prompts: whole ones, chunks at any place, and single tokens.
BATCHES = (
    ((1, 64, 127, 128, 129, 300, 517), (1, 64, 127, 128, 129, 300, 517)),
    ((700, 40, 1, 2049, 1333), (128, 1, 1, 300, 333)),
)
PROMPT = 1300
CHUNKS = (0, 3, 130, 515, 1000, PROMPT)  # where they begin and end
SPLIT = 512  # keys that are expanded at once; in service they are many more
FEW_PROGRAMS = 3


@dataclass(frozen=True, slots=True)
class LatentCase:
    """The last `queries[i]` of `contexts[i]` positions of each prompt are new."""

    contexts: tuple[int, ...]
    queries: tuple[int, ...]
    q: Tensor  # [num_tokens, num_heads, PLAIN_DIM + TURNED_DIM]
    pool: Tensor  # [num_blocks, 1, LAYERS, 1, block_size, latent + TURNED_DIM]
    block_tables: Tensor
    expansion: Tensor  # [num_heads * 2 * PLAIN_DIM, latent]
    scale: float

    def plan(self, split: int = 0, programs: int = 0) -> LatentPlan:
        prompts = []
        row = 0
        for sequence, (context, count) in enumerate(
            zip(self.contexts, self.queries, strict=True)
        ):
            prompts.append(Prompt(sequence, row, context - count, count))
            row += count
        return latent_plan(
            prompts,
            self.pool,
            self.block_tables,
            self.q.shape[1],
            split=split,
            programs=programs,
        )

    def chunk(self, first: int, end: int) -> "LatentCase":
        """Return the case of some tokens of a prompt, which is the only sequence."""
        return replace(
            self, contexts=(end,), queries=(end - first,), q=self.q[first:end]
        )

    def attend(self, split: int = 0, programs: int = 0) -> Tensor:
        with torch.inference_mode():
            return expanded_prefill_attention(
                self.q[..., :PLAIN_DIM],
                self.q[..., PLAIN_DIM:],
                self.pool,
                LAYER,
                self.plan(split, programs),
                self.expanded,
                self.scale,
            )

    def expanded(self, rows: Tensor) -> Tensor:
        """Return keys and values; a row has the same bits among any rows, as the plan cuts them."""
        return torch.cat(
            [part @ self.expansion.T for part in rows.contiguous().split(128)]
        )

    def expected(self, sequence: int) -> Tensor:
        """Return what plain torch computes for a prompt, in fp32."""
        context = self.contexts[sequence]
        count = self.queries[sequence]
        first = sum(self.queries[:sequence])
        positions = torch.arange(context, device=self.q.device)
        size = self.pool.shape[4]
        blocks = self.block_tables[sequence, positions // size].long()
        rows = self.pool[blocks, 0, LAYER, 0, positions % size]
        kv = rows[:, :-TURNED_DIM] @ self.expansion.T
        kv = kv.view(context, -1, 2, PLAIN_DIM).float()
        turned = rows[:, None, -TURNED_DIM:].float().expand(-1, kv.shape[1], -1)
        keys = torch.cat((kv[:, :, 0], turned), dim=2)
        q = self.q[first : first + count].float()
        s = torch.einsum("qhd,khd->hqk", q, keys) * self.scale
        s = s.masked_fill(positions > positions[-count:, None], -torch.inf)
        return torch.einsum("hqk,khd->qhd", s.softmax(2), kv[:, :, 1])


def latent_case(
    shapes: ModelShapes, contexts: Sequence[int], queries: Sequence[int], device: str
) -> LatentCase:
    """Return prompts over scattered blocks; equal for equal arguments.

    Slots that no prompt owns hold NaN, as does block 0, which unused entries of tables name.
    """
    assert shapes.latent is not None, "`missing_for` has refused the model"
    luck = torch.Generator(device).manual_seed(len(contexts))
    size = shapes.block_size
    dtype = getattr(torch, shapes.dtype)
    latent = shapes.latent.kv_lora_rank
    needs = [-(-length // size) for length in contexts]
    pool = torch.full(
        (sum(needs) + 1, 1, LAYERS, 1, size, latent + TURNED_DIM),
        float("nan"),
        dtype=dtype,
        device=device,
    )
    order = 1 + torch.randperm(sum(needs), generator=luck, device=device)
    tables = torch.zeros(len(needs), max(needs) + 2, dtype=torch.int32, device=device)
    for number, (blocks, length) in enumerate(
        zip(order.split(needs), contexts, strict=True)
    ):
        tables[number, : len(blocks)] = blocks
        positions = torch.arange(length, device=device)
        rows = torch.randn(
            length, LAYERS, latent + TURNED_DIM, generator=luck, device=device
        )
        pool[blocks[positions // size], 0, :, 0, positions % size] = rows.to(dtype)
    dim = PLAIN_DIM + TURNED_DIM
    q = torch.randn(
        sum(queries), shapes.num_heads, dim, generator=luck, device=device
    ).to(dtype)
    expansion = torch.randn(
        2 * shapes.num_heads * PLAIN_DIM, latent, generator=luck, device=device
    )
    return LatentCase(
        contexts=tuple(contexts),
        queries=tuple(queries),
        q=q,
        pool=pool,
        block_tables=tables,
        expansion=(expansion / latent**0.5).to(dtype),
        scale=shapes.scale or dim**-0.5,
    )


def missing_for(shapes: ModelShapes, capability: tuple[int, int]) -> str:
    """Return why the kernels cannot compute such a model; empty if they can."""
    if capability != CAPABILITY:
        return f"compute capability {capability}"
    if shapes.latent is None:
        return "no latent attention, or one with an index"
    if shapes.dtype not in {str(one).removeprefix("torch.") for one in DTYPES}:
        return f"numbers of {shapes.dtype}"
    if shapes.pool_dtype != shapes.dtype:
        return f"a pool of {shapes.pool_dtype}"
    if shapes.latent[1:] != (PLAIN_DIM, TURNED_DIM, PLAIN_DIM):
        return f"heads of {', '.join(map(str, shapes.latent[1:]))}"
    return ""


def prove(shapes: ModelShapes, device: str) -> str:
    """Return the first fault that running the kernels shows; empty if there is none."""
    for contexts, queries in BATCHES:
        case = latent_case(shapes, contexts, queries, device)
        if fault := _fault_of(case):
            return f"contexts {contexts}, queries {queries}: {fault}"
    prompt = latent_case(shapes, (PROMPT,), (PROMPT,), device)
    whole = prompt.attend(SPLIT)
    for first, end in pairwise(CHUNKS):
        chunk = prompt.chunk(first, end).attend(SPLIT)
        if fault := difference(chunk, whole[first:end]):
            return f"the chunk from {first} to {end} has other bits in {fault}"
    return ""


def _fault_of(case: LatentCase) -> str:
    wanted = torch.cat([case.expected(number) for number in range(len(case.contexts))])
    for split in (0, SPLIT):
        out = case.attend(split)
        if fault := fault_in(out, wanted):
            return f"{split or 'many'} keys at once: {fault}"
        other = case.attend(split, FEW_PROGRAMS)
        if fault := difference(other, out):
            return f"other bits with {FEW_PROGRAMS} programs in {fault}"
    first = 0
    for number, count in enumerate(case.queries):
        own = slice(first, first + count)
        table = slice(number, number + 1)
        alone = replace(
            case,
            contexts=case.contexts[table],
            queries=case.queries[table],
            q=case.q[own],
            block_tables=case.block_tables[table],
        )
        if fault := difference(alone.attend(SPLIT), out[own]):
            return f"other bits of prompt {number} alone in {fault}"
        first += count
    return ""
