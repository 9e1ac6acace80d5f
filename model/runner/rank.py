"""Make everything that computes one rank: weights, pool, runner and transfer port.

`plan_rank` decides what a configuration means for a rank (device, dtype, block count) and refuses
settings that cannot work before anything large is allocated.
"""

import ctypes
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor

from baton.kernels.cpu.functions import CpuLinears, CpuSampler
from baton.kernels.cpu.library import CpuLibrary, has_bf16_tiles
from baton.kernels.proofs import NARROW, NARROW_EXPERTS, PRODUCTS, STATES
from baton.kernels.reference import NarrowWeight
from baton.kv_transfer.agent import TransferAgent, make_port
from baton.kv_transfer.interfaces import PoolMemory
from baton.kv_transfer.pools import DevicePool, HostPool
from baton.kv_transfer.tiers import make_tiers
from baton.model.checkpoint.draft_files import METHOD, check_drafts, with_draft_head
from baton.model.checkpoint.lora_files import (
    Adapter,
    check_takes_adapters,
    fingerprint_of,
    read_adapter,
    read_adapters,
)
from baton.model.checkpoint.weight_files import as_stored
from baton.model.config.decoder_config import DecoderConfig, read_decoder_config
from baton.model.config.tasks import read_tasks
from baton.model.config.transformers_config import (
    AnyConfig,
    TransformersConfig,
    check_for_transformers,
    runs_in_transformers,
)
from baton.model.layers.attention import IndexPool, PlainBackend, PoolParts
from baton.model.layers.cpu_backend import CpuBackend, cpu_library
from baton.model.layers.decoder import Decoder
from baton.model.layers.linear import Product
from baton.model.layers.mlp import GroupedProduct
from baton.model.layers.rotary import rope_table, unrotated
from baton.model.loading.adapters import (
    NO_SPACE,
    LoraLoader,
    LoraSpace,
    PreparedAdapter,
)
from baton.model.loading.decoder_loading import check_split, load_decoder, local_heads
from baton.model.loading.draft_loading import load_draft_head
from baton.model.loading.layer_weights import (
    NarrowLinear,
    PackExperts,
    PackNarrow,
    RankDevice,
    linears_for,
)
from baton.model.loading.weight_digests import WeightDigest
from baton.model.loading.weights import Checkpoint, fingerprint
from baton.model.runner.compute_digest import compute_path, is_batch_invariant
from baton.model.runner.cuda_start import (
    buckets_up_to,
    free_for_pool,
    keep_sums_whole,
    line_without_pool,
    memory_of,
    one_line_errors,
    prepare,
    why_no_gpu,
)
from baton.model.runner.device_kernels import (
    UNPROVEN,
    DeviceKernels,
    choose_kernels,
    chosen,
    shapes_of,
)
from baton.model.runner.drafting import Drafter
from baton.model.runner.kv_cache import (
    SPARE_BLOCKS,
    KVCache,
    device_cache,
    host_bytes,
    host_cache,
    index_shape,
    kv_layout,
    num_blocks_for,
    pool_shape,
    states_of,
    wide_heads,
)
from baton.model.runner.runner import MAX_SEQUENCES, Runner, StepDecoder
from baton.model.runner.step_queue import CudaQueue, HostQueue
from baton.model.sampling.device_counts import DeviceCounts
from baton.model.sampling.sampler import Sampler, compiled
from baton.model.sampling.token_masks import TokenMasks
from baton.model.tensor_parallel import Ranks, least
from baton.node.executor import AdapterLoad, ExecutorInfo, Progress
from baton.protocol.adapters import lora_version
from baton.protocol.config import ClusterConfig, ModelConfig
from baton.protocol.errors import ConfigError, NodeError
from baton.protocol.ids import Epoch
from baton.protocol.messages import KVLayout, NodeFacts, StepLimits
from baton.protocol.pooling import ModelTasks
from baton.runtime.clock import boottime
from baton.runtime.host import gpus_of, num_gpus, thread_counts
from baton.runtime.log import logger

# Tokens and sequences of one step.
STEP_LIMITS = {"cpu": (512, 64), "cuda": (2048, 256)}
# From malloc.h; the largest threshold that glibc takes.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
# What one more row of each sequence takes, as a share of a step, measured on two cores with four
# sequences of the demo model.
ROW_COST = 0.15
KEPT_BYTES = 32 << 20

log = logger("rank")


