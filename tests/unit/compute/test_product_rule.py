"""The check at load tells products that keep a row's bits from products that do not."""

import torch
from torch import Tensor

from baton.engine.compute.linear import OrderedLinears, keeps_bits
from tests.support.compute import no_progress

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
    return in_order(rows[:, :half], weight[:, :half]) + in_order(rows[:, half:], weight[:, half:])


def test_a_product_with_one_order_keeps_its_bits() -> None:
    assert keeps_bits(in_order, WEIGHT)


def test_a_product_that_is_split_for_one_count_of_rows_is_found() -> None:
    for count in (1, 2, 128, 1024, 2048):
        assert not keeps_bits(lambda rows, weight, n=count: split_for(rows, weight, n), WEIGHT)


def test_a_layer_takes_the_library_only_where_it_keeps_bits() -> None:
    asked: list[tuple[int, ...]] = []

    def library(rows: Tensor, weight: Tensor) -> Tensor:
        asked.append(tuple(weight.shape))
        return split_for(rows, weight, 8 if len(weight) == 24 else 0)

    linears = OrderedLinears(in_order, 2, no_progress, library)
    bias = torch.arange(24.0)
    differs, keeps = linears.make(WEIGHT, bias), linears.make(WEIGHT[:16])
    assert (differs.ordered, keeps.ordered) == (in_order, library)
    assert differs.is_batch_invariant
    rows = torch.randn(40, 96, generator=torch.Generator().manual_seed(2))
    whole = differs(rows)
    assert torch.equal(whole, in_order(rows, WEIGHT) + bias)
    assert all(torch.equal(differs(rows[:count]), whole[:count]) for count in (1, 8, 39))
    asked.clear()
    assert linears.make(2 * WEIGHT).ordered is in_order
    assert not asked  # one weight of a shape speaks for all
