"""Tell nodes and the log what has changed about the nodes of a router. `core` calls it.

A node is told which nodes of the other role exist, or why it is refused. This file decides nothing:
`registry` has found the changes, and `core` handles requests.
"""

from collections.abc import Callable
from typing import assert_never

from baton.protocol.ids import Key, NodeId
from baton.protocol.messages import (
    Cancel,
    Drain,
    DrainState,
    Peers,
    Refused,
    Role,
    ToNode,
    WatchCache,
)
from baton.router.changes import Change, Differs, Entered, Left, Refuse, Unpaired
from baton.router.drains import drained
from baton.router.membership import Replaced
from baton.router.registry import Registry
from baton.router.request.events import HandoffEnded
from baton.router.request.leg import DRAINING
from baton.runtime.log import logger

Tell = Callable[[NodeId, Peers | Refused | Drain | Cancel | WatchCache], object]
# The largest number of nodes for which cancels are kept that could not be sent.
MAX_UNHEARD = 64

log = logger("router")


class Announcer:
    """With `watches_caches`, it asks nodes in service what their prefix caches hold."""

    def __init__(self, registry: Registry, tell: Tell, *, watches_caches: bool) -> None:
        self._registry = registry
        self._tell = tell
        self._watches_caches = watches_caches
        self._unheard: dict[NodeId, set[Key]] = {}

    def announce(self, change: Change) -> None:
        match change:
            case Refuse(node=node, failure=failure, is_new=is_new):
                if is_new:
                    log.warning("node refused", node=node, reason=failure.message)
                self._tell(node, Refused(failure))
            case Replaced():
                pass  # those whose requests end are told
            case Entered(info=info):
                log.info("node in service", node=info.node_id, role=info.role)
                self._introduce(info.role)
                self._tell(info.node_id, Peers(self._registry.peers_of(info.role)))
                if self._watches_caches:
                    self._tell(info.node_id, WatchCache())
                if keys := self._unheard.pop(info.node_id, None):
                    self._tell(info.node_id, Cancel(tuple(keys), "node lost"))
            case Differs(node=node, other=other):
                log.warning(change.message, node=node, other=other)
            case Unpaired(node=node, other=other, reason=reason):
                text = "two nodes can never exchange KV blocks and are not paired"
                log.warning(text, node=node, other=other, reason=reason)
            case Left(node=node, role=role, failure=failure):
                say = log.info if failure.code == DRAINING else log.warning
                say("node out of service", node=node, reason=failure.message)
                self._introduce(role)
                # Its channel may still work, so it is told.
                if self._registry.node(node) is not None:
                    self._tell(node, Peers(self._registry.peers_of(role), failure.message))
            case _:
                assert_never(change)

    def unsent(self, node: NodeId, message: ToNode) -> None:
        """Keep a cancel that cannot be sent to its node now; other messages are dropped.

        The node may have lost only its channel. It then keeps these sequences for their clients,
        which get them from other nodes.
        """
        if not isinstance(message, Cancel):
            return
        self._unheard.setdefault(node, set()).update(message.keys)
        if len(self._unheard) > MAX_UNHEARD:
            del self._unheard[next(iter(self._unheard))]

    def keeps(self, node: NodeId, key: Key) -> None:
        """Forget a cancel of this sequence, because its client has come back for it."""
        if (unheard := self._unheard.get(node)) is not None:
            unheard.discard(key)

    def drain(self, node_id: NodeId) -> DrainState:
        """Tell a node to drain, again if necessary, and return how far it is."""
        answer = drained(self._registry, node_id)
        if not answer.problem:
            self._tell(node_id, Drain())
        return answer

    def judge(self, now_s: float, ended: HandoffEnded) -> None:
        """Note what a handoff shows about its pair. A change is logged."""
        pairs, failure = self._registry.pairs, ended.failure
        names = {"prefill": ended.prefill[0], "decode": ended.decode[0]}
        if failure is None:
            if pairs.worked(ended.prefill, ended.decode):
                log.info("a pair of nodes works again", **names)
        elif pairs.failed(now_s, ended.prefill, ended.decode, failure):
            log.warning("a pair of nodes is avoided: a handoff failed", **names,
                        code=failure.code, reason=failure.message)  # fmt: skip

    def _introduce(self, role: Role) -> None:
        """Tell all nodes of the other role that the set of nodes with this role has changed."""
        other: Role = "decode" if role == "prefill" else "prefill"
        peers = Peers(self._registry.peers_of(other))
        for node in self._registry.in_service(other):
            self._tell(node.node_id, peers)
