"""Triton's compiled kernels are compiled again where a file of the cache is damaged."""

import os
from pathlib import Path

import pytest

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from baton.kernels.checked_cache import SUFFIX, CheckedCache
from baton.model.runner.cuda_start import check_compiled_kernels


@triton.jit
def _doubled(ptr: tl.tensor) -> None:
    tl.store(ptr, 2 * tl.load(ptr))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_MANAGER", "")  # so that it is gone afterwards
    monkeypatch.delenv("TRITON_CACHE_MANAGER")
    check_compiled_kernels()
    return tmp_path


def files(cache: Path) -> dict[str, Path]:
    """Those of the only kernel, by the ends of their names."""
    found = [file for file in cache.rglob("*") if file.is_file()]
    return {file.name.removeprefix("_doubled"): file for file in found}


def compiled() -> bytes:
    """Compile for a GPU that need not be there, or take what is cached."""
    source = ASTSource(_doubled, signature={"ptr": "*fp32"})
    code = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]
    assert isinstance(code, bytes)
    return code


def test_a_kernel_is_compiled_once(cache):
    assert knobs.cache.manager_class is CheckedCache
    code = compiled()
    times = {file: file.stat().st_mtime_ns for file in files(cache).values()}
    assert compiled() == code
    assert {file: file.stat().st_mtime_ns for file in times} == times


@pytest.mark.parametrize(
    "name", [".json", ".cubin", ".ttir", "__grp___doubled.json", f".cubin{SUFFIX}"]
)
@pytest.mark.parametrize("num_bytes", [None, 0, 40])
def test_a_file_that_is_gone_or_lost_its_end_is_made_again(cache, name, num_bytes):
    code = compiled()
    file = files(cache)[name]
    whole = file.read_bytes()
    if num_bytes is None:
        file.unlink()
    else:
        os.truncate(file, min(num_bytes, len(whole) - 1))
    assert compiled() == code
    assert file.read_bytes() == whole


def test_a_digest_that_is_no_text_is_made_again(cache):
    code = compiled()
    file = files(cache)[f".cubin{SUFFIX}"]
    whole = file.read_bytes()
    file.write_bytes(b"\xff" * len(whole))
    assert compiled() == code
    assert file.read_bytes() == whole


def test_a_users_own_cache_stays(monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_MANAGER", "triton.runtime.cache:FileCacheManager")
    check_compiled_kernels()
    assert knobs.cache.manager_class is not CheckedCache
