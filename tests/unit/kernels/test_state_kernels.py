"""The compiled kernels of layers with a state against their references, and their bits."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from baton.kernels import state_reference as reference
from baton.kernels.cpu.library import load_library
from baton.kernels.cpu.states.functions import CpuStates, state_work
from baton.kernels.state_layout import StateShape, state_layout
from baton.kernels.state_reference import Gates, StateBytes, StateWeights
from baton.model.batch_invariance.row_rule import num_threads

EPS = 1e-6
LAYERS = 2
LAYER = 1
# Matrices that fit a block and matrices that are cut; a head that shares its key and one that does
# not; sizes that are no whole vectors.
SHAPES = {
    "small": (StateShape(2, 4, 2, 20, 24, 176, 4), 4096),
    "as published": (StateShape(1, 2, 1, 128, 128, 512, 4), 1 << 17),
    "cut": (StateShape(2, 2, 2, 32, 72, 272, 3), 8192),
}


def no_progress(done: int, total: int) -> None:
    """For those who do not watch."""


class Case:
    """A layer over a pool whose free blocks hold NaN."""

    def __init__(
        self,
        name: str,
        dtype: torch.dtype,
        *,
        corrects: bool = True,
        by_key: bool = False,
    ) -> None:
        shape, block_bytes = SHAPES[name]
        self.shape = shape
        self.layout = state_layout(shape, LAYERS, block_bytes, dtype.itemsize)
        self.pool = torch.full(
            (120, block_bytes // dtype.itemsize), float("nan"), dtype=dtype
        )
        self.dtype = dtype
        library = load_library(is_bf16=dtype == torch.bfloat16, progress=no_progress)
        self.states = CpuStates(library, self.pool, self.layout)
        heads = shape.num_groups * shape.num_heads
        channels = shape.num_groups * shape.num_channels
        width = heads * shape.value_dim
        keys = shape.num_key_heads * shape.key_dim
        generator = torch.Generator().manual_seed(1)

        def numbers(*size: int) -> Tensor:
            return torch.randn(size, generator=generator)

        num_steps = heads * shape.key_dim if by_key else heads
        self.gates = Gates(
            to_steps=channels + width,
            to_betas=channels + width + num_steps if corrects else None,
            rates=-8 * torch.rand(num_steps, generator=generator),
            biases=numbers(num_steps),
            limits=(0.0, float("inf")) if corrects else (0.1, 2.0),
            num_betas=heads if by_key else None,
        )
        self.weights = StateWeights(
            taps=numbers(shape.num_groups, shape.num_taps, shape.num_channels),
            norm=numbers(width),
            tap_biases=None if corrects else numbers(channels),
            to_keys=keys,
            to_values=2 * keys,
            is_normed=corrects,
            scale=shape.key_dim**-0.5,
            corrects=corrects,
            skips=None if corrects else numbers(heads),
            gates=self.gates,
            to_gates=channels,
            num_norms=heads if corrects else 1,
            gates_first=not corrects,
            by_sigmoid=by_key,
        )
        self.num_columns = channels + width + num_steps + heads
        self.generator = generator

    def inputs(self, num_tokens: int) -> Tensor:
        return torch.randn(num_tokens, self.num_columns, generator=self.generator).to(
            self.dtype
        )

    def blocks(self, number: int) -> tuple[int, ...]:
        """Blocks of a sequence, in no order."""
        first = 1 + number * self.layout.num_blocks
        return tuple(reversed(range(first, first + self.layout.num_blocks)))

    def compute(self, x: Tensor, *chunks: tuple[int, ...], first: int = 0) -> Tensor:
        """Rows of sequences `first`, `first + 1`, …, as `state_work` takes them.

        The last number, of guesses, may be left out.
        """
        tables = [block for i in range(len(chunks)) for block in self.blocks(first + i)]
        every = [(*chunk, 0)[:5] for chunk in chunks]
        work = state_work(every, tables)
        mixed = self.states.convolve(x, LAYER, work, self.weights)
        steps = self.states.gate_steps(x, self.gates)
        out = self.states.advance(mixed, LAYER, work, self.weights, *steps)
        return self.states.gated_norm(out, x, self.weights, EPS)

    def expected(self, x: Tensor, pool: Tensor) -> Tensor:
        """Of one sequence from its start."""
        decays, betas = reference.gate_steps(x, self.gates)
        states = StateBytes(pool, self.layout)
        out = states.advance(
            LAYER, x, self.weights, decays, betas, self.blocks(0), start=0, num_held=0
        )
        return reference.gated_norm(out, x, self.weights, EPS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "kind", [{"corrects": True}, {"corrects": False}, {"by_key": True}], ids=str
)
@pytest.mark.parametrize("name", SHAPES)
def test_a_layer_with_a_state_is_its_reference(name, kind, dtype):
    case = Case(name, dtype, **kind)
    x = case.inputs(37)
    pool = case.pool.clone()
    ours = case.compute(x, (0, 37, 0, 0))
    expected = case.expected(x, pool)
    rtol, atol = (1e-4, 1e-5) if dtype == torch.float32 else (1.6e-2, 1e-3)
    torch.testing.assert_close(ours, expected, rtol=rtol, atol=atol)
    mine = StateBytes(case.pool, case.layout)
    theirs = StateBytes(pool, case.layout)
    blocks = case.blocks(0)
    torch.testing.assert_close(mine.tail(LAYER, blocks), theirs.tail(LAYER, blocks))
    torch.testing.assert_close(
        mine.matrices(LAYER, blocks),
        theirs.matrices(LAYER, blocks),
        rtol=1e-4,
        atol=1e-5,
    )
    assert case.pool[0].isnan().all()  # of nobody


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_no_cut_crowd_or_thread_changes_a_bit(name, by_key, dtype):
    case = Case(name, dtype, by_key=by_key)
    x = case.inputs(60)
    others = case.inputs(60)
    whole = case.compute(x, (0, 60, 0, 0))
    state = case.pool[list(case.blocks(0))].clone()
    with num_threads(2):
        parts = [case.compute(x[:5], (0, 5, 0, 0))]
        parts += [case.compute(x[at : at + 1], (0, 1, at, 0)) for at in range(5, 9)]
        beside = torch.cat((x[9:40], others[:7], others[7:30]))
        crowd = case.compute(beside, (0, 31, 9, 0), (31, 7, 0, 0), (38, 23, 0, 0))
        parts += [crowd[:31], case.compute(x[40:], (0, 20, 40, 0))]
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(case.pool[list(case.blocks(0))].nan_to_num(), state.nan_to_num())


@pytest.mark.parametrize("by_key", [False, True])
def test_a_token_that_the_state_has_already_is_read_again_with_the_same_bits(by_key):
    case = Case("small", torch.float32, by_key=by_key)
    x = case.inputs(9)
    whole = case.compute(x, (0, 9, 0, 0))
    state = case.pool.clone()
    again = case.compute(x[8:], (0, 1, 8, 1))
    assert torch.equal(again, whole[8:])
    assert torch.equal(case.pool.nan_to_num(), state.nan_to_num())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [{}, {"corrects": False}, {"by_key": True}], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_guesses_are_computed_as_other_tokens_and_leave_no_trace(name, kind, dtype):
    """Two guesses are right and one is wrong, in the middle of a crowd and on two threads."""
    case = Case(name, dtype, **kind)
    x = case.inputs(20)
    others = case.inputs(20)
    whole = case.compute(x, (0, 20, 0, 0))
    state = case.pool[list(case.blocks(0))].clone()
    wrong = torch.cat((x[:12], case.inputs(1), x[13:]))
    with num_threads(2):
        parts = [case.compute(x[:9], (0, 9, 0, 0))]
        crowd = torch.cat((wrong[9:13], others[:20]))
        mixed = case.compute(crowd, (0, 4, 9, 0, 3), (4, 20, 0, 0, 6))
        parts.append(mixed[:3])
        # The state has the token before the guesses, so the right ones go through it again.
        rest = case.compute(x[10:], (0, 10, 10, 0))
    assert torch.equal(rest[:2], mixed[1:3])
    assert not torch.equal(rest[2], mixed[3])
    assert torch.equal(torch.cat((*parts, rest[2:])), whole)
    assert torch.equal(case.pool[list(case.blocks(0))].nan_to_num(), state.nan_to_num())


@pytest.mark.parametrize("kind", [{}, {"corrects": False}, {"by_key": True}], ids=str)
def test_the_reference_keeps_no_guess_either(kind):
    case = Case("small", torch.float32, **kind)
    x = case.inputs(9)
    kept = case.pool.clone()
    case.expected(x[:6], kept)
    guessing = case.pool.clone()
    states = StateBytes(guessing, case.layout)
    gates = reference.gate_steps(x, case.gates)
    read = states.advance(LAYER, x, case.weights, *gates, case.blocks(0), 0, 0, 3)
    torch.testing.assert_close(guessing, kept, equal_nan=True)
    ours = reference.gated_norm(read, x, case.weights, EPS)
    torch.testing.assert_close(ours, case.expected(x, case.pool.clone()))


def test_the_states_of_half_the_groups_are_half_of_each_block():
    """So ranks that share a model differently read the parts that are theirs."""
    shape, block_bytes = SHAPES["small"]
    both = state_layout(shape, LAYERS, block_bytes, 4)
    half = state_layout(shape._replace(num_groups=1), LAYERS, block_bytes // 2, 4)
    assert both.num_blocks == half.num_blocks
    assert (both.strips, both.tails) == (half.strips, half.tails)


def test_blocks_that_hold_no_number_are_refused():
    shape, _ = SHAPES["small"]
    with pytest.raises(ValueError, match="too small"):
        state_layout(shape, LAYERS, 96, 4)


def test_steps_at_both_ends_are_finite_and_right():
    case = Case("small", torch.float32)
    gates = replace(case.gates, to_steps=0, to_betas=None)
    heads = len(gates.rates)
    x = torch.tensor([-200.0, -30.0, -3.0, 0.0, 1e-3, 30.0, 200.0]).repeat_interleave(
        heads
    )
    x = x.view(-1, heads)
    decays, steps = case.states.gate_steps(x, gates)
    exact, exact_steps = reference.gate_steps(x.double(), gates)
    torch.testing.assert_close(decays, exact.float(), rtol=1e-5, atol=1e-37)
    torch.testing.assert_close(steps, exact_steps.float(), rtol=1e-5, atol=1e-37)
