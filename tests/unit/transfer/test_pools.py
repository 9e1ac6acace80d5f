"""A pool's memory, what a reader may do with it, and the copy of blocks between two pools."""

import contextlib
import mmap
import os
import random
from contextlib import ExitStack, closing

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from baton.kv_transfer.interfaces import AddPeer, BlockSlice, PeerRank, Read
from baton.kv_transfer.pools import HostPool, PoolShape, left_by_cgroups, slice_ids
from baton.kv_transfer.transports import shm
from baton.kv_transfer.transports.shm import (
    ShmTransport,
    copy_blocks,
    make_fence,
    membarrier_fence,
    slice_view,
)
from baton.protocol.errors import ConfigError, TransferError
from baton.protocol.ids import Epoch
from baton.protocol.messages import RankAddress

NUM_BLOCKS = 24
BLOCK_BYTES = 6
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
        expected[place : place + part.num_bytes] = source[
            begin : begin + part.num_bytes
        ]
    copy_blocks(
        slice_view(memoryview(target), ours, part),
        slice_ids(np.array(local, np.int64), ours, part.local_offset, part),
        slice_view(memoryview(source), theirs, part),
        slice_ids(np.array(remote, np.int64), theirs, part.remote_offset, part),
    )
    assert target == expected


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_read_copies_exactly_its_blocks(data):
    ids = st.permutations(range(NUM_BLOCKS))
    count = data.draw(st.integers(0, NUM_BLOCKS))
    runs = st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=count, max_size=count)
    remote = data.draw(st.one_of(ids.map(lambda p: p[:count]), runs.map(sorted)))
    local = data.draw(
        st.one_of(ids.map(lambda p: p[:count]), st.just(list(range(count))))
    )
    offsets = st.sampled_from((0, BLOCK_BYTES, 3 * BLOCK_BYTES))
    check(
        list(remote),
        list(local),
        BlockSlice(data.draw(offsets), data.draw(offsets), BLOCK_BYTES),
    )


def test_a_block_that_changes_hands_while_it_is_copied_is_a_failed_read(monkeypatch):
    with ExitStack() as stack:
        source, target = (
            stack.enter_context(closing(HostPool(NUM_BLOCKS, BLOCK_BYTES)))
            for _ in range(2)
        )
        owner = stack.enter_context(closing(ShmTransport(source, Epoch("owner"))))
        reader = stack.enter_context(closing(ShmTransport(target, Epoch("reader"))))
        address = RankAddress({"shm": owner.address()})
        reader.add_peer(AddPeer(OWNER, "shm", address, NUM_BLOCKS, BLOCK_BYTES, WHOLE))
        while not reader.connected(OWNER):
            owner.service()
            reader.service()

        def copy_while_it_changes(*call: NDArray[np.void] | NDArray[np.int64]) -> None:
            copy_blocks(*call)
            source.generations[3] += 1

        read = Read(1, OWNER, tuple(range(5)), tuple(range(5)), (0,) * 5)
        reader.read(read)
        monkeypatch.setattr(shm, "copy_blocks", copy_while_it_changes)
        with pytest.raises(TransferError) as failed:
            reader.read(read)
        assert failed.value.code == "stale_block"


def test_blocks_generations_and_nonce_share_one_file_without_overlap():
    pool = HostPool(num_blocks=3, block_bytes=5000)
    pool.buffer[:] = b"\xff" * 15000
    pool.generations[:] = 7
    reader = mmap.mmap(pool.fileno(), pool.shape.file_bytes, prot=mmap.PROT_READ)
    shape = PoolShape(3, 5000)
    assert reader[: shape.pool_bytes] == b"\xff" * 15000
    generations = np.frombuffer(reader, np.uint32, 3, shape.generations_offset)
    assert generations.tolist() == [7, 7, 7]
    assert reader[shape.nonce_offset : shape.nonce_offset + 16] == pool.nonce
    assert shape.generations_offset % mmap.PAGESIZE == 0


def test_nobody_else_can_map_the_pool_for_writing_or_shrink_it():
    pool = HostPool(1, 4096)
    with pytest.raises(PermissionError):
        mmap.mmap(pool.fileno(), 4096)
    with pytest.raises(PermissionError):
        os.ftruncate(pool.fileno(), 0)


def test_a_pool_larger_than_memory_is_refused_with_what_to_change():
    with pytest.raises(ConfigError, match="memory_mib"):
        HostPool(num_blocks=1 << 22, block_bytes=1 << 20)


def test_the_limits_of_all_cgroups_around_a_process_count(tmp_path):
    for folder, limit in (("", "max"), ("job", "1000"), ("job/step", "5000")):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "memory.max").write_text(f"{limit}\n")
        (tmp_path / folder / "memory.current").write_text("700\n")
        (tmp_path / folder / "memory.stat").write_text("anon 500\ninactive_file 200\n")
    own = tmp_path / "cgroup"
    own.write_text("1:cpu:/other\n0::/job/step\n")
    assert list(left_by_cgroups(tmp_path, own)) == [4500, 500]
    own.write_text("0::/gone\n")
    assert list(left_by_cgroups(tmp_path, own)) == []
    assert list(left_by_cgroups(tmp_path / "none", tmp_path / "none")) == []


def test_a_machine_that_reorders_loads_gets_a_fence_or_no_shm(monkeypatch):
    with contextlib.suppress(ConfigError):  # this kernel does not allow membarrier
        membarrier_fence()()
    monkeypatch.setattr("platform.machine", lambda: "alpha")
    with pytest.raises(ConfigError, match=r"set transfer\.transport to nixl"):
        make_fence()
