"""Which model the nodes of this router serve, and which nodes fit it. Pure.

Only `registry` asks. After a restart a router knows no model, and the first node that joins may be
a stray one. So the first node decides only for the time being: until nodes of both roles serve its
model, or until it has served alone for a while, another model with more nodes takes its place. From
then on the router keeps its model. Nodes that do not fit wait, and may ask again.
"""

from collections.abc import Iterable

import msgspec

from baton.protocol.errors import Failure, NodeError, Overloaded
from baton.protocol.ids import NodeId
from baton.protocol.messages import NodeInfo

SETTLED_S = 15.0  # nodes find a router that restarted within two


class Replaced(msgspec.Struct, frozen=True):
    """Another model is served from now on: what the old one began cannot be continued."""

    @property
    def failure(self) -> Failure:
        text = "another model is served now than the one that began this request"
        return Overloaded(text, code="model_replaced", retry_after_s=1.0).to_failure()


class Membership:
    """`model` is the node by which the others are judged; None until one has been ready."""

    def __init__(self) -> None:
        self.model: NodeInfo | None = None
        self._members: dict[NodeId, NodeInfo] = {}
        self._waiting: dict[NodeId, NodeInfo] = {}
        self._is_settled = False
        self._since_s = 0.0  # that the model is served

    def join(self, now_s: float, info: NodeInfo) -> Failure | tuple[NodeId, ...]:
        """Take a node in and return the members that must leave for it, or say why it must wait."""
        self.leave(info.node_id)
        self._is_settled |= bool(self._members) and now_s - self._since_s >= SETTLED_S
        evicted: tuple[NodeId, ...] = ()
        if self.model is None or (not self._members and self._may_follow(info, self.model)):
            self._adopt(now_s, info)
        elif differences(info, self.model):
            if self._is_settled or not self._outranks(info):
                self._waiting[info.node_id] = info
                return self.refusal_of(info)
            evicted = tuple(self._members)
            self._waiting |= self._members
            self._adopt(now_s, info)
        self._waiting.pop(info.node_id, None)
        self._members[info.node_id] = info
        self._is_settled |= is_complete(self._members.values())
        return evicted

    def leave(self, node_id: NodeId) -> None:
        self._members.pop(node_id, None)
        self._waiting.pop(node_id, None)

    def wait(self, info: NodeInfo) -> None:
        """Remember a node that was turned away and is still connected."""
        self._waiting[info.node_id] = info

    def refusal_of(self, info: NodeInfo) -> Failure:
        """Return in which fields a node differs from the model that is served."""
        assert self.model is not None
        found = differences(info, self.model)
        code = next(iter(found)) if found else "model_mismatch"
        text = f"{info.node_id} does not fit the nodes in service: " + "; ".join(found.values())
        return NodeError(text, code=code).to_failure()

    # --- inside --------------------------------------------------------------------------------

    def _adopt(self, now_s: float, info: NodeInfo) -> None:
        self.model, self._members, self._since_s = info, {}, now_s

    def _may_follow(self, info: NodeInfo, model: NodeInfo) -> bool:
        """A cluster that is replaced as a whole may change its limits, but not what it serves."""
        return not self._is_settled or info.model == model.model

    def _outranks(self, info: NodeInfo) -> bool:
        """Whether this node and those that wait with it are more of a cluster than the members."""
        allies = [other for other in self._waiting.values() if not differences(other, info)]
        ours, theirs = [*allies, info], list(self._members.values())
        return (is_complete(ours), len(ours)) > (is_complete(theirs), len(theirs))


def is_complete(nodes: Iterable[NodeInfo]) -> bool:
    return {node.role for node in nodes} == {"prefill", "decode"}


def differences(info: NodeInfo, model: NodeInfo) -> dict[str, str]:
    """Return the fields in which two nodes must not differ and do: a code and a phrase each."""
    found: dict[str, str] = {}
    if info.model != model.model:
        found["model_mismatch"] = _other_model(info, model)
    if info.layout.fingerprint != model.layout.fingerprint:
        found["layout_mismatch"] = "its KV blocks have another layout (block_size or dtype)"
    limits = [
        f"its {name} is {getattr(info, name)}, theirs {getattr(model, name)}"
        for name in ("max_model_len", "vocab_size", "eos_token_ids")
        if getattr(info, name) != getattr(model, name)
    ]
    if limits:
        found["limits_mismatch"] = ", ".join(limits)
    return found


def _other_model(info: NodeInfo, model: NodeInfo) -> str:
    ours, theirs = _named(info), _named(model)
    if ours and theirs and ours != theirs:
        return f"it serves {ours}, they serve {theirs}"
    called = f" that is called {ours} too" if ours else ""
    return f"it serves another model{called} (config.json, weights or dtype)"


def _named(info: NodeInfo) -> str:
    return " in ".join(word for word in (info.facts.model_name, info.facts.dtype) if word)
