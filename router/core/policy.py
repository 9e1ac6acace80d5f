"""Choose the nodes of an attempt: the working pair with the least cost, then least load, then id.

A cost counts prompt tokens to compute (docs/decisions.md), so a cached prefix weighs as much as
the queue that it saves. A node with room comes before a full one, even if the full one has more
cached. `choose` returns None only if no node in service is large enough, or none can pair. If it
names a full node, the attempt waits, so no prompt is computed without a decode node to take it.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from itertools import chain

from baton.protocol.blocks import MIN_READ_TOKENS, blocks_needed
from baton.protocol.config import LocalPrefill
from baton.protocol.ids import NodeId
from baton.protocol.messages import ANY_PREFIX_READS, Role, TierName
from baton.router.core.cache_index import NOTHING, Holding, Holdings, NodeMask
from baton.router.core.ranking import (
    HANDOFF_TOKENS,
    NO_PENALTY,
    Group,
    Penalty,
    RankedPair,
    Ranking,
    all_pairs,
    best_of_hosts,
    best_pair,
    better_of_hosts,
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
        return self._choose(now_s, search, attempt)

    def _choose(
        self, now_s: float, search: "_PairSearch", attempt: Attempt
    ) -> Attempt | None:
        if attempt.is_pooled:
            return search.prefill_only(search.prefills())
        if self._mode == "always":
            return search.local(search.able_decodes())
        # Decode nodes that may compute it, as they lack little of it.
        near = None
        if self._mode == "auto" and attempt.wants_decode and not attempt.is_remote_only:
            near = search.able_decodes(attempt.num_tokens - self._local_tokens)
        max_uncached = MISPREDICTION * self._local_tokens
        # If all decode nodes may compute it, a handoff of such a short prompt can only cost more.
        if near and attempt.num_tokens <= min(self._local_tokens, HANDOFF_TOKENS):
            return search.local(near, max_uncached=max_uncached)
        prefills = search.prefills()
        if not attempt.wants_decode and prefills:
            return search.prefill_only(prefills)
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
        self._likely_tokens = _likely_tokens(attempt, growth)
        # Another sequence in the batch delays each step by about the time of a prompt token.
        self._slot_tokens = max(1, self._likely_tokens - attempt.num_tokens)
        model = registry.model
        size = self._block_size = 1 if model is None else model.layout.block_size
        self._state_blocks = 0 if model is None else model.layout.state_blocks
        self._likely_blocks = self._blocks(self._likely_tokens, attempt.num_choices)
        # The last token is always computed, for its logits.
        most = (attempt.num_tokens - 1) // size * size
        self._lenders: list[Node] = []  # decode nodes with most of the prompt
        self._readable = 0  # tokens, from each of these
        # What one of these tokens costs them to load from their tiers.
        self._lender_read = 0.0
        self._holdings = Holdings()
        for num_blocks, nodes in registry.caches.held(attempt.block_keys).items():
            num_held = num_blocks * size
            num_cached = min(num_held, most)
            self._holdings.add_pools(nodes, num_held, num_cached)
            self._lend(nodes, num_cached, 0.0)
        for name, index in registry.tiers.items():
            for num_blocks, nodes in index.held(attempt.block_keys).items():
                num_tokens = min(num_blocks * size, most)
                self._holdings.add_tiers(nodes, num_tokens, TIER_READS[name])
                self._lend(nodes, num_tokens, TIER_READS[name])

    def _lend(self, nodes: NodeMask, num_tokens: int, read: float) -> None:
        """Let those of these nodes lend that many tokens, if it saves more than others do."""
        if num_tokens * (1 - read) <= self._readable * (1 - self._lender_read):
            return
        if lenders := self._registry.lenders(nodes, MAX_LENDERS):
            self._lenders = lenders
            self._readable = num_tokens
            self._lender_read = read

    def prefills(self) -> Ranking:
        """Return the prefill nodes that could hold the prompt if they were empty."""
        nodes = self._large_enough("prefill", self._blocks(self._attempt.num_tokens, 1))
        others_have = 0.0
        if not self._lenders or self._readable < MIN_READ_TOKENS:
            has = [(one.nodes, one.saved) for one in self._holdings]
        elif self._registry.is_uniform():
            # Nearly always all nodes compute alike and reach each other.
            has = [(one.nodes, self._with_read(one)) for one in self._holdings]
            others_have = self._with_read(NOTHING)
        else:
            has = self._with_reads()
        return self._ranking("prefill", nodes, has, others_have=others_have)

    def _with_reads(self) -> list[tuple[NodeMask, float]]:
        """Return what prefill nodes have of the prompt if tokens count that they could read."""
        found: dict[float, NodeMask] = {}
        for node in self._registry.in_service("prefill"):
            holding = self._holdings.of(node.bit)
            can_read = any(self._can_lend(one, node) for one in self._lenders)
            has = self._with_read(holding) if can_read else holding.saved
            found[has] = found.get(has, 0) | node.bit
        return [(nodes, has) for has, nodes in found.items()]

    def _with_read(self, holding: Holding) -> float:
        """Return what a node has of the prompt if it could read from any of the lenders."""
        num_held = holding.num_cached
        num_more = self._readable - num_held
        if num_more < MIN_READ_TOKENS:
            return holding.saved
        read = NEAR_READ if self._registry.hosts().is_one else FAR_READ
        saved = 1 - read - self._lender_read
        return max(holding.saved, num_held + saved * num_more)

    def _num_read(self, prefill: Node) -> int:
        """Return how many tokens that node could read from another one instead of computing."""
        num_more = self._readable - self._holdings.of(prefill.bit).num_cached
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
        has_as_much = self._holdings.of(decode.bit).num_held >= self._readable
        return decode.lends_prefixes and has_as_much

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

    def able_decodes(self, least_known: int = 0) -> Ranking | None:
        """Return the decode nodes that could compute the prompt themselves.

        Only those that have at least `least_known` tokens of the prompt count.
        """
        holdings = self._holdings
        nodes = self._decodes()
        if least_known > 0:
            # Of a prompt that it received, a decode node has no state from which it could go on.
            if self._state_blocks:
                return None
            nodes &= holdings.knowing(least_known)
        has = [(one.nodes, one.saved) for one in holdings]
        return self._ranking("decode", nodes, has)

    def _receivers(self, read: float) -> Ranking:
        """Return the decode nodes if each token that they lack costs `read`."""
        has = [(one.nodes, one.num_held) for one in self._holdings]
        return self._ranking("decode", self._decodes(), has, read)

    def _decodes(self) -> NodeMask:
        attempt = self._attempt
        num_blocks = self._blocks(attempt.num_final_tokens, attempt.num_choices)
        return self._large_enough("decode", num_blocks)

    def _large_enough(self, role: Role, num_blocks: int) -> NodeMask:
        """Return the nodes in service that have the adapter and at least that many blocks."""
        lora = self._attempt.lora
        if not lora and num_blocks <= self._registry.smallest_pool(role):
            return self._registry.by_load(role).nodes
        found = 0
        for node in self._registry.in_service(role):
            if (not lora or lora in node.loras) and _pool(node) >= num_blocks:
                found |= node.bit
        return found

    def _ranking(
        self,
        role: Role,
        nodes: NodeMask,
        has: Iterable[tuple[NodeMask, float]],
        read: float = 1,
        others_have: float = 0,
    ) -> Ranking:
        """Return these nodes with what an attempt costs: `read` for each token that they lack.

        `has` names the nodes that have other tokens of the prompt than all others.
        """
        num_tokens = self._attempt.num_tokens
        groups = []
        for members, num_had in has:
            if members & nodes:
                cost = read * (num_tokens - num_had)
                groups.append(Group(members & nodes, cost))
                nodes ^= members & nodes
        if nodes:
            groups.append(Group(nodes, read * (num_tokens - others_have)))
        load_tokens = 1 if role == "prefill" else self._slot_tokens
        return Ranking(self._registry, role, groups, load_tokens, self._penalty)

    def _penalty(self, node: Node) -> Penalty:
        """Return what sets a node back: a suspect shares none while there is another."""
        avoid = self._attempt.avoid
        is_avoided = bool(avoid) and node.process in avoid
        is_full = not self._has_room(node)
        if not (is_avoided or is_full or node.num_suspects):
            return NO_PENALTY
        return is_avoided, node.num_suspects, is_full

    def _has_room(self, node: Node) -> bool:
        if self._kept and node.node_id in self._kept:
            return False
        return node.has_room(self._likely_blocks, leaves_room=self._leaves_room)

    def cheapest_pair(self, now_s: float, prefills: Ranking) -> RankedPair | None:
        """Return the cheapest pair that works; None if none does.

        It is the best pair of all nodes or that of a host, because the costs of two nodes are
        independent, except for the path between them.
        """
        hosts = self._registry.hosts()
        decodes = self._receivers(NEAR_READ if hosts.is_one else FAR_READ)
        best = best_pair(prefills, decodes)
        if best is None:
            return None
        shared = () if hosts.is_one else hosts.shared
        near = self._receivers(NEAR_READ) if shared else decodes
        found = better_of_hosts(shared, prefills, near, best)
        if self._works(now_s, found):
            return found
        others = [best, *best_of_hosts(shared, prefills, near)]
        others.sort(key=lambda pair: pair.order)
        for pair in chain(others, all_pairs(prefills, decodes)):
            if self._works(now_s, pair):
                return pair
        return None

    def _works(self, now_s: float, pair: RankedPair) -> bool:
        prefill = self._node(pair.prefill)
        decode = self._node(pair.decode)
        allows = self._registry.pairs.allows(now_s, prefill.process, decode.process)
        return allows and self._registry.can_pair(prefill, decode)

    def possible_pair(self, prefills: Ranking) -> RankedPair | None:
        """Return the best pair that could exchange blocks, though its handoffs fail now."""
        for pair in all_pairs(prefills, self._receivers(FAR_READ)):
            if self._registry.can_pair(
                self._node(pair.prefill), self._node(pair.decode)
            ):
                return pair
        return None

    def _node(self, name: NodeId) -> Node:
        node = self._registry.node(name)
        assert node is not None, "nodes that are ranked are in service"
        return node

    def prefill_only(self, candidates: Ranking) -> Attempt | None:
        """Select the best of these nodes, which need not hand the prompt over."""
        best = candidates.best()
        return None if best is None else self.selected(best[3], None)

    def local(
        self,
        candidates: Ranking | None,
        *,
        is_fallback: bool = False,
        max_uncached: int | None = None,
    ) -> Attempt | None:
        """Select the best of these nodes, to compute the prompt itself."""
        best = None if candidates is None else candidates.best()
        if best is None:
            return None
        return self.selected(
            None, best[3], is_fallback=is_fallback, max_uncached=max_uncached
        )

    def selected(
        self,
        prefill_node: NodeId | None,
        decode_node: NodeId | None,
        *,
        is_fallback: bool = False,
        max_uncached: int | None = None,
    ) -> Attempt:
        prefill = None if prefill_node is None else self._node(prefill_node)
        decode = None if decode_node is None else self._node(decode_node)
        attempt = self._attempt
        nodes = [node for node in (prefill, decode) if node is not None]
        num_read = 0
        num_uncached = 0
        lender = None
        if prefill is not None:
            if (num_read := self._num_read(prefill)) > 0:
                lender = self._lender(prefill, decode)
            holding = self._holdings.of(prefill.bit)
            num_cached = max(holding.num_cached + num_read, round(holding.saved))
            num_uncached = attempt.num_tokens - num_cached
        num_blocks = 0
        if decode is not None:
            num_blocks = _likely_blocks(decode, attempt, self._likely_tokens)
        attempt.prefill_node = prefill_node
        attempt.decode_node = decode_node
        attempt.epochs = {node.node_id: node.epoch for node in nodes}
        attempt.max_uncached_tokens = max_uncached
        attempt.prefix_node = None if lender is None else lender.node_id
        attempt.prompt_compute = _told_apart(prefill, decode)
        attempt.num_uncached_tokens = num_uncached
        attempt.num_decode_blocks = num_blocks
        attempt.is_fallback = is_fallback
        attempt.full = tuple(
            [node.node_id for node in nodes if not self._has_room(node)]
        )
        attempt.num_cached_tokens = (
            self._holdings.of(nodes[0].bit).num_cached + num_read
        )
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


def _told_apart(prefill: Node | None, decode: Node | None) -> str:
    """Return `compute` of a prefill node whose bits the decode node tells apart from its own.

    It does not where nodes may use blocks of any.
    """
    if prefill is None or decode is None or prefill.info is None or decode.info is None:
        return ""
    both = prefill.info, decode.info
    is_promised = all(
        info.batch_invariant and ANY_PREFIX_READS not in info.facts.features
        for info in both
    )
    differ = prefill.info.compute != decode.info.compute
    return prefill.info.compute if is_promised and differ else ""


def _pool(node: Node) -> int:
    assert node.info is not None
    return node.info.num_blocks
