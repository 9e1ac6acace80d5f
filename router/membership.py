"""Decide which model the nodes of this router serve, and which nodes fit it.

Only `registry` calls it. After a restart a router knows no model, and the first node that joins may
be a stray one. So the first node decides only provisionally: until nodes of both roles serve its
model, or until it has served alone for a while, another model with more nodes can replace it. After
that the router keeps its model. Nodes that do not fit wait, and may ask again. This file is pure.
"""

from collections.abc import Iterable

import msgspec

from baton.protocol.errors import Failure, NodeError, Overloaded
from baton.protocol.ids import NodeId
from baton.protocol.messages import NodeInfo

SETTLED_S = 15.0  # nodes find a restarted router within two


class Replaced(msgspec.Struct, frozen=True):
    """Another model is served from now on, so requests of the old one cannot be continued."""

    @property
    def failure(self) -> Failure:
        text = "the model that began this request is no longer served"
        return Overloaded(text, code="model_replaced", retry_after_s=1.0).to_failure()


class Membership:
    """`model` is the node with which others are compared; None until one has been ready."""

    def __init__(self) -> None:
        self.model: NodeInfo | None = None
        self._members: dict[NodeId, NodeInfo] = {}
        self._waiting: dict[NodeId, NodeInfo] = {}
        self._is_settled = False
        self._since_s = 0.0  # since when the model is served

    def join(self, now_s: float, info: NodeInfo) -> Failure | tuple[NodeId, ...]:
        """Admit a node and return the members that must leave for it, or the reason to wait."""
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
        """Remember a node that was refused and is still connected."""
        self._waiting[info.node_id] = info

    def refusal_of(self, info: NodeInfo) -> Failure:
        """Return the fields in which a node differs from the served model."""
        assert self.model is not None
        found = differences(info, self.model)
        code = next(iter(found)) if found else "model_mismatch"
        text = f"{info.node_id} does not fit the nodes in service: " + "; ".join(found.values())
        return NodeError(text, code=code).to_failure()

    # --- inside --------------------------------------------------------------------------------

    def _adopt(self, now_s: float, info: NodeInfo) -> None:
        self.model, self._members, self._since_s = info, {}, now_s

    def _may_follow(self, info: NodeInfo, model: NodeInfo) -> bool:
        """Return whether a replaced cluster may go on with this node: only limits may differ."""
        return not self._is_settled or info.model == model.model

    def _outranks(self, info: NodeInfo) -> bool:
        """Return whether this node and those that wait with it outnumber the members."""
        allies = [other for other in self._waiting.values() if not differences(other, info)]
        ours, theirs = [*allies, info], list(self._members.values())
        return (is_complete(ours), len(ours)) > (is_complete(theirs), len(theirs))


def is_complete(nodes: Iterable[NodeInfo]) -> bool:
    return {node.role for node in nodes} == {"prefill", "decode"}


def differences(info: NodeInfo, model: NodeInfo) -> dict[str, str]:
    """Return the fields in which two nodes differ but must not, each with a code and a phrase."""
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
        return f"it serves {ours}, and they serve {theirs}"
    called = f" that is called {ours} too" if ours else ""
    return f"it serves another model{called} (config.json, weights or dtype)"


def _named(info: NodeInfo) -> str:
    return " in ".join(word for word in (info.facts.model_name, info.facts.dtype) if word)
