"""Choose the nodes of an attempt: the working pair with the least cost, then least load, then id.

A cost counts prompt tokens to compute (docs/decisions.md), so a cached prefix weighs as much as
the queue that it saves. A node with room comes before a full one, even if the full one has more
cached. `choose` returns None only if no node in service is large enough, or none can pair. If it
names a full node, the attempt waits, so no prompt is computed without a decode node to take it.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping

import msgspec

from baton.protocol.blocks import MIN_READ_TOKENS, blocks_needed
from baton.protocol.config import LocalPrefill
from baton.protocol.ids import NodeId
from baton.protocol.messages import Role, TierName
from baton.router.core.pair_health import Hosts
from baton.router.core.registry import Node, Registry
from baton.router.core.request import ReservedLoad, Selection

# The assumed length of a response before any has ended, and the weight of the newest one.
FIRST_OUTPUT_TOKENS = 256.0
OUTPUT_WEIGHT = 0.05
# A handoff takes as long as computing this many tokens. Reading the KV of a token takes this share
# of computing it, on one host and between hosts.
HANDOFF_TOKENS = 64
NEAR_READ = 1 / 32
FAR_READ = 1 / 8
# And reading it from a tier of the node that computes the prompt.
TIER_READS: Mapping[TierName, float] = {"memory": 1 / 32, "folder": 1 / 16}
MAX_LENDERS = 8  # of those that have a hot prefix, so many are looked at
# A decode node that was chosen because it had most of a prompt cached refuses the prompt if it
# would have to compute more than this many times what the setting allows.
MISPREDICTION = 2

# Less is better: avoided, suspects, full, cost, reserved tokens, id. The node is never compared.
Candidate = tuple[bool, int, bool, float, int, NodeId, Node]
Rank = tuple[int, int, int, float]


class CheapestPair:
    """If no node has announced cached blocks, the least loaded nodes are the cheapest."""

    def __init__(self, local_prefill: LocalPrefill, local_prefill_tokens: int) -> None:
        self._mode = local_prefill
        self._local_tokens = local_prefill_tokens
        self._output_tokens = FIRST_OUTPUT_TOKENS

    def learn(self, num_output_tokens: float) -> None:
        """Note the length of one choice of a response."""
        self._output_tokens += OUTPUT_WEIGHT * (num_output_tokens - self._output_tokens)

    def load_of(self, node: Node, selection: Selection) -> ReservedLoad:
        """Return the load of an attempt at a decode node that runs it."""
        return _decode_load(
            node, selection, _likely_tokens(selection, math.ceil(self._output_tokens))
        )

    def work_of(self, selection: Selection) -> int:
        """Return the tokens that an attempt will probably compute: its prompt and its output."""
        likely = _likely_tokens(selection, math.ceil(self._output_tokens))
        return selection.num_tokens + selection.num_choices * (
            likely - selection.num_tokens
        )

    def choose(
        self,
        now_s: float,
        registry: Registry,
        selection: Selection,
        kept: Collection[NodeId] = (),
        *,
        leaves_room: bool = False,
    ) -> Selection | None:
        """Set the nodes of an attempt and return it, or None if no node in service can take it.

        Nodes that are `kept` for other attempts count as full. So do, for an attempt that
        `leaves_room`, nodes that have just enough of it for the attempts of others.
        """
        growth = math.ceil(self._output_tokens)
        search = _PairSearch(registry, selection, growth, kept, leaves_room=leaves_room)
        # Most nodes have room, and checking takes long. A choice with room is the best in any case.
        selected = self._choose(now_s, search, selection)
        if selected is None or not selected.full:
            return selected
        search.checks_room = True
        return self._choose(now_s, search, selection)

    def _choose(
        self, now_s: float, search: "_PairSearch", selection: Selection
    ) -> Selection | None:
        if selection.is_pooled:
            prefills = search.prefill_candidates()
            return search.selected(min(prefills)[-1], None) if prefills else None
        if self._mode == "always":
            return search.local(search.local_candidates())
        # Decode nodes that may compute it, as they lack little of it.
        near: list[Candidate] = []
        if (
            self._mode == "auto"
            and selection.wants_decode
            and not selection.is_remote_only
        ):
            near = search.local_candidates(selection.num_tokens - self._local_tokens)
        max_uncached = MISPREDICTION * self._local_tokens
        # If all decode nodes may compute it, a handoff of such a short prompt can only cost more.
        if near and selection.num_tokens <= min(self._local_tokens, HANDOFF_TOKENS):
            return search.local(near, max_uncached=max_uncached)
        prefills = search.prefill_candidates()
        if not selection.wants_decode and prefills:
            return search.selected(min(prefills)[-1], None)
        pair = search.cheapest_pair(now_s, prefills)
        if near and (pair is None or min(near)[:4] <= pair.rank):
            return search.local(near, max_uncached=max_uncached)
        if pair is None and self._mode == "auto":
            return search.local(search.local_candidates(), is_fallback=True)
        # Without an alternative, a pair that failed lately is better than none.
        pair = pair or next(search.possible_pairs(prefills), None)
        return None if pair is None else search.selected(pair.prefill, pair.decode)


class _Pair(msgspec.Struct, frozen=True):
    rank: Rank
    prefill: Node
    decode: Node


class _PairSearch:
    """The search for one attempt's nodes. Its sequences will probably grow by `growth` tokens."""

    def __init__(
        self,
        registry: Registry,
        selection: Selection,
        growth: int,
        kept: Collection[NodeId],
        *,
        leaves_room: bool,
    ) -> None:
        self._registry = registry
        self._selection = selection
        self._kept = kept
        self._leaves_room = leaves_room
        self.checks_room = False  # whether full nodes rank behind the others
        self._likely_tokens = _likely_tokens(selection, growth)
        # Another sequence in the batch delays each step by about the time of a prompt token.
        self._slot_tokens = max(1, self._likely_tokens - selection.num_tokens)
        model = registry.model
        size = self._block_size = 1 if model is None else model.layout.block_size
        self._state_blocks = 0 if model is None else model.layout.state_blocks
        self._likely_blocks = self._blocks(self._likely_tokens, selection.num_choices)
        self._held: dict[NodeId, int] = {}
        self._cached: dict[NodeId, int] = {}
        # The last token is always computed, for its logits.
        most = (selection.num_tokens - 1) // size * size
        self._lenders: list[Node] = []  # decode nodes with most of the prompt
        self._readable = 0  # tokens, from each of these
        # What one of these tokens costs them to load from their tiers.
        self._lender_read = 0.0
        for num_blocks, nodes in registry.caches.held(selection.block_keys).items():
            self._held.update(dict.fromkeys(nodes, num_blocks * size))
            self._cached.update(dict.fromkeys(nodes, min(num_blocks * size, most)))
            self._lend(nodes, min(num_blocks * size, most), 0.0)
        # Tokens that each node need not compute, less what reading them from its tiers costs.
        self._saved: dict[NodeId, float] = dict(self._cached)
        for name, index in registry.tiers.items():
            for num_blocks, nodes in index.held(selection.block_keys).items():
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

    def prefill_candidates(self) -> list[Candidate]:
        """Return the prefill nodes that could hold the prompt if they were empty."""
        nodes = self._large_enough(
            "prefill", self._blocks(self._selection.num_tokens, 1)
        )
        has: Mapping[NodeId, float] = self._saved
        if self._lenders:
            has = self._with_reads(nodes)
        return self._candidates(nodes, [node.num_tokens for node in nodes], has)

    def _with_reads(self, prefills: list[Node]) -> dict[NodeId, float]:
        """Return what each node has of the prompt if tokens count that it could read."""
        saved = (
            1
            - (NEAR_READ if self._registry.hosts().is_one else FAR_READ)
            - self._lender_read
        )
        computes = {one.info.compute for one in self._lenders if one.info is not None}
        cached = self._cached
        most_cached = self._readable - MIN_READ_TOKENS
        has = dict(self._saved)
        for node in [
            one for one in prefills if cached.get(one.node_id, 0) <= most_cached
        ]:
            num_held = cached.get(node.node_id, 0)
            num_more = self._readable - num_held
            # Nearly always all nodes compute alike and reach each other, which is quick to see.
            is_alike = node.info is not None and node.info.compute in computes
            reaches_all = not (node.obstacles or node.unreachable)
            if not (is_alike and reaches_all):
                num_more = self._num_read(node)
            of_tiers = self._saved.get(node.node_id, 0.0)
            has[node.node_id] = max(of_tiers, num_held + saved * num_more)
        return has

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

    def local_candidates(self, least_held: int = 0) -> list[Candidate]:
        """Return the decode nodes that could compute the prompt themselves.

        Only those that hold at least `least_held` tokens of the prompt count.
        """
        # Of a prompt that it received, a decode node has no state from which it could go on.
        if least_held > 0 and (not self._saved or self._state_blocks):
            return []
        return self._decode_candidates(self._saved, least_held=least_held)

    def _decode_candidates(
        self, has: Mapping[NodeId, float], read: float = 1, least_held: int = 0
    ) -> list[Candidate]:
        """Return the decode nodes if each token that they lack costs `read`."""
        num_blocks = self._blocks(
            self._selection.num_final_tokens, self._selection.num_choices
        )
        nodes = self._large_enough("decode", num_blocks)
        if least_held > 0:
            nodes = [node for node in nodes if self._num_known(node) >= least_held]
        waits = [node.num_sequences * self._slot_tokens for node in nodes]
        return self._candidates(nodes, waits, has, read)

    def _num_known(self, node: Node) -> float:
        """Return about how many tokens of the prompt a node need not compute."""
        return max(self._held.get(node.node_id, 0), self._saved.get(node.node_id, 0))

    def _large_enough(self, role: Role, num_blocks: int) -> list[Node]:
        """Return the nodes in service that have the adapter and at least that many blocks."""
        nodes = self._registry.in_service(role)
        if lora := self._selection.lora:
            nodes = [node for node in nodes if lora in node.loras]
        return [one for one in nodes if one.info and one.info.num_blocks >= num_blocks]

    def _candidates(
        self,
        nodes: list[Node],
        waits: list[int],
        has: Mapping[NodeId, float],
        read: float = 1,
    ) -> list[Candidate]:
        """Return nodes with their costs: their waits, plus `read` for each token that they lack.

        No attempt shares a node with a suspect while there is another node.
        """
        avoid = self._selection.avoid
        num_tokens = self._selection.num_tokens
        checks_room = self.checks_room
        return [
            (
                bool(avoid) and node.process in avoid,
                node.num_suspects,
                checks_room and not self._has_room(node),
                wait + read * (num_tokens - has.get(node.node_id, 0)),
                node.num_tokens,
                node.node_id,
                node,
            )
            for node, wait in zip(nodes, waits, strict=True)
        ]

    def _has_room(self, node: Node) -> bool:
        num_blocks = min(self._likely_blocks, _pool(node) // 2)
        has_room = node.has_room(num_blocks, leaves_room=self._leaves_room)
        return has_room and node.node_id not in self._kept

    def cheapest_pair(self, now_s: float, prefills: list[Candidate]) -> _Pair | None:
        """Return the cheapest pair that works; None if none does.

        It is the best pair of all nodes or that of a host, because the costs of two nodes are
        independent, except for the path between them.
        """
        hosts = self._registry.hosts()
        decodes = self._decode_candidates(
            self._held, NEAR_READ if hosts.is_one else FAR_READ
        )
        if not decodes or not prefills:
            return None
        best = [_paired(min(prefills), min(decodes))]
        if hosts.shared and not hosts.is_one:
            best += self._best_of_hosts(hosts, prefills)
        works = [pair for pair in best if self._works(now_s, pair)]
        if works:
            return min(works, key=_pair_order)
        pairs = self.possible_pairs(prefills)
        return next((pair for pair in pairs if self._works(now_s, pair)), None)

    def _best_of_hosts(
        self, hosts: Hosts, prefills: list[Candidate]
    ) -> Iterator[_Pair]:
        """Yield the cheapest pair of each host."""
        first = {one[5]: one for one in prefills}
        second = {one[5]: one for one in self._decode_candidates(self._held, NEAR_READ)}
        for host in hosts.shared:
            near = [first[node] for node in host.prefills if node in first]
            if near and (
                own := [second[node] for node in host.decodes if node in second]
            ):
                yield _paired(min(near), min(own))

    def _works(self, now_s: float, pair: _Pair) -> bool:
        prefill = pair.prefill
        decode = pair.decode
        allows = self._registry.pairs.allows(now_s, prefill.process, decode.process)
        return allows and self._registry.can_pair(prefill, decode)

    def possible_pairs(self, prefills: list[Candidate]) -> Iterator[_Pair]:
        """Yield all pairs that can exchange blocks, beginning with the best decode node's."""
        decodes = sorted(self._decode_candidates(self._held, FAR_READ))
        prefills = sorted(prefills)
        for second in decodes:
            for first in prefills:
                if self._registry.can_pair(first[-1], second[-1]):
                    yield _paired(first, second)

    def local(
        self,
        candidates: list[Candidate],
        *,
        is_fallback: bool = False,
        max_uncached: int | None = None,
    ) -> Selection | None:
        """Select the best of these nodes, to compute the prompt itself."""
        if not candidates:
            return None
        node = min(candidates)[-1]
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
    ) -> Selection:
        selection = self._selection
        given: list[tuple[Node, ReservedLoad]] = []
        num_read = 0
        lender = None
        if prefill is not None:
            if (num_read := self._num_read(prefill)) > 0:
                lender = self._lender(prefill, decode)
            num_cached = self._cached.get(prefill.node_id, 0) + num_read
            num_cached = max(num_cached, round(self._saved.get(prefill.node_id, 0)))
            num_uncached = selection.num_tokens - num_cached
            given.append((prefill, ReservedLoad(num_uncached, 1, selection.is_suspect)))
        if decode is not None:
            given.append((decode, _decode_load(decode, selection, self._likely_tokens)))
        selection.prefill_node = None if prefill is None else prefill.node_id
        selection.decode_node = None if decode is None else decode.node_id
        selection.epochs = {node.node_id: node.epoch for node, _ in given}
        selection.max_uncached_tokens = max_uncached
        selection.prefix_node = None if lender is None else lender.node_id
        selection.loads = tuple([(node.node_id, load) for node, load in given])
        selection.is_fallback = is_fallback
        selection.full = tuple(
            [node.node_id for node, _ in given if not self._has_room(node)]
        )
        num_cached = self._cached.get(given[0][0].node_id, 0)
        selection.num_cached_tokens = num_cached + num_read
        return selection

    def _blocks(self, num_final_tokens: int, num_choices: int) -> int:
        num_tokens = self._selection.num_tokens
        return blocks_needed(
            self._block_size,
            num_tokens,
            num_final_tokens,
            num_choices,
            self._state_blocks,
        )


