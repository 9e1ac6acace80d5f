"""Decide what a configuration means for each rank: device, dtype, blocks, limits.

Settings that cannot work are refused here, before anything large is allocated.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import torch

from baton.kernels.constants import STATE_CHUNK
from baton.model.checkpoint.draft_files import check_drafts, with_draft_head
from baton.model.checkpoint.lora_files import (
    Adapter,
    check_takes_adapters,
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
from baton.model.layers.attention import most_parts
from baton.model.loading.adapters import (
    NO_SPACE,
    LoraSpace,
)
from baton.model.loading.decoder_loading import check_split, local_heads
from baton.model.runner.cuda_start import (
    why_no_gpu,
)
from baton.model.runner.kv_cache import (
    host_bytes,
    kv_layout,
    num_blocks_for,
    pool_shape,
    states_of,
    wide_heads,
)
from baton.model.runner.runner import MAX_SEQUENCES
from baton.protocol.config import ClusterConfig, EngineConfig, ModelConfig
from baton.protocol.errors import ConfigError
from baton.protocol.messages import KVLayout
from baton.protocol.pooling import ModelTasks
from baton.runtime.host import gpus_of, num_gpus
from baton.runtime.log import logger

# Tokens and sequences of one step.
STEP_LIMITS = {"cpu": (512, 64), "cuda": (2048, 256)}

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
    max_num_batched_tokens = (
        config.engine.max_num_batched_tokens or max_num_batched_tokens
    )
    max_num_seqs = config.engine.max_num_seqs or max_num_seqs
    if device.type == "cuda":
        most = _most_sequences(decoder, max_num_batched_tokens)
        if max_num_seqs > most:
            raise ConfigError(
                f"engine.max_num_seqs: a GPU takes at most {most} in one step"
            )
    if layout.state_blocks and device.type == "cuda":
        _check_step(config.engine)
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
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        adapters=read_adapters(config.model.lora_modules, own),
        lora_space=_lora_space(config.model, own),
        tasks=found.tasks,
    )
    if device.type == "cuda" and not (
        config.cache.num_blocks or config.cache.memory_mib
    ):
        return plan
    return sized(plan, config, num_ranks, host_bytes(config.cache))


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


def _most_sequences(decoder: AnyConfig, num_tokens: int) -> int:
    """Return how many sequences the kernels take in a step of so many tokens."""
    chunks = decoder.chunks if isinstance(decoder, DecoderConfig) else None
    if chunks is None or not chunks.layers:
        return MAX_SEQUENCES
    return MAX_SEQUENCES // most_parts(num_tokens, chunks.size)


def _check_step(engine: EngineConfig) -> None:
    """Raise `ConfigError` for steps that cannot take a whole chunk through a state."""
    if 0 < engine.max_num_batched_tokens <= STATE_CHUNK:
        raise ConfigError(
            f"engine.max_num_batched_tokens: must be above {STATE_CHUNK}, because on a GPU so many "
            "tokens of a prompt go through layers with a state at once"
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


def sized(
    plan: RankPlan, config: ClusterConfig, num_ranks: int, num_bytes: int
) -> RankPlan:
    """Return the plan with the blocks that are configured or fit `num_bytes`."""
    of_state = plan.layout.state_blocks * plan.layout.block_size
    most_tokens = plan.max_num_seqs * (plan.max_model_len + of_state)
    num_blocks = num_blocks_for(
        config.cache, plan.layout, num_ranks, num_bytes, most_tokens
    )
    return replace(plan, num_blocks=num_blocks)


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
    reason = broken or lacking_on_gpus(config, decoder, num_ranks, dtype)
    if not reason:
        return torch.device("cuda", 0)
    if wanted == "cuda":
        raise ConfigError(f"engine.device: {reason}")
    if broken and torch.version.cuda is not None and gpus_of(0):
        raise ConfigError(f"engine.device: {broken}; --device cpu computes without it")
    log.warning("computing on the CPU and not on the GPU", reason=reason)
    return torch.device("cpu")


def lacking_on_gpus(
    config: ClusterConfig, decoder: AnyConfig, num_ranks: int, dtype: torch.dtype
) -> str:
    # One rank takes the GPU that torch has found, even if /dev shows none, as under WSL.
    if num_ranks > 1 and num_ranks > (num_seen := len(gpus_of(0))):
        need = f"{num_ranks} ranks (engine.tensor_parallel_size) need one GPU each"
        return f"{need}, but this node sees {num_seen}"
    # Triton exists on Linux only and is slow to import: only a rank on a GPU needs it.
    from baton.kernels.cuda.states.functions import missing_for as missing_for_states
    from baton.model.layers.cuda_backend import (
        missing_for,
        missing_for_index,
        missing_for_wide,
    )

    states = states_of(decoder, config.cache, num_ranks, dtype)
    if states is not None and (missing := missing_for_states(states, dtype)):
        return missing
    if isinstance(decoder, DecoderConfig) and decoder.index is not None:
        index = decoder.index
        if missing := missing_for_index(index.num_heads, index.head_dim):
            return missing
    shape = pool_shape(decoder, config.cache, num_ranks, 1, torch.bfloat16)
    wide = wide_heads(decoder, num_ranks)
    num_heads = local_heads(decoder, num_ranks)[0]
    if wide is not None and (missing := missing_for_wide(wide, shape, num_heads)):
        return missing
    rotary_dim = decoder.rotary_dim if isinstance(decoder, DecoderConfig) else 0
    capability = torch.cuda.get_device_capability(0)
    return missing_for(shape, num_heads, rotary_dim, capability)
