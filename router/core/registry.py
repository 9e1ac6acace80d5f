"""The nodes that have dialled in, and the load that this router reserved at each.

A node that is silent or stuck is out of service but stays known: its next good heartbeat brings it
back. The registry never chooses a node and never sends to one: it returns the changes to act on.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import get_args

import msgspec

from baton.protocol.errors import Failure, NodeError
from baton.protocol.ids import Epoch, Key, NodeId, RequestId
from baton.protocol.messages import (
    ANY_PREFIX_READS,
    PREFETCHES,
    PREFIX_READS,
    PROTOCOL_VERSION,
    CacheChanges,
    Heartbeat,
    Hello,
    Load,
    NodeInfo,
    Ready,
    Role,
    Starting,
    TierName,
    Totals,
)
from baton.protocol.pairing import pair_problem
from baton.router.core.cache_index import CacheIndex, NodeBits, NodeMask
from baton.router.core.pair_health import Hosts, LoadKey, LoadOrder, Pairs, hosts_of
from baton.router.core.request import DRAINING, Attempt, NodeProcess
from baton.runtime.metrics import LostNode, NodeState


class Refuse(msgspec.Struct, frozen=True):
    """The node was refused, and gets the reason."""

    node: NodeId
    failure: Failure
    is_new: bool = True  # the node did not get the same reason when it asked last


class Entered(msgspec.Struct, frozen=True):
    """The node is in service from now on."""

    info: NodeInfo


class Asked(msgspec.Struct, frozen=True):
    """The node had no answer and introduced itself again, but it is in service or draining."""

    node: NodeId
    role: Role


class Left(msgspec.Struct, frozen=True):
    """The node is out of service, and nothing will come of its work."""

    node: NodeId
    role: Role
    failure: Failure


class Notice(msgspec.Struct, frozen=True):
    """Something about two nodes that an operator should know. It changes nothing."""

    message: str
    node: NodeId  # that is just ready
    other: NodeId  # in service
    reason: str = ""


Change = Refuse | Entered | Asked | Left | Notice

DIFFERENT_BITS = (
    "two nodes compute different bits: a stream that moves from one to the other is a valid "
    "continuation, but it may differ from one that was never interrupted"
)
UNPAIRED = "two nodes can never exchange KV blocks and are not paired"
# A node gets this many times the work for which it has slots and blocks, so that the next prompts
# are computed and moved while earlier sequences end.
SURPLUS = 1.25
# The number of steps of work that a prefill node is given at once.
BACKLOG_STEPS = 2
# The limits for a tenant that has more than its share, while there are others: a part of the slots
# and blocks stays free, and a prompt of another tenant waits for less than a step.
LEFT_PART = 0.95
LEFT_BACKLOG_STEPS = 0.25
NO_LOAD = Load()
NO_TOTALS = Totals()


@dataclass(slots=True, eq=False)
class Node:
    """One node process. `info` is set once the node has been ready."""

    node_id: NodeId
    role: Role
    epoch: Epoch
    heard_s: float
    bit: NodeMask = 0
    # Of the time since then, in which this router could hear no node.
    excused_s: float = 0.0
    phase: str = "starting"
    done: int = 0
    total: int = 0
    info: NodeInfo | None = None
    load: Load = NO_LOAD
    totals: Totals = NO_TOTALS
    step_age_s: float = 0.0
    state: NodeState = "starting"
    reserved: dict[Key, Attempt] = field(default_factory=dict)
    # The load of these.
    num_tokens: int = 0
    num_sequences: int = 0
    num_suspects: int = 0
    num_blocks: int = 0
    num_foreign: int = 0  # sequences from other routers, as of its last heartbeat
    loras: frozenset[str] = frozenset()  # the adapters of run time that it has
    # Decode nodes that this prefill node cannot reach now.
    unreachable: tuple[NodeId, ...] = ()
    # The nodes of the other role with which it certainly cannot work, each with the reason.
    obstacles: dict[NodeId, str] = field(default_factory=dict)

    @property
    def process(self) -> NodeProcess:
        return self.node_id, self.epoch

    @property
    def load_key(self) -> LoadKey:
        """Return what orders nodes of its role by their loads."""
        load = self.num_tokens if self.role == "prefill" else self.num_sequences
        return load, self.num_tokens, self.node_id

    @property
    def shares_blocks(self) -> bool:
        """Return whether it exchanges cached blocks with other nodes."""
        return self.info is not None and PREFETCHES in self.info.facts.features

    @property
    def lends_prefixes(self) -> bool:
        """Return whether prefill nodes may read prefixes of prompts from it."""
        return self.info is not None and PREFIX_READS in self.info.facts.features

    def lends_to(self, reader: "Node") -> bool:
        """Return whether blocks of this node are as good to another one as its own."""
        if self.info is None or reader.info is None:
            return False
        is_equal = self.info.compute == reader.info.compute
        return is_equal or ANY_PREFIX_READS in self.info.facts.features

    def heard(self, now_s: float) -> None:
        """Note that the node lives."""
        self.heard_s = now_s
        self.excused_s = 0.0

    def has_room(self, num_blocks: int, *, leaves_room: bool = False) -> bool:
        """Return whether the node could soon begin work that takes that many blocks on decode.

        An idle node takes any work that its pool can hold. Work that `leaves_room` gets no further
        than others, which may come any moment, could begin at once.
        """
        info = self.info
        if info is None or not info.facts.step.num_slots or not self.reserved:
            return True
        if self.role == "prefill":
            backlog = LEFT_BACKLOG_STEPS if leaves_room else BACKLOG_STEPS
            return self.num_tokens < backlog * info.facts.step.num_tokens
        part = LEFT_PART if leaves_room else SURPLUS
        # A request with many choices needs one slot to begin.
        has_slot = (
            len(self.reserved) + self.num_foreign < part * info.facts.step.num_slots
        )
        # Many choices start one by one, so they need not wait for an empty node.
        num_blocks = min(num_blocks, info.num_blocks // 2)
        return has_slot and self.num_blocks + num_blocks <= part * info.num_blocks

    @property
    def busy(self) -> float:
        """Return the share of the work for which it has room; from 1 on, requests wait for it."""
        info = self.info
        if info is None or not info.facts.step.num_slots:
            return 0.0
        if self.role == "prefill":
            return self.num_tokens / (BACKLOG_STEPS * info.facts.step.num_tokens)
        slots = (len(self.reserved) + self.num_foreign) / info.facts.step.num_slots
        return max(slots, self.num_blocks / info.num_blocks) / SURPLUS

    def reserve(self, selected: Attempt) -> None:
        """Add the load of an attempt to this node."""
        key = selected.key
        assert key not in self.reserved, f"{key} has load reserved at {self.node_id}"
        self.reserved[key] = selected
        self._add(selected, 1)

    def release(self, key: Key) -> bool:
        """Remove the load of an attempt; False if it has none here."""
        selected = self.reserved.pop(key, None)
        if selected is not None:
            self._add(selected, -1)
        return selected is not None

    def _add(self, selected: Attempt, sign: int) -> None:
        self.num_suspects += sign * selected.is_suspect
        if self.role == "prefill":
            self.num_tokens += sign * selected.num_uncached_tokens
            self.num_sequences += sign
            return
        num_choices = selected.num_choices
        self.num_tokens += sign * selected.num_tokens * num_choices
        self.num_sequences += sign * num_choices
        self.num_blocks += sign * selected.num_decode_blocks


# Three heartbeats of one second each, and half a second for a busy router.
HEARTBEAT_TIMEOUT_S = 3.5
STUCK_S = 10.0
STUCK_FACTOR = 8.0
MAX_REFUSED = 256  # nodes whose last refusal the router remembers
# How long a lost node is shown, and how many lost nodes are shown.
LOST_KEPT_S = 3600.0
MAX_LOST = 256


class Registry:
    """`pairs` holds the handoffs between nodes, `caches` the contents of their prefix caches."""

    def __init__(self, heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S) -> None:
        self.heartbeat_timeout_s = heartbeat_timeout_s
        self._nodes: dict[NodeId, Node] = {}
        # The node whose model all others must serve; None until one has been ready. The model
        # stays the same for as long as the router runs, so no stream changes its model.
        self.model: NodeInfo | None = None
        # The last refusal of each node, which may ask again.
        self._refused: dict[NodeId, Failure] = {}
        # Nodes that left without notice, oldest first.
        self._lost: dict[NodeId, Node] = {}
        self.pairs = Pairs()
        self.bits = NodeBits()
        self.caches = CacheIndex(self.bits)
        self.tiers: dict[TierName, CacheIndex] = {
            name: CacheIndex(self.bits) for name in get_args(TierName)
        }
        self.version = 0  # grows whenever an attempt that found no node may find one
        self.num_releases = 0  # grows whenever this router gives a node less to do
        # Every request needs these, so they are cached until the state of a node changes.
        self._in_service: dict[Role, list[Node]] = {}
        self._hosts: Hosts | None = None
        self._is_uniform: bool | None = None
        self._smallest_pools: dict[Role, int] = {}
        self._lenders: NodeMask | None = None
        self._by_load: dict[Role, LoadOrder] = {}
        # The orders that each node is in, which change with its load.
        self._orders: dict[NodeId, list[LoadOrder]] = {}

    def hello(self, now_s: float, peer: NodeId, message: Hello) -> list[Change]:
        if message.version != PROTOCOL_VERSION:
            text = f"this router speaks protocol version {PROTOCOL_VERSION}, not {message.version}"
            return [Refuse(peer, _mismatch("protocol_mismatch", text))]
        if message.node_id != peer:
            text = f"a node named {message.node_id} dialled in as {peer}"
            return [Refuse(peer, _mismatch("identity_mismatch", text))]
        known = self._node(peer, message.epoch)
        if known is not None:  # it asks again in its session, and its work goes on
            known.heard(now_s)
            return []
        changes = self.gone(peer, "a new process replaced it")
        bit = self.bits.take(peer)
        self._nodes[peer] = Node(peer, message.role, message.epoch, now_s, bit)
        self._lost.pop(peer, None)
        return changes

    def starting(self, now_s: float, message: Starting) -> None:
        node = self._node(message.node_id, message.epoch)
        if node is not None:
            node.heard(now_s)
            node.phase = message.phase
            node.done = message.done
            node.total = message.total

    def ready(self, now_s: float, peer: NodeId, message: Ready) -> list[Change]:
        info = message.info
        node = self._node(peer, info.epoch)
        if node is None or info.node_id != peer or info.role != node.role:
            text = "Ready arrived without a Hello from the same process"
            return [Refuse(peer, _mismatch("identity_mismatch", text))]
        if node.info == info and node.state in ("ready", "draining"):
            node.heard(now_s)
            return [Asked(peer, node.role)]
        if (failure := self._misfit(info)) is not None:
            self.gone(peer)
            return [self._refuse(peer, failure)]
        self._refused.pop(peer, None)
        node.heard(now_s)
        node.info = info
        node.state = "ready"
        # The last message was of the start.
        node.phase, node.done, node.total = "ready", 0, 0
        self.changed()
        return [Entered(info), *self._differences(info), *self._pair_up(node, info)]

    def heartbeat(self, now_s: float, message: Heartbeat) -> list[Change]:
        node = self._node(message.node_id, message.epoch)
        if node is None:
            return []
        node.heard(now_s)
        node.load = message.load
        node.step_age_s = message.step_age_s
        node.totals = message.totals
        if node.unreachable != message.unreachable:
            for other in set(node.unreachable) - set(message.unreachable):
                if (decode := self._nodes.get(other)) is not None:
                    self.pairs.reached(node.process, decode.process)
            node.unreachable = message.unreachable
            self.changed()
        in_hand = message.load.num_running + message.load.num_waiting
        node.num_foreign = max(0, in_hand - node.num_sequences)
        if node.info is None:
            return []
        was = node.state
        # A heartbeat from before the drain may arrive after it.
        node.state = "draining" if message.is_draining or was == "draining" else "ready"
        if _is_stuck(message):
            node.state = "stuck"
        if was != node.state:
            self.changed()
        if was in ("ready", "draining") and node.state == "stuck":
            text = f"{node.node_id} is stuck: its step has run for {message.step_age_s:.0f} s"
            if message.loop_age_s > STUCK_S:
                text = f"{node.node_id} is stuck: its loop has hung for {message.loop_age_s:.0f} s"
            return [Left(node.node_id, node.role, _lost(text))]
        return [Entered(node.info)] if was != "ready" and node.state == "ready" else []

    def hears_cache(self, peer: NodeId, changes: CacheChanges) -> bool:
        """Note a node's cached blocks. Return False if changes were missed."""
        node = self._nodes.get(peer)
        if node is None or node.info is None:
            return True
        index = self.caches if changes.tier is None else self.tiers[changes.tier]
        return index.hear(peer, changes)

    def holds(
        self, peer: NodeId, loras: Iterable[str], *, are_all: bool = False
    ) -> None:
        """Note adapters of run time that a node has; all of them, or some more."""
        node = self._nodes.get(peer)
        if node is not None:
            held = frozenset(loras) if are_all else node.loras.union(loras)
            if node.loras != held:
                node.loras = held
                self.changed()

    def drains(self, peer: NodeId) -> None:
        """Give a node no more work. Its work goes on, so it does not count as gone."""
        node = self._nodes.get(peer)
        if node is not None and node.state == "ready":
            node.state = "draining"
            self.changed()

    def gone(self, peer: NodeId, why: str = "the connection was lost") -> list[Change]:
        """Drop a node whose channel ended. A living node will introduce itself again."""
        node = self._nodes.pop(peer, None)
        if node is not None:
            self.pairs.forget(node.process)
            for other in self._nodes.values():
                other.obstacles.pop(peer, None)
        for index in (self.caches, *self.tiers.values()):
            index.forget(peer)
        self.bits.give_back(peer)
        self.changed()
        if node is None or node.info is None:
            return []
        # A node that was not `ready` has left before, but may have got a cancel since.
        if node.state == "draining":
            failure = NodeError(
                f"{peer} has left: it was told to end", code=DRAINING
            ).to_failure()
        else:
            self._lost[peer] = node
            if len(self._lost) > MAX_LOST:
                del self._lost[next(iter(self._lost))]
            failure = _lost(f"{peer} is lost: {why}")
        return [Left(peer, node.role, failure)]

    def tick(self, now_s: float, deaf_s: float = 0.0) -> list[Change]:
        """Put silent nodes out of service.

        This router could hear none for `deaf_s` since the last tick, so that time counts for no
        node. Nodes that have been silent in all for longer than allowed are slow, and serve on.
        """
        changes: list[Change] = []
        for node in self._nodes.values():
            node.excused_s = min(node.excused_s + deaf_s, now_s - node.heard_s)
            silent_s = now_s - node.heard_s - node.excused_s
            if (
                node.state in ("ready", "draining")
                and silent_s > self.heartbeat_timeout_s
            ):
                node.state = "silent"
                self.changed()
                failure = _lost(f"{node.node_id} has been silent for {silent_s:.1f} s")
                changes.append(Left(node.node_id, node.role, failure))
        return changes

    def in_service(self, role: Role) -> list[Node]:
        """Return the ready nodes of a role, in order of their ids."""
        found = self._in_service.get(role)
        if found is None:
            nodes = [
                n for n in self._nodes.values() if n.role == role and n.state == "ready"
            ]
            found = self._in_service[role] = sorted(
                nodes, key=lambda node: node.node_id
            )
        return found

    def hosts(self) -> Hosts:
        """Return the sets of nodes in service that need no network between them."""
        if self._hosts is None:
            prefills = self._infos("prefill")
            decodes = self._infos("decode")
            self._hosts = hosts_of(prefills, decodes, self._order_of)
        return self._hosts

    def by_load(self, role: Role) -> LoadOrder:
        """Return the nodes in service of a role, the least loaded first."""
        found = self._by_load.get(role)
        if found is None:
            names = (node.node_id for node in self.in_service(role))
            found = self._by_load[role] = self._order_of(names)
        return found

    def _order_of(self, names: Iterable[NodeId]) -> LoadOrder:
        nodes = [self._nodes[name] for name in names]
        mask = 0
        for node in nodes:
            mask |= node.bit
        order = LoadOrder((node.load_key for node in nodes), mask)
        for node in nodes:
            self._orders.setdefault(node.node_id, []).append(order)
        return order

    def is_uniform(self) -> bool:
        """Return whether all nodes in service compute equal bits and reach each other."""
        if self._is_uniform is None:
            nodes = [*self.in_service("prefill"), *self.in_service("decode")]
            computes = {node.info.compute for node in nodes if node.info is not None}
            self._is_uniform = len(computes) < 2 and not any(
                node.obstacles or node.unreachable for node in nodes
            )
        return self._is_uniform

    def smallest_pool(self, role: Role) -> int:
        """Return the blocks of the smallest pool among the nodes in service of a role."""
        found = self._smallest_pools.get(role)
        if found is None:
            pools = (info.num_blocks for info in self._infos(role))
            found = self._smallest_pools[role] = min(pools, default=0)
        return found

    def _infos(self, role: Role) -> tuple[NodeInfo, ...]:
        return tuple(
            node.info for node in self.in_service(role) if node.info is not None
        )

    def node(self, node_id: NodeId) -> Node | None:
        return self._nodes.get(node_id)

    def joined(self, role: Role) -> list[NodeId]:
        """Return the nodes of a role that have been ready, including draining ones."""
        return [n.node_id for n in self.nodes if n.role == role and n.info is not None]

    def has_met(self, role: Role) -> bool:
        """Return whether a node of a role is here, also one that starts, or left without notice."""
        return any(
            node.role == role for node in (*self._nodes.values(), *self._lost.values())
        )

    @property
    def node_ids(self) -> list[NodeId]:
        return sorted(self._nodes)

    @property
    def nodes(self) -> list[Node]:
        """Return all nodes that have dialled in, in order of their ids."""
        return [self._nodes[node_id] for node_id in self.node_ids]

    def peers_of(self, role: Role) -> tuple[NodeInfo, ...]:
        """Return the nodes that nodes of `role` must know, which are those of the other role.

        Of those that drain, others may still read.
        """
        other: Role = "decode" if role == "prefill" else "prefill"
        known = (node for node in self.nodes if node.state in ("ready", "draining"))
        return tuple(n.info for n in known if n.role == other and n.info is not None)

    def largest_pool(self, role: Role) -> int | None:
        """Return the blocks of the largest pool of a role; None until a node has been ready."""
        infos = [node.info for node in self._nodes.values() if node.role == role]
        return max(
            (info.num_blocks for info in infos if info is not None), default=None
        )

    def lost_nodes(self, now_s: float) -> tuple[LostNode, ...]:
        """Return the nodes that left without notice in the last hour and have not come back."""
        for node in [n for n in self._lost.values() if now_s - n.heard_s > LOST_KEPT_S]:
            del self._lost[node.node_id]
        nodes = sorted(self._lost.values(), key=lambda node: node.node_id)
        return tuple(
            LostNode(n.node_id, n.role, max(0.0, now_s - n.heard_s)) for n in nodes
        )

    def lenders(self, nodes: NodeMask, limit: int) -> list[Node]:
        """Return up to `limit` of the nodes from whose caches others may read."""
        if self._lenders is None:
            self._lenders = 0
            for node in self._nodes.values():
                if node.state == "ready" and node.lends_prefixes:
                    self._lenders |= node.bit
        names = self.bits.nodes_in(nodes & self._lenders, limit)
        return [self._nodes[name] for name in names]

    def can_pair(self, prefill: Node, decode: Node) -> bool:
        """Return whether two nodes could exchange KV blocks, by what both have published."""
        other = decode.node_id
        return other not in prefill.obstacles and other not in prefill.unreachable

    def forget(self, request_id: RequestId) -> None:
        """Remove the load of a request from all nodes."""
        for node in self._nodes.values():
            for key in [key for key in node.reserved if key.request_id == request_id]:
                self.release(node.node_id, key)

    def reserve(self, selected: Attempt) -> None:
        """Add the load of an attempt to its nodes."""
        for node_id in selected.epochs:
            node = self._nodes[node_id]
            old = node.load_key
            node.reserve(selected)
            self._move(node, old)

    def note_pair(self, selected: Attempt) -> None:
        """Note that an attempt was given to a pair, whose handoff will show whether it works."""
        if selected.prefill_node is not None and selected.decode_node is not None:
            prefill = self._nodes[selected.prefill_node]
            decode = self._nodes[selected.decode_node]
            self.pairs.selected(selected.key, prefill.process, decode.process)

    def release(self, node_id: NodeId, key: Key) -> None:
        """Remove a load. That of a lost node is gone: its successor starts at zero."""
        node = self._nodes.get(node_id)
        if node is None:
            return
        old = node.load_key
        if node.release(key):
            self._move(node, old)
            self.num_releases += 1
            # Prefill is given back before decode has read the blocks.
            if node.role == "decode":
                self.pairs.released(key)

    def _move(self, node: Node, old: LoadKey) -> None:
        for order in self._orders.get(node.node_id, ()):
            order.move(old, node.load_key)

    def _node(self, node_id: NodeId, epoch: Epoch) -> Node | None:
        node = self._nodes.get(node_id)
        return node if node is not None and node.epoch == epoch else None

    def changed(self) -> None:
        """Note that an attempt that found no node may find one, or that others may be found."""
        self._in_service.clear()
        self._hosts = None
        self._is_uniform = None
        self._smallest_pools.clear()
        self._lenders = None
        self._by_load.clear()
        self._orders.clear()
        self.version += 1

    def _pair_up(self, node: Node, info: NodeInfo) -> list[Change]:
        """Note the nodes of the other role with which this one can never work."""
        node.obstacles.clear()
        found: list[Change] = []
        for other in self.nodes:
            if other.info is None or other.role == node.role:
                continue
            prefill, decode = (
                (info, other.info) if node.role == "prefill" else (other.info, info)
            )
            other.obstacles.pop(node.node_id, None)
            if reason := pair_problem(prefill, decode):
                node.obstacles[other.node_id] = other.obstacles[node.node_id] = reason
                found.append(Notice(UNPAIRED, node.node_id, other.node_id, reason))
        return found

    def _misfit(self, info: NodeInfo) -> Failure | None:
        """Return why a node does not fit the model, or take over its limits if no other is here."""
        sizes = (
            info.num_blocks,
            info.layout.block_size,
            info.max_model_len,
            info.vocab_size,
        )
        if min(sizes) < 1:
            text = f"{info.node_id} offers no blocks, no tokens or no vocabulary"
            return _mismatch("impossible_node", text)
        is_alone = all(node.info is None for node in self._nodes.values())
        if self.model is None or (is_alone and info.model == self.model.model):
            self.model = info
            return None
        if not (found := differences(info, self.model)):
            return None
        text = f"{info.node_id} does not fit the nodes in service: " + "; ".join(
            found.values()
        )
        if is_alone:
            text += "; to serve another model, restart the router"
        return NodeError(text, code=next(iter(found))).to_failure()

    def _refuse(self, peer: NodeId, failure: Failure) -> Refuse:
        is_new = self._refused.pop(peer, None) != failure
        self._refused[peer] = failure
        if len(self._refused) > MAX_REFUSED:
            del self._refused[next(iter(self._refused))]
        return Refuse(peer, failure, is_new)

    def _differences(self, info: NodeInfo) -> list[Change]:
        """Return the first node that publishes that it computes other bits than `info`."""
        for other in (node.info for node in self.nodes):
            if (
                other is not None
                and info.compute
                and other.compute not in ("", info.compute)
            ):
                return [Notice(DIFFERENT_BITS, info.node_id, other.node_id)]
        return []