def _paired(prefill: Candidate, decode: Candidate) -> _Pair:
    rank = (
        prefill[0] + decode[0],
        prefill[1] + decode[1],
        prefill[2] + decode[2],
        prefill[3] + decode[3] + HANDOFF_TOKENS,
    )
    return _Pair(rank, prefill[-1], decode[-1])


def _pair_order(pair: _Pair) -> tuple[Rank, int, NodeId, NodeId]:
    return pair.rank, pair.decode.num_tokens, pair.decode.node_id, pair.prefill.node_id


def _likely_tokens(selection: Selection, growth: int) -> int:
    return min(selection.num_final_tokens, selection.num_tokens + growth)


def _decode_load(node: Node, selection: Selection, likely_tokens: int) -> ReservedLoad:
    assert node.info is not None
    layout = node.info.layout
    num_choices = selection.num_choices
    num_blocks = blocks_needed(
        layout.block_size,
        selection.num_tokens,
        likely_tokens,
        num_choices,
        layout.state_blocks,
    )
    return ReservedLoad(
        selection.num_tokens * num_choices,
        num_choices,
        selection.is_suspect,
        # Many choices start one by one, so they need not wait for an empty node.
        min(num_blocks, _pool(node) // 2),
    )


def _pool(node: Node) -> int:
    assert node.info is not None
    return node.info.num_blocks
