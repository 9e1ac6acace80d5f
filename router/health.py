"""What a router says of its nodes and of the model that they serve, over HTTP and in Python.

`registry` and `cluster_state` fill these in. They hold no state of their own.
"""

from typing import Literal

import msgspec

from baton.protocol.ids import NodeId
from baton.protocol.messages import Load, Role, Totals
from baton.router.pairs import PairHealth, PairTransfers

# A `degraded` node is ready, but no node of the other role can work with it.
# A `draining` one gets no new work and ends when it has none.
NodeState = Literal["starting", "ready", "degraded", "draining", "silent", "stuck"]
# A `draining` router finishes its requests and takes no new ones.
Status = Literal["starting", "ready", "degraded", "draining", "failed"]


class ServedModel(msgspec.Struct, frozen=True):
    """The model that the nodes serve, as the first ready node described it."""

    name: str
    path: str
    fingerprint: str
    layout_fingerprint: str
    max_model_len: int  # less than the model's if no pool could hold such a sequence
    vocab_size: int
    block_size: int
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = ""
    sampling: dict[str, object] = {}  # what a request over HTTP that leaves it out gets


class NodeHealth(msgspec.Struct, frozen=True):
    node_id: NodeId
    role: Role
    state: NodeState
    phase: str  # of start-up, of which `done` of `total` is complete
    done: int
    total: int
    load: Load  # as of the last beat
    beat_age_s: float
    step_age_s: float
    num_legs: int  # charged by this router
    num_tokens: int  # of those legs
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


class LostNode(msgspec.Struct, frozen=True):
    """A node that was in service and is gone. It is remembered for an hour, or until it is back."""

    node_id: NodeId
    role: Role
    lost_s: float  # since it was last heard


class Health(msgspec.Struct, frozen=True):
    """`degraded` means that some node or pair does not work. Requests are served if `can_serve`."""

    status: Status
    nodes: tuple[NodeHealth, ...]
    num_running: int  # requests that have nodes
    num_queued: int  # requests that wait for nodes
    message: str = ""
    pairs: tuple[PairHealth, ...] = ()  # those whose handoffs fail
    transfer_failures: tuple[tuple[NodeId, NodeId, int], ...] = ()  # by pair, since the start
    transfers: tuple[PairTransfers, ...] = ()  # all handoffs by pair, since the start
    lost: tuple[LostNode, ...] = ()
    num_cache_gaps: int = 0  # in what nodes said of their prefix caches, since the start

    @property
    def can_serve(self) -> bool:
        return self.status in ("ready", "degraded")
