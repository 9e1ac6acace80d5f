"""Everything that computes one rank: weights, pool, runner and transfer port, made in one place.

Called by `InProcessExecutor` and by each rank's worker process. Decides what a configuration means
for a rank (device, dtype, block count) and refuses what cannot work before anything large is
allocated. Starts no threads but the port's own.
"""

import ctypes
import hashlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from baton.engine.attention.backend import Backend
from baton.engine.attention.cpu import cpu_library, make_cpu_backend
from baton.engine.cuda_queue import CudaQueue
from baton.engine.executor import ExecutorInfo, Progress
from baton.engine.kv_cache import (
    KVCache,
    device_cache,
    host_cache,
    kv_layout,
    num_blocks_for,
    pool_shape,
)
from baton.engine.layers.rope import rope_table
from baton.engine.model_config import DecoderConfig, read_decoder_config
from baton.engine.models.loading import check_split, load_decoder, local_heads
from baton.engine.plan import Slice, StepPlan
from baton.engine.runner import Runner
from baton.engine.sampler import Sampler, compiled
from baton.engine.step_queue import HostQueue, StepQueue
from baton.engine.tensor_parallel import Ranks
from baton.engine.weights import Checkpoint, fingerprint
from baton.kernels.cpu_library import CpuLibrary
from baton.kernels.cpu_sampler import CpuSampler
from baton.kv_transfer.agent import TransferAgent, make_port
from baton.kv_transfer.host_pool import HostPool
from baton.kv_transfer.interfaces import PoolMemory
from baton.protocol.config import ClusterConfig
from baton.protocol.errors import ConfigError
from baton.protocol.ids import Epoch, Key, RequestId
from baton.protocol.messages import KVLayout
from baton.protocol.sampling import Sampling
from baton.runtime.clock import boottime
from baton.runtime.cpus import threads_per_rank

# From malloc.h; the largest threshold that glibc takes.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEPT_BYTES = 32 << 20


@dataclass(slots=True, frozen=True)
class RankPlan:
    """What a configuration comes to for each rank, before anything is allocated."""

    folder: Path
    decoder: DecoderConfig
    device: torch.device
    dtype: torch.dtype
    max_model_len: int
    layout: KVLayout
    num_blocks: int


@dataclass(slots=True, frozen=True)
class LoadedRank:
    """One rank, ready to compute. `info.ranks` holds this rank's address alone."""

    runner: Runner
    pool: HostPool | PoolMemory
    port: TransferAgent
    info: ExecutorInfo

    def close(self) -> None:
        """End the port, then let go of the pool."""
        self.port.close()
        if isinstance(self.pool, HostPool):
            self.pool.close()


def load_rank(config: ClusterConfig, epoch: Epoch, ranks: Ranks, progress: Progress) -> LoadedRank:
    """Load and allocate one rank. Raises `ConfigError`.

    Sets the number of threads that torch uses in this process, and how it keeps freed memory.
    """
    plan = plan_rank(config, ranks.size)
    _keep_freed_memory()
    torch.set_num_threads(threads_per_rank(config.engine))
    runner, pool = load_runner(plan, config, ranks, progress)
    if plan.device.type == "cuda":
        progress("kernels", 0, 1)
        warm_up(runner)
        progress("kernels", 1, 1)
    port = make_port(pool, epoch, config.transfer)
    info = ExecutorInfo(
        num_blocks=plan.num_blocks,
        layout=plan.layout,
        ranks=(port.address(),),
        model=fingerprint(plan.folder, str(plan.dtype).removeprefix("torch.")),
        max_model_len=plan.max_model_len,
        vocab_size=plan.decoder.vocab_size,
        eos_token_ids=plan.decoder.eos_token_ids,
        batch_invariant=is_batch_invariant(runner),
        compute=compute_path(runner),
    )
    return LoadedRank(runner, pool, port, info)


def plan_rank(config: ClusterConfig, num_ranks: int) -> RankPlan:
    """Raises `ConfigError` when the settings and the model do not go together."""
    if not config.model.path:
        raise ConfigError("model.path: no model folder is given")
    folder = Path(config.model.path)
    decoder = read_decoder_config(folder)
    check_split(decoder, num_ranks)
    limit = decoder.max_position_embeddings
    if config.model.max_len > limit:
        raise ConfigError(f"model.max_len: the model has {limit} positions")
    name = decoder.dtype if config.model.dtype == "auto" else config.model.dtype
    dtype = torch.float32 if name == "float32" else torch.bfloat16
    layout = kv_layout(decoder, config.cache, num_ranks, dtype)
    return RankPlan(
        folder=folder,
        decoder=decoder,
        device=_device(config),
        dtype=dtype,
        max_model_len=config.model.max_len or limit,
        layout=layout,
        num_blocks=num_blocks_for(config.cache, layout, num_ranks),
    )


