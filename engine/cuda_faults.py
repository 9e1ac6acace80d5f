"""What CUDA's errors mean for the person who runs a node: one line that says what to do. Pure.

`cuda_start` asks here at a rank's start, `rank` when no pool fits. A line goes to the log, to the
router's list of nodes and to the end of the command; the other nodes go on.
"""

from dataclasses import dataclass

GIB = 1 << 30
OUT_OF_MEMORY = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
SMALL = (
    "lower cache.memory_mib, engine.chunk_tokens or engine.max_num_seqs, or set engine.graphs=false"
)
# What an error contains, and what it means.
MEANINGS = (
    (
        ("busy or unavailable", "cudaErrorDevicesUnavailable"),
        "another program has the GPU to itself: end it, or let several share the GPU with "
        "`nvidia-smi -c DEFAULT`",
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
        "the driver was updated while the machine ran: restart the machine, or load the new "
        "driver's module",
    ),
    (
        ("forward compatibility was attempted",),
        "the CUDA compatibility libraries do not fit this GPU: take them out of LD_LIBRARY_PATH, "
        "or update the driver",
    ),
    (
        ("system not yet initialized",),
        "the GPUs' NVLink fabric is not up: start nvidia-fabricmanager",
    ),
)


@dataclass(slots=True, frozen=True)
class GpuMemory:
    """The bytes of a GPU: those that are free, all of them, and those of this process."""

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
    """Return the line for an error that CUDA or torch raised, with its own first line."""
    first = error.strip().split("\n")[0].rstrip(".")
    if memory is not None and any(text in error for text in OUT_OF_MEMORY):
        return f"the GPU has no memory left {doing}: {memory}; {_what_to_free(memory)}{SMALL}"
    meaning = meaning_of(error)
    if meaning:
        return f"{meaning} ({first})"
    return f"the GPU failed {doing}: {first}; see nvidia-smi and dmesg"


def meaning_of(error: str) -> str:
    """Return what is known of an error and helps; empty if nothing is."""
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
