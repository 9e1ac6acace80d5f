"""The names of requests, nodes and process lifetimes.

Every message about a sequence carries its `Key`. The router makes the request id, so two clients
that choose the same name cannot collide in a node's tables.
"""

from typing import NewType

import msgspec

from baton.protocol.bounds import Count

RequestId = NewType("RequestId", str)
NodeId = NewType("NodeId", str)
# An epoch is random per process start. The same node id with another epoch is another process.
Epoch = NewType("Epoch", str)
# A router that takes a request over counts its attempts from the next multiple of this number, so
# the attempts of all earlier routers of the request have lower numbers.
ATTEMPTS_PER_ROUTER = 1 << 16


class Key(msgspec.Struct, frozen=True, order=True, array_like=True, gc=False):
    """One attempt at one choice of one request.

    A leg that computes a prompt for several choices has the key of its lowest choice; the sequences
    forked from it have their own. A higher attempt cancels every lower one.
    """

    request_id: RequestId
    choice: Count = 0
    attempt: Count = 0

    @property
    def nth_attempt(self) -> int:
        """Return how many attempts the router that made this one had counted before it."""
        return self.attempt % ATTEMPTS_PER_ROUTER

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
