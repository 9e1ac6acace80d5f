"""The plain-torch reference of every kernel in this room, which defines its meaning in fp32.

The engine runs the references where neither kind of kernel works. A reference states the meaning as
plainly as torch allows; the kernels are for speed. Nothing here may import Triton or numba.
"""

# ruff: noqa: PLR0913, PLR0917  (the signatures are the kernels': tensors, not records)

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.kernels.constants import (
    BIAS_MASK,
    BIAS_SHIFT,
    CHECKSUM_FACTORS,
    FP8_SPAN,
    LEAST_EXPONENT,
    MAX_COUNT,
    MOST_EXPONENT,
    SILU,
    Gate,
)


def paged_decode_attention(
    q: Tensor,  # [batch, num_heads, head_dim]
    pool: Tensor,
    layer: int,
    block_tables: Tensor,  # [batch, max_blocks]
    context_lens: Tensor,  # [batch]
    scale: float,
    window: int | None = None,  # keys that a query sees, itself included
    softcap: float | None = None,
    sinks: Tensor | None = None,  # [num_heads]
) -> Tensor:
    """Return the attention of one new token per sequence over its paged context, shaped as `q`.

    `context_lens` counts the new token, whose keys and values are already in the pool. A row of
    length 0, the padding of a captured graph, gives zeros. A score becomes `softcap * tanh(score /
    softcap)`; a sink is the score of a key that all queries of a head see, whose value is zeros.
    """
    rows = []
    for i, length in enumerate(context_lens.tolist()):
        k, v = _visible_kv(pool, layer, block_tables[i], length)
        rows.append(_causal_attention(q[i, None], k, v, scale, window, softcap, sinks))
    return torch.cat(rows)


def paged_prefill_attention(
    q: Tensor,  # [num_tokens, num_heads, head_dim]
    pool: Tensor,
    layer: int,
    block_tables: Tensor,  # [batch, max_blocks]
    query_starts: Tensor,  # [batch + 1]
    context_lens: Tensor,  # [batch]
    scale: float,
    window: int | None = None,  # keys that a query sees, itself included
    softcap: float | None = None,
    sinks: Tensor | None = None,  # [num_heads]
    # By sequence: [its tokens, its positions] bool.
    seen: Sequence[Tensor] | None = None,
) -> Tensor:
    """Return the causal attention of a ragged batch of chunks over their contexts, shaped as `q`.

    Sequence `s` owns the tokens `query_starts[s]:query_starts[s + 1]`, the last of
    `context_lens[s]` positions. Tokens past `query_starts[-1]` belong to no sequence; their results
    are undefined (zeros here). With `seen`, a query sees those of its past keys alone.
    """
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    starts = query_starts.tolist()
    for i, length in enumerate(context_lens.tolist()):
        chunk = slice(starts[i], starts[i + 1])
        k, v = _visible_kv(pool, layer, block_tables[i], length)
        own = None if seen is None else seen[i]
        out[chunk] = _causal_attention(
            q[chunk], k, v, scale, window, softcap, sinks, own
        )
    return out


def rope_and_store(
    q: Tensor,  # [num_tokens, num_heads, head_dim]
    k: Tensor,  # [num_tokens, kv_heads, head_dim]
    # [num_tokens, kv_heads, head_dim]; None: keys are the values, too.
    v: Tensor | None,
    positions: Tensor,  # [num_tokens]
    cos_sin: Tensor,  # [max_position, rotary_dim]: the cosines, then the sines
    pool: Tensor,
    layer: int,
    slot_mapping: Tensor,  # [num_tokens], -1: do not store
    q_norm_weight: Tensor | None = None,  # [head_dim]
    k_norm_weight: Tensor | None = None,  # [head_dim]
    eps: float = 1e-6,
) -> Tensor:
    """Rotate queries and keys, store keys and values in the pool, return the queries.

    With norm weights, each head is RMS-normalised before its rotation (Qwen3). The last
    `rotary_dim` numbers of a head are rotated, in pairs of `i` and `i + rotary_dim / 2` (Llama and
    Qwen checkpoints as Hugging Face lays them out). The arithmetic is fp32; results are rounded
    once.
    """
    block_size = pool.shape[4]
    kept = slot_mapping >= 0
    slots = slot_mapping[kept].long()
    blocks = slots // block_size
    offsets = slots % block_size
    rotated_k = _rotate(_head_norm(k, k_norm_weight, eps), positions, cos_sin).to(
        k.dtype
    )
    for plane, rows in enumerate((rotated_k,) if v is None else (rotated_k, v)):
        if pool.dtype == torch.uint8:
            codes, exponents = fp8_parts(pool)
            place = blocks, slice(None), layer, plane, offsets
            codes[place], exponents[place] = to_fp8(rows[kept])
        else:
            pool[blocks, :, layer, plane, offsets] = rows[kept].to(pool.dtype)
    return _rotate(_head_norm(q, q_norm_weight, eps), positions, cos_sin).to(q.dtype)


