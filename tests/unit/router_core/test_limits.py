"""How long a sequence the nodes can take."""

from baton.protocol.config import LocalPrefill
from baton.protocol.messages import NodeInfo, Ready
from baton.router.cluster_state import limits_of
from baton.router.registry import Registry
from tests.support.scripted_nodes import hello_of, node_info


def limit(*infos: NodeInfo, mode: LocalPrefill = "auto") -> int:
    registry = Registry()
    for info in infos:
        registry.hello(0.0, info.node_id, hello_of(info))
        registry.ready(0.0, info.node_id, Ready(info))
    return limits_of(registry, mode).max_model_len


def test_the_longest_sequence_is_what_the_model_and_the_largest_pools_can_take() -> None:
    prefill, decode = node_info("p0", "prefill", num_blocks=20), node_info("d0", "decode")
    tiny = node_info("d1", "decode", num_blocks=8)
    assert limit(decode) == 200  # that of the model: this pool has 256 slots
    assert limit(tiny) == 32
    assert limit(tiny, decode, prefill) == 80
    assert limit(tiny, decode, prefill, mode="always") == 200
