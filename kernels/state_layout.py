"""Where the state of a sequence is in the blocks of the pool that hold it.

A layer with a state keeps a matrix for each of its heads, and the last inputs of a short
convolution. The heads are in groups, one for each part of a block, so that ranks which read a range
of KV heads of each block read the states of their own heads. A group's matrices and inputs of all
layers follow one another through its parts of the sequence's blocks.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from baton.kernels.constants import STATE_CHUNK, STRIP

MATRIX_BYTES = 4  # of a number in fp32
ALIGNED_BYTES = 64


# Which tokens of a sequence go through a state in chunks on a GPU, and the others one by one.
Chunked = Literal["all", "prompt", "none"]


class StateShape(NamedTuple):
    """One layer's state on one rank. All sizes but the number of groups are those of one group."""

    num_groups: int
    num_heads: int  # each with a matrix; 0: the state is the convolution's alone
    num_key_heads: int  # divides `num_heads`: neighbouring heads share one
    key_dim: int  # rows of a matrix
    value_dim: int  # columns
    num_channels: int  # of the convolution
    num_taps: int  # of the convolution
    by_key: bool = False  # each number of a key has a decay of its own

    @property
    def chunked(self) -> Chunked:
        """A convolution computes each token apart. A decay by key has no kernel for chunks."""
        if not self.has_matrices:
            return "all"
        return "none" if self.by_key else "prompt"

    @property
    def num_strips(self) -> int:
        """Return how many strips of columns a matrix has, `[key_dim, STRIP]` each."""
        return -(-self.value_dim // STRIP)

    @property
    def strip_bytes(self) -> int:
        return self.key_dim * STRIP * MATRIX_BYTES

    @property
    def has_matrices(self) -> bool:
        return self.num_heads > 0

    def tail_bytes(self, number_bytes: int) -> int:
        """Return the size of the convolution's last inputs, `[num_taps, num_channels]`."""
        return self.num_taps * self.num_channels * number_bytes


class StateLayout(NamedTuple):
    """The blocks of a state. Offsets count the bytes of a group's parts, one after the other.

    `part_bytes` of each part are used; the rest is too short for an aligned number.
    """

    shape: StateShape
    # Offsets, by layer: those of each head's matrix.
    strips: tuple[tuple[int, ...], ...]
    tails: tuple[int, ...]  # offsets of the convolutions' last inputs, by layer
    num_blocks: int
    block_bytes: int
    part_bytes: int
    number_bytes: int  # of the model's dtype, which the inputs have

    @property
    def tail_bytes(self) -> int:
        return self.shape.tail_bytes(self.number_bytes)

    @property
    def stride_part(self) -> int:
        return self.block_bytes // self.shape.num_groups


def state_layout(
    shape: StateShape, num_layers: int, block_bytes: int, number_bytes: int
) -> StateLayout:
    """Return where states are in blocks of `block_bytes` on one rank.

    A strip or tail that fits a part is never cut. Raises `ValueError` for blocks that are too
    small to hold anything.
    """
    part = block_bytes // shape.num_groups // ALIGNED_BYTES * ALIGNED_BYTES
    if not part:
        raise ValueError(
            f"a part of {block_bytes // shape.num_groups} bytes is too small"
        )
    end = 0

    def placed(size: int) -> int:
        nonlocal end
        start = -(-end // ALIGNED_BYTES) * ALIGNED_BYTES
        if size <= part and start % part + size > part:
            start = (start // part + 1) * part
        end = start + size
        return start

    strips = []
    tails = []
    for _ in range(num_layers):
        num_strips = shape.num_heads * shape.num_strips
        strips.append(tuple(placed(shape.strip_bytes) for _ in range(num_strips)))
        tails.append(placed(shape.tail_bytes(number_bytes)))
    return StateLayout(
        shape,
        tuple(strips),
        tuple(tails),
        -(-end // part),
        block_bytes,
        part,
        number_bytes,
    )


class StateItem(NamedTuple):
    """What a step on a device does with the state of a sequence.

    If those of a prompt go through in chunks, its last one, whose sample may be refused, does not,
    nor those of a response. So a token's position says what computes it.
    """

    row: int  # of its first token
    length: int  # tokens; 0: padding
    start: int  # the first position
    num_chunked: int  # the first tokens, which go through in chunks
    num_held: int  # the first tokens, which the state has already
    num_guesses: int  # the last tokens, without which the state is kept


def state_item(
    row: int,
    span: tuple[int, int],  # the first position, and that after the last one
    num_prompt_tokens: int,
    held_and_guesses: tuple[int, int],
    *,
    chunked: Chunked,
) -> StateItem:
    """Return the item of a slice."""
    start, end = span
    num_held, num_guesses = held_and_guesses
    num_chunked = 0
    if chunked == "all":
        num_chunked = end - start
    elif chunked == "prompt" and end - start > 1:
        num_chunked = min(num_prompt_tokens - 1, end) - start
    return StateItem(
        row, end - start, start, max(num_chunked, 0), num_held, num_guesses
    )


def state_chunks(items: Sequence[StateItem]) -> list[tuple[int, int]]:
    """Return the chunks of items: the number of one, and which of its tokens comes first.

    Chunks are cut at absolute multiples of `STATE_CHUNK`, so the first token may be below 0.
    """
    return [
        (number, first)
        for number, item in enumerate(items)
        if item.num_chunked
        for first in range(-(item.start % STATE_CHUNK), item.num_chunked, STATE_CHUNK)
    ]


# A chunk that pads a step; no sequence is so long.
IDLE_CHUNK = (0, 1 << 24)


def most_chunks(num_tokens: int, num_sequences: int) -> int:
    """Return how many chunks the sequences of a step have at most."""
    return num_tokens // STATE_CHUNK + 2 * num_sequences
