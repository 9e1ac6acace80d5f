"""The facts about torch and the compiled kernels on a machine, without loading a model.

`baton doctor` runs `python -m baton.engine.check_compute`, which prints these facts as JSON: torch
may take seconds to load, or end the process. Nothing that serves uses this.
"""

import msgspec


class ComputeFacts(msgspec.Struct, frozen=True):
    """A field with its default value is unknown."""

    failure: str = ""  # why torch could not be imported
    torch: str = ""
    cuda: str = ""  # the CUDA version of torch's build; empty if it was built without CUDA
    driver_cuda: str = ""  # the newest CUDA version that the driver supports
    no_gpu: str = ""  # why torch can use no GPU
    num_gpus: int = 0  # that torch can use
    kernels_failure: str = ""  # why kernels cannot be compiled or cached
