"""What torch and the compiled kernels can do on a machine, without loading a model.

`baton doctor` runs `python -m baton.engine.check_compute`, which prints these facts as JSON: torch
may take seconds to load, or end the process. Nothing that serves uses this.
"""

import msgspec


class ComputeFacts(msgspec.Struct, frozen=True):
    """A default means that it is not known."""

    failure: str = ""  # why torch could not be asked
    torch: str = ""
    cuda: str = ""  # the CUDA version of torch's build; empty: built without CUDA
    driver_cuda: str = ""  # the newest CUDA version that the driver supports
    no_gpu: str = ""  # why torch can use no GPU
    num_gpus: int = 0  # that torch can use
    kernels_failure: str = ""  # why compiled kernels cannot be made or kept
