"""What the layers of a step see of the pool on a device, where not all of them see the same.

A layer that attends within chunks sees sequences that begin where a chunk does, and one with wide
heads sees smaller blocks. So the kernels know neither.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from baton.model.layers.attention import DecodeRows, Tables, WideHeads, most_parts
from baton.model.layers.hopper_attention import HopperAttention


@dataclass(slots=True)
class View:
    pool: Tensor  # [num_blocks, kv_heads, num_layers, 2 or 1, block_size, head_dim]
    tables: Tables
    slots: Tensor  # [num_tokens] int64: of the batch's tokens; -1: not stored
    decode: DecodeRows
    hopper: HopperAttention | None = None  # that computes its attention


def tables_within(
    tables: Tables, size: int, block_size: int, num_tokens: int
) -> Tables:
    """Return the rows of a batch as those of sequences that begin at multiples of `size` tokens.

    This is `attention.within` on the device. Each sequence that may have several rows becomes as
    many as these may need, whatever their number is: `num_tokens` are those of the batch. What is
    left over has no rows. `block_size` divides `size`.
    """
    decoding = tables.num_decoding
    lens = tables.context_lens
    first = (lens[:decoding] - 1).clamp(min=0) // size * size
    decode = _Parts(first, lens[:decoding], None, 1)
    if tables.decode_starts is not None:
        # One may have all rows, as the others may be padding.
        most = most_parts(tables.num_decode_rows, size)
        decode = _parts(lens[:decoding], tables.decode_starts, size, most)
    others = _Parts(lens[decoding:], lens[decoding:], None, 1)
    if decoding < len(lens):
        most = most_parts(num_tokens - tables.num_decode_rows, size)
        others = _parts(lens[decoding:], tables.query_starts, size, most)
    first = torch.cat((decode.firsts, others.firsts))
    sequences = torch.arange(len(lens), device=lens.device)
    copies = torch.cat(
        (
            sequences[:decoding].repeat_interleave(decode.most),
            sequences[decoding:].repeat_interleave(others.most),
        )
    )
    columns = torch.arange(
        min(size // block_size, tables.blocks.shape[1]), device=lens.device
    )
    places = (first // block_size)[:, None] + columns
    places = places.clamp(max=tables.blocks.shape[1] - 1)
    blocks = tables.blocks[copies[:, None], places]
    ends = torch.cat((decode.ends, others.ends))
    more_parts = len(decode.firsts) - decoding
    return Tables(
        blocks,
        ends - first,
        tables.query_starts if others.starts is None else others.starts,
        decoding + more_parts,
        tables.states,
        decode.starts,
        tables.num_more_rows - more_parts,
    )


class _Parts(NamedTuple):
    """Sequences that are cut, each into `most` parts or fewer: those left over end at 0."""

    firsts: Tensor  # [num_sequences * most]: where each begins and ends
    ends: Tensor
    starts: Tensor | None  # [num_sequences * most + 1]: counts their rows
    most: int


def _parts(lens: Tensor, starts: Tensor, size: int, most: int) -> _Parts:
    """Cut sequences, whose rows `starts` counts, at multiples of `size` tokens."""
    lengths = starts[1:] - starts[:-1]
    begins = lens - lengths
    numbers = torch.arange(most, dtype=lens.dtype, device=lens.device)
    cuts = ((begins // size)[:, None] + numbers) * size
    stops = torch.minimum(cuts + size, lens[:, None])
    has_rows = torch.maximum(cuts, begins[:, None]) < stops
    rows = (cuts - begins[:, None]).clamp(min=0).minimum(lengths[:, None])
    return _Parts(
        cuts.where(has_rows, 0).flatten(),
        stops.where(has_rows, 0).flatten(),
        torch.cat(((starts[:-1, None] + rows).flatten(), starts[-1:])),
        most,
    )


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
        tables.decode_starts,
        tables.num_more_rows,
    )
