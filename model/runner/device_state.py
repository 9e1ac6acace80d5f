"""What a device keeps from step to step, as its host knows it: sampled tokens and block tables."""

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from baton.node.scheduling.plan import Slice
from baton.protocol.errors import InvariantBroken
from baton.protocol.ids import Key

# The number of steps whose sampled tokens are kept. A plan may leave out a token only while its
# step is unsettled (two steps at most), so no plan needs older ones.
REMEMBERED_STEPS = 4
RING_TOKENS = 1 << 17
IDLE_PLACE = RING_TOKENS - 1  # takes the tokens that padding samples


class TokenRing:
    """The places of the last steps' sampled tokens in the ring of them on the device."""

    def __init__(self) -> None:
        self._steps: deque[dict[Key, int]] = deque(maxlen=REMEMBERED_STEPS)
        self._next = 0

    def stand_in(self, part: Slice) -> int:
        """Return the negative number that stands for the token that was sampled last for a key."""
        for step in reversed(self._steps):
            place = step.get(part.key)
            if place is not None:
                return place - RING_TOKENS
        raise InvariantBroken(f"{part.key}: no token was sampled in the last steps")

    def add(self, slices: Sequence[Slice]) -> list[int]:
        """Assign a place to each sample of a step, and return the places in order."""
        num_samples = sum(part.num_sampled for part in slices)
        if num_samples > IDLE_PLACE // REMEMBERED_STEPS:
            raise InvariantBroken(f"a step samples {num_samples} tokens")
        if self._next + num_samples > IDLE_PLACE:
            self._next = 0
        places = list(range(self._next, self._next + num_samples))
        self._next += num_samples
        left = iter(places)
        self._steps.append(
            {
                part.key.of_choice(choice): next(left)
                for part in slices
                for choice in part.samples * (1 + part.num_guesses)
            }
        )
        return places


class DeviceArray:
    """Memory of a GPU in the form in which torch takes it from other libraries without a copy."""

    def __init__(self, address: int, shape: tuple[int, ...]) -> None:
        """Take the shape of the memory as an array of int32."""
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": "<i4",
            "data": (address, False),
            "version": 3,
        }


def without_owning(tensor: Tensor) -> Tensor:
    """Return a tensor of the same memory of a GPU that does not keep it from being reused."""
    storage = tensor.untyped_storage()
    # The allocator rounds up to whole words.
    words = DeviceArray(storage.data_ptr(), (-(-storage.nbytes() // 4),))
    flat = torch.as_tensor(words, device=tensor.device).view(tensor.dtype)
    return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


IDLE_ROW = 0  # no sequence has this row, which padding reads


class DeviceTables:
    """The block tables of sequences in the device's memory.

    `blocks` is `[1 + num_sequences, num_blocks]` int32, undefined after a sequence's blocks. Those
    of its state, `state_blocks` if the model has any, come before those of its tokens. A
    sequence keeps its row from step to step, and a step sends only new blocks. A new sequence takes
    the row that was used least recently; if its sequence returns, the whole table is sent again.
    """

    def __init__(
        self,
        num_sequences: int,
        num_blocks: int,
        device: torch.device,
        state_blocks: int = 0,
    ) -> None:
        self.state_blocks = state_blocks
        self._num_blocks = state_blocks + num_blocks
        self.blocks = torch.zeros(
            1 + num_sequences, self._num_blocks, dtype=torch.int32, device=device
        )
        self._free = list(range(num_sequences, IDLE_ROW, -1))
        # Least recently used first.
        self._rows: dict[Key, tuple[int, tuple[int, ...]]] = {}

    def follow(
        self, key: Key, table: tuple[int, ...], changes: tuple[list[int], list[int]]
    ) -> int:
        """Return the row of a sequence with this table; add the changes as (place, block)."""
        row, known = self._rows.pop(key, (0, ()))
        if not row:
            row = (
                self._free.pop()
                if self._free
                else self._rows.pop(next(iter(self._rows)))[0]
            )
        if table != known:
            start = len(known) if table[: len(known)] == known else 0
            first = row * self._num_blocks
            places, blocks = changes
            places.extend(range(first + start, first + len(table)))
            blocks.extend(table[start:])
        self._rows[key] = row, table
        return row

    def write(self, places: Tensor, blocks: Tensor) -> None:
        """Write the changes of a step, in the order of the device's work."""
        self.blocks.view(-1).index_copy_(0, places, blocks)
