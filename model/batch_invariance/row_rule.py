"""Find how many rows of a linear layer may be computed at once, by trying it on this machine.

A matrix library may give a row other bits when other numbers of rows are computed with it. Which
numbers agree depends on the CPU, the dtype, the shape of the weight and the threads. `find_rule`
tries some numbers of rows, called tiles, and keeps a set of them that gives a row the same bits at
every place and beside every neighbour. `RowRule` then computes any number of rows as pieces of
exactly these sizes. No time is measured here, because two nodes on equal CPUs must choose the same.

`RowThreads` cuts the rows of a batch once for all operations between two attentions, so threads
wait for one another once a layer. Where a row has the same bits in every batch, cuts change none.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.kernels.cpu.threads import CpuThreads

RowProduct = Callable[[Tensor], Tensor]  # [num_rows, inputs] -> [num_rows, outputs]

TILES = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 64, 80, 96, 112, 128, 192, 256, 512)
FEW_TILES = (1, 16, 64, 256)
# A product that no library packs is slow here, as bf16 ones without AVX-512 are.
SLOW_TILES = (1, 2, 4, 8, 16, 32, 64, 256)
# The largest weights are tried with few tiles, so that the search stays short compared with
# loading.
MAX_SEARCH_FLOPS = 40e9
# Tiles up to this size are computed until each row has been at PASSES places and each place has
# held two rows, which shows that all places are alike. A larger tile is computed once and compared
# with these, so a set without any small tile proves nothing. Decoding needs a small tile as well.
SMALL_TILE = 64
PASSES = 4
ALIGNED_BYTES = 64

# A product costs as much as its rows plus this number of rows, because it always reads the whole
# weight. The number was measured as 10 to 40 on a CPU without AMX; with AMX it is probably several
# times that.
START_ROWS = 32
TYPICAL_ROWS = (1, 8, 64, 512)


@dataclass(slots=True, frozen=True)
class Trial:
    """A number of rows that gave each row of the pool the same bits at every place."""

    tile: int
    digest: bytes  # of the bits that the pool's rows got


class RowRule:
    """Tiles that give equal bits, and how to cut rows into them."""

    def __init__(
        self, trials: Sequence[Trial], *, is_single_threaded: bool = False
    ) -> None:
        self.tiles = tuple(trial.tile for trial in trials)
        self.digest = trials[0].digest
        self.is_single_threaded = is_single_threaded
        self._pieces = plan_pieces(self.tiles)

    def pieces(self, num_rows: int) -> tuple[int, ...]:
        """Return the pieces' sizes for `num_rows`, largest first; the last may have padding."""
        whole, rest = divmod(num_rows, self.tiles[-1])
        return (self.tiles[-1],) * whole + self._pieces[rest]

    def compute(self, product: RowProduct, x: Tensor) -> Tensor:
        """Return `product(x)` for at least one row, computed piece by piece."""
        if not self.is_single_threaded:
            return self._compute(product, x)
        with num_threads(1):
            return self._compute(product, x)

    def _compute(self, product: RowProduct, x: Tensor) -> Tensor:
        num_rows = x.shape[0]
        *whole, last = self.pieces(num_rows)
        if last == num_rows:
            return product(x)
        first = sum(whole)
        missing = first + last - num_rows
        end = product(F.pad(x[first:], (0, 0, 0, missing)) if missing else x[first:])
        if missing:
            end = end[:-missing]
        if not whole:
            return end
        parts = x[:first].split(whole)
        return torch.cat([*(product(part) for part in parts), end])


def find_rule(
    product: RowProduct,
    pool: Tensor,
    tiles: Sequence[int],
    thread_counts: Sequence[int] = (),
) -> RowRule | None:
    """Return the rule for `product`, tried with the rows of `pool`; None if there is none.

    There is none if no small tile gives a row the same bits at every place. The bits are those of
    one thread, so they do not depend on `engine.threads`. If no tile reproduces them with each of
    `thread_counts` (by default, this thread's number), the rule computes with one thread, because
    equal bits come before speed.
    """
    with num_threads(1):
        trials = _try_tiles(product, pool, tiles, PASSES)
    chosen = _best_class(trials)
    if not chosen:
        return None
    equal = chosen
    for count in set(thread_counts or [torch.get_num_threads()]) - {1}:
        with num_threads(count):
            # One pass is enough: the bits are compared with bits that are known to be right.
            again = _try_tiles(product, pool, [trial.tile for trial in equal], 1)
        equal = [trial for trial in again if trial.digest == chosen[0].digest]
        # Without a small tile every decode step would be padded to a large one.
        if not equal or equal[0].tile > SMALL_TILE:
            return RowRule(chosen, is_single_threaded=True)
    return RowRule(equal)


def tiles_for(
    outputs: int, inputs: int, max_rows: int, pool_size: int, *, is_slow: bool = False
) -> tuple[int, ...]:
    """Return the tiles to try for a weight that seldom gets more than `max_rows` at once."""
    tiles = [tile for tile in (SLOW_TILES if is_slow else TILES) if tile <= max_rows]
    num_rows = sum(_num_products(tile, pool_size, PASSES) * tile for tile in tiles)
    if 2.0 * outputs * inputs * num_rows > MAX_SEARCH_FLOPS:
        tiles = [tile for tile in FEW_TILES if tile <= max_rows]
    return tuple(tiles)


