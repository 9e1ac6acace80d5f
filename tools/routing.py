"""`python -m tools.routing`: what routers spend on where blocks are cached: memory and CPU time.

A registry of nodes that never spoke holds their announced blocks; no process is started. Each
decision is for one prompt, of which no node, one or every node has the first blocks cached.
"""

import argparse
import gc
import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from baton.bench.figures.metrics import nearest_rank
from baton.protocol.blocks import KEY_BYTES, unpack_keys
from baton.protocol.ids import MAX_KEYS, Epoch, Key, NodeId, RequestId
from baton.protocol.messages import (
    PREFIX_READS,
    PROTOCOL_VERSION,
    CacheChanges,
    Hello,
    KVLayout,
    NodeFacts,
    NodeInfo,
    RankAddress,
    Ready,
    Role,
    StepLimits,
    TierName,
)
from baton.router.core.cache_index import CacheIndex, NodeBits
from baton.router.core.policy import CheapestPair
from baton.router.core.registry import Registry
from baton.router.core.request import Attempt
from baton.router.main import COLLECT_AFTER

BLOCK_SIZE = 16
PAGE_BYTES = 4096
Holds = Callable[[int], bool]
# Which nodes hold a prompt, by their numbers.
CASES: Mapping[str, Holds] = {
    "no node holds it": lambda _: False,
    "one node holds it": lambda number: number == 1,
    "every node holds it": lambda _: True,
}
PLACES: Mapping[str, Sequence[TierName | None]] = {
    "": (None,),
    ", in a folder, too": (None, "folder"),
}


def node(name: str, role: Role, host: int) -> NodeInfo:
    features = (PREFIX_READS,) if role == "decode" else ()
    facts = NodeFacts(features=features, step=StepLimits(64, 2048))
    layout = KVLayout(BLOCK_SIZE, 1 << 16, "layout", 8)
    rank = RankAddress({"shm": b"", "nixl": b""})
    endpoint = "tcp://host" if role == "decode" else ""
    info = (NodeId(name), Epoch(f"{name}-e"), role, endpoint, 1 << 14, layout, (rank,))
    return NodeInfo(
        *info,
        "model",
        1 << 17,
        1 << 17,
        reaches=(f"shm@host{host}", "nixl"),
        facts=facts,
    )


def cluster(num_nodes: int, num_hosts: int) -> Registry:
    """Return a registry of as many prefill as decode nodes, of which each host has some."""
    registry = Registry()
    for number in range(num_nodes):
        role: Role = "prefill" if number % 2 else "decode"
        info = node(f"n{number:04}", role, number * num_hosts // num_nodes)
        hello = Hello(PROTOCOL_VERSION, info.node_id, info.role, info.epoch)
        registry.hello(0.0, info.node_id, hello)
        registry.ready(0.0, info.node_id, Ready(info))
    return registry


class Times(NamedTuple):
    """Of one decision, in µs."""

    cpu: float
    wall: float


def decisions(
    registry: Registry,
    num_tokens: int,
    holds: Holds,
    tiers: Sequence[TierName | None],
    num: int,
) -> list[Times]:
    """Return the times of each of `num` decisions, for prompts of so many tokens."""
    keys = random.Random(0).randbytes(KEY_BYTES * (num_tokens // BLOCK_SIZE))
    for number, one in enumerate(registry.nodes):
        for tier in tiers if holds(number) else ():
            registry.hears_cache(one.node_id, CacheChanges(0, keys, tier=tier))
    policy = CheapestPair("auto", 32)
    block_keys = unpack_keys(keys)
    taken: list[Times] = []
    for number in range(num):
        key = Key(RequestId(f"r{number}"))
        attempt = Attempt(
            key, (0,), num_tokens, True, num_tokens + 256, block_keys=block_keys
        )
        began_s = time.perf_counter()
        began_cpu_s = time.thread_time()
        selected = policy.choose(0.0, registry, attempt)
        cpu_s = time.thread_time() - began_cpu_s
        wall_s = time.perf_counter() - began_s
        taken.append(Times(cpu_s * 1e6, wall_s * 1e6))
        assert selected is not None
        registry.reserve(selected)
    return taken


def bytes_per_block(num_nodes: int, num_blocks: int) -> float:
    """Return the memory of an index in which each node has blocks of its own."""
    gc.collect()
    source = random.Random(0)
    per_node = num_blocks // num_nodes
    index = CacheIndex(NodeBits())
    before = _rss_bytes()
    for number in range(num_nodes):
        numbers = itertools.count()
        for first in range(0, per_node, MAX_KEYS):
            keys = source.randbytes(KEY_BYTES * min(MAX_KEYS, per_node - first))
            index.hear(NodeId(f"n{number}"), CacheChanges(next(numbers), keys))
    return (_rss_bytes() - before) / (per_node * num_nodes)


def _percentiles(taken_us: list[float]) -> str:
    p99 = nearest_rank(sorted(taken_us), 99)
    return f"{statistics.median(taken_us):.0f} µs, p99 {p99:.0f}"


def _rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.routing", description=__doc__
    )
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=4096, help="of each prompt")
    parser.add_argument("--decisions", type=int, default=1000)
    parser.add_argument(
        "--blocks", type=int, default=1_000_000, help="that the index holds"
    )
    given = parser.parse_args(arguments)
    gc.set_threshold(*COLLECT_AFTER)
    print(f"{bytes_per_block(given.nodes, given.blocks):.0f} bytes a known block")
    for name, holds in CASES.items():
        for what, tiers in PLACES.items():
            registry = cluster(given.nodes, given.hosts)
            # As a router does: what is there from the start is not looked at again.
            gc.collect()
            gc.freeze()
            taken = decisions(registry, given.tokens, holds, tiers, given.decisions)
            cpu = _percentiles([one.cpu for one in taken])
            wall = _percentiles([one.wall for one in taken])
            print(f"{name}{what}: CPU {cpu}, wall {wall}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
