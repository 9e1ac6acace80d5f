"""`python -m baton.engine.check_compute`: print the `ComputeFacts` of this machine as JSON.

`baton doctor` runs it in a separate process. It compiles nothing and takes no GPU memory except
that of a CUDA context.
"""

import ctypes
import os
import sys

import msgspec
import torch

from baton.engine.compute_facts import ComputeFacts
from baton.engine.cuda_start import why_no_gpu
from baton.kernels.cpu_library import why_not_kept


def compute_facts() -> ComputeFacts:
    no_gpu = why_no_gpu()
    return ComputeFacts(
        torch=str(torch.__version__),
        cuda=torch.version.cuda or "",
        driver_cuda=_driver_cuda(),
        no_gpu=no_gpu,
        num_gpus=0 if no_gpu else torch.cuda.device_count(),
        kernels_failure=why_not_kept(),
    )


def _driver_cuda() -> str:
    """Return the newest CUDA version that the driver supports; empty without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ""
    version = ctypes.c_int()
    if driver.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return ""
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


if __name__ == "__main__":
    # Libraries may print too, so the facts are the last line.
    sys.stdout.flush()
    os.write(1, b"\n" + msgspec.json.encode(compute_facts()) + b"\n")
