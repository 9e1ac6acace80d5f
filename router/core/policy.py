"""Choose the nodes of an attempt: the working pair with the least cost, then least load, then id.

A cost counts prompt tokens to compute (docs/decisions.md), so a cached prefix weighs as much as
the queue that it saves. A node with room comes before a full one, even if the full one has more
cached. `choose` returns None only if no node in service is large enough, or none can pair. If it
names a full node, the attempt waits, so no prompt is computed without a decode node to take it.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from itertools import chain
from operator import attrgetter

from baton.protocol.blocks import MIN_READ_TOKENS, blocks_needed
from baton.protocol.config import LocalPrefill
from baton.protocol.ids import NodeId
from baton.protocol.messages import Role, TierName
from baton.router.core.ranking import (
    HANDOFF_TOKENS,
    NO_NODES,
    RankedPair,
    Ranking,
    all_pairs,
    best_of_hosts,
    best_pair,
)
from baton.router.core.registry import Node, Registry
from baton.router.core.request import Attempt

# The assumed length of a response before any has ended, and the weight of the newest one.
FIRST_OUTPUT_TOKENS = 256.0
OUTPUT_WEIGHT = 0.05
# Reading the KV of a token takes this share of computing it, on one host and between hosts.
NEAR_READ = 1 / 32
FAR_READ = 1 / 8
# And reading it from a tier of the node that computes the prompt.
TIER_READS: Mapping[TierName, float] = {"memory": 1 / 32, "folder": 1 / 16}
MAX_LENDERS = 8  # of those that have a hot prefix, so many are looked at
# A decode node that was chosen because it had most of a prompt cached refuses the prompt if it
# would have to compute more than this many times what the setting allows.
MISPREDICTION = 2

_node_id = attrgetter("node_id")
_num_sequences = attrgetter("num_sequences")
_num_suspects = attrgetter("num_suspects")
_num_tokens = attrgetter("num_tokens")
_order = attrgetter("order")


class CheapestPair:
    """If no node has announced cached blocks, the least loaded nodes are the cheapest."""

    def __init__(self, local_prefill: LocalPrefill, local_prefill_tokens: int) -> None:
        self._mode = local_prefill
        self._local_tokens = local_prefill_tokens
        self._output_tokens = FIRST_OUTPUT_TOKENS

    def learn(self, num_output_tokens: float) -> None:
        """Note the length of one choice of a response."""
        self._output_tokens += OUTPUT_WEIGHT * (num_output_tokens - self._output_tokens)

    def work_of(self, attempt: Attempt) -> int:
        """Return the tokens that an attempt will probably compute: its prompt and its output."""
        likely = _likely_tokens(attempt, math.ceil(self._output_tokens))
        return attempt.num_tokens + attempt.num_choices * (likely - attempt.num_tokens)

    def choose(
        self,
        now_s: float,
        registry: Registry,
        attempt: Attempt,
        kept: Collection[NodeId] = (),
        *,
        leaves_room: bool = False,
    ) -> Attempt | None:
        """Set the nodes of an attempt and return it, or None if no node in service can take it.

        Nodes that are `kept` for other attempts count as full. So do, for an attempt that
        `leaves_room`, nodes that have just enough of it for the attempts of others.
        """
        growth = math.ceil(self._output_tokens)
        search = _PairSearch(registry, attempt, growth, kept, leaves_room=leaves_room)
        # Most nodes have room, and checking takes long. A choice with room is the best in any case.
        selected = self._choose(now_s, search, attempt)
        if selected is None or not selected.full:
            return selected
        search.checks_room = True
        return self._choose(now_s, search, attempt)

    def _choose(
        self, now_s: float, search: "_PairSearch", attempt: Attempt
    ) -> Attempt | None:
        if attempt.is_pooled:
            prefills = search.prefills()
            return search.selected(prefills.best(), None) if prefills else None
        if self._mode == "always":
            return search.local(search.able_decodes())
        # Decode nodes that may compute it, as they lack little of it.
        near = NO_NODES
        if self._mode == "auto" and attempt.wants_decode and not attempt.is_remote_only:
            near = search.able_decodes(attempt.num_tokens - self._local_tokens)
        max_uncached = MISPREDICTION * self._local_tokens
        # If all decode nodes may compute it, a handoff of such a short prompt can only cost more.
        if near and attempt.num_tokens <= min(self._local_tokens, HANDOFF_TOKENS):
            return search.local(near, max_uncached=max_uncached)
        prefills = search.prefills()
        if not attempt.wants_decode and prefills:
            return search.selected(prefills.best(), None)
        pair = search.cheapest_pair(now_s, prefills)
        if near and (pair is None or near.best_rank() <= pair.rank):
            return search.local(near, max_uncached=max_uncached)
        if pair is None and self._mode == "auto":
            return search.local(search.able_decodes(), is_fallback=True)
        # Without an alternative, a pair that failed lately is better than none.
        pair = pair or search.possible_pair(prefills)
        return None if pair is None else search.selected(pair.prefill, pair.decode)


class _PairSearch:
    """The search for one attempt's nodes. Its sequences will probably grow by `growth` tokens."""

    def __init__(
        self,
        registry: Registry,
        attempt: Attempt,
        growth: int,
        kept: Collection[NodeId],
        *,
        leaves_room: bool,
    ) -> None:
        self._registry = registry
        self._attempt = attempt
        self._kept = kept
        self._leaves_room = leaves_room
        self.checks_room = False  # whether full nodes rank behind the others
        self._likely_tokens = _likely_tokens(attempt, growth)
        # Another sequence in the batch delays each step by about the time of a prompt token.
        self._slot_tokens = max(1, self._likely_tokens - attempt.num_tokens)
        model = registry.model
        size = self._block_size = 1 if model is None else model.layout.block_size
        self._state_blocks = 0 if model is None else model.layout.state_blocks
        self._likely_blocks = self._blocks(self._likely_tokens, attempt.num_choices)
        self._held: dict[NodeId, int] = {}
        self._cached: dict[NodeId, int] = {}
        # The last token is always computed, for its logits.
        most = (attempt.num_tokens - 1) // size * size
        self._lenders: list[Node] = []  # decode nodes with most of the prompt
        self._readable = 0  # tokens, from each of these
        # What one of these tokens costs them to load from their tiers.
        self._lender_read = 0.0
        for num_blocks, nodes in registry.caches.held(attempt.block_keys).items():
            self._held.update(dict.fromkeys(nodes, num_blocks * size))
            self._cached.update(dict.fromkeys(nodes, min(num_blocks * size, most)))
            self._lend(nodes, min(num_blocks * size, most), 0.0)
        # Tokens that each node need not compute, less what reading them from its tiers costs.
        self._saved: dict[NodeId, float] = dict(self._cached)
        # About how many tokens of the prompt each node need not compute.
        self._known: dict[NodeId, float] = dict(self._held)
        for name, index in registry.tiers.items():
            for num_blocks, nodes in index.held(attempt.block_keys).items():
                self._save(nodes, min(num_blocks * size, most), TIER_READS[name])
                self._lend(nodes, min(num_blocks * size, most), TIER_READS[name])

    def _lend(self, nodes: Iterable[NodeId], num_tokens: int, read: float) -> None:
        """Let those of these nodes lend that many tokens, if it saves more than others do."""
        if num_tokens * (1 - read) <= self._readable * (1 - self._lender_read):
            return
        if lenders := self._registry.lenders(nodes, MAX_LENDERS):
            self._lenders = lenders
            self._readable = num_tokens
            self._lender_read = read

    def _save(self, nodes: Iterable[NodeId], num_tokens: int, read: float) -> None:
        """Count the first tokens of the prompt, which a tier of each of these nodes holds."""
        cached = self._cached
        most_cached = num_tokens - MIN_READ_TOKENS
        for node in nodes:
            if (num_cached := cached.get(node, 0)) <= most_cached:
                saved = num_cached + (1 - read) * (num_tokens - num_cached)
                self._saved[node] = max(saved, self._saved.get(node, 0))
                self._known[node] = max(saved, self._known.get(node, 0))

    def prefills(self) -> Ranking:
        """Return the prefill nodes that could hold the prompt if they were empty."""
        nodes = self._large_enough("prefill", self._blocks(self._attempt.num_tokens, 1))
        waits = list(map(_num_tokens, nodes))
        if not self._lenders or self._readable < MIN_READ_TOKENS:
            return self._ranking(nodes, waits, self._saved)
        has, others_have = self._with_reads(nodes)
        return self._ranking(nodes, waits, has, others_have=others_have)

    def _with_reads(self, prefills: list[Node]) -> tuple[dict[NodeId, float], float]:
        """Return what nodes have of the prompt if tokens count that they could read.

        The second number is what each node has that is not named.
        """
        saved = (
            1
            - (NEAR_READ if self._registry.hosts().is_one else FAR_READ)
            - self._lender_read
        )
        has = dict(self._saved)
        # Nearly always all nodes compute alike and reach each other, which is quick to see.
        is_uniform = self._registry.is_uniform()
        cached = self._cached
        most_held = self._readable - MIN_READ_TOKENS
        for node in prefills:
            num_held = cached.get(node.node_id, 0)
            if num_held > most_held:
                continue
            if is_uniform and not num_held and node.node_id not in has:
                continue
            if (num_more := self._num_read(node)) > 0:
                of_tiers = self._saved.get(node.node_id, 0.0)
                has[node.node_id] = max(of_tiers, num_held + saved * num_more)
        return has, saved * self._readable if is_uniform else 0.0

    def _num_read(self, prefill: Node) -> int:
        """Return how many tokens that node could read from another one instead of computing."""
        num_more = self._readable - self._cached.get(prefill.node_id, 0)
        if num_more < MIN_READ_TOKENS:
            return 0
        return (
            num_more
            if any(self._can_lend(one, prefill) for one in self._lenders)
            else 0
        )

    def _is_lender(self, decode: Node) -> bool:
        """Return whether a node has as much as any other, also beyond those that are looked at."""
        if decode in self._lenders:
            return True
        return (
            decode.lends_prefixes
            and self._held.get(decode.node_id, 0) >= self._readable
        )

    def _can_lend(self, lender: Node, prefill: Node) -> bool:
        return lender.lends_to(prefill) and self._registry.can_pair(prefill, lender)

    def _lender(self, prefill: Node, decode: Node | None) -> Node | None:
        """Return the node from which that one would read, if it can be, the decode node itself."""
        if (
            decode is not None
            and self._is_lender(decode)
            and self._can_lend(decode, prefill)
        ):
            return decode
        usable = [one for one in self._lenders if self._can_lend(one, prefill)]
        return min(usable, key=lambda one: (one.num_tokens, one.node_id), default=None)

    def able_decodes(self, least_held: int = 0) -> Ranking:
        """Return the decode nodes that could compute the prompt themselves.

        Only those that hold at least `least_held` tokens of the prompt count.
        """
        # Of a prompt that it received, a decode node has no state from which it could go on.
        if least_held > 0 and (not self._saved or self._state_blocks):
            return NO_NODES
        return self._decodes(self._saved, least_held=least_held)

    def _decodes(
        self, has: Mapping[NodeId, float], read: float = 1, least_held: int = 0
    ) -> Ranking:
        """Return the decode nodes if each token that they lack costs `read`."""
        num_blocks = self._blocks(
            self._attempt.num_final_tokens, self._attempt.num_choices
        )
        nodes = self._large_enough("decode", num_blocks)
        if least_held > 0:
            known = self._known
            nodes = [node for node in nodes if known.get(node.node_id, 0) >= least_held]
        slot_tokens = self._slot_tokens
        waits = [number * slot_tokens for number in map(_num_sequences, nodes)]
        return self._ranking(nodes, waits, has, read)

    def _large_enough(self, role: Role, num_blocks: int) -> list[Node]:
        """Return the nodes in service that have the adapter and at least that many blocks."""
        nodes = self._registry.in_service(role)
        if lora := self._attempt.lora:
            nodes = [node for node in nodes if lora in node.loras]
        if num_blocks <= self._registry.smallest_pool(role):
            return nodes
        return [node for node in nodes if _pool(node) >= num_blocks]

    def _ranking(
        self,
        nodes: list[Node],
        waits: list[int],
        has: Mapping[NodeId, float],
        read: float = 1,
        others_have: float = 0,
    ) -> Ranking:
        """Return nodes with their costs: their waits, plus `read` for each token that they lack.

        `has` names the nodes that have other tokens of the prompt than all others. No attempt
        shares a node with a suspect while there is another node.
        """
        avoid = self._attempt.avoid
        num_tokens = self._attempt.num_tokens
        checks_room = self.checks_room
        if has:
            costs = [
                wait + read * (num_tokens - has.get(node_id, others_have))
                for node_id, wait in zip(map(_node_id, nodes), waits, strict=True)
            ]
        else:
            cost = read * (num_tokens - others_have)
            costs = [wait + cost for wait in waits]
        if not (avoid or checks_room or any(map(_num_suspects, nodes))):
            return Ranking(nodes, costs)
        penalties = [
            (
                node.process in avoid,
                node.num_suspects,
                checks_room and not self._has_room(node),
            )
            for node in nodes
        ]
        return Ranking(nodes, costs, penalties)

    def _has_room(self, node: Node) -> bool:
        num_blocks = min(self._likely_blocks, _pool(node) // 2)
        has_room = node.has_room(num_blocks, leaves_room=self._leaves_room)
        return has_room and node.node_id not in self._kept

    def cheapest_pair(self, now_s: float, prefills: Ranking) -> RankedPair | None:
        """Return the cheapest pair that works; None if none does.

        It is the best pair of all nodes or that of a host, because the costs of two nodes are
        independent, except for the path between them.
        """
        hosts = self._registry.hosts()
        decodes = self._decodes(self._held, NEAR_READ if hosts.is_one else FAR_READ)
        if not decodes or not prefills:
            return None
        best = [best_pair(prefills, decodes)]
        if hosts.shared and not hosts.is_one:
            near = self._decodes(self._held, NEAR_READ)
            best += best_of_hosts(hosts.shared, prefills, near)
            best.sort(key=_order)
        for pair in chain(best, all_pairs(prefills, decodes)):
            if self._works(now_s, pair):
                return pair
        return None

    def _works(self, now_s: float, pair: RankedPair) -> bool:
        prefill = pair.prefill
        decode = pair.decode
        allows = self._registry.pairs.allows(now_s, prefill.process, decode.process)
        return allows and self._registry.can_pair(prefill, decode)

    def possible_pair(self, prefills: Ranking) -> RankedPair | None:
        """Return the best pair that could exchange blocks, though its handoffs fail now."""
        decodes = self._decodes(self._held, FAR_READ)
        pairs = all_pairs(prefills, decodes)
        can_pair = self._registry.can_pair
        return next((one for one in pairs if can_pair(one.prefill, one.decode)), None)

    def local(
        self,
        candidates: Ranking,
        *,
        is_fallback: bool = False,
        max_uncached: int | None = None,
    ) -> Attempt | None:
        """Select the best of these nodes, to compute the prompt itself."""
        if not candidates:
            return None
        node = candidates.best()
        return self.selected(
            None, node, is_fallback=is_fallback, max_uncached=max_uncached
        )

    def selected(
        self,
        prefill: Node | None,
        decode: Node | None,
        *,
        is_fallback: bool = False,
        max_uncached: int | None = None,
    ) -> Attempt:
        attempt = self._attempt
        nodes = [node for node in (prefill, decode) if node is not None]
        num_read = 0
        num_uncached = 0
        lender = None
        if prefill is not None:
            if (num_read := self._num_read(prefill)) > 0:
                lender = self._lender(prefill, decode)
            num_cached = self._cached.get(prefill.node_id, 0) + num_read
            num_cached = max(num_cached, round(self._saved.get(prefill.node_id, 0)))
            num_uncached = attempt.num_tokens - num_cached
        num_blocks = 0
        if decode is not None:
            num_blocks = _likely_blocks(decode, attempt, self._likely_tokens)
        attempt.prefill_node = None if prefill is None else prefill.node_id
        attempt.decode_node = None if decode is None else decode.node_id
        attempt.epochs = {node.node_id: node.epoch for node in nodes}
        attempt.max_uncached_tokens = max_uncached
        attempt.prefix_node = None if lender is None else lender.node_id
        attempt.num_uncached_tokens = num_uncached
        attempt.num_decode_blocks = num_blocks
        attempt.is_fallback = is_fallback
        attempt.full = tuple(
            [node.node_id for node in nodes if not self._has_room(node)]
        )
        num_cached = self._cached.get(nodes[0].node_id, 0)
        attempt.num_cached_tokens = num_cached + num_read
        return attempt

    def _blocks(self, num_final_tokens: int, num_choices: int) -> int:
        num_tokens = self._attempt.num_tokens
        return blocks_needed(
            self._block_size,
            num_tokens,
            num_final_tokens,
            num_choices,
            self._state_blocks,
        )


def _likely_tokens(attempt: Attempt, growth: int) -> int:
    return min(attempt.num_final_tokens, attempt.num_tokens + growth)


def _likely_blocks(node: Node, attempt: Attempt, likely_tokens: int) -> int:
    """Return how many blocks of a decode node an attempt will probably take."""
    assert node.info is not None
    layout = node.info.layout
    num_blocks = blocks_needed(
        layout.block_size,
        attempt.num_tokens,
        likely_tokens,
        attempt.num_choices,
        layout.state_blocks,
    )
    # Many choices start one by one, so they need not wait for an empty node.
    return min(num_blocks, _pool(node) // 2)


def _pool(node: Node) -> int:
    assert node.info is not None
    return node.info.num_blocks
