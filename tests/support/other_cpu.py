"""Lets this process take its CPU for another one, as far as the compiled kernels ask for features.

A program imports it first, or pytest by `-p tests.support.other_cpu`. The variable `TEST_CPU` says
which CPU: `avx2`, `avx512` (without bf16), or `tiles`. The last has AMX if this CPU has none and
none if it has, which decides who computes the linear layers of bf16 models.
"""

import os

import llvmlite.binding as llvm

from baton.kernels.cpu import library as cpu_library

_HASWELL = (
    "64bit avx avx2 bmi bmi2 cmov cx16 cx8 f16c fma fxsr lzcnt mmx movbe popcnt sahf sse sse2 sse3 "
    "sse4.1 sse4.2 ssse3 xsave"
)
_SKYLAKE = f"{_HASWELL} adx aes avx512bw avx512cd avx512dq avx512f avx512vl pclmul"
OLDER = {"avx2": ("haswell", _HASWELL), "avx512": ("skylake-avx512", _SKYLAKE)}


def _become(name: str, features: str) -> None:
    known = set(features.split())
    shown = llvm.FeatureMap(
        {each: each in known for each in llvm.get_host_cpu_features()}
    )
    llvm.get_host_cpu_features = lambda: shown
    llvm.get_host_cpu_name = lambda: name


_wanted = os.environ["TEST_CPU"]
if _wanted == "tiles":
    _has_tiles = cpu_library.has_bf16_tiles()
    cpu_library.has_bf16_tiles = lambda: not _has_tiles
else:
    _become(*OLDER[_wanted])
