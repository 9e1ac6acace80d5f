"""One node as a router knows it: what it published, its last beat, and the work that it was given.

`registry` keeps the nodes and changes them; `policy` compares them. This file is pure: no node here
knows another, and nothing is sent.
"""

from dataclasses import dataclass, field

import msgspec

from baton.protocol.ids import Epoch, Key, NodeId
from baton.protocol.messages import Load, NodeInfo, Role, Totals
from baton.router.request.events import NodeProcess
from baton.runtime.node_health import NodeState

# A node gets this many times the work for which it has seats and blocks, so that the next prompts
# are computed and moved while earlier sequences end.
SURPLUS = 1.25
# The number of steps of work that a prefill node is given at once.
BACKLOG_STEPS = 2
NO_LOAD = Load()
NO_TOTALS = Totals()


class Charge(msgspec.Struct, frozen=True):
    num_tokens: int
    num_sequences: int
    is_suspect: bool = False
    num_blocks: int = 0  # the blocks that its sequences will probably take


@dataclass(slots=True, eq=False)
class Node:
    """One node process. `info` is set once the node has been ready."""

    node_id: NodeId
    role: Role
    epoch: Epoch
    heard_s: float
    phase: str = "starting"
    done: int = 0
    total: int = 0
    info: NodeInfo | None = None
    load: Load = NO_LOAD
    totals: Totals = NO_TOTALS
    step_age_s: float = 0.0
    state: NodeState = "starting"
    charges: dict[Key, Charge] = field(default_factory=dict)
    num_tokens: int = 0
    num_sequences: int = 0
    num_suspects: int = 0
    num_blocks: int = 0
    num_foreign: int = 0  # sequences from other routers, as of its last beat
    # The nodes of the other role with which it certainly cannot work, each with the reason.
    obstacles: dict[NodeId, str] = field(default_factory=dict)

    @property
    def process(self) -> NodeProcess:
        return self.node_id, self.epoch

    def has_room(self, num_blocks: int) -> bool:
        """Return whether the node could soon begin work that takes that many blocks on decode.

        An idle node takes any work that its pool can hold.
        """
        info = self.info
        if info is None or not info.facts.step.num_seats or not self.charges:
            return True
        if self.role == "prefill":
            return self.num_tokens < BACKLOG_STEPS * info.facts.step.num_tokens
        # A request with many choices needs one seat to begin.
        has_seat = len(self.charges) + self.num_foreign < SURPLUS * info.facts.step.num_seats
        return has_seat and self.num_blocks + num_blocks <= SURPLUS * info.num_blocks

    def charge(self, key: Key, charge: Charge) -> None:
        """Add the work of a leg to this node."""
        assert key not in self.charges, f"{key} is already charged to {self.node_id}"
        self.charges[key] = charge
        self._add(charge, 1)

    def release(self, key: Key) -> bool:
        """Take the work of a leg off this node; False if the leg is not charged to it."""
        charge = self.charges.pop(key, None)
        if charge is not None:
            self._add(charge, -1)
        return charge is not None

    def _add(self, charge: Charge, sign: int) -> None:
        self.num_tokens += sign * charge.num_tokens
        self.num_sequences += sign * charge.num_sequences
        self.num_suspects += sign * charge.is_suspect
        self.num_blocks += sign * charge.num_blocks
