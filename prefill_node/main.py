"""The prefill process: `baton prefill`."""

from baton.engine.process.node import EngineNode
from baton.prefill_node.scheduler import PrefillScheduler
from baton.protocol.config import ClusterConfig


def run(config: ClusterConfig) -> int:
    """Serve until SIGTERM or Ctrl-C and return the exit code."""
    return EngineNode(config, "prefill", PrefillScheduler).run()
