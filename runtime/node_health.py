"""The state of one node, as a router's /health and metrics and a node's own metrics show it.

A router makes a `NodeHealth` from the node's messages, and a node that serves HTTP makes one from
its own counts. Both structs are data only.
"""

from typing import Literal

import msgspec

from baton.protocol.ids import NodeId
from baton.protocol.messages import Load, NodeInfo, Role, Totals

# A `degraded` node is ready, but no node of the other role can work with it. A `draining` node gets
# no new work and ends when it has none left.
NodeState = Literal["starting", "ready", "degraded", "draining", "silent", "stuck"]


class NodeHealth(msgspec.Struct, frozen=True):
    node_id: NodeId
    role: Role
    state: NodeState
    phase: str = ""  # of the start, with `done` of `total` complete
    done: int = 0
    total: int = 0
    load: Load = Load()  # as of the last beat
    beat_age_s: float = 0.0
    step_age_s: float = 0.0
    num_legs: int = 0  # charged by this router
    num_tokens: int = 0  # of those legs
    batch_invariant: bool = False  # a token's bits depend on its own sequence alone
    compute: str = ""  # equal for nodes that compute the same bits
    reason: str = ""  # why it is degraded
    totals: Totals = Totals()  # as of the last beat
    dtype: str = ""
    device: str = ""
    transports: str = ""
    tensor_parallel: int = 0  # 0: not known yet
    features: tuple[str, ...] = ()
    num_known_blocks: int = 0  # of its prefix cache, as this router knows it

    def with_info(self, info: NodeInfo | None) -> "NodeHealth":
        """Return a copy with what the node has published about itself, if it has been ready."""
        if info is None:
            return self
        names = {name for rank in info.ranks for name in rank.metadata}
        return msgspec.structs.replace(
            self,
            batch_invariant=info.batch_invariant,
            compute=info.compute,
            dtype=info.facts.dtype,
            device=info.facts.device,
            transports="+".join(sorted(names)),
            tensor_parallel=len(info.ranks),
            features=info.facts.features,
        )


class LostNode(msgspec.Struct, frozen=True):
    """A node that was in service and is gone. The router remembers it for an hour at most."""

    node_id: NodeId
    role: Role
    lost_s: float  # since its last message
