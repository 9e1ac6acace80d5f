"""The prefill and decode processes that can hand KV blocks to each other, and those that fail to.

What two nodes publish may rule out a pair from the start. A pair whose handoffs fail is avoided for
a while, longer each time, and then tried by one request at a time, because only a handoff shows
whether blocks can be read. So a prefill node whose blocks cannot be read does not attract the whole
load because it is idle. Broken channels are tried by the prefill node itself, without a request.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass

import msgspec

from baton.protocol.errors import Failure
from baton.protocol.ids import Key, NodeId
from baton.protocol.messages import NodeInfo, StageTimes
from baton.router.core.cache_index import NodeMask
from baton.router.core.request import NodeProcess

FIRST_AVOID_S = 5.0
MAX_AVOID_S = 60.0
# The largest number of pairs whose handoffs are counted; the oldest one makes room.
MAX_COUNTED = 4096


class PairTransfers(msgspec.Struct):
    """The handoffs from one node to another since the router started."""

    prefill_node: NodeId
    decode_node: NodeId
    num_handoffs: int = 0  # successful handoffs
    num_failures: int = 0
    num_bytes: int = 0
    transfer_s: float = 0.0  # added up over all handoffs
    reason: str = ""  # why the pair is avoided, or is being tried again
    avoided_s: float = 0.0  # for how much longer; 0 if one attempt at a time may try it


@dataclass(slots=True)
class _Trouble:
    failure: Failure
    num_failures: int
    until_s: float
    probe: Key | None = None  # the attempt that tries it again


class Pairs:
    def __init__(self) -> None:
        self._trouble: dict[tuple[NodeProcess, NodeProcess], _Trouble] = {}
        self._probes: dict[Key, tuple[NodeProcess, NodeProcess]] = {}
        self._counts: dict[tuple[NodeId, NodeId], PairTransfers] = {}

    def failed(
        self, now_s: float, prefill: NodeProcess, decode: NodeProcess, failure: Failure
    ) -> bool:
        """Note a failed handoff. Return whether the pair was in good order before."""
        self._count(prefill[0], decode[0]).num_failures += 1
        trouble = self._trouble.get((prefill, decode))
        if trouble is None:
            self._trouble[prefill, decode] = _Trouble(failure, 1, now_s + FIRST_AVOID_S)
            return True
        trouble.failure = failure
        # Attempts that were running when the pair was first avoided show nothing new.
        if now_s >= trouble.until_s:
            trouble.num_failures += 1
            wait_s = FIRST_AVOID_S * 2.0 ** min(trouble.num_failures - 1, 10)
            trouble.until_s = now_s + min(wait_s, MAX_AVOID_S)
        return False

    def worked(self, prefill: NodeProcess, decode: NodeProcess) -> bool:
        """Note a successful handoff. Return whether the pair was in trouble before."""
        self._count(prefill[0], decode[0]).num_handoffs += 1
        is_trouble = (prefill, decode) in self._trouble
        if is_trouble:
            self._forget(prefill, decode)
        return is_trouble

    def reached(self, prefill: NodeProcess, decode: NodeProcess) -> None:
        """Note that a prefill node has reached a decode node again on a channel that broke."""
        trouble = self._trouble.get((prefill, decode))
        if trouble is not None and trouble.failure.code == "node_lost":
            self._forget(prefill, decode)

    def allows(self, now_s: float, prefill: NodeProcess, decode: NodeProcess) -> bool:
        """Return whether an attempt should be given to this pair now."""
        trouble = self._trouble.get((prefill, decode))
        return trouble is None or (trouble.probe is None and now_s >= trouble.until_s)

    def reason(self, now_s: float, prefill: NodeProcess, decode: NodeProcess) -> str:
        """Return why this pair is avoided now; empty if it is not."""
        trouble = self._trouble.get((prefill, decode))
        return (
            trouble.failure.message
            if trouble is not None and now_s < trouble.until_s
            else ""
        )

    def selected(self, key: Key, prefill: NodeProcess, decode: NodeProcess) -> None:
        """Note that an attempt was given to this pair, which probes a pair in trouble."""
        trouble = self._trouble.get((prefill, decode))
        if trouble is not None and trouble.probe is None:
            trouble.probe = key
            self._probes[key] = prefill, decode

    def released(self, key: Key) -> None:
        """Note that an attempt gives back a node, which ends its time as a probe."""
        pair = self._probes.pop(key, None)
        if pair is not None:
            self._trouble[pair].probe = None

    def forget(self, process: NodeProcess) -> None:
        """Drop the evidence about a process that is gone."""
        for pair in [pair for pair in self._trouble if process in pair]:
            self._forget(*pair)

    def moved(self, prefill: NodeId, decode: NodeId, times: StageTimes) -> None:
        """Note what a handoff moved."""
        if times.transfer_bytes:
            count = self._count(prefill, decode)
            count.num_bytes += times.transfer_bytes
            count.transfer_s += times.transfer_s

    def transfers(self, now_s: float) -> tuple[PairTransfers, ...]:
        found = {pair: copy(one) for pair, one in self._counts.items()}
        for (prefill, decode), trouble in self._trouble.items():
            pair = prefill[0], decode[0]
            one = found.setdefault(pair, PairTransfers(*pair))
            one.reason = trouble.failure.message or trouble.failure.code
            one.avoided_s = max(0.0, trouble.until_s - now_s)
        return tuple(found.values())

    def _forget(self, prefill: NodeProcess, decode: NodeProcess) -> None:
        probe = self._trouble.pop((prefill, decode)).probe
        if probe is not None:
            del self._probes[probe]

    def _count(self, prefill: NodeId, decode: NodeId) -> PairTransfers:
        found = self._counts.get((prefill, decode))
        if found is None:
            found = self._counts[prefill, decode] = PairTransfers(prefill, decode)
            if len(self._counts) > MAX_COUNTED:
                del self._counts[next(iter(self._counts))]
        return found


# How much a node has to do, in the unit of its role, then its tokens and its id.
LoadKey = tuple[int, int, NodeId]


class LoadOrder:
    """Nodes of a role, the least loaded first, and the mask of them."""

    __slots__ = ("keys", "nodes")

    def __init__(self, keys: Iterable[LoadKey], nodes: NodeMask) -> None:
        self.keys = sorted(keys)
        self.nodes = nodes

    def move(self, old: LoadKey, new: LoadKey) -> None:
        """Put a node in its place after its load has changed."""
        del self.keys[bisect_left(self.keys, old)]
        insort(self.keys, new)


class Host(msgspec.Struct, frozen=True):
    """Nodes in service that can read each other within a host."""

    prefills: LoadOrder
    decodes: LoadOrder


class Hosts(msgspec.Struct, frozen=True):
    """The hosts with nodes of both roles."""

    shared: tuple[Host, ...] = ()
    is_one: bool = False  # all nodes in service are on one of them


def hosts_of(
    prefills: Sequence[NodeInfo],
    decodes: Sequence[NodeInfo],
    order_of: Callable[[Iterable[NodeId]], LoadOrder],
) -> Hosts:
    """Return the hosts of these nodes, which are all nodes in service."""
    first = _by_way(prefills)
    second = _by_way(decodes)
    ways = [way for way in first if way in second]
    num_nodes = len(prefills) + len(decodes)
    is_one = any(len(first[way]) + len(second[way]) == num_nodes for way in ways)
    shared = tuple(Host(order_of(first[way]), order_of(second[way])) for way in ways)
    return Hosts(shared, is_one)


def _by_way(nodes: Sequence[NodeInfo]) -> dict[str, list[NodeId]]:
    """Return the nodes that can be read in each way that stays within a host."""
    found: dict[str, list[NodeId]] = {}
    for node in nodes:
        for way in dict.fromkeys(node.reaches):
            if "@" in way:  # the other ways may lead to other hosts
                found.setdefault(way, []).append(node.node_id)
    return found
