"""Content hashes of KV blocks: a chain, so equal hashes mean equal prefixes.

Used by the prefix caches of both nodes. Extra keys (a tenant's salt, an adapter) enter the first
link, so prefixes of different tenants never meet.
"""

import hashlib
from array import array
from collections.abc import Sequence

BlockHash = bytes


def block_hashes(
    token_ids: Sequence[int], block_size: int, extra_keys: tuple[str, ...] = ()
) -> list[BlockHash]:
    """One 16-byte hash per *full* block of `token_ids`; each covers all tokens before it too."""
    parent = root_hash(extra_keys)
    hashes: list[BlockHash] = []
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = next_hash(parent, token_ids[start : start + block_size])
        hashes.append(parent)
    return hashes


def root_hash(extra_keys: tuple[str, ...] = ()) -> BlockHash:
    """The link before the first block."""
    link = hashlib.blake2b(digest_size=16)
    for key in extra_keys:
        data = key.encode()
        link.update(len(data).to_bytes(8, "little") + data)  # so that no two lists read the same
    return link.digest()


def next_hash(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """The hash of the block that holds `token_ids` and follows `parent`."""
    link = hashlib.blake2b(parent, digest_size=16)
    link.update(array("q", token_ids).tobytes())
    return link.digest()