@dataclass(slots=True, frozen=True)
class RankPlan:
    """The settings of each rank, which follow from a configuration and its model."""

    folder: Path
    decoder: AnyConfig
    device: torch.device
    dtype: torch.dtype
    pool_dtype: torch.dtype  # uint8: FP8
    max_model_len: int
    layout: KVLayout
    # 0 on a GPU: as many as fit beside the weights and the largest step.
    num_blocks: int
    max_num_batched_tokens: int
    max_num_seqs: int
    adapters: tuple[Adapter, ...] = ()
    lora_space: LoraSpace = NO_SPACE
    tasks: ModelTasks = field(default_factory=ModelTasks)


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
        draft_cost=draft_cost(runner),
    )
    return LoadedRank(runner, pool, port, info, plan)


def _loaded(
    plan: RankPlan, config: ClusterConfig, ranks: Ranks, progress: Progress
) -> tuple[Runner, HostPool | DevicePool, DeviceKernels]:
    """Load a runner; on a GPU, prove its kernels first, and capture its steps too."""
    if plan.device.type != "cuda":
        return *load_runner(plan, config, ranks, progress), UNPROVEN
    # Parts of a sum are added in fp32.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    with one_line_errors(plan.device, "while it proves its kernels"):
        kernels = _device_kernels(plan, config, ranks, progress)
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
        prepare(runner, buckets_up_to(num_decoding, num_tokens), progress)
    return runner, pool, kernels


def plan_rank(config: ClusterConfig, num_ranks: int) -> RankPlan:
    """Return the plan of each rank. Raises `ConfigError` if settings and model do not fit."""
    if not config.model.path:
        raise ConfigError("model.path is empty: name the folder of a model")
    folder = Path(config.model.path)
    decoder = _described(config, folder, num_ranks)
    if isinstance(decoder, DecoderConfig):
        _check_blocks(decoder, config.cache.block_size)
    found = read_tasks(folder, decoder, config.model.convert)
    if isinstance(decoder, DecoderConfig):
        decoder = msgspec.structs.replace(
            decoder, label_token_ids=found.label_token_ids
        )
    limit = decoder.max_position_embeddings
    if config.model.max_model_len > limit:
        raise ConfigError(f"model.max_model_len: the model has {limit} positions")
    name = decoder.dtype if config.model.dtype == "auto" else config.model.dtype
    dtype = torch.float32 if name == "float32" else torch.bfloat16
    pool_dtype = _pool_dtype(config, decoder, dtype)
    layout = kv_layout(decoder, config.cache, num_ranks, pool_dtype)
    device = _device(config, decoder, num_ranks, dtype)
    max_num_batched_tokens, max_num_seqs = STEP_LIMITS[device.type]
    if device.type == "cuda" and config.engine.max_num_seqs > MAX_SEQUENCES:
        raise ConfigError(
            f"engine.max_num_seqs: a GPU takes at most {MAX_SEQUENCES} in one step"
        )
    own = decoder if isinstance(decoder, DecoderConfig) else None
    plan = RankPlan(
        folder=folder,
        decoder=decoder,
        device=device,
        dtype=dtype,
        pool_dtype=pool_dtype,
        max_model_len=config.model.max_model_len or limit,
        layout=layout,
        num_blocks=0,
        max_num_batched_tokens=config.engine.max_num_batched_tokens
        or max_num_batched_tokens,
        max_num_seqs=config.engine.max_num_seqs or max_num_seqs,
        adapters=read_adapters(config.model.lora_modules, own),
        lora_space=_lora_space(config.model, own),
        tasks=found.tasks,
    )
    if device.type == "cuda" and not (
        config.cache.num_blocks or config.cache.memory_mib
    ):
        return plan
    return _sized(plan, config, num_ranks, host_bytes(config.cache))


def _check_blocks(decoder: DecoderConfig, block_size: int) -> None:
    """Raise `ConfigError` unless blocks have the parts, or begin the chunks, that layers need."""
    kinds = decoder.kinds
    if kinds is not None and block_size % (
        pieces := decoder.num_kv_heads // kinds.kv_heads
    ):
        raise ConfigError(
            f"cache.block_size: {block_size} must be a multiple of {pieces}, because {pieces} KV "
            "heads of a block share one of the layers that see everything"
        )
    chunks = decoder.chunks
    if chunks is not None and chunks.layers and chunks.size % block_size:
        raise ConfigError(
            f"cache.block_size: {block_size} must divide attention_chunk_size, which is "
            f"{chunks.size}"
        )


def _lora_space(model: ModelConfig, decoder: DecoderConfig | None) -> LoraSpace:
    """Return the room for adapters at run time. Raises `ConfigError` for a model without any."""
    if not model.allow_runtime_lora_updating:
        return NO_SPACE
    check_takes_adapters(decoder, "model.allow_runtime_lora_updating")
    # A new version of an adapter is loaded while the last one is still in use.
    return LoraSpace(model.max_loras + 1, model.max_lora_rank)