@cache
def plan_pieces(tiles: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return, for each number of rows up to the largest tile, the cheapest pieces."""
    best: list[tuple[int, tuple[int, ...]]] = [(0, ())]
    for num_rows in range(1, max(tiles) + 1):
        rests = [(tile, *best[max(0, num_rows - tile)]) for tile in tiles]
        best.append(
            min((tile + START_ROWS + cost, (tile, *rest)) for tile, cost, rest in rests)
        )
    return tuple(tuple(sorted(pieces, reverse=True)) for _, pieces in best)


@cache
def arrangement(pool_size: int, tile: int, passes: int) -> Tensor:
    """Return which row of the pool stands at each place of each product: `[num_products, tile]`."""
    num_products = _num_products(tile, pool_size, passes)
    generator = torch.Generator().manual_seed(tile)
    num_orders = -(-num_products * tile // pool_size)
    orders = [torch.randperm(pool_size, generator=generator) for _ in range(num_orders)]
    return torch.cat(orders)[: num_products * tile].view(num_products, tile)


@contextmanager
def num_threads(count: int) -> Iterator[None]:
    """Let torch compute with `count` threads in this thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _num_products(tile: int, pool_size: int, passes: int) -> int:
    if tile == 1 or passes == 1 or tile > SMALL_TILE:
        return -(-pool_size // tile)
    return max(2, -(-pool_size * passes // tile))


def _try_tiles(
    product: RowProduct, pool: Tensor, tiles: Sequence[int], passes: int
) -> tuple[Trial, ...]:
    trials = (
        _try_tile(product, pool, arrangement(len(pool), tile, passes)) for tile in tiles
    )
    return tuple(trial for trial in trials if trial is not None)


def _try_tile(product: RowProduct, pool: Tensor, arranged: Tensor) -> Trial | None:
    """Return None if a row got other bits at another place or beside other rows."""
    rows = []
    found = []
    tile = arranged.shape[1]
    # Pieces start at any row of a larger tensor, which is any multiple of a row's bytes.
    starts = (0, 1) if pool[0].nbytes % ALIGNED_BYTES else (0,)
    for places in arranged:
        for start in starts:
            x = pool.new_empty(start + tile, pool.shape[1])[start:]
            torch.index_select(pool, 0, places, out=x)
            found.append(product(x))
            rows.append(places)
    bits = torch.cat(found).view(torch.uint8)  # [all places, bytes]
    places = torch.cat(rows)
    of_row = bits.new_empty(len(pool), bits.shape[1])
    of_row[places] = bits
    if not torch.equal(of_row[places], bits):
        return None
    digest = hashlib.blake2b(of_row.numpy().tobytes(), digest_size=16).digest()
    return Trial(tile, digest)


def _best_class(trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials of equal bits that compute few and many rows at the least modelled cost."""
    classes: dict[bytes, list[Trial]] = {}
    for trial in trials:
        classes.setdefault(trial.digest, []).append(trial)
    proven = [each for each in classes.values() if each[0].tile <= SMALL_TILE]
    return min(
        proven,
        key=lambda each: _modelled_cost(tuple(trial.tile for trial in each)),
        default=[],
    )


def _modelled_cost(tiles: tuple[int, ...]) -> float:
    """Return the summed cost of typical numbers of rows, relative to products of exactly these."""
    largest = max(tiles)
    pieces = plan_pieces(tiles)
    total = 0.0
    for num_rows in TYPICAL_ROWS:
        whole, rest = divmod(num_rows, largest)
        used = (largest,) * whole + pieces[rest]
        total += sum(tile + START_ROWS for tile in used) / (num_rows + START_ROWS)
    return total


# Two of [num_rows, ...] to the same.
RowWork = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
ByRows = Callable[[RowWork, Tensor, Tensor], tuple[Tensor, Tensor]]

# Each thread reads all weights, so it needs rows for which that pays.
MIN_ROWS = 128


def at_once(work: RowWork, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    return work(x, residual)


class RowThreads:
    """A `ByRows` on as many threads as torch uses. One caller at a time."""

    def __init__(self) -> None:
        self._threads = CpuThreads()

    def __call__(
        self, work: RowWork, x: Tensor, residual: Tensor
    ) -> tuple[Tensor, Tensor]:
        num_rows = len(x)
        count = torch.get_num_threads()
        if count == 1 or num_rows < count * MIN_ROWS:
            return work(x, residual)
        parts: dict[int, tuple[Tensor, Tensor]] = {}

        def compute(first: int, end: int) -> None:
            with torch.inference_mode(), num_threads(1):
                parts[first] = work(x[first:end], residual[first:end])

        cuts = [num_rows * i // count for i in range(count + 1)]
        self._threads.run(compute, list(pairwise(cuts)))
        outputs, residuals = zip(*(parts[first] for first in cuts[:-1]), strict=True)
        return torch.cat(outputs), torch.cat(residuals)
