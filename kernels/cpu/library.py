"""The compiled CPU kernels of one dtype: found in a cache on disk, or compiled and put there.

The cache is a folder of the user's, so an installation may be read-only. It holds machine code, so
it is used only if no other user can write to it. A file's name says what it was compiled from and
for (source, compiler, CPU). Its first line is a digest of the rest; a damaged file is compiled
again. Files are replaced as a whole. If several processes find no file, one of them compiles while
the others wait.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.metadata
import json
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from baton.runtime.private_cache import (
    cache_folder,
    compiling_alone,
    make_private,
    read_whole,
    write_whole,
)

SOURCES = (
    "attention.py",
    "int8_products.py",
    "compile.py",
    "fp8_pool.py",
    "narrow_products.py",
    "pair_attention.py",
    "pairs.py",
    "products.py",
    "rows.py",
    "sampling.py",
    "sparse/kernels.py",
    "states/kernels.py",
    "vectors.py",
    "../constants.py",
)
CTYPES = {"pointer": ctypes.c_void_p, "int": ctypes.c_int64, "float": ctypes.c_float}

CompileProgress = Callable[[int, int], None]
Kernel = Callable[..., int]


class KernelsUnavailable(Exception):
    """This machine or installation cannot compile the kernels. The text says why."""


class CpuLibrary:
    """Kernels by name, as functions of addresses and numbers. They run without Python's lock."""

    def __init__(
        self, arguments: dict[str, list[str]], code: bytes, *, in_pairs: bool
    ) -> None:
        """With `in_pairs`, the kernels multiply bf16 numbers directly, which gives other bits."""
        import llvmlite.binding as llvm

        self.in_pairs = in_pairs
        self.not_kept = ""  # why the code could not be put into the cache
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        self._jit = llvm.create_lljit_compiler()
        builder = llvm.JITLibraryBuilder().add_object_img(code).add_current_process()
        for name in arguments:
            builder.export_symbol(name)
        self._linked = builder.link(self._jit, "baton")
        # Space for the result and the exception of a numba function.
        self._ignored = (ctypes.c_int64 * 2)()
        self.kernels = {
            name: self._kernel(name, takes) for name, takes in arguments.items()
        }

    def _kernel(self, name: str, arguments: list[str]) -> Kernel:
        own = [CTYPES[argument] for argument in arguments]
        prototype = ctypes.CFUNCTYPE(
            ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *own
        )
        function = prototype(self._linked[name])
        result = ctypes.addressof(self._ignored)
        return partial(function, result, result + 8)


def load_library(
    *,
    is_bf16: bool,
    progress: CompileProgress,
    in_pairs: bool | None = None,
    fp8_pool: bool = False,
) -> CpuLibrary:
    """Return the kernels from the cache, or compile them and report (done, total) to `progress`.

    By default, `in_pairs` (see `CpuLibrary`) is what the CPU and the dtype allow.
    """
    fingerprint = _fingerprint()
    if in_pairs is None:
        in_pairs = is_bf16 and has_bf16_products()
    kind = "pairs" if in_pairs else "bf16" if is_bf16 else "fp32"
    name = f"{kind}{'-fp8' * fp8_pool}-{fingerprint}.kernels"
    if (found := _cached(name, in_pairs=in_pairs)) is not None:
        return found
    progress(0, 1)
    # Raised by `progress`, which may end the start of a node.
    refusals: list[Exception] = []

    def report(done: int, total: int) -> None:
        try:
            progress(done, total)
        except Exception as error:
            refusals.append(error)
            raise

    with compiling_alone("kernels"):
        # Another process may have compiled them while this one waited.
        if (found := _cached(name, in_pairs=in_pairs)) is not None:
            progress(1, 1)
            return found
        try:
            from baton.kernels.cpu.compile import compile_kernels

            arguments, code = compile_kernels(
                is_bf16=is_bf16, in_pairs=in_pairs, fp8_pool=fp8_pool, progress=report
            )
            library = CpuLibrary(arguments, code, in_pairs=in_pairs)
        # A compiler can raise anything, and torch can take the place of the kernels.
        except Exception as error:
            if refusals:
                raise
            raise KernelsUnavailable(
                f"numba cannot compile the kernels: {error!r}"
            ) from error
        try:
            content = json.dumps(arguments).encode() + b"\n" + code
            write_whole(_folder() / name, content)
        except (OSError, RuntimeError, ValueError) as error:
            library.not_kept = str(error)
    return library


def has_bf16_products() -> bool:
    """Return whether this CPU multiplies bf16 numbers itself, with AVX512-BF16."""
    return _has("avx512bf16")


def has_bf16_tiles() -> bool:
    """Return whether this CPU has AMX, with which torch's library is faster than our kernels."""
    return _has("amx-bf16")


def _has(feature: str) -> bool:
    import llvmlite.binding as llvm

    return bool(llvm.get_host_cpu_features().get(feature))


def _cached(name: str, *, in_pairs: bool) -> CpuLibrary | None:
    """Return the cached kernels, or None: a cache that cannot be read only costs time."""
    with contextlib.suppress(OSError, RuntimeError, ValueError, LookupError, TypeError):
        return _read(_folder() / name, in_pairs=in_pairs)
    return None


def _fingerprint() -> str:
    """Return a digest of everything that object code depends on. Raises `KernelsUnavailable`."""
    try:
        import llvmlite.binding as llvm

        versions = [importlib.metadata.version(name) for name in ("numba", "llvmlite")]
        features = llvm.get_host_cpu_features()
    except ImportError as error:
        raise KernelsUnavailable(f"numba is not installed ({error})") from error
    except (OSError, RuntimeError) as error:
        raise KernelsUnavailable(
            f"numba's compiler cannot be used ({error})"
        ) from error
    if not (features.get("avx2") and features.get("fma")):
        raise KernelsUnavailable("the CPU has no AVX2")
    digest = hashlib.sha256()
    folder = Path(__file__).parent
    for part in (*versions, llvm.get_host_cpu_name(), features.flatten()):
        digest.update(part.encode() + b"\n")
    for name in SOURCES:
        digest.update((folder / name).read_bytes())
    return digest.hexdigest()[:32]


def _folder() -> Path:
    return cache_folder("kernels")


def why_not_kept() -> str:
    """Return why kernels cannot be compiled or cached here; empty if they can."""
    try:
        _fingerprint()
        folder = _folder()
        make_private(folder)
        descriptor, name = tempfile.mkstemp(dir=folder)
        os.close(descriptor)
        Path(name).unlink()
    except (KernelsUnavailable, OSError, RuntimeError, ValueError) as error:
        return str(error)
    return ""


def _read(file: Path, *, in_pairs: bool) -> CpuLibrary:
    """Return a file's code. Raises as `read_whole` does."""
    arguments, _, code = read_whole(file).partition(b"\n")
    return CpuLibrary(json.loads(arguments), code, in_pairs=in_pairs)
