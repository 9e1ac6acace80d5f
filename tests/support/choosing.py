"""A registry whose nodes never spoke, and the choice of nodes for attempts in turn."""

from baton.protocol.blocks import prompt_keys
from baton.protocol.config import LocalPrefill
from baton.protocol.ids import Key, NodeId, RequestId
from baton.protocol.messages import NodeInfo, Ready
from baton.router.core.policy import CheapestPair
from baton.router.core.registry import Registry
from baton.router.core.request import ANYONE, Attempt, NodeProcess, Tenant
from tests.support.scripted_nodes import BLOCK_SIZE, hello_of, node_info

PAIRS = [
    node_info(name, "prefill" if name.startswith("p") else "decode")
    for name in ("p1", "p0", "d1", "d0")
]


def cluster(*infos: NodeInfo) -> Registry:
    registry = Registry()
    for info in infos:
        join(registry, info)
    return registry


def join(registry: Registry, info: NodeInfo) -> None:
    registry.hello(0.0, info.node_id, hello_of(info))
    registry.ready(0.0, info.node_id, Ready(info))


def place(
    name: str = "r",
    num_tokens: int = 40,
    *,
    wants_decode: bool = True,
    avoid: frozenset[NodeProcess] = frozenset(),
    tenant: Tenant = ANYONE,
) -> Attempt:
    key = Key(RequestId(name))
    keys = prompt_keys(range(num_tokens), BLOCK_SIZE)
    return Attempt(
        key,
        (0,),
        num_tokens,
        wants_decode,
        num_tokens + 10,
        avoid,
        block_keys=keys,
        tenant=tenant,
    )


def choose(
    registry: Registry,
    attempt: Attempt,
    mode: LocalPrefill = "auto",
    now_s: float = 0.0,
) -> tuple[str | None, str | None] | None:
    selected = CheapestPair(mode, 32).choose(now_s, registry, attempt)
    if selected is None:
        return None
    registry.reserve(selected)
    registry.note_pair(selected)
    return selected.prefill_node, selected.decode_node


def occupy(
    registry: Registry, name: str, num_tokens: int, request: str = "busy"
) -> None:
    """Reserve the load of an attempt with that many tokens at one node."""
    node = registry.node(NodeId(name))
    assert node is not None
    registry.reserve(
        Attempt(
            Key(RequestId(request)),
            (0,),
            num_tokens,
            True,
            num_tokens,
            epochs={node.node_id: node.epoch},
            num_uncached_tokens=num_tokens,
        )
    )
