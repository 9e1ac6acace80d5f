"""Copying blocks between pools: every shape of read is the same mapping."""

import random
from contextlib import ExitStack, closing

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from baton.kv_transfer.interfaces import BlockSlice, PeerRank
from baton.kv_transfer.pools import HostPool, PoolShape, slice_ids
from baton.kv_transfer.transports import shm
from baton.kv_transfer.transports.shm import ShmTransport, copy_blocks, slice_view
from baton.protocol.errors import TransferError
from baton.protocol.ids import Epoch

NUM_BLOCKS, BLOCK_BYTES = 24, 6
WHOLE = BlockSlice(0, 0, BLOCK_BYTES)
OWNER = PeerRank(Epoch("owner"))


def check(remote: list[int], local: list[int], part: BlockSlice = WHOLE) -> None:
    """Copy that slice of blocks; the larger of the two offsets is in the last slice of a block."""
    theirs = PoolShape(NUM_BLOCKS, part.remote_offset + part.num_bytes)
    ours = PoolShape(NUM_BLOCKS, part.local_offset + part.num_bytes)
    source = random.Random(1).randbytes(theirs.pool_bytes)
    target = bytearray(b"\xff" * ours.pool_bytes)
    expected = bytearray(target)
    for frm, to in zip(remote, local, strict=True):
        begin = frm * theirs.block_bytes + part.remote_offset
        place = to * ours.block_bytes + part.local_offset
        expected[place : place + part.num_bytes] = source[begin : begin + part.num_bytes]
    copy_blocks(
        slice_view(memoryview(target), ours, part),
        slice_ids(np.array(local, np.int64), ours, part.local_offset, part),
        slice_view(memoryview(source), theirs, part),
        slice_ids(np.array(remote, np.int64), theirs, part.remote_offset, part),
    )
    assert target == expected


@pytest.mark.parametrize(
    ("remote", "local"),
    [
        ([], []),
        ([3], [9]),
        ([4, 5, 6, 7], [10, 11, 12, 13]),  # one run on both sides
        ([7, 6, 5, 4], [13, 12, 11, 10]),  # the same, last first
        ([9, 2, 7, 20, 0], [3, 4, 5, 6, 7]),  # a gather
        ([3, 4, 5, 6, 7], [9, 2, 7, 20, 0]),  # a scatter
        ([1, 9, 17, 3], [2, 20, 6, 11]),  # nothing in common
    ],
)
def test_each_kind_of_copy_puts_every_block_in_its_place(
    remote: list[int], local: list[int]
) -> None:
    check(remote, local)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_read_copies_exactly_its_blocks(data: st.DataObject) -> None:
    ids = st.permutations(range(NUM_BLOCKS))
    count = data.draw(st.integers(0, NUM_BLOCKS))
    runs = st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=count, max_size=count)
    remote = data.draw(st.one_of(ids.map(lambda p: p[:count]), runs.map(sorted)))
    local = data.draw(st.one_of(ids.map(lambda p: p[:count]), st.just(list(range(count)))))
    offsets = st.sampled_from((0, BLOCK_BYTES, 3 * BLOCK_BYTES))
    check(
        list(remote), list(local), BlockSlice(data.draw(offsets), data.draw(offsets), BLOCK_BYTES)
    )


def test_a_block_that_changes_hands_while_it_is_copied_is_a_failed_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with ExitStack() as stack:
        source, target = (
            stack.enter_context(closing(HostPool(NUM_BLOCKS, BLOCK_BYTES))) for _ in range(2)
        )
        owner = stack.enter_context(closing(ShmTransport(source, Epoch("owner"))))
        reader = stack.enter_context(closing(ShmTransport(target, Epoch("reader"))))
        reader.add_peer(OWNER, owner.address(), NUM_BLOCKS, BLOCK_BYTES, WHOLE)
        while not reader.connected(OWNER):
            owner.service()
            reader.service()

        def copy_while_it_changes(*call: NDArray[np.void] | NDArray[np.int64]) -> None:
            copy_blocks(*call)
            source.generations[3] += 1

        blocks = range(5)
        reader.read(OWNER, blocks, blocks, [0] * 5)
        monkeypatch.setattr(shm, "copy_blocks", copy_while_it_changes)
        with pytest.raises(TransferError) as failed:
            reader.read(OWNER, blocks, blocks, [0] * 5)
        assert failed.value.code == "stale_block"
