"""Make everything that computes one rank: weights, pool, runner and transfer port."""

import ctypes
import math
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from baton.kernels.cpu.functions import CpuLinears, CpuSampler
from baton.kernels.cpu.library import CpuLibrary, has_bf16_tiles
from baton.kernels.proofs import LATENT_PREFILL, STATES
from baton.kv_transfer.agent import TransferAgent, make_port
from baton.kv_transfer.interfaces import PoolMemory
from baton.kv_transfer.pools import DevicePool, HostPool
from baton.kv_transfer.tiers import make_tiers
from baton.model.checkpoint.lora_files import (
    fingerprint_of,
    read_adapter,
)
from baton.model.config.decoder_config import DecoderConfig
from baton.model.config.transformers_config import (
    TransformersConfig,
)
from baton.model.layers.attention import IndexPool, PlainBackend, PoolParts
from baton.model.layers.cpu_backend import CpuBackend, cpu_library
from baton.model.layers.decoder import Decoder
from baton.model.layers.draft_head import DraftHead
from baton.model.layers.rotary import rope_table, unrotated
from baton.model.loading.adapters import (
    LoraLoader,
    PreparedAdapter,
)
from baton.model.loading.decoder_loading import load_decoder, local_heads
from baton.model.loading.draft_loading import load_draft_head
from baton.model.loading.layer_weights import (
    RankDevice,
    linears_for,
)
from baton.model.loading.weight_digests import WeightDigest
from baton.model.loading.weights import Checkpoint, fingerprint
from baton.model.runner.compute_digest import (
    compute_path,
    has_two_orders,
    is_batch_invariant,
)
from baton.model.runner.cuda_start import (
    buckets_up_to,
    check_compiled_kernels,
    free_for_pool,
    idle_slice,
    keep_sums_whole,
    line_without_pool,
    memory_of,
    one_line_errors,
    prepare,
    with_guesses,
)
from baton.model.runner.device_kernels import (
    UNPROVEN,
    DeviceKernels,
    experts_packing_of,
    experts_product_of,
    kernels_of,
    library_of,
    packing_of,
    product_of,
)
from baton.model.runner.kv_cache import (
    SPARE_BLOCKS,
    KVCache,
    device_cache,
    host_cache,
    index_shape,
    pool_shape,
    states_of,
    wide_heads,
)
from baton.model.runner.rank_plan import RankPlan, plan_rank, sized
from baton.model.runner.runner import Runner, StepDecoder
from baton.model.runner.step_queue import CudaQueue, HostQueue
from baton.model.sampling.device_counts import DeviceCounts
from baton.model.sampling.sampler import Sampler, compiled
from baton.model.sampling.token_masks import TokenMasks
from baton.model.tensor_parallel import Ranks, least
from baton.node.executor import AdapterLoad, ExecutorInfo, Progress
from baton.node.scheduling.plan import DraftCost, StepPlan
from baton.protocol.adapters import lora_version
from baton.protocol.config import ClusterConfig
from baton.protocol.errors import ConfigError, NodeError
from baton.protocol.ids import Epoch
from baton.protocol.messages import NodeFacts, StepLimits
from baton.runtime.clock import boottime
from baton.runtime.host import thread_counts
from baton.runtime.log import logger

# From malloc.h; the largest threshold that glibc takes.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
# Most sequences with which the cost of a draft is measured, how often, and for about how long.
COST_SEQUENCES = 8
COST_ROUNDS = 16
COST_SECONDS = 1.0
KEPT_BYTES = 32 << 20

log = logger("rank")


@dataclass(slots=True, frozen=True)
class LoadedRank:
    """One rank, ready to compute. `info.ranks` holds this rank's address alone."""

    runner: Runner
    pool: HostPool | DevicePool
    port: TransferAgent
    info: ExecutorInfo
    plan: RankPlan

    def prepare_adapter(self, load: AdapterLoad) -> tuple[PreparedAdapter, str]:
        """Read an adapter while steps run; return it with the digest of its files.

        Raises `ConfigError` for one that does not fit.
        """
        loras = self.runner.loras
        config = self.plan.decoder
        if (
            loras is None
            or not loras.space.num_slots
            or not isinstance(config, DecoderConfig)
        ):
            raise ConfigError(
                "the node was started without model.allow_runtime_lora_updating"
            )
        adapter = read_adapter(load.name, Path(load.path), config)
        digest = fingerprint_of((adapter,)).hex()
        return loras.prepare(
            lora_version(load.name, digest), adapter, load.slot
        ), digest

    def close(self) -> None:
        """End the port, then release the captured steps and the pool."""
        self.port.close()
        if (masks := self.runner.sampler.masks) is not None:
            masks.close()
        self.runner.drop_graphs()
        self.pool.close()


