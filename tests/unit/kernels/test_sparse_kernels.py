"""The compiled kernels of sparse attention against their references, and bits of a query alone.

Slots that no sequence owns hold NaN.
"""

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from baton.kernels import reference, sparse_reference
from baton.kernels.cpu.functions import CpuKernels
from baton.kernels.cpu.library import load_library
from baton.kernels.cpu.sparse import functions
from baton.kernels.cpu.sparse.functions import CpuSparse
from baton.model.batch_invariance.row_rule import num_threads
from baton.model.config.rope_config import Rope
from baton.model.layers.rotary import rope_table

EPS = 1e-6
LAYERS = 2
LAYER = 1
ROTATED = 8
HEADS = 3
TABLE = tuple(range(20, 0, -1))  # blocks of a sequence, in no order of memory


def no_progress(done: int, total: int) -> None:
    """For those who do not watch."""


class Case:
    """Two layers of rows and of keys in blocks of one tensor."""

    def __init__(
        self,
        dtype: torch.dtype,
        index: tuple[int, int] = (6, 24),
        block_size: int = 16,
        num_chosen: int = 20,
    ) -> None:
        self.num_heads, self.head_dim = index
        self.dtype = dtype
        self.block_size = block_size
        self.num_chosen = num_chosen
        row_dim = 40
        sizes = [LAYERS * block_size * width for width in (row_dim, self.head_dim)]
        blocks = torch.full((22, sum(sizes)), float("nan"), dtype=dtype)
        rows, keys = blocks.split(sizes, dim=1)
        self.rows = rows.view(22, 1, LAYERS, 1, block_size, row_dim)
        self.keys = keys.view(22, 1, LAYERS, 1, block_size, self.head_dim)
        library = load_library(is_bf16=dtype == torch.bfloat16, progress=no_progress)
        self.plain = CpuKernels(library, self.rows, HEADS)
        self.sparse = CpuSparse(
            library, self.plain, self.rows, self.keys, self.num_heads, num_chosen
        )
        self.angles = rope_table(Rope(1e4), ROTATED, 22 * block_size)
        self.generator = torch.Generator().manual_seed(4)

    def numbers(self, *size: int) -> Tensor:
        return torch.randn(size, generator=self.generator).to(self.dtype)

    def inputs(self, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """What attention takes of tokens, what an index takes, and the weights of its heads."""
        return (
            self.numbers(length, (HEADS + 1) * self.rows.shape[-1]),
            self.numbers(length, (self.num_heads + 1) * self.head_dim),
            torch.randn(length, self.num_heads, generator=self.generator),
        )

    def places(self, start: int, length: int) -> tuple[Tensor, Tensor]:
        positions = torch.arange(start, start + length)
        blocks = torch.tensor(TABLE)[positions // self.block_size]
        return positions, blocks * self.block_size + positions % self.block_size

    def compute(self, inputs: tuple[Tensor, ...], start: int, end: int) -> Tensor:
        """The rows of one sequence, whose earlier ones are in the pool."""
        qkv, heads, weights = (of[start:end] for of in inputs)
        positions, slots = self.places(start, end - start)
        chunks = np.array([[0, end - start, start, 0]], np.int64)
        self.sparse.begin(np.array(TABLE, np.int32), chunks)
        self.sparse.choose(
            LAYER, heads.contiguous(), weights, positions, slots, self.angles
        )
        q = self.plain.rope_and_store(
            qkv.contiguous(), LAYER, positions, slots, self.angles, None, EPS
        )
        return self.sparse.attend(q, LAYER, None, chunks, 0.2)

    def expected(self, inputs: tuple[Tensor, ...]) -> Tensor:
        qkv, heads, weights = inputs
        positions, slots = self.places(0, len(qkv))
        q, rows, index_q, keys = (
            part
            for x, count in ((qkv, HEADS), (heads, self.num_heads))
            for part in x.view(len(x), count + 1, -1).split((count, 1), dim=1)
        )
        pools = (self.rows.clone(), self.keys.clone())
        q, index_q = (
            reference.rope_and_store(
                of, key, None, positions, self.angles, pool, LAYER, slots
            )
            for of, key, pool in ((q, rows, pools[0]), (index_q, keys, pools[1]))
        )
        table = torch.tensor([TABLE])
        ends = torch.tensor([len(qkv)])
        own = sparse_reference.paged_keys(pools[1], LAYER, table[0], len(qkv))
        scores = sparse_reference.index_scores(index_q, weights, own)
        return reference.paged_prefill_attention(
            q,
            pools[0],
            LAYER,
            table,
            torch.tensor([0, len(qkv)]),
            ends,
            0.2,
            seen=[sparse_reference.chosen_keys(scores, self.num_chosen)],
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("index", "block_size", "num_chosen"),
    [
        ((6, 24), 16, 20),
        ((64, 128), 16, 64),
        ((1, 8), 5, 1),
        ((7, 32), 24, 90),
        ((5, 64), 64, 130),
    ],
)
def test_queries_see_what_the_reference_chooses(index, block_size, num_chosen, dtype):
    case = Case(dtype, index, block_size, num_chosen)
    inputs = case.inputs(95)
    expected = case.expected(inputs)
    tolerance = {"rtol": 2e-5, "atol": 2e-5} if dtype == torch.float32 else {}
    if dtype == torch.bfloat16:
        tolerance = {"rtol": 1.6e-2, "atol": 1.6e-2}
    torch.testing.assert_close(case.compute(inputs, 0, 95), expected, **tolerance)
    assert case.keys[0].isnan().all()  # of nobody


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_cut_or_thread_changes_a_bit(dtype, monkeypatch):
    case = Case(dtype)
    inputs = case.inputs(150)
    whole = case.compute(inputs, 0, 150)
    monkeypatch.setattr(functions, "GATHERED_BYTES", 1)  # few queries at a time
    monkeypatch.setattr(functions, "MIN_SLICE_NS", 1)
    with num_threads(2):
        again = Case(dtype)
        cuts = (0, 7, 19, 20, 21, 70, 149, 150)
        parts = [again.compute(inputs, *cut) for cut in pairwise(cuts)]
    assert torch.equal(torch.cat(parts), whole)


def test_of_equal_scores_the_first_keys_are_chosen():
    case = Case(torch.float32, num_chosen=4)
    qkv, heads, weights = case.inputs(64)
    heads[:, -24:] = 0.0  # all keys score 0, but two
    heads[[30, 50], -24:-8] = 1.0
    heads[:, :-24] = heads[:, :-24].abs()
    chosen = []
    for sign in (1.0, -1.0):
        case.compute((qkv, heads, sign * weights.abs()), 0, 64)
        slots = case.sparse._slots[-1].tolist()
        places = case.places(0, 64)[1].tolist()
        chosen.append([places.index(slot) for slot in slots])
    assert chosen == [[0, 1, 30, 50], [0, 1, 2, 3]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 8, 24, 128, 130])
def test_a_layer_norm_is_its_reference(count, dtype):
    case = Case(dtype)
    x = case.numbers(9, count + 3)[:, :count] * 3 + 1
    norm = torch.randn(2, count)
    expected = sparse_reference.layer_norm(x, norm, EPS)
    found = case.sparse.layer_norm(x, norm, EPS)
    tolerance = (1e-5, 1e-5) if dtype == torch.float32 else (1.6e-2, 1e-2)
    torch.testing.assert_close(found, expected, rtol=tolerance[0], atol=tolerance[1])
    for row in range(9):
        assert torch.equal(
            case.sparse.layer_norm(x[row : row + 1], norm, EPS)[0], found[row]
        )
