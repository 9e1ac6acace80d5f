"""KV blocks as numbers: how many a sequence needs, and a hash of what each one holds. Pure.

Routers and nodes ask here what fits a pool, so that a router never sends what a node refuses. The
hashes form a chain: equal hashes mean equal prefixes, on every node.
"""

import hashlib
from array import array
from collections.abc import Sequence

BlockHash = bytes
HASH_BYTES = 16
ROOT_HASH: BlockHash = hashlib.blake2b(digest_size=HASH_BYTES).digest()  # before the first block


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Return how many blocks hold `num_tokens` tokens of one sequence."""
    return -(-num_tokens // block_size)


def blocks_needed(block_size: int, num_tokens: int, num_final_tokens: int, num_choices: int) -> int:
    """Return how many blocks a prompt and all its choices take in one pool at their full length.

    All choices share the whole blocks of the `num_tokens` that are sent. From there on each choice
    has blocks of its own, up to `num_final_tokens`.
    """
    shared = num_tokens // block_size
    return shared + (blocks_for(num_final_tokens, block_size) - shared) * num_choices


def tokens_held(num_blocks: int, block_size: int, num_tokens: int, num_choices: int) -> int:
    """Return how many tokens each choice can add to `num_tokens` in a pool of `num_blocks`.

    The inverse of `blocks_needed`; 0 when not even the prompt fits.
    """
    shared = num_tokens // block_size
    own = (num_blocks - shared) // num_choices
    return max((shared + own) * block_size - num_tokens, 0)


def block_hashes(
    token_ids: Sequence[int], block_size: int, known: Sequence[BlockHash] = ()
) -> list[BlockHash]:
    """Return one 16-byte hash per full block; each covers all tokens before it too.

    `known` are the hashes of the first blocks, which are not computed again.
    """
    hashes = list(known)
    for end in range((len(hashes) + 1) * block_size, len(token_ids) + 1, block_size):
        link = hashlib.blake2b(hashes[-1] if hashes else ROOT_HASH, digest_size=HASH_BYTES)
        link.update(array("q", token_ids[end - block_size : end]).tobytes())
        hashes.append(link.digest())
    return hashes
