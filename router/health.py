"""A router's report on its cluster and on the model that it serves, over HTTP and in Python.

`cluster_state` makes these structs, which hold no state of their own.
"""

from typing import Literal

import msgspec

from baton.protocol.ids import NodeId
from baton.router.pairs import PairHealth, PairTransfers
from baton.runtime.node_health import LostNode, NodeHealth

# A `draining` router finishes its requests and takes no new ones.
Status = Literal["starting", "ready", "degraded", "draining", "failed"]


class ServedModel(msgspec.Struct, frozen=True):
    """The model that the nodes serve, as the first ready node described it."""

    name: str
    path: str
    fingerprint: str
    layout_fingerprint: str
    max_model_len: int  # less than the model's limit if no pool could hold such a sequence
    vocab_size: int
    block_size: int
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = ""
    sampling: dict[str, object] = {}  # the default of HTTP requests


class Health(msgspec.Struct, frozen=True):
    """`degraded` means that some node or pair does not work. Requests are served if `can_serve`."""

    status: Status
    nodes: tuple[NodeHealth, ...]
    num_running: int  # requests that have nodes
    num_queued: int  # requests that wait for nodes
    message: str = ""
    pairs: tuple[PairHealth, ...] = ()  # pairs whose handoffs fail
    transfer_failures: tuple[tuple[NodeId, NodeId, int], ...] = ()  # by pair, since the start
    transfers: tuple[PairTransfers, ...] = ()  # all handoffs by pair, since the start
    lost: tuple[LostNode, ...] = ()
    num_cache_gaps: int = 0  # gaps in the nodes' announcements of cached blocks, since the start

    @property
    def can_serve(self) -> bool:
        return self.status in ("ready", "degraded")
