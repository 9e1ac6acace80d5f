"""The plain-torch reference of the kernels of layers with a state per sequence, in fp32.

A layer convolves its inputs with those before them, lets a matrix of each head go through the
tokens one by one, and norms what the matrices say. Gated DeltaNet (Yang, Kautz, Hatamizadeh 2024)
and Mamba-2 (Dao, Gu 2024) differ in what a token adds to a matrix. Short convolutions have none.
"""

# ruff: noqa: PLR0913, PLR0917  (the signatures are the kernels': tensors, not records)

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.kernels.constants import STRIP
from baton.kernels.state_layout import StateLayout

LENGTH_EPS = 1e-6  # of the squared length of a query or key


@dataclass(frozen=True, slots=True)
class StateTables:
    """The states of a step's sequences in device memory."""

    blocks: Tensor  # [num_sequences, state_blocks] int32
    items: Tensor  # [num_sequences, 6] int32: each a `StateItem`
    chunks: Tensor  # [num_chunks, 2] int32: of `state_chunks`
    is_decoding: bool  # every sequence has one token, or is padding


@dataclass(frozen=True, slots=True)
class Gates:
    """How numbers of a row become each head's decays and beta.

    A step is `softplus(x + bias)` within `limits`, and the decay `exp(rate * step)`. Beta is the
    sigmoid of another number, or the step.
    """

    to_steps: int  # the first number in a row
    to_betas: int | None
    rates: Tensor  # [heads] fp32, or [heads * key_dim]
    biases: Tensor  # as `rates`
    limits: tuple[float, float] = (0.0, float("inf"))
    # Heads, where each number of a key has a decay of its own.
    num_betas: int | None = None


@dataclass(frozen=True, slots=True)
class StateWeights:
    """One rank's weights of a layer with a state, beside its linear layers, and what they do.

    Channels are in groups, each of which has queries, keys and values of its heads.
    """

    taps: Tensor  # [groups, num_taps, channels] fp32
    norm: Tensor  # [heads * value_dim] fp32
    tap_biases: Tensor | None = None  # [groups * channels] fp32
    activates: bool = True  # with a SiLU, what the convolution gives
    to_queries: int = 0  # within the channels of a group
    to_keys: int = 0
    to_values: int = 0
    is_normed: bool = False  # queries and keys have a length of 1
    scale: float = 1.0  # of queries
    corrects: bool = False  # a token adds what the state lacks of its value
    skips: Tensor | None = None  # [heads] fp32: how much of a value goes past the state
    gates: Gates | None = None  # None: there are no matrices
    to_gates: int = 0  # the first number in a row that gates the norm
    num_norms: int = 1
    gates_first: bool = False  # before the norm
    by_sigmoid: bool = False  # these gates are sigmoids, and not SiLUs


