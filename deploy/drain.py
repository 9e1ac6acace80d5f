"""`baton drain NODE` removes one node from a running cluster and waits until it is gone.

It dials a router as nodes do, so a process that may join the cluster may drain its nodes, but
clients of the HTTP API may not. It repeats its message until the node is gone; each time, the
router answers with the node's state.
"""

import zmq

from baton.protocol.codec import to_node_codec, to_router_codec
from baton.protocol.config import ClusterConfig
from baton.protocol.errors import ConfigError, NodeError
from baton.protocol.ids import NodeId
from baton.protocol.messages import DrainNode, DrainState, ToNode, ToRouter
from baton.runtime.channels.dialer import Dialer
from baton.runtime.channels.endpoint import parse_endpoint
from baton.runtime.channels.keys import load_keys
from baton.runtime.channels.wire import OPERATOR
from baton.runtime.clock import monotonic
from baton.runtime.process import Interrupts

POLL_S = 0.05
ASK_S = 0.5
# How long a router may be silent. A router that exists answers at once.
SILENCE_S = 10.0


def drain(config: ClusterConfig, node: NodeId) -> int:
    """Drain `node`, print what happens, and return 0 when it is gone.

    Raises `ConfigError` if there is no such node and `NodeError` if no router answers.
    """
    keys = load_keys(config.keys)
    keys.check(parse_endpoint(config.control), "dialling")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dialer = Dialer[ToRouter, ToNode](
        config.control, OPERATOR, to_router_codec(), to_node_codec(), context, keys
    )
    try:
        with Interrupts() as interrupts:
            return _follow(dialer, node, interrupts)
    finally:
        dialer.close()
        context.term()


def _follow(
    dialer: Dialer[ToRouter, ToNode], node: NodeId, interrupts: Interrupts
) -> int:
    said = ""
    heard_s = monotonic()
    ask_at_s = 0.0
    while not interrupts.wait(POLL_S):
        now_s = monotonic()
        if now_s >= ask_at_s:
            ask_at_s = now_s + ASK_S
            dialer.send(DrainNode(node))
        while (message := dialer.receive()) is not None:
            if not isinstance(message, DrainState):
                continue
            heard_s = now_s
            if message.problem and (message.is_known or not said):
                raise ConfigError(message.problem)
            if not message.is_known:
                print(f"{node} is gone", flush=True)
                return 0
            line = f"{node} is draining: {message.num_running} sequences to finish"
            if line != said:
                print(line, flush=True)
                said = line
        if now_s - heard_s > SILENCE_S:
            text = f"no router answers at {dialer.endpoint}: name its endpoint with --control"
            raise NodeError(text, code="no_router")
    print(f"{node} continues to drain", flush=True)
    return 0
