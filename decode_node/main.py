"""The decode process: `baton decode`."""

from baton.decode_node.scheduler import DecodeScheduler
from baton.engine.process.node import EngineNode
from baton.protocol.config import ClusterConfig


def run(config: ClusterConfig) -> int:
    """Serve until SIGTERM or Ctrl-C and return the exit code."""
    return EngineNode(config, "decode", DecodeScheduler).run()
