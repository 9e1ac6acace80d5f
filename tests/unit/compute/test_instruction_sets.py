"""Equal bits on other kinds of CPU: torch and its libraries do without newer instructions.

They read these settings when they start, so each set runs in a process of its own. Only sets that
this machine has are run; the tests themselves, run as usual, use all that it has.
"""

from pathlib import Path

import pytest

from tests.support.module_process import said_by

HERE = Path(__file__).parent
CPU_INFO = Path("/proc/cpuinfo")
# Instruction set -> the flags that a CPU with it has, and how ATen, oneDNN and MKL call it.
SETS = {
    "avx2": ({"avx2", "fma"}, ("avx2", "AVX2", "AVX2")),
    "avx512": (
        {"avx512f", "avx512bw", "avx512vl", "avx512dq"},
        ("avx512", "AVX512_CORE", "AVX512"),
    ),
}
FILES = ("test_linear_bits.py", "test_batch_invariance.py", "test_split_bits.py")
# Left out there: what adds time and no other kinds of products.
CHOSEN = "not wide and not mistral and not block_size and not 8192"


def flags() -> set[str]:
    """Of the first CPU; empty where the system does not list them."""
    lines = CPU_INFO.read_text().splitlines() if CPU_INFO.exists() else []
    return next((set(line.split()) for line in lines if line.startswith("flags")), set())


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [name for name, (needed, _) in SETS.items() if needed <= flags()])
def test_bits_are_equal_without_newer_instructions(name: str) -> None:
    aten, onednn, mkl = SETS[name][1]
    said_by(
        "pytest", "-q", "-p", "no:cacheprovider", "-k", CHOSEN, *(str(HERE / f) for f in FILES),
        env={
            "ATEN_CPU_CAPABILITY": aten, "ONEDNN_MAX_CPU_ISA": onednn,
            "MKL_ENABLE_INSTRUCTIONS": mkl,
        },
        timeout_s=280.0,
    )  # fmt: skip