def _pool_dtype(
    config: ClusterConfig, decoder: AnyConfig, dtype: torch.dtype
) -> torch.dtype:
    """Return what KV blocks hold. Raises `ConfigError` for a model that has no FP8 blocks."""
    if config.engine.kv_cache_dtype == "auto":
        return dtype
    refused = ""
    if isinstance(decoder, TransformersConfig):
        refused = "transformers' code computes the model"
    elif decoder.state is not None:
        refused = "layers keep a state for each sequence, whose numbers are not FP8"
    elif decoder.kinds is not None:
        refused = "layers store heads of several sizes"
    elif decoder.latent is not None:
        refused = "the model stores latent rows (MLA), which are small already"
    if refused:
        raise ConfigError(
            f"engine.kv_cache_dtype: fp8 is not supported where {refused}; use auto"
        )
    return torch.uint8


def _described(config: ClusterConfig, folder: Path, num_ranks: int) -> AnyConfig:
    if not runs_in_transformers(folder, config.model.model_impl):
        decoder = as_stored(folder, read_decoder_config(folder))
        decoder = with_draft_head(folder, decoder, config.engine)
        check_split(decoder, num_ranks)
        return decoder
    check_drafts(folder, None, config.engine)
    if num_ranks > 1:
        architecture, _ = check_for_transformers(folder)
        raise ConfigError(
            f"engine.tensor_parallel_size: {architecture} has no plan for {num_ranks} ranks, "
            "because transformers' code computes it"
        )
    # transformers takes seconds to import, and only its models need it.
    from baton.model.transformers_code.transformers_gate import examine

    return examine(folder, config.model.max_model_len)


def _sized(
    plan: RankPlan, config: ClusterConfig, num_ranks: int, num_bytes: int
) -> RankPlan:
    """Return the plan with the blocks that are configured or fit `num_bytes`."""
    of_state = plan.layout.state_blocks * plan.layout.block_size
    most_tokens = plan.max_num_seqs * (plan.max_model_len + of_state)
    num_blocks = num_blocks_for(
        config.cache, plan.layout, num_ranks, num_bytes, most_tokens
    )
    return replace(plan, num_blocks=num_blocks)


def _device_kernels(
    plan: RankPlan, config: ClusterConfig, ranks: Ranks, progress: Progress
) -> DeviceKernels:
    setting = config.engine.deterministic
    if not isinstance(plan.decoder, DecoderConfig):
        return chosen(setting, {}, ranks.size)
    shapes = shapes_of(
        plan.decoder,
        ranks.size,
        plan.layout.block_size,
        (plan.dtype, plan.pool_dtype),
        plan.max_model_len,
    )
    return choose_kernels(setting, shapes, plan.device, ranks, progress)


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
        _ordered_product(plan, kernels),
        _compiled_linears(library),
        _grouped_product(plan),
        _narrow_product(plan, kernels),
        _examined_library(plan),
        _narrow_experts(plan, kernels),
    )
    decoder: StepDecoder
    draft_head = None
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
        runner, device_pool = _on_gpu(plan, config, decoder, progress, kernels)
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
        runner.drafter = Drafter(draft_head, backend, sampler, plan.layout.block_size)
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


def _ordered_product(plan: RankPlan, kernels: DeviceKernels) -> Product | None:
    if plan.device.type != "cuda" or not kernels.is_ordered:
        return None
    # Triton is imported here for the same reason as in `_on_gpu`.
    if PRODUCTS in kernels.proven:
        from baton.kernels.hopper.products.product import load_product

        return load_product(plan.device)
    from baton.kernels.cuda.fixed_product import fixed_product

    return fixed_product


def _examined_library(plan: RankPlan) -> Product | None:
    """Return the library's product where it may take the place of the ordered one.

    Not where the ordered one has the bits of faster kernels, which other nodes may use.
    """
    if plan.device.type != "cuda":
        return None
    from baton.kernels.cuda.fixed_product import has_warpgroup_products

    return None if has_warpgroup_products(plan.device) else F.linear


def _grouped_product(plan: RankPlan) -> GroupedProduct | None:
    if plan.device.type != "cuda" or isinstance(plan.decoder, TransformersConfig):
        return None
    from baton.kernels.cuda.grouped_product import grouped_product

    return grouped_product


def _narrow_product(plan: RankPlan, kernels: DeviceKernels) -> PackNarrow | None:
    if plan.device.type != "cuda" or plan.dtype != torch.bfloat16:
        return None
    from baton.kernels.cuda.fixed_product import packed

    if NARROW not in kernels.proven:
        return packed
    from baton.kernels.hopper.narrow.product import streamed

    def streamed_or_widened(
        weight: NarrowWeight, device: torch.device
    ) -> tuple[Tensor, NarrowLinear] | None:
        return streamed(weight, device) or packed(weight, device)

    return streamed_or_widened


