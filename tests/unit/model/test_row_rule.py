"""The finder of row rules, against libraries that add in other orders for other numbers of rows."""

import hashlib
import itertools

import pytest
import torch
from torch import Tensor

from baton.model.batch_invariance.host_linears import (
    NUM_ROWS,
    trial_bias,
    trial_rows,
    trial_weight,
)
from baton.model.batch_invariance.row_rule import (
    FEW_TILES,
    MIN_ROWS,
    SLOW_TILES,
    SMALL_TILE,
    TILES,
    RowRule,
    RowThreads,
    Trial,
    find_rule,
    num_threads,
)
from tests.support.scripted_library import (
    OrderOf,
    RowPosition,
    ScriptedLibrary,
    differing,
)


@pytest.fixture(autouse=True)
def one_thread():
    with num_threads(1):
        yield


def found(order_of: OrderOf, threads: int = 1) -> RowRule | None:
    library = ScriptedLibrary(order_of)
    with num_threads(threads):
        return find_rule(library.product, library.pool, TILES)


def tiles(order_of: OrderOf, threads: int = 1) -> tuple[int, ...]:
    rule = found(order_of, threads)
    assert rule is not None
    return rule.tiles


# On an Intel CPU with AMX, products of these numbers of rows did not share their bits with products
# of 600; each line is a dtype or a shape.
@pytest.mark.parametrize(
    "others",
    [
        range(1, 16),
        range(1, 9),
        range(20, 37),
        range(2, 37),
        range(33, 301),
        range(96, 401),
        (),
    ],
    ids=str,
)
def test_the_set_of_tiles_that_serves_few_and_many_rows_is_preferred(others):
    assert tiles(differing(others)) == tuple(
        tile for tile in TILES if tile not in others
    )


def test_a_library_that_never_repeats_itself_has_no_rule():
    counter = itertools.count()
    assert found(lambda _: next(counter)) is None


@pytest.mark.parametrize("odd_place", [0, 1, -1])
def test_a_tile_with_one_place_that_adds_otherwise_is_left_out(odd_place):
    def order_of(at: RowPosition) -> int:
        return int(at.num_rows in (4, 32, 128) and at.place == odd_place % at.num_rows)

    assert tiles(order_of) == tuple(tile for tile in TILES if tile not in (4, 32, 128))


def test_neighbours_that_change_bits_are_noticed():
    library = ScriptedLibrary(differing())

    def product(x: Tensor) -> Tensor:
        y = library.product(x)
        # As if a row's sums had been joined with those of the row before.
        if len(x) == 8:
            y += x.roll(1, 0).sum(dim=1, keepdim=True) * 1e-6
        return y

    rule = find_rule(product, library.pool, TILES)
    assert rule is not None
    assert rule.tiles == tuple(tile for tile in TILES if tile != 8)


def test_large_tiles_prove_nothing_by_themselves():
    """A product of one row has an order of its own here, and that alone is a rule."""
    library = ScriptedLibrary(
        lambda at: 0 if at.num_rows > SMALL_TILE else 1 + at.place
    )
    rule = find_rule(library.product, library.pool, TILES)
    assert rule is not None
    assert rule.tiles == (1,)
    assert find_rule(library.product, library.pool, TILES[1:]) is None


def test_only_tiles_that_repeat_the_bits_of_one_thread_are_kept_with_several():
    def order_of(at: RowPosition) -> int:
        return int(at.threads > 1 and at.num_rows < 16)

    rule = found(order_of, threads=2)
    assert rule is not None
    assert rule.tiles == tuple(tile for tile in TILES if tile >= 16)
    assert not rule.is_single_threaded
    alone = found(order_of)
    assert alone is not None
    assert alone.digest == rule.digest


def test_one_thread_computes_where_several_never_repeat_its_bits():
    library = ScriptedLibrary(lambda at: at.threads)
    with num_threads(2):
        rule = find_rule(library.product, library.pool, TILES)
        assert rule is not None
        assert rule.is_single_threaded
        x = library.pool[:5]
        y = rule.compute(library.product, x)
        assert torch.get_num_threads() == 2
    assert all(torch.equal(y[i], library.row(x[i], order=1)) for i in range(5))


