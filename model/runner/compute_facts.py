"""What torch and the compiled kernels can do on this machine, without loading a model.

`baton doctor` runs `python -m baton.model.runner.compute_facts`, which prints `ComputeFacts` as
JSON, because torch may take seconds to load or end the process. It compiles nothing and takes no
GPU memory except that of a CUDA context.
"""

import ctypes
import itertools
import os
import sys

import msgspec


class ComputeFacts(msgspec.Struct, frozen=True):
    """A field with its default value is unknown."""

    failure: str = ""  # why torch could not be imported
    torch: str = ""
    # The CUDA version of torch's build; empty if it was built without CUDA.
    cuda: str = ""
    driver_cuda: str = ""  # the newest CUDA version that the driver supports
    no_gpu: str = ""  # why torch can use no GPU
    num_gpus: int = 0  # that torch can use
    gpu_bytes: int = 0  # the memory of the largest
    peerless: tuple[str, ...] = ()  # pairs of GPUs without peer access, such as "0-1"
    no_launcher: str = ""  # why Triton cannot compile what launches its kernels
    kernels_failure: str = ""  # why kernels cannot be compiled or cached


def compute_facts() -> ComputeFacts:
    # The doctor reads `ComputeFacts` in a process that must not load torch.
    import torch

    from baton.kernels.cpu.library import why_not_kept
    from baton.model.runner.cuda_start import why_no_gpu, why_no_launcher

    no_gpu = why_no_gpu()
    gpus = range(0 if no_gpu else torch.cuda.device_count())
    return ComputeFacts(
        torch=str(torch.__version__),
        cuda=torch.version.cuda or "",
        driver_cuda=_driver_cuda(),
        no_gpu=no_gpu,
        num_gpus=len(gpus),
        gpu_bytes=max(
            (torch.cuda.get_device_properties(gpu).total_memory for gpu in gpus),
            default=0,
        ),
        peerless=tuple(
            f"{one}-{two}"
            for one, two in itertools.combinations(gpus, 2)
            if not torch.cuda.can_device_access_peer(one, two)
        ),
        no_launcher=why_no_launcher(),
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