def add_rms_norm(
    x: Tensor,  # [num_tokens, hidden]
    residual: Tensor | None,  # [num_tokens, hidden]
    weight: Tensor,  # [hidden]
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Return the RMS norm of `x + residual` and the sum itself, as `(normed, new_residual)`.

    The norm uses the *rounded* sum, to which the next layer adds. Without a residual, the sum is
    `x`.
    """
    stream = x if residual is None else (x.float() + residual.float()).to(x.dtype)
    normed = _rms_norm(stream.float(), weight, eps)
    return normed.to(x.dtype), stream


def gate_mul(gate_up: Tensor, how: Gate = SILU) -> Tensor:
    """Return the gated numbers, `[tokens, features]`, of `[tokens, 2 * features]`, gates first."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    gate = gate.clamp(max=how.limit)
    up = up.clamp(-how.limit, how.limit) + how.offset
    share = torch.sigmoid(
        gate * how.slope + gate**3 * how.cubic if how.cubic else gate * how.slope
    )
    return (gate * share * up).to(gate_up.dtype)


def sigmoid_mul(x: Tensor, gates: Tensor) -> Tensor:
    """Return `x * sigmoid(gates)`, both `[num_rows, count]`."""
    return (x.float() * gates.float().sigmoid()).to(x.dtype)


def soft_cap(x: Tensor, softcap: float) -> None:
    """Replace each fp32 number of `x` by `softcap * tanh(x / softcap)`."""
    x.div_(softcap).tanh_().mul_(softcap)


def fixed_product(x: Tensor, weight: Tensor) -> Tensor:
    """Return `x @ weight.T`, `[rows, out]`, of `[rows, in]` and `[out, in]`, rounded once."""
    return (x.float() @ weight.float().T).to(x.dtype)


def grouped_product(
    x: Tensor, weight: Tensor, ends: Tensor, biases: Tensor | None = None
) -> Tensor:
    """Return `x[i] @ weight[expert of i].T + bias`; `ends` says where each expert's rows end."""
    places = torch.arange(len(x), device=x.device)
    expert_of = torch.searchsorted(ends.long(), places, right=True)
    out = x.new_zeros(len(x), weight.shape[1])
    for number, own in enumerate(weight):
        product = x.double() @ own.double().T
        product = (product if biases is None else product + biases[number].double()).to(
            x.dtype
        )
        out = torch.where((expert_of == number)[:, None], product, out)
    return out


def add_experts(rows: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of `[tokens, top_k, hidden]`, added in fp32 in order of `top_k`."""
    first, *others = (rows.float() * weights[..., None]).unbind(1)
    total = first.contiguous()
    for other in others:
        total += other
    return total.to(rows.dtype)


def sum_blocks(pool: Tensor, ids: Tensor) -> Tensor:
    """Return the checksum of each block `ids[i]` of `pool`, `[num_blocks, numel]`, as int32 bits.

    It is the sum modulo 2^32 of a mix of each word with its place, so one changed word always
    changes it.
    """
    words = pool.view(torch.int32)[ids.long()].long() & 0xFFFFFFFF
    place_factor, word_factor, mix_factor = CHECKSUM_FACTORS
    places = (
        torch.arange(words.shape[1], device=words.device) * place_factor & 0xFFFFFFFF
    )
    mixed = (words ^ places) * word_factor & 0xFFFFFFFF
    mixed = (mixed ^ mixed >> 15) * mix_factor & 0xFFFFFFFF
    return (mixed ^ mixed >> 13).sum(1).to(torch.int32)


def pool_head_dim(pool: Tensor) -> int:
    """Return the numbers of a row. In a pool of FP8, which is of bytes, a row has one byte more."""
    return pool.shape[-1] - (pool.dtype == torch.uint8)


def fp8_parts(pool: Tensor) -> tuple[Tensor, Tensor]:
    """Return views of the codes, `[..., block_size, head_dim]`, and exponents, `[..., block_size]`.

    In the tile `[block_size, head_dim + 1]` of a block, head, layer and plane, the codes of all
    rows come first and then a byte for each, so that codes stay aligned.
    """
    block_size = pool.shape[-2]
    head_dim = pool_head_dim(pool)
    codes, exponents = pool.flatten(-2).split(
        (block_size * head_dim, block_size), dim=-1
    )
    return codes.unflatten(-1, (block_size, head_dim)), exponents


def to_fp8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the e4m3 codes of rows, `[..., head_dim]`, and their exponents, `[...]`, as bytes.

    A code stands for `e4m3 * 2**(exponent - 127)`, which bf16 holds exactly. The largest number of
    a row lies from 224 to 448 in e4m3. A row with NaN, infinity or numbers from 1.75 * 2**127 on
    has the exponent 255, which makes all of it infinite or NaN.
    """
    top = rows.float().abs().amax(dim=-1).view(torch.int32)
    exponents = (((top >> 20) + 2) >> 3) - FP8_SPAN
    exponents = exponents.clamp(min=LEAST_EXPONENT).masked_fill(
        exponents > MOST_EXPONENT, 255
    )
    factors = ((254 - exponents).clamp(min=0) << 23).view(torch.float32)
    codes = (rows.float() * factors[..., None]).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8), exponents.to(torch.uint8)


def in_fp8(pool: Tensor) -> Tensor:
    """Return a pool as bytes of FP8, which have one more for each row."""
    narrow = pool.new_empty((*pool.shape[:-1], pool.shape[-1] + 1), dtype=torch.uint8)
    codes, exponents = fp8_parts(narrow)
    codes[:], exponents[:] = to_fp8(pool)
    return narrow


def from_fp8(codes: Tensor, exponents: Tensor) -> Tensor:
    """Return the fp32 numbers of codes, `[..., head_dim]`, and exponents, `[...]`."""
    factors = (exponents.to(torch.int32) << 23).view(torch.float32)
    return codes.view(torch.float8_e4m3fn).float() * factors[..., None]


def _visible_kv(
    pool: Tensor, layer: int, block_table: Tensor, context_len: int
) -> tuple[Tensor, Tensor]:
    """Return keys and values of a context in fp32, each `[kv_heads, context_len, head_dim]`.

    Slots beyond the context are cut off, not masked, so a NaN in them cannot reach a result.
    """
    _, kv_heads, _, planes, block_size, _ = pool.shape
    head_dim = pool_head_dim(pool)
    num_blocks = -(-context_len // block_size)
    # [blocks, kv_heads, planes, size, dim]
    blocks = pool[block_table[:num_blocks].long(), :, layer]
    if pool.dtype == torch.uint8:
        blocks = from_fp8(*fp8_parts(blocks))
    kv = blocks.permute(2, 1, 0, 3, 4).reshape(
        planes, kv_heads, num_blocks * block_size, head_dim
    )
    kv = kv[:, :, :context_len].float()
    return kv[0], kv[-1]


def _causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    seen: Tensor | None = None,
) -> Tensor:
    """Return the attention of the last `len(q)` positions of one sequence, shaped as `q`."""
    q_len, num_heads, head_dim = q.shape
    kv_heads, context_len, _ = k.shape
    if context_len == 0:
        return torch.zeros_like(q)
    grouped = q.float().unflatten(1, (kv_heads, num_heads // kv_heads))
    scores = torch.einsum("qkgd,knd->kgqn", grouped, k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    own = torch.arange(context_len - q_len, context_len, device=q.device)
    keys = torch.arange(context_len, device=q.device)
    hidden = keys > own[:, None]  # [q_len, context_len]
    if window is not None:
        hidden |= keys <= own[:, None] - window
    if seen is not None:
        hidden |= ~seen
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        column = sinks.float().view(kv_heads, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, column), dim=-1)
    probs = scores.softmax(dim=-1)[..., :context_len]
    out = torch.einsum("kgqn,knd->qkgd", probs, v)
    return out.reshape(q_len, num_heads, head_dim).to(q.dtype)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight.float()


def _head_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return x.float() if weight is None else _rms_norm(x.float(), weight, eps)


def _rotate(x: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
    # [tokens, 1, dim / 2].
    cos, sin = cos_sin[positions.long()].float()[:, None].chunk(2, dim=-1)
    half = cos.shape[-1]
    plain, low, high = x.split((x.shape[-1] - 2 * half, half, half), dim=-1)
    return torch.cat([plain, low * cos - high * sin, high * cos + low * sin], dim=-1)


def penalize_counted(
    logits: Tensor,
    words: Tensor,
    factors: Tensor,
    biases: Tensor,
    counted: Tensor,
    token_ids: Tensor,
) -> Tensor:
    """Do what `token_counts.penalize_counted` does, with shapes that no value changes."""
    tokens = torch.arange(words.shape[1], device=words.device)
    has_row = counted[:, :1] >= 0
    rows = counted[:, 0].clamp(min=0).long()
    is_new = has_row & (counted[:, 1:] > 0) & (tokens == token_ids[:, None])
    is_new &= ((words[rows] >> 1) & MAX_COUNT) < MAX_COUNT
    words.index_add_(0, rows, 2 * is_new.to(torch.int32))
    own = torch.where(has_row, words[rows], 0)
    count = (own >> 1) & MAX_COUNT
    places = ((own >> BIAS_SHIFT) & BIAS_MASK).long()
    presence, frequency, repetition = factors[rows, :, None].unbind(1)
    added = biases[rows].gather(1, (places - 1).clamp(min=0))
    x = logits.double() + torch.where(places > 0, added, 0.0)
    is_seen = (own & ((1 << BIAS_SHIFT) - 1)) > 0
    x = torch.where(is_seen, torch.where(x > 0, x / repetition, x * repetition), x)
    x -= torch.where(count > 0, frequency * count + presence, 0.0)
    return x.float()


# What four bits stand for in MXFP4; the highest bit is the sign.
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


@dataclass(slots=True, frozen=True)
class NarrowWeight:
    """A weight of four or eight bits, whose groups of inputs share a scale and a zero point.

    Output o stands for `(number of codes[o, i] - zeros[o, i // group]) * scales[o, i // group]`.
    """

    # [outputs, inputs] uint8 of four bits; or int8 or float8_e4m3fn, whose zero points are 0
    codes: Tensor
    scales: Tensor  # [outputs, groups] fp32
    zeros: Tensor  # [outputs, groups] int32
    group: int  # inputs
    is_fp4: bool = False  # the four bits are floats, whose zero points are 0

    @property
    def kind(self) -> str:
        if self.codes.dtype == torch.uint8:
            return "fp4" if self.is_fp4 else "int4"
        return "int8" if self.codes.dtype == torch.int8 else "fp8"

    @property
    def is_whole(self) -> bool:
        """Return whether inputs fill words of eight codes, and groups the tiles of the kernels."""
        return not self.codes.shape[1] % 8 and (
            self.scales.shape[1] == 1 or not self.group % 32
        )

    def values(
        self, outputs: slice = slice(None), dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Return what the codes of some outputs stand for, `[outputs, inputs]`."""
        codes = self.codes[outputs]
        of = torch.arange(codes.shape[1], device=codes.device) // self.group
        if self.is_fp4:
            numbers = torch.cat((FP4, -FP4)).to(codes.device)[codes.int()]
        else:
            numbers = codes.float()
        numbers = numbers.to(dtype) - self.zeros[outputs][:, of]
        return numbers * self.scales[outputs][:, of].to(dtype)