def _is_stuck(heartbeat: Heartbeat) -> bool:
    if heartbeat.loop_age_s > STUCK_S:
        return True
    has_work = heartbeat.load.num_running + heartbeat.load.num_waiting > 0
    return has_work and heartbeat.step_age_s > max(
        STUCK_S, STUCK_FACTOR * heartbeat.predicted_s
    )


def _lost(message: str) -> Failure:
    return NodeError(message).to_failure()


def _mismatch(code: str, message: str) -> Failure:
    return NodeError(message, code=code).to_failure()


def differences(info: NodeInfo, model: NodeInfo) -> dict[str, str]:
    """Return the fields in which two nodes differ but must not, each with a code and a phrase."""
    found: dict[str, str] = {}
    if info.model != model.model:
        ours, theirs = (
            f"{i.facts.model_name or 'a model'} in {i.facts.dtype}"
            for i in (info, model)
        )
        found["model_mismatch"] = (
            f"it serves another model (config.json, weights or dtype): {ours}, not {theirs}"
            if ours != theirs
            else f"its copy of {ours} differs from theirs, in config.json or in the weights"
        )
    if info.layout.fingerprint != model.layout.fingerprint:
        stored = [
            ", ".join(
                f"{one.num_layers} {one.kind} layers of {one.width}"
                for one in i.layout.groups
            )
            for i in (info, model)
        ]
        what = (
            "block_size, dtype or model_impl"
            if stored[0] == stored[1]
            else "{}, not {}".format(*stored)
        )
        found["layout_mismatch"] = f"its KV blocks have another layout ({what})"
    limits = [
        f"its {name} is {getattr(info, name)}, theirs {getattr(model, name)}"
        for name in ("max_model_len", "vocab_size", "eos_token_ids")
        if getattr(info, name) != getattr(model, name)
    ]
    if info.facts.tasks != model.facts.tasks:
        limits.append("its model serves other tasks (modules.json, model.convert)")
    if limits:
        found["limits_mismatch"] = ", ".join(limits)
    return found
