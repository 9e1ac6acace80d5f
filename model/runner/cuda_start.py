"""The start of a rank on a GPU: check that it works, size the pool, warm up and capture.

Errors of CUDA are explained in one line that says what to do.
"""

import os
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from baton.model.runner.packing import ALL_DECODE_ROWS, Bucket
from baton.model.runner.runner import Runner
from baton.node.executor import Progress
from baton.node.scheduling.plan import Slice, StepPlan
from baton.protocol.config import CacheConfig, ClusterConfig
from baton.protocol.errors import BatonError, NodeError
from baton.protocol.ids import Key, RequestId
from baton.protocol.sampling import Penalties, Sampling
from baton.runtime.host import num_gpus

GIB = 1 << 30
OUT_OF_MEMORY = (
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
SMALL = (
    "lower cache.memory_mib, engine.max_num_batched_tokens or engine.max_num_seqs, "
    "or set engine.graphs=none"
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
        ("Failed to find C compiler", "Python.h", "'gcc'", "'clang'", "'cc'"),
        "Triton compiles its launcher here: install a C compiler and Python's headers, such as by "
        "`apt install gcc libc6-dev python3-dev`",
    ),
    (
        ("libcuda.so", "ldconfig"),
        "the driver's libcuda.so was not found: install the NVIDIA driver's libraries where "
        "`ldconfig -p` lists them, or set TRITON_LIBCUDA_PATH to their folder",
    ),
    (
        ("out of resource: shared memory",),
        "a kernel needs more shared memory than this GPU has; use --device cpu, and report it",
    ),
    (
        ("PTXAS error", "`ptxas`"),
        "Triton's assembler does not know this GPU: install a newer triton, with the torch that "
        "wants it",
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
        f"{memory}; {_what_to_free(memory)}lower engine.max_num_batched_tokens or "
        "engine.max_num_seqs, or take a smaller model"
    )


def _what_to_free(memory: GpuMemory) -> str:
    is_crowded = memory.others > GIB
    return "end what else uses the GPU (nvidia-smi lists it), or " if is_crowded else ""


# The tokens of captured steps of prompts, and such a step's tokens for each prompt, or its prompts
# if it is small. With room for more prompts, Hopper's attention would take its tile for short ones.
PROMPT_TOKENS = (64, 128, 192, 256, 384, 512, *range(768, 2049, 256))
TOKENS_A_PROMPT = 128
PROMPTS = 8
# Rows of a captured step with guesses.
GUESS_TOKENS = 512
MANY_TOKENS = 65  # of a chunk that no tile for few queries takes
POOL_SHARE = 0.9  # the share of the memory that the weights and the largest step leave
CONTEXT_BYTES = 1 << 29  # about what CUDA itself takes for a process


def why_no_gpu() -> str:
    """Return why no GPU can be used here; empty if one can."""
    if torch.version.cuda is None:
        return (
            "this torch is built without CUDA: install a build with it, such as by "
            "`make clean install`, or use --device cpu"
        )
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().split("\n")[0]
        if not num_gpus():
            return (
                f"no NVIDIA driver or GPU was found: install the driver, or use --device cpu "
                f"({reason})"
            )
        if meaning := meaning_of(str(error)):
            return f"{meaning} ({reason})"
        return (
            f"the GPU cannot be used; check it and its driver with nvidia-smi: {reason}"
        )
    return "" if torch.cuda.device_count() else "CUDA_VISIBLE_DEVICES leaves no GPU"


def why_no_launcher() -> str:
    """Return why Triton could not compile its launcher here, and what to do; empty if it can."""
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return meaning_of("Failed to find C compiler")
    has_headers = (Path(sysconfig.get_path("include")) / "Python.h").exists()
    return "" if has_headers else f"{meaning_of('Python.h')} (Python.h is missing)"


def check_compiled_kernels() -> None:
    """Let Triton compile again what is damaged in its cache, here and in processes started here."""
    os.environ.setdefault(
        "TRITON_CACHE_MANAGER", "baton.kernels.checked_cache:CheckedCache"
    )


def keep_sums_whole() -> None:
    """Take cuBLAS's workspace away, without which it cannot split the sums of a product.

    Called before the first product of this process. Where a sum's order still depends on the number
    of rows, `keeps_bits` finds it.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    os.environ.setdefault("CUBLASLT_WORKSPACE_SIZE", "1")
    torch.backends.cuda.preferred_blas_library("cublaslt")


@contextmanager
def one_line_errors(device: torch.device, doing: str) -> Iterator[None]:
    """Turn exceptions of CUDA, Triton and compilers into a `NodeError` that says what to do."""
    try:
        yield
    except BatonError:
        raise
    except Exception as error:  # Triton's have no base class but this
        memory = None
        # After some errors the device answers no more calls.
        with suppress(RuntimeError):
            memory = memory_of(device)
        text = str(error) or type(error).__name__
        if isinstance(error, subprocess.CalledProcessError):
            text = " ".join(map(str, (error, error.stderr or "", error.output or "")))
        raise NodeError(line_of(text, doing, memory)) from error


def memory_of(device: torch.device) -> GpuMemory:
    free, total = torch.cuda.mem_get_info(device)
    return GpuMemory(free, total, torch.cuda.memory_reserved(device))


def free_for_pool(
    probe: Runner,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    max_model_len: int,
    config: ClusterConfig,
) -> int:
    """Return the bytes that a pool may take beside the largest steps, which are tried on `probe`.

    Nodes that share a GPU take equal parts of it, in any order of starting.
    """
    cache = config.cache
    device = probe.device
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    length = min(max_num_batched_tokens, max_model_len)
    # Where keys are expanded, so are those of the whole context.
    first = max_model_len - length if probe.backend.expands_prompts else 0
    probe.execute(StepPlan(0, (idle_slice("prompt", first, length, probe),)))
    # A table as wide as the longest sequence needs the largest workspace.
    num_guesses = config.engine.num_speculative_tokens
    most = max(1, max_num_batched_tokens - max_num_seqs)
    steps = {(0, max_num_seqs, most), (num_guesses, max_num_seqs, most)}
    if num_guesses:
        # With few guesses, more sequences share decode attention, whose workspace grows with them.
        several = min(max_num_seqs, ALL_DECODE_ROWS - num_guesses)
        steps.add((num_guesses, several, min(most, ALL_DECODE_ROWS - several)))
    for guesses, num_sequences, room in sorted(steps):
        start = max(0, max_model_len - 2 - 2 * guesses)
        decoding = [idle_slice("longest", start, 1, probe, guesses)]
        decoding += [
            idle_slice(
                f"s{number}", 1, 1, probe, guesses if number * guesses < room else 0
            )
            for number in range(1, num_sequences)
        ]
        decoding.sort(key=lambda part: part.length)
        probe.execute(StepPlan(1, tuple(decoding)))
    needed = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    left = left_to_take(free, total, torch.cuda.memory_reserved(device), cache)
    # Captured steps keep memory of their own, at most as much as the largest one needs.
    share = 1.0 if cache.gpu_memory_utilization else POOL_SHARE
    return max(0, int(share * (left - 2 * needed)))


def left_to_take(free: int, total: int, reserved: int, cache: CacheConfig) -> int:
    """Return the bytes of a GPU that a node which has `reserved` may still take.

    The free memory depends on how far other nodes have started, so nodes that share the GPU take
    equal parts of the whole, or of the share of it that `cache` allows them.
    """
    if cache.gpu_shared_by == 1 and not cache.gpu_memory_utilization:
        return free
    allowed = int((cache.gpu_memory_utilization or 1.0) * total) // cache.gpu_shared_by
    return min(free, allowed - reserved - CONTEXT_BYTES)


def prepare(runner: Runner, buckets: Sequence[Bucket], progress: Progress) -> None:
    """Compile every kernel and capture the steps of `buckets`; later it would look like a hang."""
    progress("kernels", 0, 1)
    warm_up(runner)
    progress("kernels", 1, 1)
    if buckets:
        runner.capture(buckets, progress)


def warm_up(runner: Runner) -> None:
    """Compute prompts of two and of more tokens, a token again, and the last of a long context.

    This compiles every kernel, including the one that merges the splits of long contexts, for both
    tiles of prefill attention. A head drafts behind single tokens. All stores go to block 0, which
    has no owner yet and whose first owner stores before it reads.
    """
    key = Key(RequestId("warm-up"))
    sampling = Sampling(
        seed=0, max_tokens=1, top_p=0.9, penalties=Penalties(presence=1.0)
    )
    num_blocks = max(1, runner.backend.table_blocks)
    size = runner.cache.pool.shape[4]
    longest = (num_blocks - 1) * size
    many = min(MANY_TOKENS, num_blocks * size)
    for start, length, width in (
        (0, 2, 1),
        (0, many, -(-many // size)),
        (1, 1, 1),
        (longest, 1, num_blocks),
        (longest, 2, num_blocks),
    ):
        part = Slice(
            key,
            start,
            length,
            (0,) * length,
            (0,) * width,
            (0,),
            sampling,
            2,
            past=(),
            state=_state_of(runner),
            num_drafts=2 if runner.drafter is not None and start else None,
        )
        runner.execute(StepPlan(start, (part,)))


def idle_slice(
    name: str, start: int, length: int, runner: Runner, num_guesses: int | None = None
) -> Slice:
    """Return a slice whose keys and values are all in block 0.

    One that decodes has guesses, and asks for as many drafts if a head makes them.
    """
    sampling = Sampling(seed=0, max_tokens=1, top_p=0.9)
    num_drafts = num_guesses if runner.drafter is not None else None
    num_ahead = 0 if num_guesses is None else 1 + 2 * num_guesses
    num_blocks = -(-(start + length + num_ahead) // runner.cache.pool.shape[4])
    num_prompt_tokens = start + (length if num_guesses is None else 1)
    length += num_guesses or 0
    return Slice(
        Key(RequestId(name)),
        start,
        length,
        (0,) * length,
        (0,) * num_blocks,
        (0,),
        sampling,
        num_prompt_tokens,
        num_guesses=num_guesses or 0,
        state=_state_of(runner),
        num_drafts=num_drafts,
    )


def _state_of(runner: Runner) -> tuple[int, ...]:
    """Return a state whose blocks are all block 0."""
    states = runner.cache.states
    return () if states is None else (0,) * states.num_blocks


def buckets_up_to(num_sequences: int, num_tokens: int = 0) -> tuple[Bucket, ...]:
    """Return the sizes to capture so that decode steps and chunks of prompts fit.

    A decode step has up to `num_sequences` rows, at most 256. Chunks have up to `num_tokens`, which
    is a size itself so that a long prompt's chunks have no padding. Above 2,048 tokens even a small
    model computes for longer than Python takes to launch it.
    """
    sizes = (1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 257, 32))
    last = next((size for size in (0, *sizes) if size >= num_sequences), sizes[-1])
    decoding = [Bucket(size, size) for size in sizes if size <= last]
    chunks = {size for size in PROMPT_TOKENS if size <= num_tokens}
    if PROMPT_TOKENS[0] < num_tokens < PROMPT_TOKENS[-1]:
        chunks.add(num_tokens)
    prompts = [
        Bucket(size, max(PROMPTS, size // TOKENS_A_PROMPT)) for size in sorted(chunks)
    ]
    return (*decoding, *prompts)


def with_guesses(
    buckets: Sequence[Bucket], num_guesses: int, *, has_head: bool = False
) -> tuple[Bucket, ...]:
    """Return `buckets`, and for each decode step those where sequences have guesses.

    Every sequence or a quarter of them has up to `num_guesses`. If the model `has_head`, it drafts
    as many in these steps, and in decode steps where a sequence asks for drafts.
    """
    if not num_guesses:
        return tuple(buckets)
    sizes = [bucket.num_sequences for bucket in buckets if bucket.num_decoding]
    num_drafts = num_guesses if has_head else 0
    guessing = {
        Bucket(size + num_guesses * num_guessing, size, True, num_drafts)
        for size in sizes
        for num_guessing in (-(-size // 4), size)
    }
    found = {one for one in guessing if one.num_tokens <= GUESS_TOKENS}
    if has_head:
        found |= {Bucket(size, size, num_drafts=num_drafts) for size in sizes}
    return tuple(sorted({*buckets, *found}))
