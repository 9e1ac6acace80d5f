"""Linear layers of the real library, whichever code this CPU makes it choose, and compiled ones.

`test_instruction_sets.py` runs this file and others again with the library's choice restricted.
"""

import itertools

import pytest
import torch
from torch import Tensor

from baton.kernels.cpu.functions import CpuLinears
from baton.kernels.cpu.library import has_bf16_products, load_library
from baton.kernels.reference import NarrowWeight
from baton.model.batch_invariance.device_linears import OrderedLinears, keeps_bits
from baton.model.batch_invariance.host_linears import (
    NUM_ROWS,
    HostLinears,
    trial_bias,
    trial_rows,
    trial_weight,
)
from baton.model.batch_invariance.row_rule import num_threads
from baton.model.layers.linear import Linear
from tests.support.compute import no_progress

# Those of a 30M model (QKV, output, gate and up, down, head), and odd ones.
SHAPES = [
    (1024, 512),
    (512, 512),
    (512, 1536),
    (192, 640),
    (343, 171),
    *(pytest.param((size, 512), marks=pytest.mark.release) for size in (3072, 8192)),
]
COUNTS = [
    1,
    2,
    3,
    5,
    7,
    8,
    9,
    15,
    16,
    17,
    20,
    31,
    33,
    36,
    64,
    65,
    100,
    129,
    300,
    512,
    513,
    600,
]
DTYPES = [torch.float32, torch.bfloat16]
# The dtype of a layer, and whether the compiled kernels compute it.
FORMS = [(torch.float32, False), (torch.bfloat16, False)]
if has_bf16_products():
    FORMS.append((torch.bfloat16, True))
Form = tuple[torch.dtype, bool]


def linears(form: Form) -> HostLinears:
    compiled = None
    if form[1]:
        compiled = CpuLinears(load_library(is_bf16=True, progress=lambda *_: None))
    return HostLinears(1, no_progress, compiled=compiled)


def made(shape: tuple[int, int], form: Form, *, has_bias: bool = False) -> Linear:
    """A layer whose weight shows in every output in which order the library added."""
    dtype, _ = form
    bias = trial_bias(shape[0], dtype) if has_bias else None
    return linears(form).make(trial_weight(*shape, dtype), bias)


def sensitive_rows(inputs: int, dtype: torch.dtype) -> Tensor:
    """`[600, inputs]`: the same few rows again and again, in changing order."""
    order = torch.randint(NUM_ROWS, (600,), generator=torch.Generator().manual_seed(0))
    return trial_rows(inputs, dtype)[order]


@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_has_the_same_bits_alone_and_in_any_batch(shape, form, has_bias):
    linear = made(shape, form, has_bias=has_bias)
    x = sensitive_rows(shape[1], form[0])
    if not linear.is_batch_invariant:
        pytest.skip("no row rule was found on this CPU")
    alone = torch.cat([linear(x[i : i + 1]) for i in range(100)])
    whole = linear(x)
    assert torch.equal(whole[:100], alone)
    for count in COUNTS:
        assert torch.equal(linear(x[:count]), whole[:count]), f"the first {count} rows"
        assert torch.equal(linear(x[-count:]), whole[-count:]), f"the last {count} rows"


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("shape", [(1024, 512), (8192, 512)], ids=str)
def test_threads_change_no_bits(shape, form):
    """Few rows of the larger weight are enough work to be shared."""
    x = sensitive_rows(512, form[0])
    with num_threads(1):
        one = made(shape, form)
        expected = one(x)
    for threads in (2, 3):
        with num_threads(threads):
            several = made(shape, form)
            assert several.is_batch_invariant == one.is_batch_invariant
            assert several.digest == one.digest
            if one.is_batch_invariant:
                assert torch.equal(several(x), expected)
                for count in (9, 20):
                    assert torch.equal(several(x[:count]), expected[:count])


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", [(1024, 512), (343, 640), (64, 16)], ids=str)
def test_a_layer_of_bytes_computes_the_integers_it_says(shape, threads):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-127, 128, shape, dtype=torch.int8, generator=generator)
    scales = torch.rand(shape[0], generator=generator)
    bias = torch.randn(shape[0]).bfloat16()
    layer = linears(FORMS[-1]).of_bytes(weight, scales, bias)
    assert (layer is not None) == (FORMS[-1] == (torch.bfloat16, True))
    if layer is None:
        return
    for count in COUNTS:
        x = torch.randn(count, shape[1], generator=generator).bfloat16()
        # Far from the others, which become 0.
        x[0, 3] = float("nan") if count == 5 else 1e4
        steps = x.float().abs().amax(1, keepdim=True) / 127
        rounded = (x.float() / steps).round()
        sums = (rounded.double() @ weight.double().T).float()
        with num_threads(threads):
            found = layer(x)
        expected = (sums * steps * scales + bias.float()).bfloat16()
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    zeros = torch.zeros(2, shape[1]).bfloat16()
    assert torch.equal(layer(zeros), bias.expand(2, -1))
    assert linears(FORMS[-1]).of_bytes(weight[:, :-1], scales, None) is None


