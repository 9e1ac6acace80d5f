"""A pool's memory: what its owner may do with it, and what a reader may not."""

import mmap
import os

import numpy as np
import pytest

from baton.kv_transfer.host_pool import HostPool, PoolShape
from baton.protocol.errors import ConfigError


def test_blocks_generations_and_nonce_share_one_file_without_overlap() -> None:
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


def test_nobody_else_can_map_the_pool_for_writing_or_shrink_it() -> None:
    pool = HostPool(1, 4096)
    with pytest.raises(PermissionError):
        mmap.mmap(pool.fileno(), 4096)
    with pytest.raises(PermissionError):
        os.ftruncate(pool.fileno(), 0)


def test_views_outlive_close_and_close_may_be_repeated() -> None:
    pool = HostPool(2, 4096)
    buffer, generations = pool.buffer, pool.generations
    pool.close()
    pool.close()
    buffer[0], generations[1] = 9, 4
    assert (buffer[0], int(generations[1]), pool.fileno()) == (9, 4, -1)


def test_a_pool_larger_than_memory_is_refused_with_what_to_change() -> None:
    with pytest.raises(ConfigError, match="memory_mib"):
        HostPool(num_blocks=1 << 22, block_bytes=1 << 20)
