"""Measure the CPU time of one routing decision among many nodes, and print its p50 and p99.

It calls the router's policy on a registry whose nodes have announced cached blocks and are partly
busy; there are no sockets and no processes. A decision includes the charges of the request, so the
load changes from one decision to the next as it does in a router.
"""

import argparse
import random
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence

from baton.protocol.blocks import block_hashes, pack_keys, prompt_keys
from baton.protocol.ids import Epoch, Key, NodeId, RequestId
from baton.protocol.messages import (
    PROTOCOL_VERSION,
    CacheChanges,
    Hello,
    KVLayout,
    NodeFacts,
    NodeInfo,
    Ready,
    Role,
    StepLimits,
)
from baton.router.policy import CheapestPair, Decision
from baton.router.registry import Registry
from baton.router.request import Place

LAYOUT = KVLayout(block_size=16, block_bytes=1024, fingerprint="layout")
LIMITS = StepLimits(num_seats=64, num_tokens=2048)
EPOCH = Epoch("epoch")
NUM_BLOCKS = 1 << 16
SHORT_TOKENS, LONG_TOKENS, ANSWER_TOKENS = 12, 2048, 256
NODES_PER_HOST = 8
RUNNING_PER_NODE = 4  # sequences of each decode node, on the average


def cluster(num_nodes: int, num_holders: int, *, is_one_host: bool) -> Registry:
    """Return a registry of nodes, half of each role; some hold the long prompt's blocks."""
    registry = Registry()
    blocks = pack_keys(block_hashes(range(LONG_TOKENS), LAYOUT.block_size))
    for number in range(num_nodes):
        role: Role = "decode" if number % 2 else "prefill"
        host = 0 if is_one_host else number // NODES_PER_HOST
        info = NodeInfo(
            NodeId(f"{role}-{number:04}"), EPOCH, role, "", NUM_BLOCKS, LAYOUT, (), "model",
            1 << 18, 1 << 18, reaches=("nixl", f"shm@{host}"), facts=NodeFacts(step=LIMITS),
        )  # fmt: skip
        registry.hello(0.0, info.node_id, Hello(PROTOCOL_VERSION, info.node_id, role, EPOCH))
        registry.ready(0.0, info.node_id, Ready(info))
        if number < num_holders:
            registry.hears_cache(info.node_id, CacheChanges(0, blocks))
    return registry


def decision_times_us(registry: Registry, num_tokens: int, num_decisions: int) -> list[float]:
    """Return the microseconds of each decision while requests come and end at the same rate."""
    policy = CheapestPair("auto", SHORT_TOKENS)
    keys = prompt_keys(range(num_tokens), LAYOUT.block_size)
    num_decodes = len(registry.in_service("decode"))
    num_running, order = RUNNING_PER_NODE * num_decodes, random.Random(0)
    prefilling: deque[Decision] = deque()
    decoding: deque[Decision] = deque()
    times_us = []
    for number in range(num_running + num_decisions):
        place = Place(
            Key(RequestId(f"{number:x}")), num_tokens, 1, True, num_tokens + ANSWER_TOKENS,
            block_keys=keys,
        )  # fmt: skip
        before_s = time.thread_time()
        decision = policy.choose(0.0, registry, place)
        took_s = time.thread_time() - before_s
        assert decision is not None
        assert not decision.full
        for node, charge in decision.loads:
            registry.reserve(node, place.key, charge)
        prefilling.append(decision)
        if len(prefilling) > num_decodes:
            _release(registry, prefilling, order, is_decode=False)
        decoding.append(decision)
        if len(decoding) > num_running:
            _release(registry, decoding, order, is_decode=True)
            times_us.append(took_s * 1e6)
    return times_us


def _release(
    registry: Registry, decisions: deque[Decision], order: random.Random, *, is_decode: bool
) -> None:
    """Give back the charges of one of these requests at its nodes of one role."""
    decisions.rotate(order.randrange(len(decisions)))
    placed = decisions.popleft().placed
    node = placed.decode_node if is_decode else placed.prefill_node
    if node is not None:
        registry.release(node, placed.key)


def cases(num_nodes: int) -> Iterator[tuple[str, int, int, bool]]:
    """Yield the cases: prompts, cached tokens, nodes that hold them, and one host or several."""
    yield "a short prompt", SHORT_TOKENS, 0, True
    yield "a long prompt that no node holds", LONG_TOKENS, 0, True
    yield "a long prompt that two nodes hold", LONG_TOKENS, 2, True
    yield "a long prompt that all nodes hold", LONG_TOKENS, num_nodes, True
    yield f"the same, {NODES_PER_HOST} nodes to a host", LONG_TOKENS, num_nodes, False


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.routing_cost", description=__doc__)
    parser.add_argument(
        "--nodes", type=int, default=1000, help="number of nodes, half of each role"
    )
    parser.add_argument("--decisions", type=int, default=1000, help="decisions that are timed")
    given = parser.parse_args(arguments)
    for name, num_tokens, num_holders, is_one_host in cases(given.nodes):
        registry = cluster(given.nodes, num_holders, is_one_host=is_one_host)
        ordered = sorted(decision_times_us(registry, num_tokens, given.decisions))
        p50, p99 = (ordered[int(share * (len(ordered) - 1))] for share in (0.5, 0.99))
        print(f"{name}, {given.nodes} nodes: p50 {p50:.0f} us, p99 {p99:.0f} us", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
