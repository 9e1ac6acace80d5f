"""What the layers of a step see of the pool on a device, where not all of them see the same.

A layer that attends within chunks sees sequences that begin where a chunk does, and one with wide
heads sees smaller blocks. So the kernels know neither.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from baton.model.layers.attention import Tables, WideHeads, most_parts
from baton.model.layers.hopper_attention import HopperAttention


@dataclass(slots=True)
class View:
    pool: Tensor  # [num_blocks, kv_heads, num_layers, 2 or 1, block_size, head_dim]
    tables: Tables
    slots: Tensor  # [num_tokens] int64: of the batch's tokens; -1: not stored
    hopper: HopperAttention | None = None  # that computes its attention


def tables_within(
    tables: Tables, size: int, block_size: int, num_tokens: int
) -> Tables:
    """Return the rows of a batch as those of sequences that begin at multiples of `size` tokens.

    This is `attention.within` on the device. Each sequence behind those that decode becomes as many
    as its rows may need, whatever their number is: `num_tokens` are those of the batch. What is
    left over has no rows. `block_size` divides `size`.
    """
    decoding = tables.num_decoding
    lens = tables.context_lens
    first = (lens[:decoding] - 1).clamp(min=0) // size * size
    firsts = [first]
    ends = [lens[:decoding]]
    starts = tables.query_starts
    if decoding < len(lens):
        own = lens[decoding:]
        lengths = starts[1:] - starts[:-1]
        begins = own - lengths
        numbers = torch.arange(
            most_parts(num_tokens - decoding, size),
            dtype=lens.dtype,
            device=lens.device,
        )
        cuts = ((begins // size)[:, None] + numbers) * size
        stops = torch.minimum(cuts + size, own[:, None])
        has_rows = torch.maximum(cuts, begins[:, None]) < stops
        rows = (cuts - begins[:, None]).clamp(min=0).minimum(lengths[:, None])
        firsts.append(cuts.where(has_rows, 0).flatten())
        ends.append(stops.where(has_rows, 0).flatten())
        starts = torch.cat(((starts[:-1, None] + rows).flatten(), starts[-1:]))
    first = torch.cat(firsts)
    num_parts = (len(first) - decoding) // max(len(lens) - decoding, 1)
    sequences = torch.arange(len(lens), device=lens.device)
    copies = torch.cat(
        (sequences[:decoding], sequences[decoding:].repeat_interleave(num_parts))
    )
    columns = torch.arange(
        min(size // block_size, tables.blocks.shape[1]), device=lens.device
    )
    places = (first // block_size)[:, None] + columns
    places = places.clamp(max=tables.blocks.shape[1] - 1)
    blocks = tables.blocks[copies[:, None], places]
    return Tables(blocks, torch.cat(ends) - first, starts, decoding, tables.states)


def tables_of_pieces(wide: WideHeads, pool: Tensor, tables: Tables) -> Tables:
    """Return tables of the blocks of `wide.view(pool)`."""
    pieces = torch.arange(
        wide.pieces(pool), dtype=torch.int32, device=tables.blocks.device
    )
    blocks = (tables.blocks * pool.shape[1])[:, :, None] + pieces
    return Tables(
        blocks.flatten(1),
        tables.context_lens,
        tables.query_starts,
        tables.num_decoding,
        tables.states,
    )