def _narrow_experts(plan: RankPlan, kernels: DeviceKernels) -> PackExperts | None:
    if plan.device.type != "cuda" or NARROW_EXPERTS not in kernels.proven:
        return None
    from baton.kernels.hopper.narrow.product import streamed_experts

    return streamed_experts


def _on_gpu(
    plan: RankPlan,
    config: ClusterConfig,
    decoder: StepDecoder,
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
            proven=kernels.proven,
        )
        vocab = plan.decoder.vocab_size
        counts = DeviceCounts(plan.max_num_seqs, vocab, plan.device, penalize_counted)
        sampler = Sampler(
            plan.decoder.eos_token_ids, sample_tokens, _masks(plan), counts
        )
        return Runner(
            decoder, backend, cache, sampler, CudaQueue(plan.device), boottime
        )

    if not plan.num_blocks:
        probe = runner_over(1)
        num_bytes = free_for_pool(
            probe,
            plan.max_num_batched_tokens,
            plan.max_num_seqs,
            plan.max_model_len,
            config.cache,
        )
        if num_bytes < plan.layout.block_bytes:
            raise NodeError(
                line_without_pool(memory_of(plan.device), plan.layout.block_bytes)
            )
        plan = _sized(plan, config, 1, num_bytes)
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


def draft_cost(runner: Runner) -> float:
    """Return what a draft and its row in the next step take, as a share of a step without any.

    Reading weights is most of a decode step, so the head takes as much as it has of them.
    """
    if runner.drafter is None:
        return 0.0
    own, models = (
        sum(linear.weight.numel() for linear in part.linears())
        for part in (runner.drafter.head, runner.decoder)
    )
    return own / models + ROW_COST


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


def _device(
    config: ClusterConfig, decoder: AnyConfig, num_ranks: int, dtype: torch.dtype
) -> torch.device:
    """Return the device to compute on. `auto` logs one line if the GPU cannot serve the model.

    Raises `ConfigError` for a GPU that does not work: a large model would take the CPUs for days.
    """
    wanted = config.engine.device
    is_there = torch.cuda.is_available() or num_gpus() > 0
    if wanted == "cpu" or (wanted == "auto" and not is_there):
        return torch.device("cpu")
    broken = why_no_gpu()
    reason = broken or _lacking_on_gpus(config, decoder, num_ranks, dtype)
    if not reason:
        return torch.device("cuda", 0)
    if wanted == "cuda":
        raise ConfigError(f"engine.device: {reason}")
    if broken and torch.version.cuda is not None and gpus_of(0):
        raise ConfigError(f"engine.device: {broken}; --device cpu computes without it")
    log.warning("computing on the CPU and not on the GPU", reason=reason)
    return torch.device("cpu")


def _lacking_on_gpus(
    config: ClusterConfig, decoder: AnyConfig, num_ranks: int, dtype: torch.dtype
) -> str:
    # One rank takes the GPU that torch has found, even if /dev shows none, as under WSL.
    if num_ranks > 1 and num_ranks > (num_seen := len(gpus_of(0))):
        need = f"{num_ranks} ranks (engine.tensor_parallel_size) need one GPU each"
        return f"{need}, but this node sees {num_seen}"
    if isinstance(decoder, DecoderConfig) and decoder.has_draft_head:
        return f"{METHOD}: only CPUs draft with a part of the model yet; use ngram"
    if isinstance(decoder, DecoderConfig) and decoder.kinds is not None:
        return f"layers of {decoder.family} with heads of several sizes have no CUDA kernel yet"
    if isinstance(decoder, DecoderConfig) and decoder.chunks is not None:
        return f"layers of {decoder.family} that attend within chunks have no CUDA kernel yet"
    # Triton exists on Linux only and is slow to import: only a rank on a GPU needs it.
    from baton.kernels.cuda.states.functions import missing_for as missing_for_states
    from baton.model.layers.cuda_backend import missing_for, missing_for_index

    states = states_of(decoder, config.cache, num_ranks, dtype)
    if states is not None:
        assert isinstance(decoder, DecoderConfig), "it has states"
        assert decoder.state is not None, "it has states"
        by_key = decoder.state.names.kind == "key_delta"
        if missing := missing_for_states(states, dtype, by_key=by_key):
            return missing
    if isinstance(decoder, DecoderConfig) and decoder.index is not None:
        index = decoder.index
        if missing := missing_for_index(index.num_heads, index.head_dim):
            return missing
    shape = pool_shape(decoder, config.cache, num_ranks, 1, torch.bfloat16)
    rotary_dim = decoder.rotary_dim if isinstance(decoder, DecoderConfig) else 0
    capability = torch.cuda.get_device_capability(0)
    return missing_for(
        shape, local_heads(decoder, num_ranks)[0], rotary_dim, capability
    )
