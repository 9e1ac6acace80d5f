"""The proof that the kernels of layers with a state compute what their reference does on a GPU.

There are no others: a GPU that does not prove them does not serve such a model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from baton.kernels import state_reference as reference
from baton.kernels.cuda.paged import LEAST_CAPABILITY
from baton.kernels.cuda.states.functions import DeviceStates
from baton.kernels.proofs import ModelShapes
from baton.kernels.state_layout import (
    StateItem,
    StateShape,
    state_chunks,
    state_item,
    state_layout,
)
from baton.kernels.state_reference import Gates, StateBytes, StateTables, StateWeights

LAYERS = 2
LAYER = 1
NUM_SEQUENCES = 4
EPS = 1e-6
# Where slices begin and end: chunks of a prompt, then tokens of a response.
PROMPT = 139
CUTS = (0, 64, 128, PROMPT, PROMPT + 1, PROMPT + 2, PROMPT + 3, PROMPT + 4)
LENGTH = CUTS[-1]
RAGGED_CUT = 50
LONG = 2000  # of a prompt that only a GPU computes
NUM_GUESSES = 2
# Of the norms of a head's numbers. A state in bf16, or products in tf32, would have more.
STATE_ERROR = 3e-5
OUTPUT_ERROR = 1e-2
MIXED_ERROR = 1e-5

Slices = Sequence[
    tuple[int, int, int]
]  # a sequence, its first token and that after the last


def missing_for(shapes: ModelShapes, capability: tuple[int, int]) -> str:
    """Return why the kernels cannot compute such a model; empty if they can.

    A rank refuses states of other sizes before it comes to proofs.
    """
    if shapes.state is None:
        return "the model keeps no state"
    return "" if capability >= LEAST_CAPABILITY else f"compute capability {capability}"


def prove(shapes: ModelShapes, device: str) -> str:
    """Return the first fault that running the kernels shows; empty if there is none."""
    assert shapes.state is not None, "possible() leaves out other models"
    lengths = [LENGTH]
    if torch.device(device).type == "cuda":
        lengths.append(LONG)
    for length in lengths:
        trial = StateTrial(shapes.state, shapes.state_kind, length, device)
        faults = trial.faults() if length == LENGTH else trial.errors()
        if fault := next((f"{length} tokens: {one}" for one in faults if one), ""):
            return fault
    return ""


class StateTrial:
    """Random tokens of one layer, over a pool whose free blocks hold NaN."""

    def __init__(self, shape: StateShape, kind: str, length: int, device: str) -> None:
        self._shape = shape
        self._length = length
        self._device = torch.device(device)
        self._generator = torch.Generator().manual_seed(length)
        pieces = [shape.tail_bytes(2)]
        if shape.has_matrices:
            pieces.append(shape.strip_bytes)
        # A part that holds the largest piece, and leaves a rest.
        part = max(pieces) + 64
        self._layout = state_layout(shape, LAYERS, part * shape.num_groups, 2)
        num_blocks = 1 + NUM_SEQUENCES * self._layout.num_blocks
        self._pool = torch.full(
            (num_blocks, self._layout.block_bytes // 2), float("nan")
        ).to(self._device, torch.bfloat16)
        self._states = DeviceStates(self._pool, self._layout)
        self._bytes = StateBytes(self._pool, self._layout)
        self.weights = self._weights_of(kind)
        self._x = self._numbers(length, self._width).to(torch.bfloat16)
        self._beside = self._numbers(length, self._width).to(torch.bfloat16)

    def faults(self) -> Iterator[str]:
        yield from self.errors()
        yield from self._of_slices()
        yield from self._of_held_and_guesses()
        yield self._of_padding()

    def errors(self) -> Iterator[str]:
        """Compare one whole sequence with the reference; keep what it gave."""
        before = self._pool.clone()
        self._whole = self._compute((0, 0, self._length))
        untouched = [0, *(block for i in (1, 2, 3) for block in self._blocks(i))]
        if not _equal(self._pool[untouched], before[untouched]):
            yield "it writes to blocks of others"
        yield from self._differs_from_reference()

    # --- inside --------------------------------------------------------------------------------

    def _differs_from_reference(self) -> Iterator[str]:
        pool = torch.zeros_like(self._pool)
        stored = StateBytes(pool, self._layout)
        blocks = self._blocks(0)
        weights = self.weights
        mixed = stored.convolve(LAYER, self._x, weights, blocks, 0)
        if not _equal(self._bytes.tail(LAYER, blocks), stored.tail(LAYER, blocks)):
            yield "the last inputs differ"
        if not self._shape.has_matrices:
            yield _error("channels", self._whole, mixed.flatten(1), MIXED_ERROR)
            return
        expected, matrices = self._advanced(mixed.to(torch.bfloat16).double())
        heads = len(matrices)
        ours = self._bytes.matrices(LAYER, blocks).view_as(matrices)
        for head in range(heads):
            yield _error(f"state {head}", ours[head], matrices[head], STATE_ERROR)
        normed = reference.gated_norm(
            expected.float(), self._x.float(), weights, EPS
        ).view(self._length, heads, -1)
        mine = self._whole.view_as(normed)
        for head in range(heads):
            yield _error(f"head {head}", mine[:, head], normed[:, head], OUTPUT_ERROR)

    def _advanced(self, mixed: Tensor) -> tuple[Tensor, Tensor]:
        """Return what tokens read, and the states after them, in fp64."""
        shape = self._shape
        keys = shape.num_key_heads * shape.key_dim
        parts = []
        for first, count, width in (
            (0, keys, shape.key_dim),
            (keys, keys, shape.key_dim),
            (2 * keys, shape.num_heads * shape.value_dim, shape.value_dim),
        ):
            heads = mixed[:, :, first : first + count].unflatten(2, (-1, width))
            copies = shape.num_heads // heads.shape[2]
            parts.append(heads.repeat_interleave(copies, dim=2).flatten(1, 2))
        gates = self.weights.gates
        assert gates is not None, "heads have matrices"
        decays, betas = reference.gate_steps(self._x, gates)
        size = (shape.num_groups * shape.num_heads, shape.key_dim, shape.value_dim)
        queries, keys_of_heads, values = parts
        out, matrices = reference.advance(
            queries,
            keys_of_heads,
            values,
            decays.double(),
            betas.double(),
            torch.zeros(size, dtype=torch.float64, device=self._device),
            self.weights,
        )
        return out.flatten(1), matrices

    def _of_slices(self) -> Iterator[str]:
        """Compare chunks and steps, beside other sequences, with the whole."""
        for first, end in pairwise(CUTS):
            slices = [(1, first, end)]
            if end > PROMPT:
                slices = [(2, first % 5, first % 5 + 1), *slices]
            elif first:
                slices.append((2, 0, 70))
            out = self._compute(*slices)
            own = out[1:] if end > PROMPT else out[: end - first]
            if not _equal(own, self._whole[first:end]):
                yield f"tokens {first} to {end} have other bits by themselves"
        yield self._differs(1)
        if self._shape.chunked == "prompt":
            yield from self._of_ragged_chunks()

    def _of_ragged_chunks(self) -> Iterator[str]:
        """Cut a prompt where no chunk ends: its bits may be others, but not its state."""
        self._compute((3, 0, RAGGED_CUT))
        self._compute((3, RAGGED_CUT, LENGTH))
        ours, whole = (self._bytes.matrices(LAYER, self._blocks(i)) for i in (3, 0))
        yield _error("a state behind short chunks", ours, whole, STATE_ERROR)

    def _of_held_and_guesses(self) -> Iterator[str]:
        again = self._compute((1, LENGTH - 1, LENGTH), num_held=1)
        if not _equal(again, self._whole[-1:]):
            yield "a token that is computed again has other bits"
        yield self._differs(1)
        self._compute((3, 0, PROMPT + 1))
        guessed = self._compute((3, PROMPT + 1, LENGTH), num_guesses=NUM_GUESSES)
        if not _equal(guessed, self._whole[PROMPT + 1 :]):
            yield "guesses have other bits"
        self._compute((3, LENGTH - NUM_GUESSES, LENGTH))
        yield self._differs(3)

    def _of_padding(self) -> str:
        """Two steps of padding write nothing."""
        before = self._pool.clone()
        items = [StateItem(row, 0, 0, 0, 0, 0) for row in range(2)]
        cuts = [(0, 1 << 24)] if self._shape.chunked == "all" else []
        out = self._advance(self._x[:2], items, [0, 1], cuts, is_decoding=True)
        if not _equal(self._pool, before) or bool(out.isnan().any()):
            return "padding is computed"
        return ""

    def _differs(self, sequence: int) -> str:
        """Return whether the state of a sequence differs from that of the whole."""
        ours, whole = self._blocks(sequence), self._blocks(0)
        tails = (self._bytes.tail(LAYER, one) for one in (ours, whole))
        if not _equal(*tails):
            return "the last inputs depend on slices"
        if not self._shape.has_matrices:
            return ""
        states = (self._bytes.matrices(LAYER, one) for one in (ours, whole))
        return "" if _equal(*states) else "a state depends on slices"

    def _compute(
        self, *slices: tuple[int, int, int], num_held: int = 0, num_guesses: int = 0
    ) -> Tensor:
        """Return the rows of slices, `num_held` and `num_guesses` of each."""
        items: list[StateItem] = []
        rows = []
        for number, first, end in slices:
            row = items[-1].row + items[-1].length if items else 0
            prompt = 1 if number == 2 and end - first == 1 else PROMPT
            if self._length == LONG:
                prompt = LONG
            items.append(
                state_item(
                    row,
                    (first, end),
                    prompt,
                    (num_held, num_guesses),
                    chunked=self._shape.chunked,
                )
            )
            rows.append((self._beside if number == 2 else self._x)[first:end])
        numbers = [number for number, *_ in slices]
        is_decoding = all(item.length == 1 for item in items)
        x = torch.cat(rows)
        return self._advance(
            x, items, numbers, state_chunks(items), is_decoding=is_decoding
        )

    def _advance(
        self,
        x: Tensor,
        items: list[StateItem],
        numbers: list[int],
        cuts: list[tuple[int, int]],
        *,
        is_decoding: bool,
    ) -> Tensor:
        def on_device(values: Sequence[Sequence[int]]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self._device)

        tables = StateTables(
            on_device([self._blocks(number) for number in numbers]),
            on_device(items),
            on_device(cuts).view(-1, 2),
            is_decoding,
        )
        out = self._states.advance(x, LAYER, tables, self.weights)
        if not self._shape.has_matrices:
            return out
        return self._states.gated_norm(out, x, self.weights, EPS)

    def _blocks(self, number: int) -> list[int]:
        """Return the blocks of a sequence, in no order."""
        count = self._layout.num_blocks
        return [*range(count * (number + 1), count * number, -1)]

    @property
    def _width(self) -> int:
        """Return the numbers of a row: channels, then gates, betas and steps."""
        shape = self._shape
        heads = shape.num_groups * shape.num_heads
        gates = heads * (shape.value_dim + 1)
        return shape.num_groups * shape.num_channels + gates + self._num_steps

    @property
    def _num_steps(self) -> int:
        shape = self._shape
        heads = shape.num_groups * shape.num_heads
        return heads * shape.key_dim if shape.by_key else heads

    def _weights_of(self, kind: str) -> StateWeights:
        shape = self._shape
        channels = shape.num_groups * shape.num_channels
        heads = shape.num_groups * shape.num_heads
        width = heads * shape.value_dim
        taps = self._numbers(shape.num_groups, shape.num_taps, shape.num_channels)
        taps *= shape.num_taps**-0.5
        if not shape.has_matrices:
            return StateWeights(taps=taps, norm=taps.new_empty(0), activates=False)
        is_delta = kind in {"delta", "key_delta"}
        keys = shape.num_key_heads * shape.key_dim
        # Half of the heads forget at once, and half of them slowly.
        rates = -torch.linspace(0.01, 4.0, self._num_steps).to(self._device)
        return StateWeights(
            taps=taps,
            norm=1 + 0.2 * self._numbers(width),
            tap_biases=None if is_delta else 0.1 * self._numbers(channels),
            to_keys=keys,
            to_values=2 * keys,
            is_normed=is_delta,
            scale=shape.key_dim**-0.5 if is_delta else 1.0,
            corrects=is_delta,
            skips=None if is_delta else self._numbers(heads),
            gates=Gates(
                to_steps=channels + width + heads,
                to_betas=channels + width if is_delta else None,
                rates=rates,
                biases=self._numbers(self._num_steps) - 2.0,
                num_betas=heads if shape.by_key else None,
            ),
            to_gates=channels,
            num_norms=heads if is_delta else shape.num_groups * shape.num_key_heads,
            gates_first=not is_delta,
            by_sigmoid=shape.by_key,
        )

    def _numbers(self, *size: int) -> Tensor:
        numbers = torch.randn(size, generator=self._generator)
        return numbers.to(self._device)


def _equal(ours: Tensor, theirs: Tensor) -> bool:
    """Return whether the bits are equal, those of NaN included."""
    words = torch.int16 if ours.element_size() == 2 else torch.int32
    return torch.equal(ours.contiguous().view(words), theirs.contiguous().view(words))


def _error(name: str, ours: Tensor, expected: Tensor, allowed: float) -> str:
    """Return what of `name` differs by more than a share of its norm; empty if nothing."""
    expected = expected.double()
    error = float((ours.double() - expected).norm() / expected.norm())
    return "" if error <= allowed else f"{name} differs by {error:.1e}"
