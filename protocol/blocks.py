"""Count the KV blocks that a sequence needs, and hash what each block holds.

Routers and nodes count alike, so that a router never sends what a node refuses. The hashes form a
chain: equal hashes mean equal prefixes, on every node. Chains with different roots share no block.
A node finds blocks by their hashes. A router, which only guesses where blocks are, knows them by
shorter keys.
"""

import hashlib
import struct
from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

BlockHash = bytes
HASH_BYTES = 16
NO_HASH = bytes(HASH_BYTES)  # stands for no block
# A key is the first 8 bytes of a hash, as a number. Two different blocks have equal keys with a
# probability of 2**-64.
BlockKey = int
KEY_BYTES = 8
# Fewer tokens of a prefix are computed: asking another node for them takes about as long.
MIN_READ_TOKENS = 64
# Before the first block.
ROOT_HASH: BlockHash = hashlib.blake2b(digest_size=HASH_BYTES).digest()


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Return how many blocks hold `num_tokens` tokens of one sequence."""
    return -(-num_tokens // block_size)


def blocks_needed(
    block_size: int,
    num_tokens: int,
    num_final_tokens: int,
    num_choices: int,
    state_blocks: int = 0,
) -> int:
    """Return how many blocks a prompt and all its choices take in one pool at their full length.

    All choices share the whole blocks of the `num_tokens` that are sent. From there on each choice
    has blocks of its own, up to `num_final_tokens`, and `state_blocks` for its state.
    """
    shared = num_tokens // block_size
    own = blocks_for(num_final_tokens, block_size) - shared + state_blocks
    return shared + own * num_choices


def tokens_held(
    num_blocks: int,
    block_size: int,
    num_tokens: int,
    num_choices: int,
    state_blocks: int = 0,
) -> int:
    """Return how many tokens each choice can add to `num_tokens` in a pool of `num_blocks`.

    This is the inverse of `blocks_needed`. It returns 0 when not even the prompt fits.
    """
    shared = num_tokens // block_size
    own = (num_blocks - shared) // num_choices - state_blocks
    return max((shared + own) * block_size - num_tokens, 0)


def block_hashes(
    token_ids: Sequence[int],
    block_size: int,
    known: Sequence[BlockHash] = (),
    root: BlockHash = b"",
) -> list[BlockHash]:
    """Return one 16-byte hash per full block; each covers the root and all tokens before it too.

    `known` holds the hashes of the first blocks, which are not computed again.
    """
    hashes = list(known)
    first = len(hashes) * block_size
    num_blocks = (len(token_ids) - first) // block_size
    size = block_size * 8
    tokens = array("q", token_ids[first : first + num_blocks * block_size]).tobytes()
    last = hashes[-1] if hashes else root or ROOT_HASH
    for start in range(0, len(tokens), size):
        last = hashlib.blake2b(
            last + tokens[start : start + size], digest_size=HASH_BYTES
        ).digest()
        hashes.append(last)
    return hashes


class Makers(NamedTuple):
    """What computed the tokens of a sequence, if equal tokens may have other bits elsewhere.

    From each position of `borders` on, something else computed them: the rows of a response where
    those of a prompt are summed in another order, or another node.
    """

    compute: str = ""  # of the node that computed the prompt; empty: this one's
    borders: tuple[int, ...] = ()

    def hashes(
        self, chain: Sequence[BlockHash], first: int, block_size: int
    ) -> list[BlockHash]:
        """Return hashes that cover the makers, too, of blocks from number `first` on.

        Another node's blocks keep their keys, so that a router finds them for this one's peers.
        """
        if self == THIS_NODE:
            return list(chain)
        hashes = []
        for number, block_hash in enumerate(chain, first + 1):
            past = [one for one in self.borders if one < number * block_size]
            if not past and not self.compute:
                hashes.append(block_hash)
                continue
            made = hashlib.blake2b(
                f"{self.compute} {past}".encode(),
                key=block_hash,
                person=b"makers",
                digest_size=HASH_BYTES,
            ).digest()
            key = made if past else block_hash
            hashes.append(key[:KEY_BYTES] + made[KEY_BYTES:])
        return hashes


THIS_NODE = Makers()


def state_hashes(block_hash: BlockHash, num_blocks: int) -> list[BlockHash]:
    """Return the hashes of the blocks that hold the state after the prefix of `block_hash`."""
    return [
        hashlib.blake2b(
            number.to_bytes(4, "big"),
            key=block_hash,
            person=b"state",
            digest_size=HASH_BYTES,
        ).digest()
        for number in range(num_blocks)
    ]


def pack_hashes(hashes: Iterable[BlockHash]) -> bytes:
    return b"".join(hashes)


def unpack_hashes(data: bytes) -> list[BlockHash]:
    """Return the hashes that `pack_hashes` packed. Bytes after the last whole one are ignored."""
    end = len(data) // HASH_BYTES * HASH_BYTES
    return [data[start : start + HASH_BYTES] for start in range(0, end, HASH_BYTES)]


def pack_keys(hashes: Iterable[BlockHash]) -> bytes:
    return b"".join([block_hash[:KEY_BYTES] for block_hash in hashes])


def unpack_keys(data: bytes) -> tuple[BlockKey, ...]:
    """Return the keys that `pack_keys` packed. Bytes after the last whole key are ignored."""
    num_keys = len(data) // KEY_BYTES
    return struct.unpack_from(f">{num_keys}Q", data)


def prompt_keys(
    token_ids: Sequence[int], block_size: int, root: BlockHash = b""
) -> tuple[BlockKey, ...]:
    return unpack_keys(pack_keys(block_hashes(token_ids, block_size, root=root)))
