"""Compiled kernels come from a cache that may be missing, damaged or read-only."""

import importlib.metadata
import os
import shutil
import subprocess
import sys

import llvmlite.binding
import pytest

from baton.kernels.cpu import library as cpu_library
from baton.kernels.cpu.library import CpuLibrary, KernelsUnavailable, load_library
from tests.support.sources import REPOSITORY

NAMES = {
    "attend",
    "rope_and_store",
    "add_rms_norm",
    "gate_mul",
    "sigmoid_mul",
    "soft_cap",
    "sample",
    "convolve",
    "gate_steps",
    "advance_states",
    "gated_norm",
    "choose_keys",
    "layer_norm",
    "gather_rows",
}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "baton" / "kernels"


@pytest.fixture
def file(tmp_path, monkeypatch):
    """The only file of a cache, which is whole: a copy of what other tests of this user load."""
    loaded()
    name = f"fp32-{cpu_library._fingerprint()}.kernels"
    folder = tmp_path / "baton" / "kernels"
    folder.mkdir(parents=True, mode=0o700)
    shutil.copy2(cpu_library._folder() / name, folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert loaded()[1] == []
    return folder / name


def loaded() -> tuple[CpuLibrary, list[tuple[int, int]]]:
    """The library, and what was said while it was compiled."""
    said: list[tuple[int, int]] = []
    library = load_library(
        is_bf16=False, progress=lambda done, total: said.append((done, total))
    )
    assert set(library.kernels) == NAMES
    return library, said


@pytest.mark.release
def test_kernels_are_compiled_once_and_said_so(cache):
    _, said = loaded()
    assert said == [(0, 1), *((done, len(NAMES)) for done in range(len(NAMES) + 1))]
    (file,) = cache.iterdir()
    assert file.name.startswith("fp32-")
    assert cache.stat().st_mode & 0o077 == 0, "machine code that others may write"
    assert loaded()[1] == []


@pytest.mark.usefixtures("cache")
def test_a_refusal_that_progress_brings_is_not_the_compilers():
    def refuse(_done: int, total: int) -> None:
        if total > 1:
            raise PermissionError("the router refused this node")

    with pytest.raises(PermissionError, match="refused"):
        load_library(is_bf16=False, progress=refuse)


def test_a_file_that_is_damaged_or_that_other_users_may_write_is_not_used(
    file, monkeypatch
):
    """Where no compiler can be had, there are no kernels then."""
    monkeypatch.setitem(sys.modules, "baton.kernels.cpu.compile", None)
    whole = file.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    for damaged in (flipped, whole[:-100], b"", b"\xff\x00" * 500):
        file.write_bytes(damaged)
        with pytest.raises(KernelsUnavailable, match="cannot compile"):
            loaded()
    file.write_bytes(whole)
    assert loaded()[1] == []
    for path in (file.parent, file):
        mode = path.stat().st_mode
        path.chmod(0o777)
        with pytest.raises(KernelsUnavailable, match="cannot compile"):
            loaded()
        path.chmod(mode)


@pytest.mark.release
def test_a_damaged_cache_is_made_anew_and_one_that_cannot_be_written_is_done_without(
    file, monkeypatch
):
    file.write_bytes(b"")
    assert loaded()[1]
    library, said = loaded()
    assert (library.not_kept, said) == ("", [])
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    library, said = loaded()
    assert said
    assert "Not a directory" in library.not_kept


@pytest.mark.usefixtures("cache")
def test_without_numba_there_are_no_kernels(monkeypatch):
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(KernelsUnavailable, match="numba is not installed"):
        loaded()


def test_without_avx2_there_are_no_kernels(monkeypatch):
    monkeypatch.setattr(
        llvmlite.binding, "get_host_cpu_features", llvmlite.binding.FeatureMap
    )
    with pytest.raises(KernelsUnavailable, match="no AVX2"):
        loaded()


# Computes something with every kernel; prints the bits' digest and how many kernels it compiled.
PROGRAM = """
import hashlib, os
if "TEST_CPU" in os.environ:
    import tests.support.other_cpu
import numpy as np
import torch
from baton.kernels.cpu.functions import CpuKernels
from baton.kernels.cpu.library import load_library
from baton.kernels.cpu.functions import CpuSampler
torch.set_num_threads(1)
torch.manual_seed(0)
said = []
library = load_library(
    is_bf16=True, in_pairs=False, progress=lambda done, total: said.append(total)
)
pool = torch.randn(20, 2, 1, 2, 16, 64).bfloat16()
kernels = CpuKernels(library, pool, 8)
qkv, table = torch.randn(300, 12 * 64).bfloat16(), torch.randn(300, 64)
at = torch.arange(300)
q = kernels.rope_and_store(qkv, 0, at, at, table, qkv[0, : 10 * 64], 1e-6)
work = kernels.attention_work(np.arange(19, dtype=np.int32), np.array([(0, 300, 0, 0)]))
out = torch.empty_like(q)
kernels.attend(q, 0, work, out, 0.125)
normed, stream = kernels.add_rms_norm(out.flatten(1), q.flatten(1), out[0], 1e-6)
results = (q, pool, out, normed, stream, kernels.gate_mul(stream))
tokens = CpuSampler(library).sample(
    torch.randn(300, 1237), np.array([(row, 0, 9, row % 9) for row in range(300)]),
    np.array([(row % 7 / 4, -5.0, 1 - row % 2 / 9) for row in range(300)]),
)
digest = hashlib.sha256(repr(tokens).encode())
for result in results:
    digest.update(result.view(torch.int16).numpy().tobytes())
print(digest.hexdigest(), max(said, default=1))
"""


def start(**env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", PROGRAM],
        cwd=REPOSITORY,
        env=os.environ | env,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.release
@pytest.mark.timeout(400)
def test_one_of_several_processes_compiles_and_every_cpu_computes_the_same_bits(cache):
    children = [start(), start(), start(TEST_CPU="avx2")]
    told = [child.communicate()[0].split() for child in children]
    assert [child.returncode for child in children] == [0, 0, 0]
    digests, compiled = zip(*told, strict=True)
    assert len(set(digests)) == 1
    is_old = llvmlite.binding.get_host_cpu_name() == "haswell"
    num_kinds = 1 if is_old else 2
    assert len(list(cache.iterdir())) == num_kinds
    # A process that waited for another one to compile says 1.
    assert sorted(compiled) == ["1"] * (3 - num_kinds) + [str(len(NAMES))] * num_kinds