def load_rank(
    config: ClusterConfig, epoch: Epoch, ranks: Ranks, progress: Progress
) -> LoadedRank:
    """Load and allocate one rank; sets torch's threads in this process. Raises `ConfigError`."""
    plan = plan_rank(config, ranks.size)
    rope = plan.decoder.rope if isinstance(plan.decoder, DecoderConfig) else None
    if rope is not None and rope.is_long(plan.max_model_len):
        log.warning(
            "longrope: sequences of every length take long_factor; with model.max_model_len up to "
            "the original length they take short_factor",
            original_max_position_embeddings=rope.original_max_position_embeddings,
            max_model_len=plan.max_model_len,
        )
    keep_freed_memory()
    torch.set_num_threads(thread_counts(config.engine)[0])
    # Ranks load one folder, so one of them reads all of it.
    with WeightDigest(plan.folder) if ranks.rank == 0 else nullcontext() as digest:
        runner, pool, kernels = _loaded(plan, config, ranks, progress)
        try:
            weights = b"" if digest is None else digest.result(progress)
        except ConfigError:
            pool.close()
            raise
    give_back_freed_memory()
    dtype = str(plan.dtype).removeprefix("torch.")
    model = fingerprint(plan.folder, dtype, weights, fingerprint_of(plan.adapters))
    compute = compute_path(runner)
    maker = f"{model} {plan.layout} {compute}"
    tiers = make_tiers(config.cache, pool, ranks.rank, ranks.size, maker)
    port = make_port(pool, epoch, config.transfer, tiers)
    info = ExecutorInfo(
        num_blocks=len(runner.cache.pool),
        layout=plan.layout,
        ranks=(port.address(),),
        model=model,
        max_model_len=plan.max_model_len,
        vocab_size=plan.decoder.vocab_size,
        eos_token_ids=plan.decoder.eos_token_ids,
        batch_invariant=is_batch_invariant(runner),
        compute=compute,
        facts=NodeFacts(
            dtype,
            plan.device.type,
            model_name=config.model.shown_name,
            features=kernels.features,
            step=StepLimits(plan.max_num_seqs, plan.max_num_batched_tokens),
            lora_modules=tuple(one.name for one in plan.adapters),
            tasks=plan.tasks,
        ),
        draft_cost=draft_cost(
            runner, config.engine.num_speculative_tokens, plan.max_num_seqs
        ),
        has_two_orders=has_two_orders(runner),
    )
    return LoadedRank(runner, pool, port, info, plan)


def _loaded(
    plan: RankPlan, config: ClusterConfig, ranks: Ranks, progress: Progress
) -> tuple[Runner, HostPool | DevicePool, DeviceKernels]:
    """Load a runner; on a GPU, prove its kernels first, and capture its steps too."""
    if plan.device.type != "cuda":
        return *load_runner(plan, config, ranks, progress), UNPROVEN
    check_compiled_kernels()
    # Parts of a sum are added in fp32.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    with one_line_errors(plan.device, "while it proves its kernels"):
        kernels = kernels_of(plan, config, ranks, progress)
    if plan.layout.state_blocks and STATES not in kernels.proven:
        raise NodeError(
            "layers that keep a state cannot be computed: their kernels are not proven on this "
            "GPU, and the line before says why; --device cpu computes without it"
        )
    if kernels.is_ordered:
        keep_sums_whole()
    with one_line_errors(plan.device, "while it loads the model"):
        runner, pool = load_runner(plan, config, ranks, progress, kernels)
    with one_line_errors(plan.device, "while it captures its steps"):
        graphs = config.engine.graphs if isinstance(runner.decoder, Decoder) else "none"
        num_decoding = plan.max_num_seqs if graphs == "all" else 0
        num_tokens = plan.max_num_batched_tokens if graphs != "none" else 0
        if runner.backend.expands_prompts:
            num_tokens = 0  # how many rows are expanded is known on the host alone
        buckets = with_guesses(
            buckets_up_to(num_decoding, num_tokens),
            config.engine.num_speculative_tokens,
            has_head=runner.drafter is not None,
        )
        prepare(runner, buckets, progress)
    return runner, pool, kernels


