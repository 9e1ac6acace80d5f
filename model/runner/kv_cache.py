"""One rank's KV pool for compute: a tensor over the pool's memory.

`BlockPool` decides which sequence owns a block; nothing here checks that.
"""

import hashlib
from collections.abc import Sequence
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.kernels.state_layout import StateLayout, state_layout
from baton.kv_transfer.pools import HostPool, available_bytes
from baton.model.config.decoder_config import DecoderConfig
from baton.model.config.transformers_config import AnyConfig
from baton.model.layers.attention import WideHeads
from baton.protocol.config import CacheConfig
from baton.protocol.errors import ConfigError
from baton.protocol.ids import MAX_BLOCKS
from baton.protocol.messages import KVLayout, LayerGroup

SPARE_BLOCKS = 1  # blocks after a GPU's pool, for reads that only try a connection
# The share of the free memory; weights and other programs need memory too.
HOST_SHARE = 0.25


class KVCache:
    """`pool` is `[num_blocks, kv_heads, num_layers, 2, block_size, head_dim]`, keys before values.

    A pool of FP8 is of bytes, and its rows have one more (`reference.fp8_parts`).

    Where one row is the key and the value of all heads, it is `[num_blocks, 1, num_layers, 1, …]`.
    If layers have an index, its keys, `[num_blocks, 1, num_layers, 1, block_size, index_head_dim]`,
    follow in the same blocks.

    On a GPU, the blocks are in device memory and `generations` in host memory.
    """

    def __init__(
        self,
        pool: Tensor,
        generations: NDArray[np.uint32],
        states: StateLayout | None = None,  # in the same blocks, if the model has any
        index_keys: Tensor | None = None,
    ) -> None:
        self.pool = pool
        self.generations = generations
        self.states = states
        self.index_keys = index_keys

    @property
    def blocks(self) -> Tensor:
        """Return all that blocks hold, `[num_blocks, numbers]`."""
        size = self.pool.stride(0)
        return self.pool.as_strided((len(self.pool), size), (size, 1))

    def write_generations(self, generations: Sequence[tuple[int, int]]) -> None:
        """Write new owners' generations before their first store, so that readers notice them."""
        for block, generation in generations:
            self.generations[block] = generation

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        for source, target in copies:
            self.blocks[target].copy_(self.blocks[source])


def host_cache(
    host: HostPool,
    shape: Sequence[int],
    dtype: torch.dtype,
    states: StateLayout | None = None,
    index_shape: Sequence[int] | None = None,
) -> KVCache:
    """Return the cache whose blocks are the host pool's own bytes."""
    blocks = torch.frombuffer(host.buffer, dtype=dtype).view(shape[0], -1)
    pool, index_keys = _parts(blocks, shape, index_shape)
    return KVCache(pool, host.generations, states, index_keys)


def device_cache(
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    table: HostPool | None = None,
    index_shape: Sequence[int] | None = None,
    states: StateLayout | None = None,
) -> KVCache:
    """Return a cache in device memory, with spare blocks after its own.

    Its generations are in `table`, where readers on this host see them, or without a table, in
    memory of this process.
    """
    numbers = prod(shape[1:]) + (0 if index_shape is None else prod(index_shape[1:]))
    whole = torch.zeros((shape[0] + SPARE_BLOCKS, numbers), dtype=dtype, device=device)
    generations = np.zeros(shape[0], np.uint32) if table is None else table.generations
    pool, index_keys = _parts(whole[: shape[0]], shape, index_shape)
    return KVCache(pool, generations, states, index_keys)


def _parts(
    blocks: Tensor, shape: Sequence[int], index_shape: Sequence[int] | None
) -> tuple[Tensor, Tensor | None]:
    """Return the keys and values of blocks, `[num_blocks, numbers]`, and the keys of an index."""
    end = prod(shape[1:])
    pool = blocks[:, :end].view(*shape)
    return pool, None if index_shape is None else blocks[:, end:].view(*index_shape)


def pool_shape(
    config: AnyConfig,
    cache: CacheConfig,
    num_ranks: int,
    num_blocks: int,
    dtype: torch.dtype,
) -> tuple[int, ...]:
    group = _group(config, dtype)
    kv_heads = _num_kv_heads(config, num_ranks)
    width = group.width + (dtype == torch.uint8)
    return (
        num_blocks,
        kv_heads,
        group.num_layers,
        group.planes,
        cache.block_size,
        width,
    )


def index_shape(
    config: AnyConfig, cache: CacheConfig, num_blocks: int
) -> tuple[int, ...] | None:
    """Return the shape of the index's keys of each rank, if the model has an index."""
    index = config.index if isinstance(config, DecoderConfig) else None
    if index is None:
        return None
    return (num_blocks, 1, len(index.layers), 1, cache.block_size, index.head_dim)