@pytest.mark.parametrize(
    "num_rows", [*range(1, 18), 31, 33, 64, 65, 100, 255, 511, 512, 513, 600, 1100]
)
@pytest.mark.parametrize("others", [range(1, 16), range(33, 301), range(2, 37)])
def test_any_number_of_rows_is_computed_to_the_same_bits(num_rows, others):
    library = ScriptedLibrary(differing(others))
    rule = find_rule(library.product, library.pool, TILES)
    assert rule is not None
    library.asked.clear()
    x = library.pool[torch.arange(num_rows) % NUM_ROWS]
    y = rule.compute(library.product, x)
    assert set(library.asked) <= set(rule.tiles)
    alone = torch.cat(
        [rule.compute(library.product, library.pool[i : i + 1]) for i in range(8)]
    )
    assert torch.equal(y, alone[torch.arange(num_rows) % NUM_ROWS])


def rule_of(*tiles: int) -> RowRule:
    return RowRule([Trial(tile, b"") for tile in tiles])


@pytest.mark.parametrize(
    "some", [TILES, FEW_TILES, SLOW_TILES, (16,), (1, 512), (24, 96)]
)
def test_pieces_hold_all_rows_and_none_holds_padding_alone(some):
    rule = rule_of(*some)
    for num_rows in range(1, 2 * max(some) + 40):
        pieces = rule.pieces(num_rows)
        assert list(pieces) == sorted(pieces, reverse=True)
        assert sum(pieces) - pieces[-1] < num_rows <= sum(pieces)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inputs", [64, 171, 512])
def test_another_order_of_the_sum_shows_in_nearly_every_output(dtype, inputs):
    weight = trial_weight(100, inputs, dtype)
    rows = trial_rows(inputs, dtype)
    exact = rows.double() @ weight.double().T
    largest = rows.double().abs() @ weight.double().abs().T
    assert (exact.abs() < 1e-12 * largest).all()
    orders = [
        torch.randperm(inputs, generator=torch.Generator().manual_seed(i))
        for i in (0, 1)
    ]
    one, other = (
        sum(
            (rows[:, k, None].float() * weight[:, k].float() for k in order),
            torch.zeros(8, 100),
        )
        for order in orders
    )
    assert (one.to(dtype) != other.to(dtype)).float().mean() > 0.9
    assert (trial_bias(100, dtype).float().abs() < 100 * one.abs().mean()).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_trial_data_holds_the_same_numbers_on_every_machine(dtype):
    """Two nodes compare digests of what they compute from it."""
    numbers = torch.cat(
        (trial_weight(70, 33, dtype).flatten(), trial_rows(33, dtype).flatten())
    )
    digest = hashlib.sha256(numbers.float().numpy().tobytes()).hexdigest()[:16]
    assert (
        digest
        == {torch.float32: "b8a621c56dd720a9", torch.bfloat16: "58a15bed8931345e"}[
            dtype
        ]
    )


@pytest.mark.parametrize(
    ("threads", "num_rows", "parts"),
    [(1, 500, 1), (3, 3 * MIN_ROWS - 1, 1), (3, 3 * MIN_ROWS, 3), (3, 1000, 3)],
)
def test_rows_are_cut_where_each_thread_gets_enough(threads, num_rows, parts):
    seen: list[tuple[int, int]] = []

    def work(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        seen.append((len(x), torch.get_num_threads()))
        return torch.cat((x, residual), dim=1), residual + 1

    x = torch.randn(num_rows, 4)
    residual = torch.randn(num_rows, 3)
    with num_threads(threads):
        wide, more = RowThreads()(work, x, residual)
        assert torch.get_num_threads() == threads
    assert torch.equal(wide, torch.cat((x, residual), dim=1))
    assert torch.equal(more, residual + 1)
    assert len(seen) == parts
    assert sum(length for length, _ in seen) == num_rows
    assert parts == 1 or {count for _, count in seen} == {1}
