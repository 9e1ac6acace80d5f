"""The check at load tells products that keep a row's bits from products that do not."""

import torch
from torch import Tensor

from baton.engine.layers.product_rule import keeps_bits, weights_by_shape

WEIGHT = torch.randn(24, 96, generator=torch.Generator().manual_seed(1))


def in_order(rows: Tensor, weight: Tensor) -> Tensor:
    """Every sum in the order of the inner dimension, whatever the number of rows."""
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


def test_one_weight_of_each_shape_and_type_is_asked() -> None:
    weights = [torch.zeros(2, 3), torch.ones(2, 3), torch.zeros(3, 2), torch.zeros(2, 3).bfloat16()]
    assert len(weights_by_shape(weights)) == 3
