"""Cached blocks that nodes are asked to read from other nodes before a prompt needs them.

A node that leaves names what it used last, and the nodes that stay share what none of them has. A
prefix that many requests have gets a second prefill node before the queue of the first one grows.
A node reads one message's blocks after the other, and no request waits for any of it.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from baton.protocol.blocks import (
    MIN_READ_TOKENS,
    BlockHash,
    BlockKey,
    block_hashes,
    pack_hashes,
    pack_keys,
    unpack_hashes,
    unpack_keys,
)
from baton.protocol.ids import MAX_KEYS, Key, NodeId, RequestId
from baton.protocol.messages import (
    HandedOver,
    HandOver,
    Prefetch,
    Prefetched,
    Role,
    ToNode,
)
from baton.router.core.lifecycle import Request
from baton.router.core.policy import MAX_LENDERS
from baton.router.core.registry import Node, Registry
from baton.router.core.request import Attempt

LATE_S = 1.0  # after the end of a read, for the reply
MAX_ASKED = 1024  # reads that have no reply yet
COPY_TIMEOUT_S = 5.0
COPY_IDLE_S = 1.0  # what takes its requests' place was used before that
HALF_LIFE_S = 10.0
HOT_REQUESTS = 8.0  # of about the last half-life
# A prefix is copied no sooner again, so that nodes that both lack room for it do not take turns.
REST_S = 60.0
LEAST_BLOCKS = 4
MAX_PREFIXES = 8192


@dataclass(slots=True)
class _Asked:
    reader: NodeId
    source: NodeId
    number: int | None  # of the `HandOver` that is answered at its end
    late_s: float


class Prefetches:
    def __init__(
        self,
        registry: Registry,
        send: Callable[[NodeId, ToNode], None],
        new_id: Callable[[], str],
    ) -> None:
        self._registry = registry
        self._send = send
        self._new_id = new_id
        self._asked: dict[Key, _Asked] = {}
        self._num_asked: Counter[NodeId] = Counter()  # by reader
        self._hot = HotPrefixes()

    def hand_over(self, now_s: float, source: NodeId, message: HandOver) -> None:
        """Let a node that stays read what is about to leave."""
        hashes = self._not_held_elsewhere(source, unpack_hashes(message.hashes))
        node = self._registry.node(source)
        readers = [] if node is None or not hashes else self._readers(node)
        if not readers or len(self._asked) >= MAX_ASKED:
            self._send(source, HandedOver(message.number))
            return
        reader = min(readers, key=self._busy)
        asked = _Asked(
            reader.node_id, source, message.number, now_s + message.timeout_s + LATE_S
        )
        self._ask(asked, hashes, message.idle_s, message.timeout_s)

    def placed(self, now_s: float, selected: Attempt, request: Request) -> None:
        """Let a second prefill node read the prefix of a request if many requests have it."""
        model = self._registry.model
        if selected.prefill_node is None or not request.block_keys or model is None:
            return
        size = model.layout.block_size
        keys = request.block_keys[:MAX_KEYS]
        num_known = min(selected.num_cached_tokens // size, len(keys))
        num_blocks = self._hot.note(now_s, keys, num_known)
        if num_blocks * size < MIN_READ_TOKENS or len(self._asked) >= MAX_ASKED:
            return
        # Also if it is not copied now, nobody looks again soon.
        self._hot.rest(now_s, keys[:num_blocks])
        found = self._lender_and_reader(keys[:num_blocks])
        if found is None:
            return
        lender, reader = found
        asked = _Asked(reader, lender, None, now_s + COPY_TIMEOUT_S + LATE_S)
        tokens = request.token_ids[: num_blocks * size]
        hashes = block_hashes(tokens, size, root=request.sampling.cache_root)
        self._ask(asked, hashes, COPY_IDLE_S, COPY_TIMEOUT_S)

    def answered(self, node: NodeId, message: Prefetched) -> None:
        asked = self._asked.get(message.key)
        if asked is not None and asked.reader == node:
            self._end(message.key)

    def left(self, node: NodeId) -> None:
        """Expect nothing more of a node, and nothing of those that read from it."""
        for key, asked in list(self._asked.items()):
            if node in (asked.reader, asked.source):
                self._end(key)

    def tick(self, now_s: float) -> None:
        for key, asked in list(self._asked.items()):
            if asked.late_s <= now_s:
                self._end(key)

    def _lender_and_reader(
        self, keys: tuple[BlockKey, ...]
    ) -> tuple[NodeId, NodeId] | None:
        """Return who should read these blocks from whom, if one prefill node alone has them."""
        holders = self._registry.caches.held(keys).get(len(keys), 0)
        prefills = self._registry.in_service("prefill")
        lacking = [node for node in prefills if not node.bit & holders]
        if len(prefills) - len(lacking) != 1:
            return None
        lacking = [node for node in lacking if node.shares_blocks]
        for lender in self._registry.lenders(holders, MAX_LENDERS):
            readers = [one for one in lacking if lender.lends_to(one)]
            readers = [one for one in readers if self._registry.can_pair(one, lender)]
            if readers:
                return lender.node_id, min(readers, key=self._busy).node_id
        return None

    def _ask(
        self,
        asked: _Asked,
        hashes: Iterable[BlockHash],
        idle_s: float,
        timeout_s: float,
    ) -> None:
        key = Key(RequestId(self._new_id()))
        self._asked[key] = asked
        self._num_asked[asked.reader] += 1
        prefetch = Prefetch(key, asked.source, pack_hashes(hashes), idle_s, timeout_s)
        self._send(asked.reader, prefetch)

    def _end(self, key: Key) -> None:
        asked = self._asked.pop(key)
        self._num_asked[asked.reader] -= 1
        if not self._num_asked[asked.reader]:
            del self._num_asked[asked.reader]
        if asked.number is not None:
            self._send(asked.source, HandedOver(asked.number))

    def _readers(self, source: Node) -> list[Node]:
        """Return the nodes that may read from that one: of the other role, and computing alike."""
        if not source.shares_blocks:
            return []
        other: Role = "decode" if source.role == "prefill" else "prefill"
        nodes = (
            node for node in self._registry.in_service(other) if node.shares_blocks
        )
        alike = (node for node in nodes if source.lends_to(node))
        return [node for node in alike if self._can_pair(source, node)]

    def _can_pair(self, source: Node, reader: Node) -> bool:
        if source.role == "prefill":
            return self._registry.can_pair(source, reader)
        return self._registry.can_pair(reader, source)

    def _not_held_elsewhere(
        self, source: NodeId, hashes: list[BlockHash]
    ) -> list[BlockHash]:
        """Return the blocks that no node in service holds, in its cache or in a tier."""
        keys = unpack_keys(pack_keys(hashes))
        indexes = (self._registry.caches, *self._registry.tiers.values())
        others = 0
        for node in self._registry.nodes:
            if node.state == "ready" and node.node_id != source:
                others |= node.bit
        return [
            block_hash
            for block_hash, key in zip(hashes, keys, strict=True)
            if not any(index.holders(key) & others for index in indexes)
        ]

    def _busy(self, reader: Node) -> tuple[int, int, NodeId]:
        return self._num_asked[reader.node_id], reader.num_tokens, reader.node_id


@dataclass(slots=True)
class _Heat:
    num_requests: float
    at_s: float
    rests_until_s: float = 0.0


class HotPrefixes:
    """Prefixes that many requests have lately begun with.

    A request counts for its prefixes of 4, 8, 16 … blocks, and for the one that the nodes know, so
    it costs a few look-ups however long its prompt is. Counts halve in `HALF_LIFE_S`.
    """

    def __init__(self, max_prefixes: int = MAX_PREFIXES) -> None:
        self._heats: OrderedDict[BlockKey, _Heat] = OrderedDict()
        self._max_prefixes = max_prefixes

    def note(self, now_s: float, keys: Sequence[BlockKey], num_known: int) -> int:
        """Count a request, and return of how many blocks its longest hot prefix is; 0 if none is.

        `num_known` blocks of it were cached somewhere. A prefix that rests is not hot.
        """
        longest = 0
        num_blocks = LEAST_BLOCKS
        counted: list[int] = []
        while num_blocks <= len(keys):
            counted.append(num_blocks)
            num_blocks *= 2
        if num_known > LEAST_BLOCKS and num_known not in counted:
            counted.append(num_known)
        for num_blocks in counted:
            heat = self._count(now_s, keys[num_blocks - 1])
            if heat.num_requests >= HOT_REQUESTS and now_s >= heat.rests_until_s:
                longest = max(longest, num_blocks)
        return longest

    def rest(self, now_s: float, keys: Sequence[BlockKey]) -> None:
        """Let the prefix of these blocks, and those that it begins with, not count as hot."""
        for key in keys:
            if (heat := self._heats.get(key)) is not None:
                heat.rests_until_s = now_s + REST_S

    def _count(self, now_s: float, key: BlockKey) -> _Heat:
        heat = self._heats.get(key)
        if heat is None:
            heat = self._heats[key] = _Heat(1.0, now_s)
            if len(self._heats) > self._max_prefixes:
                self._heats.popitem(last=False)
            return heat
        heat.num_requests *= 0.5 ** ((now_s - heat.at_s) / HALF_LIFE_S)
        heat.num_requests += 1
        heat.at_s = now_s
        self._heats.move_to_end(key)
        return heat
