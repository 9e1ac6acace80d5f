"""A matrix library whose order of summation is scripted: real fp32 sums, in any order asked for.

The finder of row rules is tested against it, because no machine has every library.
"""

from collections.abc import Callable, Container
from typing import NamedTuple

import torch
from torch import Tensor

from baton.model.batch_invariance.host_linears import trial_rows, trial_weight

INPUTS = 24
OUTPUTS = 8


class RowPosition(NamedTuple):
    """Where a row stands in a product."""

    num_rows: int
    place: int
    threads: int


OrderOf = Callable[[RowPosition], int]  # which order the sums of a row take


class ScriptedLibrary:
    """`product` adds each row's terms one by one, in the order that `order_of` names."""

    def __init__(self, order_of: OrderOf) -> None:
        self._order_of = order_of
        self.weight = trial_weight(OUTPUTS, INPUTS, torch.float32)
        self.pool = trial_rows(INPUTS, torch.float32)
        self.asked: list[int] = []  # the numbers of rows of all products

    def product(self, x: Tensor) -> Tensor:
        num_rows = len(x)
        threads = torch.get_num_threads()
        self.asked.append(num_rows)
        orders = [
            self._order_of(RowPosition(num_rows, place, threads))
            for place in range(num_rows)
        ]
        y = x.new_empty(num_rows, OUTPUTS)
        for number in set(orders):
            rows = [place for place, order in enumerate(orders) if order == number]
            y[rows] = self._summed(x[rows], number)
        return y

    def row(self, x: Tensor, order: int) -> Tensor:
        """The product of one row in that order."""
        return self._summed(x[None], order)[0]

    def _summed(self, x: Tensor, order: int) -> Tensor:
        columns = torch.randperm(
            INPUTS, generator=torch.Generator().manual_seed(order)
        ).tolist()
        total = x.new_zeros(len(x), OUTPUTS)
        for column in columns:
            total += x[:, column, None] * self.weight[:, column]
        return total


def differing(others: Container[int] = ()) -> OrderOf:
    """Order 1 for these numbers of rows, and order 0 for all that are not among them."""

    return lambda at: int(at.num_rows in others)