def load_runner(
    plan: RankPlan, config: ClusterConfig, ranks: Ranks, progress: Progress
) -> tuple[Runner, HostPool | PoolMemory]:
    """Weights first: they take longest, and a bad folder shows there."""
    checkpoint = Checkpoint(plan.folder)
    decoder = load_decoder(plan.decoder, checkpoint, ranks, plan.dtype, plan.device, progress)
    progress("kv pool", 0, 1)
    shape = pool_shape(plan.decoder, config.cache, ranks.size, plan.num_blocks)
    pool: HostPool | PoolMemory
    if plan.device.type == "cpu":
        pool = HostPool(plan.num_blocks, plan.layout.block_bytes)
        cache = host_cache(pool, shape, plan.dtype)
    else:
        cache = device_cache(shape, plan.dtype, plan.device)
        pool = PoolMemory(
            cache.pool.data_ptr(), plan.num_blocks, plan.layout.block_bytes, str(plan.device)
        )
    progress("kv pool", 1, 1)
    library = None
    if plan.device.type == "cpu":
        library = cpu_library(plan.dtype, config.engine.kernels, partial(progress, "kernels"))
    backend = _backend(plan, cache, ranks.size, library)
    kernel = compiled(CpuSampler(library)) if library else None
    sampler = Sampler(plan.decoder.eos_token_ids, kernel)
    queue: StepQueue = HostQueue() if plan.device.type == "cpu" else CudaQueue(plan.device)
    return Runner(decoder, backend, cache, sampler, queue, boottime), pool


def is_batch_invariant(runner: Runner) -> bool:
    """Whether the bits of a token depend on its own sequence alone."""
    has_rules = all(linear.rule is not None for linear in runner.decoder.linears())
    return has_rules and runner.backend.is_batch_invariant


def compute_path(runner: Runner) -> str:
    """Equal for two ranks of one model if they compute the same bits, as far as is known."""
    digest = hashlib.blake2b(runner.backend.name.encode(), digest_size=6)
    if runner.device.type == "cuda":
        digest.update(torch.cuda.get_device_name(runner.device).encode())
    rules = [linear.rule for linear in runner.decoder.linears() if linear.rule is not None]
    for rule in sorted({rule.digest for rule in rules}):
        digest.update(rule)
    return f"{runner.backend.name}-{digest.hexdigest()}"


def warm_up(runner: Runner) -> None:
    """Compute a prompt of two tokens, and its last one again, so that every kernel is compiled.

    That takes seconds; in a request's first step it could pass for a step that is stuck. Stores
    into block 0 alone: nobody owns it yet, and whoever does stores before reading.
    """
    key = Key(RequestId("warm-up"))
    sampling = Sampling(seed=0, max_tokens=1, top_p=0.9)
    for start in (0, 1):
        tokens = (0, 0)[start:]
        part = Slice(key, start, len(tokens), tokens, (0,), (0,), sampling, 2)
        runner.execute(StepPlan(start, (part,)))


def _keep_freed_memory() -> None:
    """Let the C library reuse large buffers; else every operation on a chunk maps fresh pages.

    On CPUs an RMS norm of 512 tokens took eight times as long without.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc has it
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, KEPT_BYTES)
        mallopt(M_TRIM_THRESHOLD, 16 * KEPT_BYTES)


def _device(config: ClusterConfig) -> torch.device:
    wanted = config.engine.device
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("engine.device: no CUDA device is available")
    return torch.device("cpu") if wanted == "cpu" else torch.device("cuda", 0)


def _backend(plan: RankPlan, cache: KVCache, num_ranks: int, library: CpuLibrary | None) -> Backend:
    decoder = plan.decoder
    num_heads, _ = local_heads(decoder, num_ranks)
    table = rope_table(decoder.rope, decoder.head_dim, plan.max_model_len)
    if plan.device.type == "cpu":
        return make_cpu_backend(
            library, cache.pool, num_heads, table, decoder.rms_norm_eps, decoder.sliding_window
        )
    # Triton is there on Linux only, and slow to import: only who computes on a GPU needs it.
    from baton.engine.attention.cuda import CudaBackend, missing_for

    shape = tuple(cache.pool.shape)
    missing = missing_for(shape, num_heads)
    if missing:
        raise ConfigError(missing)
    window = decoder.sliding_window
    return CudaBackend(cache.pool, num_heads, table, decoder.rms_norm_eps, window)
