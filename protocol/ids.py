"""The names of requests, nodes and process lifetimes, and the ranges of the numbers in messages.

Every message about a sequence carries its `Key`. The router makes the request id, so two clients
that choose the same name cannot collide in a node's tables. Decoding refuses a number that is out
of range, so that no number from outside can overflow an array, a clock or an allocation.
"""

from typing import Annotated, NewType

import msgspec
from msgspec import Meta

MAX_COUNT = (1 << 31) - 1
MAX_GENERATION = (1 << 32) - 1
MAX_BLOCKS = 1 << 24  # in one pool: a reader lists all blocks of a peer's pool
MAX_BYTES = 1 << 62
MAX_KEYS = 4096  # in one message about blocks that were cached or given up

# Tokens, positions, token ids, sequences.
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Generation = Annotated[int, Meta(ge=0, le=MAX_GENERATION)]
BlockCount = Annotated[int, Meta(ge=0, le=MAX_BLOCKS)]
BlockId = Annotated[int, Meta(ge=0, lt=MAX_BLOCKS)]
Checksum = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
# A count over the whole life of a process.
Total = Annotated[int, Meta(ge=0, le=MAX_BYTES)]
NumBytes = Annotated[int, Meta(ge=0, le=MAX_BYTES)]
Int64 = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
HttpStatus = Annotated[int, Meta(ge=100, le=599)]


RequestId = NewType("RequestId", str)
NodeId = NewType("NodeId", str)
# An epoch is random per process start. The same node id with another epoch is another process.
Epoch = NewType("Epoch", str)


class Key(msgspec.Struct, frozen=True, order=True, array_like=True, gc=False):
    """One attempt at one choice of one request.

    An attempt that computes a prompt for several choices has the key of its lowest choice; the
    sequences forked from it have their own. A higher attempt cancels every lower one.
    """

    request_id: RequestId
    choice: Count = 0
    attempt: Count = 0

    def of_choice(self, choice: int) -> "Key":
        return Key(self.request_id, choice, self.attempt)

    def is_superseded_by(self, other: "Key") -> bool:
        return (
            self.request_id == other.request_id
            and self.choice == other.choice
            and self.attempt < other.attempt
        )

    def __str__(self) -> str:
        return f"{self.request_id}/{self.choice}.{self.attempt}"

    def __repr__(self) -> str:
        return f"Key({self})"