def kv_layout(
    config: AnyConfig, cache: CacheConfig, num_ranks: int, dtype: torch.dtype
) -> KVLayout:
    """Return the layout of each rank's pool. All ranks share its fingerprint."""
    group = _group(config, dtype)
    groups: tuple[LayerGroup, ...] = (group,)
    numbers = prod(pool_shape(config, cache, num_ranks, 1, dtype))
    of_index = index_shape(config, cache, 1)
    if of_index is not None:
        numbers += prod(of_index)
        groups = (group, LayerGroup("index", of_index[2], 1, 1, of_index[-1]))
    block_bytes = numbers * dtype.itemsize
    order = (
        "heads-layers-kv-tokens"
        if group.kind == "full"
        else f"heads-layers-{group.kind}-tokens"
    )
    shared = (
        order,
        str(dtype),
        group.kv_heads,
        group.num_layers,
        group.width,
        cache.block_size,
        *_key_order(config, group),
        *_of_index(config),
    )
    states = states_of(config, cache, num_ranks, dtype)
    if states is None:
        return KVLayout(
            block_size=cache.block_size,
            block_bytes=block_bytes,
            fingerprint=_digest(shared),
            kv_heads=config.num_kv_heads,
            groups=groups,
        )
    # Equal in all splits over ranks, because the parts of a block are.
    shared = (*shared, states.shape[1:], states.strips, states.tails, states.part_bytes)
    heads = states.shape.num_groups * states.shape.num_heads * num_ranks
    of_states = LayerGroup(
        "state", len(states.tails), heads, states.shape.key_dim, states.shape.value_dim
    )
    return KVLayout(
        block_size=cache.block_size,
        block_bytes=block_bytes,
        fingerprint=_digest(shared),
        kv_heads=config.num_kv_heads,
        groups=(group, of_states),
        state_blocks=states.num_blocks,
    )


def states_of(
    config: AnyConfig, cache: CacheConfig, num_ranks: int, dtype: torch.dtype
) -> StateLayout | None:
    """Return where the blocks of each rank hold the states of sequences, if the model has any."""
    if not isinstance(config, DecoderConfig) or config.state is None:
        return None
    shape = config.state.shape(config.num_kv_heads, num_ranks)
    block_bytes = prod(pool_shape(config, cache, num_ranks, 1, dtype)) * dtype.itemsize
    try:
        return state_layout(
            shape, len(config.state.layers), block_bytes, dtype.itemsize
        )
    except ValueError as error:
        raise ConfigError(
            f"cache.block_size: the model's states do not fit: {error}"
        ) from None


def _key_order(config: AnyConfig, group: LayerGroup) -> tuple[object, ...]:
    """Return what tells the own decoder's order of the numbers of keys from that of others."""
    if not isinstance(config, DecoderConfig):
        return ()
    if config.kinds is not None:
        kinds = config.kinds
        return (
            kinds.head_dim,
            kinds.kv_heads,
            config.num_stored(),
            config.num_stored(wide=True),
        )
    rotated = config.rope.rotated(group.width)
    partly = (rotated,) if rotated < group.width else ()
    return (*partly, "neighbours") if config.rope.rotates_neighbours else partly


def wide_heads(config: AnyConfig, num_ranks: int) -> WideHeads | None:
    """Return where one rank's blocks hold the heads of layers that see everything."""
    if not isinstance(config, DecoderConfig) or config.kinds is None:
        return None
    kinds = config.kinds
    own = max(1, kinds.kv_heads // num_ranks)
    return WideHeads(
        own, kinds.head_dim, config.num_stored(wide=True), config.num_stored()
    )


def _of_index(config: AnyConfig) -> tuple[object, ...]:
    """Return what pools that hold an index's keys must agree on."""
    index = config.index if isinstance(config, DecoderConfig) else None
    return () if index is None else (index.layers, index.head_dim)


def _digest(shared: tuple[object, ...]) -> str:
    return hashlib.blake2b(repr(shared).encode(), digest_size=16).hexdigest()


def _group(config: AnyConfig, dtype: torch.dtype) -> LayerGroup:
    """Return the group of layers that store something of each token."""
    is_latent = isinstance(config, DecoderConfig) and config.latent is not None
    full = "full-fp8" if dtype == torch.uint8 else "full"
    kind, planes = ("latent", 1) if is_latent else (full, 2)
    num_layers = config.num_layers
    if isinstance(config, DecoderConfig):
        num_layers = config.num_kv_layers
    return LayerGroup(kind, num_layers, config.num_kv_heads, planes, config.head_dim)


def num_blocks_for(
    cache: CacheConfig,
    layout: KVLayout,
    num_ranks: int,
    num_bytes: int,
    most_tokens: int,
) -> int:
    """Return how many blocks are configured or fit. Raises `ConfigError` if they are too few.

    Without a setting, they take at most `num_bytes` and hold at most `most_tokens`.
    """
    least = layout.state_blocks + 1  # for a sequence of one block
    if cache.num_blocks:
        if cache.num_blocks < least:
            raise ConfigError(
                f"cache.num_blocks is {cache.num_blocks}, but the state of one sequence takes "
                f"{layout.state_blocks}: make it at least {least}"
            )
        return cache.num_blocks
    most = MAX_BLOCKS
    if cache.memory_mib:
        num_bytes = cache.memory_mib << 20
    else:
        most = min(most, -(-most_tokens // layout.block_size))
    num_blocks = min(num_bytes // (layout.block_bytes * num_ranks), most)
    if num_blocks < least:
        needed = -(-least * layout.block_bytes * num_ranks >> 20)
        what = "one sequence with its state" if layout.state_blocks else "one block"
        raise ConfigError(
            f"{num_bytes >> 20} MiB for the KV pool are too little, because {what} takes "
            f"{needed} MiB: raise cache.memory_mib or free memory"
        )
    return num_blocks


def host_bytes(cache: CacheConfig) -> int:
    """Return how much of this host's memory a pool takes without a setting."""
    return int(HOST_SHARE * available_bytes()) // cache.shared_by


def _num_kv_heads(config: AnyConfig, num_ranks: int) -> int:
    return max(1, config.num_kv_heads // num_ranks)