@pytest.mark.skipif(not FORMS[-1][1], reason="the CPU does not multiply bf16")
@pytest.mark.parametrize(
    ("outputs", "inputs", "group"),
    [(343, 640, 128), (64, 1000, 8), (100, 520, 520)],
    ids=str,
)
def test_a_layer_of_four_bits_computes_its_numbers(outputs, inputs, group):
    """More exactly than a weight in bf16, and with the same bits in any batch."""
    generator = torch.Generator().manual_seed(0)
    size = outputs, -(-inputs // group)
    codes = torch.randint(16, (outputs, inputs), dtype=torch.uint8, generator=generator)
    scales = torch.rand(size, generator=generator) + 0.1
    zeros = torch.randint(16, size, dtype=torch.int32, generator=generator)
    of = torch.arange(inputs) // group
    weight = (codes.int() - zeros[:, of]) * scales[:, of]
    bias = torch.randn(outputs).bfloat16()
    makers = linears(FORMS[-1])
    narrow = makers.of_narrow(NarrowWeight(codes, scales, zeros, group), bias)
    x = torch.randn(600, inputs, generator=generator).bfloat16()
    expected = x.double() @ weight.double().T + bias
    whole = narrow(x)
    wide = makers.make(weight.bfloat16(), bias)(x)
    assert (whole - expected).norm() < min(
        0.002 * expected.norm(), (wide - expected).norm()
    )
    for threads, count in itertools.product((1, 2), COUNTS):
        with num_threads(threads):
            assert torch.equal(narrow(x[:count]), whole[:count])


WEIGHT = torch.randn(24, 96, generator=torch.Generator().manual_seed(1))


def in_order(rows: Tensor, weight: Tensor) -> Tensor:
    """Compute every sum in the order of the inner dimension, for any number of rows."""
    out = rows.new_zeros(len(rows), len(weight))
    for k in range(weight.shape[1]):
        out += rows[:, k, None] * weight[None, :, k]
    return out


def split_for(rows: Tensor, weight: Tensor, count: int) -> Tensor:
    """Two halves of the sum apart for `count` rows, as a library that splits it for few rows."""
    if len(rows) != count:
        return in_order(rows, weight)
    half = weight.shape[1] // 2
    return in_order(rows[:, :half], weight[:, :half]) + in_order(
        rows[:, half:], weight[:, half:]
    )


def test_a_product_with_one_order_keeps_its_bits():
    assert keeps_bits(in_order, WEIGHT)


def test_a_product_that_is_split_for_one_count_of_rows_is_found():
    for count in (1, 2, 128, 1024, 2048):
        assert not keeps_bits(
            lambda rows, weight, n=count: split_for(rows, weight, n), WEIGHT
        )


def test_a_layer_takes_the_library_only_where_it_keeps_bits():
    asked: list[tuple[int, ...]] = []

    def library(rows: Tensor, weight: Tensor) -> Tensor:
        asked.append(tuple(weight.shape))
        return split_for(rows, weight, 8 if len(weight) == 24 else 0)

    linears = OrderedLinears(in_order, 2, no_progress, library)
    bias = torch.arange(24.0)
    differs = linears.make(WEIGHT, bias)
    keeps = linears.make(WEIGHT[:16])
    assert (differs.ordered, keeps.ordered) == (in_order, library)
    assert differs.is_batch_invariant
    rows = torch.randn(40, 96, generator=torch.Generator().manual_seed(2))
    whole = differs(rows)
    assert torch.equal(whole, in_order(rows, WEIGHT) + bias)
    assert all(
        torch.equal(differs(rows[:count]), whole[:count]) for count in (1, 8, 39)
    )
    asked.clear()
    assert linears.make(2 * WEIGHT).ordered is in_order
    assert not asked  # one weight of a shape speaks for all


def test_a_load_examines_nothing_where_every_weight_takes_the_ordered_product():
    def progress(*_of: object) -> None:
        raise AssertionError("nothing takes time")

    linears = OrderedLinears(in_order, 2, progress)
    bias = torch.arange(24.0)
    layer = linears.make(WEIGHT, bias)
    assert layer.ordered is in_order
    assert layer.is_batch_invariant
    assert torch.equal(layer(WEIGHT), in_order(WEIGHT, WEIGHT) + bias)
