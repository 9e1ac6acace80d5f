"""The tiles of products, and the table that chooses them by the weight's shape and the rows.

All variants compute each number as one chain over the whole inner dimension, so a choice changes
no bit. The table holds what was fastest on an H200 beside cuBLAS; other cards of compute capability
9.0 take it as well. A shape between those that were measured has the row of the next wider one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PANEL_INPUTS = 64
PANEL_BYTES = 128
GROUP_ROWS = 64
SHARED_BYTES = 227 << 10  # that the programs of a multiprocessor may use
MAX_STAGES = {"cuda": 16, "gluon": 12}

Shared = Literal["", "x", "weight"]


@dataclass(slots=True, frozen=True)
class Variant:
    """The tile of a program, `64 * groups` rows by `columns`, and how it is filled."""

    route: Literal["cuda", "gluon"]
    groups: int  # warpgroups that multiply, of 64 rows each
    columns: int
    box: int  # rows of x that are loaded, which bound the rows if there is one group
    panels: int = 1  # of 64 inputs in a step
    shares: Shared = ""  # what the programs of a cluster load together
    cluster: int = 1
    per_multiprocessor: int = 1
    band: int = 16  # tiles of rows that share a tile of the weight in the L2 cache

    @property
    def rows(self) -> int:
        return GROUP_ROWS * self.groups

    @property
    def max_rows(self) -> int | None:
        """Return how many rows it takes; None: any number."""
        return self.box if self.box < self.rows else None

    @property
    def stored_rows(self) -> int:
        """Return for how many rows of x a stage has memory."""
        return self.box if self.route == "cuda" else self.rows

    @property
    def stage_bytes(self) -> int:
        return (self.stored_rows + self.columns) * self.panels * PANEL_BYTES

    @property
    def stages(self) -> int:
        """Return how many steps may be in flight."""
        room = SHARED_BYTES // self.per_multiprocessor - 1024
        if self.route == "cuda":
            room -= 2048 + self.read_on_bytes
        else:
            room -= 5120 if self.columns >= 64 else 1024
        return min(MAX_STAGES[self.route], room // self.stage_bytes)

    @property
    def read_on_bytes(self) -> int:
        """Return the bytes behind the last stage that a group of few rows reads in CUDA C++."""
        is_short = self.groups == 1
        return (GROUP_ROWS - self.stored_rows) * PANEL_BYTES if is_short else 0

    @property
    def shared_bytes(self) -> int:
        """Return what a program of CUDA C++ asks for, barriers and alignment included."""
        assert self.route == "cuda"
        stages = self.stages * (self.stage_bytes + 16)
        return stages + self.read_on_bytes + 1024

    @property
    def threads(self) -> int:
        """Return the threads of a program of CUDA C++."""
        return self.groups * 128 + (128 if self.groups == 2 else 32)

    @property
    def x_box(self) -> int:
        return self.box // self.cluster if self.shares == "x" else self.box

    @property
    def weight_box(self) -> int:
        return self.columns // self.cluster if self.shares == "weight" else self.columns

    def takes(self, rows: int, inner: int) -> bool:
        """Return whether it can compute `rows` with weights of `inner` inputs."""
        fits = self.max_rows is None or rows <= self.max_rows
        return fits and inner % (PANEL_INPUTS * self.panels) == 0


# The names say the route, rows by columns, rows of x that are loaded (r), what a cluster of how
# many programs shares (x, w), and two programs on a multiprocessor (d).
CUDA = {
    "c64x8_r32": Variant("cuda", 1, 8, 32, panels=4),
    "c64x32_r8_d": Variant("cuda", 1, 32, 8, panels=2, per_multiprocessor=2),
    "c64x48_r8": Variant("cuda", 1, 48, 8, panels=4),
    "c64x96_r8": Variant("cuda", 1, 96, 8, panels=2),
    "c64x32_r32": Variant("cuda", 1, 32, 32, panels=2),
    "c64x48_r32": Variant("cuda", 1, 48, 32, panels=2),
    "c64x96_r32": Variant("cuda", 1, 96, 32, panels=2),
    "c64x192_r32": Variant("cuda", 1, 192, 32),
    "c64x64_r32_x2": Variant("cuda", 1, 64, 32, 2, "x", 2),
    "c64x48_x4": Variant("cuda", 1, 48, 64, 2, "x", 4),
    "c64x96_x2": Variant("cuda", 1, 96, 64, 2, "x", 2),
    "c64x64_w2": Variant("cuda", 1, 64, 64, 2, "weight", 2),
    "c128x128_w2": Variant("cuda", 2, 128, 128, 1, "weight", 2),
    "c128x192": Variant("cuda", 2, 192, 128),
}
GLUON = {
    "g64x32_r16": Variant("gluon", 1, 32, 16, panels=2),
    "g64x128_r16": Variant("gluon", 1, 128, 16, panels=2),
    "g64x32": Variant("gluon", 1, 32, 64, panels=2),
    "g64x128": Variant("gluon", 1, 128, 64, panels=2),
    "g128x64": Variant("gluon", 2, 64, 128),
    "g128x128": Variant("gluon", 2, 128, 128),
    "g128x256": Variant("gluon", 2, 256, 128),
}
VARIANTS = CUDA | GLUON
# For inner dimensions that are no multiple of the steps of the table's choice.
ANY_INNER = "g128x64"
ANY_ROWS = 1 << 31


@dataclass(slots=True, frozen=True)
class VariantChoice:
    """The variants for up to `max_rows`: the fastest, and the fastest in Gluon."""

    max_rows: int
    best: str
    gluon: str


@dataclass(slots=True, frozen=True)
class ShapeClass:
    """Weights of up to `max_columns` outputs and more than `min_inner` inputs."""

    max_columns: int
    min_inner: int
    choices: tuple[VariantChoice, ...]


# With few rows each of 132 multiprocessors should have one tile, which sets the borders.
TABLE = (
    ShapeClass(
        132 * 8,  # 1,024 was measured
        0,
        (
            VariantChoice(16, "g64x32_r16", "g64x32_r16"),
            VariantChoice(32, "c64x8_r32", "g64x32"),
            VariantChoice(128, "g64x32", "g64x32"),
            VariantChoice(512, "c64x64_w2", "g128x64"),
            VariantChoice(ANY_ROWS, "g128x128", "g128x128"),
        ),
    ),
    ShapeClass(
        132 * 32,  # 4,096 by 12,288
        8192,
        (
            VariantChoice(8, "c64x32_r8_d", "g64x32_r16"),
            VariantChoice(16, "g64x32_r16", "g64x32_r16"),
            VariantChoice(32, "c64x32_r32", "g64x32"),
            VariantChoice(64, "c64x48_x4", "g64x32"),
            VariantChoice(128, "c64x64_w2", "g128x64"),
            VariantChoice(256, "g128x64", "g128x64"),
            VariantChoice(512, "c128x128_w2", "g128x128"),
            VariantChoice(ANY_ROWS, "g128x128", "g128x128"),
        ),
    ),
    ShapeClass(
        132 * 32,  # 4,096 by 4,096
        0,
        (
            VariantChoice(8, "c64x32_r8_d", "g64x32_r16"),
            VariantChoice(32, "c64x32_r32", "g64x32"),
            VariantChoice(64, "g64x32", "g64x32"),
            VariantChoice(128, "c64x64_w2", "g128x64"),
            VariantChoice(256, "g128x64", "g128x64"),
            VariantChoice(512, "c128x128_w2", "g128x64"),
            VariantChoice(ANY_ROWS, "g128x128", "g128x128"),
        ),
    ),
    ShapeClass(
        132 * 48,  # 6,144
        0,
        (
            VariantChoice(8, "c64x48_r8", "g64x128_r16"),
            VariantChoice(16, "c64x48_r32", "g64x128_r16"),
            VariantChoice(32, "c64x48_r32", "g64x128"),
            VariantChoice(64, "c64x96_x2", "g64x128"),
            VariantChoice(128, "g64x128", "g64x128"),
            VariantChoice(256, "g128x128", "g128x128"),
            VariantChoice(512, "c128x192", "g128x64"),
            VariantChoice(ANY_ROWS, "g128x128", "g128x128"),
        ),
    ),
    ShapeClass(
        132 * 96,  # not measured: tiles for widths of half as many columns as the next
        0,
        (
            VariantChoice(8, "c64x96_r8", "g64x128_r16"),
            VariantChoice(16, "c64x96_r32", "g64x128_r16"),
            VariantChoice(32, "c64x96_r32", "g64x128"),
            VariantChoice(64, "c64x96_x2", "g64x128"),
            VariantChoice(128, "g64x128", "g64x128"),
            VariantChoice(ANY_ROWS, "g128x128", "g128x128"),
        ),
    ),
    ShapeClass(
        65_536,  # 24,576
        0,
        (
            VariantChoice(16, "c64x192_r32", "g64x128_r16"),
            VariantChoice(32, "c64x96_r32", "g64x128"),
            VariantChoice(64, "c64x96_x2", "g64x128"),
            VariantChoice(128, "c128x192", "g64x128"),
            VariantChoice(2048, "g128x128", "g128x128"),
            VariantChoice(ANY_ROWS, "g128x256", "g128x256"),
        ),
    ),
    ShapeClass(
        ANY_ROWS,  # 151,936, a head
        0,
        (
            VariantChoice(16, "g64x128_r16", "g64x128_r16"),
            VariantChoice(32, "c64x64_r32_x2", "g64x128"),
            VariantChoice(128, "c128x192", "g128x128"),
            VariantChoice(ANY_ROWS, "g128x256", "g128x256"),
        ),
    ),
)


def class_of(columns: int, inner: int) -> ShapeClass:
    return next(
        row for row in TABLE if columns <= row.max_columns and inner > row.min_inner
    )


def choose(rows: int, columns: int, inner: int, *, has_cuda: bool) -> str:
    """Return the name of the variant for `rows` with a weight `[columns, inner]`."""
    choices = class_of(columns, inner).choices
    choice = next(choice for choice in choices if rows <= choice.max_rows)
    name = choice.best if has_cuda else choice.gluon
    return name if VARIANTS[name].takes(rows, inner) else ANY_INNER


def names_for(columns: int, inner: int, *, has_cuda: bool) -> tuple[str, ...]:
    """Return all variants that a weight of this shape may need, each of them once."""
    names = (
        choose(choice.max_rows, columns, inner, has_cuda=has_cuda)
        for choice in class_of(columns, inner).choices
    )
    return tuple(dict.fromkeys(names))


@dataclass(slots=True, frozen=True)
class Grid:
    """How a variant covers the output: tiles along rows and columns, and programs."""

    tiles_m: int
    tiles_n: int
    steps: int
    programs: int


def grid_of(
    variant: Variant, rows: int, columns: int, inner: int, multiprocessors: int
) -> Grid:
    tiles_m = -(-rows // variant.rows)
    tiles_n = -(-columns // variant.columns)
    units_m = -(-tiles_m // variant.cluster) if variant.shares == "weight" else tiles_m
    units_n = -(-tiles_n // variant.cluster) if variant.shares == "x" else tiles_n
    slots = multiprocessors * variant.per_multiprocessor // variant.cluster
    # Clusters of four do not fill a GPC whose multiprocessors are no multiple of four.
    slots -= variant.cluster == 4
    programs = max(1, min(units_m * units_n, slots)) * variant.cluster
    steps = inner // (PANEL_INPUTS * variant.panels)
    return Grid(tiles_m, tiles_n, steps, programs)
