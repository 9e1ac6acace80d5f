"""The machine code of the CUDA C++ products: read from a cache on disk, or compiled by NVRTC.

A file's name says what it was compiled from and by (source, compiler, architecture), and it is
damaged or absent only at the cost of compiling again. NVRTC and its bindings come with torch's
CUDA builds.
"""

from __future__ import annotations

import contextlib
import hashlib

from baton.kernels.hopper.products.cuda_source import source
from baton.runtime.private_cache import (
    cache_folder,
    compiling_alone,
    read_whole,
    write_whole,
)

ARCHITECTURE = "sm_90a"
OPTIONS = (f"--gpu-architecture={ARCHITECTURE}", "--std=c++17")
FOLDER = "kernels"


class CompilerMissing(Exception):
    """This installation cannot compile CUDA C++. The text says why."""


def load_cubin() -> bytes:
    """Return the code of all variants. Raises `CompilerMissing`."""
    text = source()
    name = f"products-{ARCHITECTURE}-{_fingerprint(text)}.cubin"
    if (cached := _cached(name)) is not None:
        return cached
    with compiling_alone(FOLDER):
        # Another process may have compiled it while this one waited.
        if (cached := _cached(name)) is not None:
            return cached
        cubin = compiled(text)
        with contextlib.suppress(OSError, RuntimeError, ValueError):
            write_whole(cache_folder(FOLDER) / name, cubin)
    return cubin


def compiler_name() -> str:
    """Return the compiler and its version; empty without one. What it compiles rests on these."""
    try:
        return "NVRTC {}.{}".format(*_version())
    except CompilerMissing:
        return ""


def compiled(text: str) -> bytes:
    """Return the machine code of CUDA C++. Raises `CompilerMissing`, also if it is refused."""
    nvrtc = _nvrtc()
    program = _checked(nvrtc.nvrtcCreateProgram(text.encode(), b"", 0, [], []))
    options = [option.encode() for option in OPTIONS]
    (result,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    try:
        if int(result):
            log = b" " * _checked(nvrtc.nvrtcGetProgramLogSize(program))
            nvrtc.nvrtcGetProgramLog(program, log)
            first = log.decode(errors="replace").strip(" \0\n").split("\n")[0]
            raise CompilerMissing(f"NVRTC refuses the products: {first}")
        cubin = b" " * _checked(nvrtc.nvrtcGetCUBINSize(program))
        nvrtc.nvrtcGetCUBIN(program, cubin)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return cubin


def _cached(name: str) -> bytes | None:
    """Return a cached file, or None: a cache that cannot be read only costs time."""
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        return read_whole(cache_folder(FOLDER) / name)
    return None


def _fingerprint(text: str) -> str:
    version = ".".join(map(str, _version()))
    parts = "\n".join((version, *OPTIONS, text))
    return hashlib.sha256(parts.encode()).hexdigest()[:32]


def _version() -> tuple[int, int]:
    result, major, minor = _nvrtc().nvrtcVersion()
    if int(result):
        raise CompilerMissing(f"NVRTC does not say its version ({result})")
    return major, minor


def _nvrtc():  # type: ignore[no-untyped-def]
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()  # it is loaded by the first call
    # The loader of NVIDIA's libraries raises errors of several kinds.
    except (ImportError, OSError, RuntimeError) as error:
        first = str(error).split("\n")[0]
        raise CompilerMissing(f"NVRTC cannot be loaded: {first}") from error
    return nvrtc


def _checked(results):  # type: ignore[no-untyped-def]
    result, value = results
    if int(result):
        raise CompilerMissing(f"NVRTC failed: {result}")
    return value