class StateBytes:
    """The states of one layout in the bytes of a pool."""

    def __init__(self, pool: Tensor, layout: StateLayout) -> None:
        blocks = pool.view(len(pool), -1).view(torch.uint8)
        parts = blocks.view(len(pool), layout.shape.num_groups, layout.stride_part)
        self._parts = parts[:, :, : layout.part_bytes]  # [num_blocks, groups, part]
        self._layout = layout
        self._dtype = pool.dtype

    def tail(self, layer: int, blocks: Sequence[int]) -> Tensor:
        """Return the last inputs, `[groups, taps, channels]`."""
        shape = self._layout.shape
        found = self._read(self._layout.tails[layer], self._tail_bytes, blocks)
        return found.view(self._dtype).view(-1, shape.num_taps, shape.num_channels)

    def set_tail(self, layer: int, blocks: Sequence[int], tail: Tensor) -> None:
        self._write(self._layout.tails[layer], blocks, tail.flatten(1))

    def matrices(self, layer: int, blocks: Sequence[int]) -> Tensor:
        """Return the matrices, `[groups, heads, key_dim, value_dim]`."""
        shape = self._layout.shape
        strips = [
            self._read(offset, shape.strip_bytes, blocks)
            .view(torch.float32)
            .view(-1, shape.key_dim, STRIP)
            for offset in self._layout.strips[layer]
        ]
        whole = torch.stack(strips, dim=1).unflatten(1, (shape.num_heads, -1))
        return whole.transpose(2, 3).flatten(3)[..., : shape.value_dim]

    def set_matrices(self, layer: int, blocks: Sequence[int], matrices: Tensor) -> None:
        shape = self._layout.shape
        wide = F.pad(matrices, (0, shape.num_strips * STRIP - shape.value_dim))
        strips = wide.unflatten(3, (-1, STRIP)).transpose(2, 3).flatten(1, 2)
        for number, offset in enumerate(self._layout.strips[layer]):
            self._write(offset, blocks, strips[:, number].flatten(1))

    def advance(
        self,
        layer: int,
        x: Tensor,  # [num_tokens, channels and more]
        weights: StateWeights,
        decays: Tensor,  # [num_tokens, heads]
        betas: Tensor,  # [num_tokens, heads]
        blocks: Sequence[int],
        start: int,
        num_held: int,
        num_guesses: int = 0,
    ) -> Tensor:
        """Let a sequence's state go through tokens from position `start` on.

        The state is kept without the last `num_guesses`. Return what all tokens read,
        `[num_tokens, heads * value_dim]` in fp32.
        """
        shape = self._layout.shape
        mixed = self.convolve(layer, x, weights, blocks, start, num_guesses)
        matrices = self.matrices(layer, blocks).flatten(0, 1)
        if start + num_held == 0:
            matrices = torch.zeros_like(matrices)
        keys = shape.num_key_heads * shape.key_dim
        values = shape.num_heads * shape.value_dim
        of_heads = []
        for first, count, width in (
            (weights.to_queries, keys, shape.key_dim),
            (weights.to_keys, keys, shape.key_dim),
            (weights.to_values, values, shape.value_dim),
        ):
            heads = mixed[:, :, first : first + count].unflatten(2, (-1, width))
            copies = shape.num_heads // heads.shape[2]
            of_heads.append(heads.repeat_interleave(copies, dim=2).flatten(1, 2))
        queries, keys_of_heads, values_of_heads = of_heads
        groups = (shape.num_groups, shape.num_heads)
        kept = slice(len(x) - num_guesses)
        guessed = slice(len(x) - num_guesses, None)
        out, matrices = advance(
            queries[kept],
            keys_of_heads[kept],
            values_of_heads[kept],
            decays[kept],
            betas[kept],
            matrices,
            weights,
            num_held,
        )
        self.set_matrices(layer, blocks, matrices.unflatten(0, groups))
        if num_guesses:
            of_guesses, _ = advance(
                queries[guessed],
                keys_of_heads[guessed],
                values_of_heads[guessed],
                decays[guessed],
                betas[guessed],
                matrices,
                weights,
            )
            out = torch.cat((out, of_guesses))
        return out.flatten(1)

    def convolve(
        self,
        layer: int,
        x: Tensor,
        weights: StateWeights,
        blocks: Sequence[int],
        start: int,
        num_guesses: int = 0,
    ) -> Tensor:
        """Return the channels of a sequence's tokens, `[num_tokens, groups, channels]` in fp32.

        The last inputs are kept without the last `num_guesses`.
        """
        size = (self._layout.shape.num_groups, self._layout.shape.num_channels)
        tail = self.tail(layer, blocks)
        mixed = convolve(
            x[:, : size[0] * size[1]].view(-1, *size), start, tail, weights, num_guesses
        )
        self.set_tail(layer, blocks, tail)
        return mixed

    @property
    def _tail_bytes(self) -> int:
        return self._layout.shape.tail_bytes(self._layout.number_bytes)

    def _read(self, offset: int, size: int, blocks: Sequence[int]) -> Tensor:
        pieces = [
            self._parts[block, :, part]
            for block, part in self._pieces(offset, size, blocks)
        ]
        return torch.cat(pieces, dim=1)

    def _write(self, offset: int, blocks: Sequence[int], values: Tensor) -> None:
        stored = values.contiguous().view(torch.uint8)
        done = 0
        for block, part in self._pieces(offset, stored.shape[1], blocks):
            size = part.stop - part.start
            self._parts[block, :, part] = stored[:, done : done + size]
            done += size

    def _pieces(
        self, offset: int, size: int, blocks: Sequence[int]
    ) -> list[tuple[int, slice]]:
        """Return the blocks of bytes `offset:offset + size` of each group, and where in a part."""
        part = self._layout.part_bytes
        end = offset + size
        pieces = []
        while offset < end:
            first = offset % part
            last = min(part, first + end - offset)
            pieces.append((blocks[offset // part], slice(first, last)))
            offset += last - first
        return pieces


def convolve(
    x: Tensor,  # [num_tokens, groups, channels]
    start: int,  # the position of the first token
    # [groups, taps, channels]: inputs by position modulo `taps`; it changes.
    tail: Tensor,
    weights: StateWeights,
    num_guesses: int = 0,  # the last tokens, which do not change it
) -> Tensor:
    """Return the convolution of each channel with its last inputs, shaped as `x`, in fp32."""
    num_taps = tail.shape[1]
    end = start + len(x) - num_guesses
    before = range(start - num_taps + 1, start)
    earlier = [
        tail[:, at % num_taps] if at >= 0 else torch.zeros_like(tail[:, 0])
        for at in before
    ]
    every = torch.cat((torch.stack(earlier), x)) if earlier else x
    out = sum(
        every[tap : tap + len(x)].float() * weights.taps[:, tap]
        for tap in range(num_taps)
    )
    assert isinstance(out, Tensor)
    if weights.tap_biases is not None:
        out = out + weights.tap_biases.view(x.shape[1:])
    for position in range(max(start, end - num_taps), end):
        tail[:, position % num_taps] = x[position - start]
    return F.silu(out) if weights.activates else out


def gated_inputs(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return what a layer without matrices convolves, and the gates of what that gives.

    A row has gates of the inputs, gates of the outputs, and the inputs.
    """
    before, after, inputs = x.chunk(3, dim=1)
    return before * inputs, after


def gated_outputs(mixed: Tensor, gates: Tensor, rows: Tensor | None) -> Tensor:
    """Return the gated outputs of all rows, or of some, in the dtype of the gates."""
    if rows is not None:
        mixed = mixed[rows]
        gates = gates[rows]
    return (mixed * gates.float()).to(gates.dtype)


def gate_steps(x: Tensor, gates: Gates) -> tuple[Tensor, Tensor]:
    """Return decays and betas, `[num_tokens, heads]` in fp32.

    Decays may be those of each number of a head's keys.
    """
    heads = gates.num_betas or len(gates.rates)
    raw = (
        x[:, gates.to_steps : gates.to_steps + len(gates.rates)].float() + gates.biases
    )
    steps = F.softplus(raw).clamp(*gates.limits)
    decays = torch.exp(gates.rates * steps)
    if gates.to_betas is None:
        return decays, steps
    return decays, x[:, gates.to_betas : gates.to_betas + heads].float().sigmoid()


def advance(
    queries: Tensor,  # [num_tokens, heads, key_dim]
    keys: Tensor,  # [num_tokens, heads, key_dim]
    values: Tensor,  # [num_tokens, heads, value_dim]
    decays: Tensor,  # [num_tokens, heads] or [num_tokens, heads * key_dim]
    betas: Tensor,  # [num_tokens, heads]
    matrices: Tensor,  # [heads, key_dim, value_dim]
    weights: StateWeights,
    num_held: int = 0,  # the first tokens, which the matrices have already
) -> tuple[Tensor, Tensor]:
    """Return what each token reads, shaped as `values`, and the matrices after the last one.

    A matrix S becomes `decay * S + key ⊗ delta`, with `delta = beta * value`, or, if it `corrects`,
    `beta * (value - key (decay * S))`. The result is `query S + skip * value`.
    """
    decays = decays.unflatten(1, (values.shape[1], -1))
    if weights.is_normed:
        queries = (
            queries * (queries.square().sum(-1, keepdim=True) + LENGTH_EPS).rsqrt()
        )
        keys = keys * (keys.square().sum(-1, keepdim=True) + LENGTH_EPS).rsqrt()
    out = []
    for token in range(len(values)):
        key = keys[token, :, :, None]
        value = values[token]
        decay = decays[token, :, :, None]
        if token >= num_held:
            matrices = matrices * decay
            known = (
                (matrices * key).sum(1) if weights.corrects else torch.zeros_like(value)
            )
            delta = (value - known) * betas[token, :, None]
            matrices = matrices + key * delta[:, None]
        read = (matrices * queries[token, :, :, None] * weights.scale).sum(1)
        out.append(
            read if weights.skips is None else read + weights.skips[:, None] * value
        )
    return torch.stack(out), matrices


def gated_norm(x: Tensor, gates: Tensor, weights: StateWeights, eps: float) -> Tensor:
    """Return the RMS norms of `x`, `[num_rows, width]`, gated, in the dtype of `gates`."""
    gate = gates[:, weights.to_gates : weights.to_gates + x.shape[1]].float()
    gate = gate.sigmoid() if weights.by_sigmoid else F.silu(gate)
    parts = (x * gate if weights.gates_first else x).view(len(x), weights.num_norms, -1)
    normed = parts * (parts.square().mean(-1, keepdim=True) + eps).rsqrt()
    normed = normed.flatten(1) * weights.norm
    return (normed if weights.gates_first else normed * gate).to(gates.dtype)
