"""What one KV block looks like in memory, as far as a transfer must know.

A rank's pool is one tensor `[num_blocks, kv_heads, num_layers, 2, block_size, head_dim]`, so a
block is one contiguous region for all layers and the heads of a tensor-parallel rank are
contiguous inside it. `kv_transfer` moves named runs of bytes and never learns what they mean.
"""

import msgspec


class Run(msgspec.Struct, frozen=True, array_like=True):
    """A contiguous stretch of a block, in bytes from the block's start."""

    offset: int
    length: int


class KVLayout(msgspec.Struct, frozen=True):
    """The layout of every block of one rank's pool.

    `block_bytes` is the distance between blocks, the trailer included. `groups` names the runs
    (today one group, `kv`, with one run). `bytes_per_token` is informative, over all ranks.
    `fingerprint` covers everything that two pools must share to exchange blocks.
    """

    block_size: int  # tokens
    block_bytes: int
    groups: dict[str, tuple[Run, ...]]
    trailer_bytes: int
    kv_heads: int  # of this rank
    bytes_per_token: int
    fingerprint: str
