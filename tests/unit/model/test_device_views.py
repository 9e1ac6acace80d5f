"""Tables on a device of sequences cut into chunks, and of blocks cut into pieces."""

import random
from itertools import accumulate, pairwise

import pytest
import torch

from baton.model.layers.attention import (
    Chunk,
    Tables,
    WideHeads,
    decode_rows,
    within,
)
from baton.model.layers.device_views import tables_of_pieces, tables_within
from tests.support.depth import nightly

SIZE, BLOCK_SIZE = 8, 4


def tables_of(
    chunks: list[Chunk], num_decoding: int, num_padded: int = 0, num_more_rows: int = 0
) -> Tables:
    """As a step's inputs say it; padding has no rows, and what its table says means nothing."""
    width = max(len(one.block_table) for one in chunks)
    blocks = torch.full((len(chunks) + num_padded, width), -7, dtype=torch.int32)
    for row, one in enumerate(chunks):
        blocks[row, : len(one.block_table)] = torch.tensor(one.block_table)
    lens = [one.end for one in chunks] + [0] * num_padded
    longer = [one.length for one in chunks[num_decoding:]] + [0] * num_padded
    starts = list(accumulate(longer, initial=0)) if longer else []
    counts = [one.length for one in chunks[:num_decoding]]
    has_more_rows = max(counts, default=1) > 1
    return Tables(
        blocks,
        torch.tensor(lens, dtype=torch.int32),
        torch.tensor(starts, dtype=torch.int32),
        num_decoding,
        None,
        torch.tensor([0, *accumulate(counts)]).int() if has_more_rows else None,
        num_more_rows + sum(counts) - num_decoding,
    )


def parts_of(tables: Tables) -> list[tuple[int, int, tuple[int, ...]]]:
    """The rows and the end of each sequence that has any, and its blocks up to there."""
    decoding = tables.num_decoding
    starts = tables.query_starts.tolist()
    lengths = [1] * decoding
    if tables.decode_starts is not None:
        lengths = [b - a for a, b in pairwise(tables.decode_starts.tolist())]
    lengths += [b - a for a, b in pairwise(starts)]
    return [
        (length, end, tuple(blocks[: -(-end // BLOCK_SIZE)]))
        for length, end, blocks in zip(
            lengths, tables.context_lens.tolist(), tables.blocks.tolist(), strict=True
        )
        if length and end
    ]


@pytest.mark.parametrize("seed", [*range(20), *map(nightly, range(20, 200))])
def test_rows_within_chunks_are_those_that_the_host_names(seed):
    luck = random.Random(seed)
    num_decoding = luck.randint(0, 3)
    most_decoded = luck.choice((1, 3, SIZE + 2))
    chunks: list[Chunk] = []
    row = 0
    for number in range(num_decoding + luck.randint(0 if num_decoding else 1, 3)):
        length = luck.randint(1, 3 * SIZE)
        if number < num_decoding:
            length = luck.choice((1, most_decoded))
        start = luck.randint(0, 4 * SIZE)
        num_blocks = -(-(start + length) // BLOCK_SIZE)
        table = tuple(luck.sample(range(100), num_blocks))
        chunks.append(Chunk(row, start, length, table))
        row += length
    num_padded = luck.randint(0, 2) * (num_decoding < len(chunks))
    num_tokens = row + luck.randint(0, 9)
    found = tables_within(
        tables_of(chunks, num_decoding, num_padded), SIZE, BLOCK_SIZE, num_tokens
    )
    expected = [
        (one.length, one.end, one.block_table[: -(-one.end // BLOCK_SIZE)])
        for one in within(chunks, SIZE, BLOCK_SIZE)
    ]
    assert parts_of(found) == expected
    assert found.blocks.dtype == found.context_lens.dtype == torch.int32
    assert found.query_starts.dtype == torch.int32
    assert found.context_lens.max() <= SIZE
    rows = sum(one.length for one in chunks[num_decoding:])
    assert not len(found.query_starts) or found.query_starts[-1] == rows
    assert found.num_decode_rows == row - rows


def test_a_sequence_beside_padding_may_have_more_rows_than_are_left_for_others():
    """Sequences of padding have none, so a captured step may have their rows elsewhere."""
    rows, others = SIZE + 3, 7
    one = Chunk(0, SIZE - 1, rows, tuple(range(10, 15)))
    blocks = torch.zeros(1 + others, 5, dtype=torch.int32)
    blocks[0] = torch.tensor(one.block_table)
    tables = Tables(
        blocks,
        torch.tensor([one.end] + [0] * others).int(),
        torch.empty(0, dtype=torch.int32),
        1 + others,
        None,
        torch.tensor([0] + [rows] * (1 + others)).int(),
        rows - others,
    )
    found = tables_within(tables, SIZE, BLOCK_SIZE, tables.num_decode_rows)
    assert parts_of(found) == [
        (part.length, part.end, part.block_table[: -(-part.end // BLOCK_SIZE)])
        for part in within([one], SIZE, BLOCK_SIZE)
    ]


@pytest.mark.parametrize("seed", [*range(20), *map(nightly, range(20, 200))])
def test_pieces_of_rows_that_decode_have_each_row_once_with_its_keys(seed):
    luck = random.Random(seed)
    chunks: list[Chunk] = []
    row = 0
    for _ in range(luck.randint(1, 5)):
        length = luck.choice((1, 1, 2, 4, 5, 9))
        start = luck.randint(0, 4 * SIZE)
        blocks = tuple(luck.sample(range(100), -(-(start + length) // BLOCK_SIZE)))
        chunks.append(Chunk(row, start, length, blocks))
        row += length
    num_padded = luck.randint(0, 9)
    tables = tables_of(chunks, len(chunks), 0, num_padded)
    most = luck.choice((1, 2, 4, 16))
    found = decode_rows(tables, most)
    count = len(chunks) + (row + num_padded - len(chunks)) // most
    if tables.decode_starts is None:
        count = len(chunks)
    starts = range(count + 1) if found.starts is None else found.starts.tolist()
    seen = []
    for (first, end), length, blocks in zip(
        pairwise(starts),
        found.context_lens.tolist(),
        found.blocks.tolist(),
        strict=True,
    ):
        own = range(first, end) if length else ()
        assert len(own) <= most
        seen += [(one, length - end + 1 + one, tuple(blocks)) for one in own]
    width = tables.blocks.shape[1]
    assert seen == [
        (
            one.row + step,
            one.start + step + 1,
            (one.block_table + (-7,) * width)[:width],
        )
        for one in chunks
        for step in range(one.length)
    ]


def test_a_captured_step_has_as_many_sequences_whatever_its_rows_are():
    sizes = {
        tuple(
            tables_within(
                tables_of([Chunk(0, start, 9, tuple(range(12)))], 0), SIZE, 4, 9
            ).blocks.shape
        )
        for start in range(30)
    }
    assert sizes == {(2, SIZE // BLOCK_SIZE)}


def test_pieces_of_blocks_are_in_the_order_of_their_tokens():
    wide = WideHeads(kv_heads=2, head_dim=8, num_layers=1, num_before=1)
    pool = torch.zeros(9, 4, 2, 2, BLOCK_SIZE, 4)
    table = (5, 3)
    tables = tables_of([Chunk(0, 0, 7, table)], 0)
    found = tables_of_pieces(wide, pool, tables)
    assert found.blocks.tolist() == [list(wide.block_table(pool, table))]
