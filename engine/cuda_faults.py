"""Explain CUDA's errors to the person who runs a node, in one line that says what to do.

`cuda_start` calls it when a rank starts, and `rank` when no pool fits. The line is written to the
log, to the router's list of nodes and at the end of the command; the other nodes go on. This file
is pure.
"""

from dataclasses import dataclass

GIB = 1 << 30
OUT_OF_MEMORY = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
SMALL = (
    "lower cache.memory_mib, engine.chunk_tokens or engine.max_num_seqs, or set engine.graphs=false"
)
# A text that an error contains, and its meaning.
MEANINGS = (
    (
        ("busy or unavailable", "cudaErrorDevicesUnavailable"),
        "another program has exclusive use of the GPU: end it, or let several programs share the "
        "GPU with `nvidia-smi -c DEFAULT`",
    ),
    (
        ("driver on your system is too old", "driver version is insufficient"),
        "the NVIDIA driver is too old for this torch: update the driver, or install a torch for an "
        "older CUDA",
    ),
    (
        ("no kernel image",),
        "this torch has no code for this GPU: install a torch that supports it",
    ),
    (
        ("driver/library version mismatch", "system has unsupported display driver"),
        "the driver was updated while the machine was running: restart the machine, or load the "
        "new driver's module",
    ),
    (
        ("forward compatibility was attempted",),
        "the CUDA compatibility libraries do not fit this GPU: remove them from LD_LIBRARY_PATH, "
        "or update the driver",
    ),
    (
        ("system not yet initialized",),
        "the NVLink fabric of the GPUs is not running: start nvidia-fabricmanager",
    ),
)


@dataclass(slots=True, frozen=True)
class GpuMemory:
    """The bytes of a GPU's memory: the free ones, all of them, and those that this process uses."""

    free: int
    total: int
    ours: int

    @property
    def others(self) -> int:
        return max(0, self.total - self.free - self.ours)

    def __str__(self) -> str:
        return (
            f"{self.free / GIB:.1f} of {self.total / GIB:.1f} GiB are free, this node has "
            f"{self.ours / GIB:.1f} and others have {self.others / GIB:.1f}"
        )


def line_of(error: str, doing: str, memory: GpuMemory | None) -> str:
    """Return the line for an error that CUDA or torch raised, including the error's first line."""
    first = error.strip().split("\n")[0].rstrip(".")
    if memory is not None and any(text in error for text in OUT_OF_MEMORY):
        return f"the GPU has no memory left {doing}: {memory}; {_what_to_free(memory)}{SMALL}"
    meaning = meaning_of(error)
    if meaning:
        return f"{meaning} ({first})"
    return f"the GPU failed {doing}: {first}; see nvidia-smi and dmesg"


def meaning_of(error: str) -> str:
    """Return what an error means and what to do about it; empty if that is unknown."""
    for texts, meaning in MEANINGS:
        if any(text in error for text in texts):
            return meaning
    return ""


def line_without_pool(memory: GpuMemory, block_bytes: int) -> str:
    """Return the line for a GPU on which weights and steps leave no room for a pool."""
    return (
        f"no KV block of {block_bytes / GIB:.3f} GiB fits beside the weights and the largest step: "
        f"{memory}; {_what_to_free(memory)}lower engine.chunk_tokens or engine.max_num_seqs, or "
        "take a smaller model"
    )


def _what_to_free(memory: GpuMemory) -> str:
    is_crowded = memory.others > GIB
    return "end what else uses the GPU (nvidia-smi lists it), or " if is_crowded else ""
