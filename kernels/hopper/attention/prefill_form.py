"""What the parts of the prefill kernel share: its form, its memory, and how threads hold tiles."""

# ruff: noqa: N803, PLR0913, PLR0917
# Compile-time values are in capitals, as in Triton's own code.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate


@aggregate
class Form:
    """What is fixed when the kernel is compiled."""

    HEAD_DIM: gl.constexpr
    DIM: gl.constexpr  # the head size of a tile: a multiple of 64
    GROUP: gl.constexpr  # heads that share a KV head
    PACK: gl.constexpr  # heads of a tile: 1, or a group and its padding
    WARPGROUPS: gl.constexpr
    STAGES: gl.constexpr
    KEYS: gl.constexpr
    PAGE: gl.constexpr
    WINDOWED: gl.constexpr
    CAPPED: gl.constexpr
    SINKS: gl.constexpr
    CUTS: gl.constexpr
    LATENT: gl.constexpr
    FP8: gl.constexpr  # the pool, whose codes a warpgroup widens
    PINGPONG: gl.constexpr  # the warpgroups begin their products in turns

    @gluon.constexpr_function
    def __init__(
        self,
        HEAD_DIM: int,
        DIM: int,
        GROUP: int,
        PACK: int,
        WARPGROUPS: int,
        STAGES: int,
        KEYS: int,
        PAGE: int,
        WINDOWED: bool,
        CAPPED: bool,
        SINKS: bool,
        CUTS: bool,
        LATENT: bool,
        FP8: bool,
    ) -> None:
        self.HEAD_DIM = gl.constexpr(HEAD_DIM)
        self.DIM = gl.constexpr(DIM)
        self.GROUP = gl.constexpr(GROUP)
        self.PACK = gl.constexpr(PACK)
        self.WARPGROUPS = gl.constexpr(WARPGROUPS)
        self.STAGES = gl.constexpr(STAGES)
        self.KEYS = gl.constexpr(KEYS)
        self.PAGE = gl.constexpr(PAGE)
        self.WINDOWED = gl.constexpr(WINDOWED)
        self.CAPPED = gl.constexpr(CAPPED)
        self.SINKS = gl.constexpr(SINKS)
        self.CUTS = gl.constexpr(CUTS)
        self.LATENT = gl.constexpr(LATENT)
        self.FP8 = gl.constexpr(FP8)
        self.PINGPONG = gl.constexpr(WARPGROUPS == 2)


@aggregate
class Inputs:
    """What all partitions of a program read."""

    plan: gl.tensor
    window: gl.tensor
    scale: gl.tensor
    cap: gl.tensor

    @gluon.constexpr_function
    def __init__(
        self, plan: gl.tensor, window: gl.tensor, scale: gl.tensor, cap: gl.tensor
    ) -> None:
        self.plan = plan
        self.window = window
        self.scale = scale
        self.cap = cap


@aggregate
class Carried:
    """What launches leave of rows that have more keys to see."""

    out: gl.tensor  # [num_tokens, num_heads, DIM] fp32
    sums: gl.tensor  # [num_tokens, num_heads, 2] fp32: maxima and sums

    @gluon.constexpr_function
    def __init__(self, out: gl.tensor, sums: gl.tensor) -> None:
        self.out = out
        self.sums = sums


@aggregate
class Shared:
    """Tiles in shared memory, and the barriers that say which are full and which are empty."""

    q: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    # The last numbers of queries and keys, if all heads share those of keys.
    q_turned: gl.shared_memory_descriptor
    k_turned: gl.shared_memory_descriptor
    total: gl.shared_memory_descriptor  # of the cuts before the present one
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    k_empty: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    v_empty: gl.shared_memory_descriptor
    turn: gl.shared_memory_descriptor  # whose products come next
    tail: gl.shared_memory_descriptor  # the values of a context's last tile

    @gluon.constexpr_function
    def __init__(
        self,
        q: gl.shared_memory_descriptor,
        k: gl.shared_memory_descriptor,
        v: gl.shared_memory_descriptor,
        q_turned: gl.shared_memory_descriptor,
        k_turned: gl.shared_memory_descriptor,
        total: gl.shared_memory_descriptor,
        q_full: gl.shared_memory_descriptor,
        q_empty: gl.shared_memory_descriptor,
        k_full: gl.shared_memory_descriptor,
        k_empty: gl.shared_memory_descriptor,
        v_full: gl.shared_memory_descriptor,
        v_empty: gl.shared_memory_descriptor,
        turn: gl.shared_memory_descriptor,
        tail: gl.shared_memory_descriptor,
    ) -> None:
        self.q = q
        self.k = k
        self.v = v
        self.q_turned = q_turned
        self.k_turned = k_turned
        self.total = total
        self.q_full = q_full
        self.q_empty = q_empty
        self.k_full = k_full
        self.k_empty = k_empty
        self.v_full = v_full
        self.v_empty = v_empty
        self.turn = turn
        self.tail = tail


@gluon.constexpr_function
def products(columns: int) -> gl.NVMMADistributedLayout:
    """The layout of a warpgroup's product `[64, columns]`."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16]
    )


@gluon.constexpr_function
def out_layout(dim: int, has_room: bool) -> gl.DistributedLinearLayout:
    """The layout in which results are stored: rows are where the products have them.

    A thread has eight neighbours of a row. Where shared memory has no room for an exchange it has
    four, which come from the products' by one exchange of lanes.
    """
    if not has_room:
        panels = [[0, n] for n in (16, 32, 64, 128) if n < dim]
        return gl.DistributedLinearLayout(
            [[0, 1], [0, 2], [8, 0], *panels],
            [[0, 8], [0, 4], [1, 0], [2, 0], [4, 0]],
            [[16, 0], [32, 0]],
            [],
            [64, dim],
        )
    panels = [[0, 32]] + [[0, n] for n in (64, 128) if n < dim]
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0], *panels],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, dim],
    )