def load_runner(
    plan: RankPlan,
    config: ClusterConfig,
    ranks: Ranks,
    progress: Progress,
    kernels: DeviceKernels = UNPROVEN,
) -> tuple[Runner, HostPool | DevicePool]:
    """Load the weights, then make the pool. Raises `ConfigError` for a bad folder."""
    checkpoint = Checkpoint(plan.folder)
    library = None
    if plan.device.type == "cpu":
        library = cpu_library(
            plan.dtype,
            plan.pool_dtype,
            config.engine.kernels,
            partial(progress, "kernels"),
        )
    place = RankDevice(
        plan.dtype,
        plan.device,
        thread_counts(config.engine),
        product_of(plan, kernels),
        _compiled_linears(library),
        experts_product_of(plan),
        packing_of(plan, kernels),
        library_of(plan),
        experts_packing_of(plan, kernels),
        LATENT_PREFILL in kernels.proven,
    )
    decoder: StepDecoder
    draft_head: DraftHead | None = None
    loras = LoraLoader(plan.adapters, plan.device, plan.dtype, plan.lora_space)
    if isinstance(plan.decoder, TransformersConfig):
        # transformers takes seconds to import, and only its models need it.
        from baton.model.transformers_code.transformers_decoder import load_transformers

        progress("weights", 0, 1)
        linears = linears_for(place, progress)
        decoder = load_transformers(
            plan.folder, plan.decoder, ranks, plan.dtype, linears, plan.device
        )
    else:
        decoder = load_decoder(plan.decoder, checkpoint, ranks, place, progress, loras)
        draft_head = load_draft_head(plan.decoder, checkpoint, place, progress, decoder)
    progress("kv pool", 0, 1)
    if plan.device.type == "cuda":
        runner, device_pool = _on_gpu(
            plan, config, decoder, draft_head, progress, kernels
        )
        runner.loras = loras
        return runner, device_pool
    shape = pool_shape(
        plan.decoder, config.cache, ranks.size, plan.num_blocks, plan.pool_dtype
    )
    pool = HostPool(plan.num_blocks, plan.layout.block_bytes)
    states = states_of(plan.decoder, config.cache, ranks.size, plan.pool_dtype)
    of_index = index_shape(plan.decoder, config.cache, plan.num_blocks)
    cache = host_cache(pool, shape, plan.pool_dtype, states, of_index)
    progress("kv pool", 1, 1)
    num_heads, _ = local_heads(plan.decoder, ranks.size)
    wide = wide_heads(plan.decoder, ranks.size)
    index = _index_pool(plan, cache)
    sizes = num_heads, *_rotation(plan), PoolParts(states, wide, index)
    backend = (
        CpuBackend(library, cache.pool, *sizes)
        if library
        else PlainBackend(cache.pool, *sizes)
    )
    if not isinstance(decoder, Decoder):
        from baton.model.transformers_code.transformers_decoder import try_rows

        try_rows(decoder, backend, cache.pool, plan.decoder.vocab_size)
    kernel = compiled(CpuSampler(library)) if library else None
    sampler = Sampler(plan.decoder.eos_token_ids, kernel, _masks(plan))
    runner = Runner(decoder, backend, cache, sampler, HostQueue(), boottime)
    runner.loras = loras
    if draft_head is not None:
        runner.draft_with(draft_head, config.engine.num_speculative_tokens)
    return runner, pool


def _index_pool(plan: RankPlan, cache: KVCache) -> IndexPool | None:
    index = plan.decoder.index if isinstance(plan.decoder, DecoderConfig) else None
    if index is None or cache.index_keys is None:
        return None
    num_chosen = min(index.num_chosen, plan.max_model_len)  # no query sees more keys
    return IndexPool(cache.index_keys, index.num_heads, num_chosen)


def _masks(plan: RankPlan) -> TokenMasks:
    return TokenMasks(plan.folder, plan.decoder.vocab_size, plan.decoder.eos_token_ids)


def _compiled_linears(library: CpuLibrary | None) -> CpuLinears | None:
    """Return the kernels' products, or None where torch's library computes linear layers."""
    if library is None or not library.in_pairs or has_bf16_tiles():
        return None
    return CpuLinears(library)


