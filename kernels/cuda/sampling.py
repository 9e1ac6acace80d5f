"""Sample tokens from logits on a GPU with five kernels, without the host.

The first kernel takes the largest logit of every 64. The second reads the logits again for rows
that need the sum of all weights or that draw without a filter. The third, with one program per row,
gathers the few tokens that a filter may keep. Where top-p keeps too many for that, it brackets the
edge, and the fourth reads the logits once more. The last picks a token. No shape depends on what
was drawn.

It works under CUDA graph capture. The compiled CPU kernel does the same operations in fp32 and
gives the same token for the same logits; the torch code of the engine's `Sampler` defines it.
"""

import torch
from torch import Tensor

from baton.kernels.constants import ROW_INTS, ROW_REALS
from baton.kernels.cuda.filters import WIDTH
from baton.kernels.cuda.nucleus import CAPACITY
from baton.kernels.cuda.sampling_kernels import (
    choose_kernel,
    gather_kernel,
    scan_kernel,
    sweep_kernel,
    weigh_kernel,
)
from baton.kernels.launch import Launcher, cdiv, next_power_of_2

CHUNK = 4096  # logits of one program of the kernels that read all

_launch_scan = Launcher(scan_kernel)
_launch_weigh = Launcher(weigh_kernel)
_launch_gather = Launcher(gather_kernel)
_launch_sweep = Launcher(sweep_kernel)
_launch_choose = Launcher(choose_kernel)


def sample_tokens(
    logits: Tensor,  # [num_rows, vocab] fp32 or bf16
    ints: Tensor,  # [num_rows, ROW_INTS] int64: seed, choice, position, top_k
    reals: Tensor,  # [num_rows, ROW_REALS] float64: temperature, log of min_p, top_p
    # [num_rows, width] int32: ids that must not be drawn; -1 names none.
    held_back: Tensor,
    changed: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Return one token id for each row, `[num_rows]` int64, on the device.

    `changed` has other logits, `[num_rows, vocab]` fp32, for rows whose number in `[num_rows, 2]`
    int32 is not negative: those of `token_counts`, which bf16 would round.
    The logits of the ids that must not be drawn are overwritten with minus infinity. A temperature
    below `constants.MIN_TEMPERATURE` is greedy and takes the lowest id among equals; it ignores the
    filters and costs least, so it suits the padding rows of a captured graph.
    """
    num_rows, vocab = logits.shape
    assert logits.stride(1) == 1, "the logits of a row are contiguous"
    assert (ints.shape, ints.dtype) == ((num_rows, ROW_INTS), torch.int64)
    assert (reals.shape, reals.dtype) == ((num_rows, ROW_REALS), torch.float64)
    assert (len(held_back), held_back.dtype) == (num_rows, torch.int32)
    assert all(given.is_contiguous() for given in (ints, reals, held_back))
    tiles = cdiv(vocab, WIDTH.value)
    chunks = cdiv(vocab, CHUNK)
    new = logits.new_empty
    tile_tops = new((num_rows, tiles), dtype=torch.float32)
    tile_sums = new((num_rows, tiles), dtype=torch.int64)
    tops, raced = new((2, num_rows, chunks), dtype=torch.float32)
    top_ids, raced_ids = new((2, num_rows, chunks), dtype=torch.int32)
    above = new((num_rows, chunks), dtype=torch.int64)
    places = new((num_rows, tiles), dtype=torch.int32)
    kept = new((num_rows, CAPACITY.value), dtype=torch.float32)
    kept_ids = new((num_rows, CAPACITY.value), dtype=torch.int32)
    shares = new(num_rows, dtype=torch.int64)
    nums = new((num_rows, 4), dtype=torch.int32)
    floors = new(num_rows, dtype=torch.float32)
    tokens = new(num_rows, dtype=torch.int64)
    padded = max(16, next_power_of_2(chunks))
    # Without any, other tensors of these types stand for them, which nothing reads.
    others = (tile_tops, held_back, 0) if changed is None else (*changed, 1)
    assert others[0].is_contiguous()
    assert others[1].is_contiguous()
    _launch_scan(
        (chunks, num_rows, 1),
        logits,
        *others,
        held_back,
        tile_tops,
        tops,
        top_ids,
        vocab,
        tiles,
        held_back.shape[1],
        logits.stride(0),
        CHUNK=CHUNK,
        num_warps=4,
        num_stages=1,
        enable_fp_fusion=False,
    )
    _launch_weigh(
        (chunks, num_rows, 1),
        logits,
        *others,
        ints,
        reals,
        tops,
        tile_sums,
        raced,
        raced_ids,
        vocab,
        tiles,
        logits.stride(0),
        CHUNK=CHUNK,
        CHUNKS=padded,
        num_warps=4,
        num_stages=2,
        enable_fp_fusion=False,
    )
    _launch_gather(
        (num_rows, 1, 1),
        logits,
        *others,
        ints,
        reals,
        tops,
        tile_tops,
        tile_sums,
        places,
        kept,
        kept_ids,
        shares,
        nums,
        floors,
        vocab,
        tiles,
        chunks,
        logits.stride(0),
        CHUNKS=padded,
        TILES=max(16, next_power_of_2(tiles)),
        num_warps=16,
        num_stages=1,
        enable_fp_fusion=False,
    )
    _launch_sweep(
        (chunks, num_rows, 1),
        logits,
        *others,
        ints,
        reals,
        tops,
        nums,
        floors,
        kept,
        kept_ids,
        above,
        raced,
        raced_ids,
        vocab,
        chunks,
        logits.stride(0),
        CHUNK=CHUNK,
        CHUNKS=padded,
        num_warps=4,
        num_stages=1,
        enable_fp_fusion=False,
    )
    _launch_choose(
        (num_rows, 1, 1),
        logits,
        *others,
        ints,
        reals,
        tops,
        top_ids,
        above,
        raced,
        raced_ids,
        kept,
        kept_ids,
        shares,
        nums,
        tokens,
        vocab,
        chunks,
        logits.stride(0),
        CHUNKS=padded,
        num_warps=16,
        num_stages=1,
        enable_fp_fusion=False,
    )
    return tokens
