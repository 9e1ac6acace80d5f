"""Equal bits on other kinds of CPU: torch, its libraries and the compiled kernels do without newer
instructions.

They read these settings when they start, so each set runs in a process of its own. Only sets that
this machine has are run; the tests themselves, run as usual, use all that it has.
"""

from pathlib import Path

import pytest

from tests.support.module_process import said_by

HERE = Path(__file__).parent
CPU_INFO = Path("/proc/cpuinfo")
AVX512 = {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
# A kind of CPU as `other_cpu` knows it -> the flags that this machine needs for it, and how ATen,
# oneDNN and MKL call its instructions, if they are to do without others.
SETS: dict[str, tuple[set[str], tuple[str, ...]]] = {
    "avx2": ({"avx2", "fma"}, ("avx2", "AVX2", "AVX2")),
    "avx512": (AVX512, ("avx512", "AVX512_CORE", "AVX512")),
    "tiles": ({*AVX512, "avx512_bf16"}, ()),
}
LIBRARIES = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
FILES = ("test_linear_bits.py", "test_batch_invariance.py")
# Left out there: what adds time and no other kinds of products.
CHOSEN = "not wide and not mistral and not block_size and not 8192"
# What the tiles of a CPU decide.
IN_BF16 = "bfloat16 and not block_size and not test_linear_bits"


def flags() -> set[str]:
    """Of the first CPU; empty where the system does not list them."""
    lines = CPU_INFO.read_text().splitlines() if CPU_INFO.exists() else []
    return next(
        (set(line.split()) for line in lines if line.startswith("flags")), set()
    )


@pytest.mark.release
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name", [name for name, (needed, _) in SETS.items() if needed <= flags()]
)
def test_bits_are_equal_on_other_cpus(name):
    libraries = SETS[name][1]
    said_by(
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "tests.support.other_cpu",
        "-k",
        CHOSEN if libraries else IN_BF16,
        *(str(HERE / f) for f in FILES),
        env={"TEST_CPU": name, **dict(zip(LIBRARIES, libraries, strict=False))},
    )