def _on_gpu(
    plan: RankPlan,
    config: ClusterConfig,
    decoder: StepDecoder,
    draft_head: DraftHead | None,
    progress: Progress,
    kernels: DeviceKernels,
) -> tuple[Runner, DevicePool]:
    # Triton exists on Linux only and is slow to import: only a rank on a GPU needs it.
    from baton.kernels.cuda.sampling import sample_tokens
    from baton.kernels.cuda.token_counts import penalize_counted
    from baton.model.layers.cuda_backend import CudaBackend
    from baton.model.runner.peer_memory import CudaPeerMemory, shareable_memory

    ranks = decoder.ranks
    states = states_of(plan.decoder, config.cache, ranks.size, plan.pool_dtype)

    def runner_over(num_blocks: int, generations: HostPool | None = None) -> Runner:
        shape = pool_shape(
            plan.decoder, config.cache, ranks.size, num_blocks, plan.pool_dtype
        )
        with shareable_memory():
            of_index = index_shape(plan.decoder, config.cache, num_blocks)
            cache = device_cache(
                shape, plan.pool_dtype, plan.device, generations, of_index, states
            )
        num_heads, _ = local_heads(plan.decoder, ranks.size)
        backend = CudaBackend(
            cache.pool,
            num_heads,
            *_rotation(plan),
            is_ordered=kernels.is_ordered,
            index=_index_pool(plan, cache),
            states=states,
            wide=wide_heads(plan.decoder, ranks.size),
            proven=kernels.proven,
        )
        vocab = plan.decoder.vocab_size
        counts = DeviceCounts(plan.max_num_seqs, vocab, plan.device, penalize_counted)
        sampler = Sampler(
            plan.decoder.eos_token_ids, sample_tokens, _masks(plan), counts
        )
        runner = Runner(
            decoder, backend, cache, sampler, CudaQueue(plan.device), boottime
        )
        if draft_head is not None:
            runner.draft_with(draft_head, config.engine.num_speculative_tokens)
        return runner

    if not plan.num_blocks:
        probe = runner_over(1)
        num_bytes = free_for_pool(
            probe,
            plan.max_num_batched_tokens,
            plan.max_num_seqs,
            plan.max_model_len,
            config,
        )
        if num_bytes < plan.layout.block_bytes:
            raise NodeError(
                line_without_pool(memory_of(plan.device), plan.layout.block_bytes)
            )
        plan = sized(plan, config, 1, num_bytes)
        plan = replace(plan, num_blocks=least(ranks, plan.num_blocks, plan.device))
        del probe
    table = HostPool(plan.num_blocks, 0)
    runner = runner_over(plan.num_blocks, table)
    progress("kv pool", 1, 1)
    pool = runner.cache.blocks
    memory = PoolMemory(
        pool.data_ptr(),
        plan.num_blocks,
        plan.layout.block_bytes,
        str(plan.device),
        SPARE_BLOCKS,
    )
    return runner, DevicePool(memory, table, CudaPeerMemory(pool, plan.num_blocks))


def _rotation(plan: RankPlan) -> tuple[list[Tensor], float]:
    """Return a backend's rotary tables and `eps`."""
    model = plan.decoder
    if isinstance(model, TransformersConfig):
        return [unrotated(model.head_dim, plan.max_model_len)], 0.0
    tables = [
        rope_table(rope, width, plan.max_model_len) for rope, width in model.rotations
    ]
    return tables, model.rms_norm_eps


def draft_cost(runner: Runner, num_drafts: int, max_num_seqs: int) -> DraftCost:
    """Measure what a draft costs with one sequence and with some.

    All stores go to block 0, which has no owner yet.
    """
    if runner.drafter is None:
        return DraftCost()
    several = min(COST_SEQUENCES, max_num_seqs)
    one = _cost_with(1, runner, num_drafts)
    if several == 1:
        return DraftCost(one)
    more = _cost_with(several, runner, num_drafts) - one
    return DraftCost(one, max(0.0, more / math.log2(several)))


def _cost_with(num_sequences: int, runner: Runner, num_drafts: int) -> float:
    def seconds(num_guesses: int) -> float:
        names = [f"s{number}" for number in range(num_sequences)]
        slices = tuple(idle_slice(name, 1, 1, runner, num_guesses) for name in names)
        result = runner.execute(StepPlan(0, slices))
        return result.ended_s - result.started_s

    for _ in range(2):  # the first steps take longer
        pair_s = seconds(0) + seconds(num_drafts)
    num_rounds = max(2, min(COST_ROUNDS, int(COST_SECONDS / pair_s)))
    num_rounds = least(runner.decoder.ranks, num_rounds, runner.device)
    # In turns, because others may use the machine for a while.
    pairs = [(seconds(0), seconds(num_drafts)) for _ in range(num_rounds)]
    without = min(pair[0] for pair in pairs)
    with_drafts = min(pair[1] for pair in pairs)
    return max(0.0, with_drafts / without - 1) / num_drafts


def keep_freed_memory() -> None:
    """Let the C library reuse large buffers; otherwise each operation on a chunk maps new pages.

    On CPUs, an RMS norm of 512 tokens took eight times as long without this.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc has this function
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, KEPT_BYTES)
        mallopt(M_TRIM_THRESHOLD, 16 * KEPT_BYTES)


def give_back_freed_memory() -> None:
    """Return to the system what loading needed; of four-bit weights, that is several copies."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has this function
    if trim is not None:
        trim(0)
