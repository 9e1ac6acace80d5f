"""A pool's memory: what its owner may do with it, and what a reader may not."""

import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from baton.kv_transfer.pools import HostPool, PoolShape, left_by_cgroups
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


def test_a_pool_larger_than_memory_is_refused_with_what_to_change() -> None:
    with pytest.raises(ConfigError, match="memory_mib"):
        HostPool(num_blocks=1 << 22, block_bytes=1 << 20)


def test_the_limits_of_all_cgroups_around_a_process_count(tmp_path: Path) -> None:
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
