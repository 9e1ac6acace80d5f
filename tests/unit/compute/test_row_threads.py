"""Many rows are shared between threads, each of which takes its own through all operations."""

import pytest
import torch
from torch import Tensor

from baton.engine.compute.row_rule import MIN_ROWS, RowThreads, num_threads


@pytest.mark.parametrize(
    ("threads", "num_rows", "parts"),
    [(1, 500, 1), (3, 3 * MIN_ROWS - 1, 1), (3, 3 * MIN_ROWS, 3), (3, 1000, 3)],
)
def test_rows_are_cut_where_each_thread_gets_enough(
    threads: int, num_rows: int, parts: int
) -> None:
    seen: list[tuple[int, int]] = []

    def work(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        seen.append((len(x), torch.get_num_threads()))
        return torch.cat((x, residual), dim=1), residual + 1

    x, residual = torch.randn(num_rows, 4), torch.randn(num_rows, 3)
    with num_threads(threads):
        wide, more = RowThreads()(work, x, residual)
        assert torch.get_num_threads() == threads
    assert torch.equal(wide, torch.cat((x, residual), dim=1))
    assert torch.equal(more, residual + 1)
    assert len(seen) == parts
    assert sum(length for length, _ in seen) == num_rows
    assert parts == 1 or {count for _, count in seen} == {1}
