"""Prove the products on this GPU: right, and with the same bits for any rows, places and tiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from baton.kernels.cuda.fixed_product import has_fitting_sizes, one_chain_product
from baton.kernels.hopper.products.product import CAPABILITY, load_product
from baton.kernels.hopper.products.variants import (
    ANY_ROWS,
    CUDA,
    VARIANTS,
    Variant,
    class_of,
)
from baton.kernels.proofs import ModelShapes

# Rows of the largest product: more than a band of tiles, and few where a head makes them wide.
MOST_ROWS = 2200
HEAD_ROWS = 301
WIDE_COLUMNS = 65_536
# What the bf16 of a result and fp32 chains of the inner dimension may err.
ROUNDING = 2.0**-8
CHAIN_ERROR = 5e-5
CHECKED_ROWS = 48
CHECKED_COLUMNS = 8192
GUARD_ROWS = 8
GUARD = 7.0
UNWRITTEN = float("nan")

Product = Callable[[Tensor, Tensor], Tensor]


class AnyProduct(Protocol):
    """What is proven: `HopperProduct`, or what stands in for it."""

    has_cuda: bool

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor: ...

    def compute(self, name: str, x: Tensor, weight: Tensor, out: Tensor) -> None: ...


def missing_for(shapes: ModelShapes, capability: tuple[int, int]) -> str:
    """Return why the products cannot serve a model; empty if they can."""
    if capability != CAPABILITY:
        return "they need compute capability 9.0"
    if shapes.dtype != "bfloat16":
        return f"they multiply bfloat16, and the model computes in {shapes.dtype}"
    if not any(has_fitting_sizes(*linear) for linear in shapes.linears):
        return "no weight has outputs in eights and inputs in steps of 64"
    return ""


def prove(shapes: ModelShapes, device: str) -> str:
    """Return the first fault that products with weights of the model's shapes show."""
    product = load_product(torch.device(device))
    for columns, inner in dict.fromkeys(shapes.linears):
        if has_fitting_sizes(columns, inner):
            trial = ProductTrial(product, columns, inner, torch.device(device))
            if fault := trial.fault():
                return f"{fault} (a weight of {columns} x {inner})"
    return ""


class ProductTrial:
    """Random rows and a random weight of one shape, and what the widest tiles make of them."""

    def __init__(
        self,
        product: AnyProduct,
        columns: int,
        inner: int,
        device: torch.device,
        fallback: Product = one_chain_product,
    ) -> None:
        """`fallback` computes where the product is not proven, and must have its bits."""
        self._product = product
        self._fallback = fallback
        self._most = HEAD_ROWS if columns > WIDE_COLUMNS else MOST_ROWS
        self._counts = counts_for(columns, inner, self._most)
        generator = torch.Generator(device).manual_seed(columns + inner)
        weight = torch.empty(columns, inner, dtype=torch.bfloat16, device=device)
        weight.normal_(std=inner**-0.5, generator=generator)
        x = weight.new_empty(self._most, inner)
        x.normal_(generator=generator)
        # Outlying inputs, as models have them, and a row whose products are zeros of either sign.
        x[:, 5] *= 40
        x[1] = 0
        self._x = x
        self._weight = weight
        self._whole = torch.empty(0)

    def fault(self) -> str:
        """Return the first fault; empty if there is none."""
        self._whole, fault = self._guarded("g128x128", self._x)
        if fault or (fault := self._error()):
            return f"g128x128 {fault}"
        return next((fault for fault in self._faults() if fault), "")

    def _faults(self) -> Iterator[str]:
        for name, variant in VARIANTS.items():
            if self._product.has_cuda or name not in CUDA:
                yield from self._of_variant(name, variant)
        yield from self._of_any_rows("the table", self._product)
        yield from self._of_any_rows("Triton's kernel", self._fallback)

    def _of_variant(self, name: str, variant: Variant) -> Iterator[str]:
        """Compare few rows, as many as it takes or fill no tile, and the same ones again."""
        inner = self._x.shape[1]
        most = min(self._most, variant.max_rows or self._most)
        if not variant.takes(1, inner):
            return
        for count in dict.fromkeys((1, max(1, most - 1), most, most)):
            for first in self._starts(count):
                rows, fault = self._guarded(name, self._x[first : first + count])
                fault = fault or self._differs(rows, first)
                yield f"{name} {fault}" if fault else ""

    def _of_any_rows(self, name: str, product: Product) -> Iterator[str]:
        for count in self._counts:
            for first in self._starts(count):
                rows = product(self._x[first : first + count], self._weight)
                fault = self._differs(rows, first)
                yield f"{name} {fault}" if fault else ""

    def _starts(self, count: int) -> list[int]:
        """Return where to take rows: at the start, at an odd place in the middle, at the end."""
        rest = self._most - count
        return sorted({0, min(rest, rest // 3 | 1), rest})

    def _guarded(self, name: str, x: Tensor) -> tuple[Tensor, str]:
        """Return what a variant computes, and whether it leaves other rows alone."""
        out = x.new_full((len(x) + GUARD_ROWS, len(self._weight)), UNWRITTEN)
        out[len(x) :] = GUARD
        self._product.compute(name, x, self._weight, out[: len(x)])
        is_safe = bool((out[len(x) :] == GUARD).all())
        fault = "" if is_safe else f"writes behind the last of {len(x)} rows"
        return out[: len(x)], fault

    def _differs(self, rows: Tensor, first: int) -> str:
        """Return how rows differ from the same ones of the largest product; empty if not."""
        whole = self._whole[first : first + len(rows)]
        if torch.equal(rows.view(torch.int16), whole.view(torch.int16)):
            return ""
        differs = rows.view(torch.int16) != whole.view(torch.int16)
        row, column = (int(at) for at in differs.nonzero()[0])
        return (
            f"gives {int(differs.sum())} other bits with {len(rows)} rows from {first} on, "
            f"first in row {row} and column {column}"
        )

    def _error(self) -> str:
        """Return how the largest product differs from its reference in fp64; empty if not."""
        picked = torch.linspace(0, self._most - 1, CHECKED_ROWS).long().unique()
        x = self._x[picked.to(self._x.device)].double()
        got = self._whole[picked.to(self._x.device)]
        norms = x.norm(dim=1, keepdim=True)
        for start in range(0, len(self._weight), CHECKED_COLUMNS):
            columns = slice(start, start + CHECKED_COLUMNS)
            weight = self._weight[columns].double()
            wanted = x @ weight.T
            allowed = wanted.abs() * ROUNDING + CHAIN_ERROR * norms * weight.norm(dim=1)
            # A number that was not written is not within any bound either.
            is_right = (got[:, columns].double() - wanted).abs() <= allowed
            if not bool(is_right.all()):
                row, column = (int(at) for at in (~is_right).nonzero()[0])
                return f"is wrong in row {int(picked[row])} and column {start + column}"
        return ""


def counts_for(columns: int, inner: int, most: int) -> list[int]:
    """Return numbers of rows on both sides of every border of the table, and some between."""
    borders = [choice.max_rows for choice in class_of(columns, inner).choices]
    counts = {1, 2, 3, 7, 100, 300, most}
    for border in borders:
        if border != ANY_ROWS:
            counts |= {border, border + 1}
    return sorted(count for count in counts if count <= most)
