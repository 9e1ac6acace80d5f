"""The executors of a node: one rank in threads of this process, or a process for each rank."""

from baton.model.executors.local_executor import InProcessExecutor
from baton.model.executors.worker_executor import WorkerExecutor
from baton.node.executor import Executor
from baton.protocol.config import ClusterConfig
from baton.protocol.ids import Epoch


def make_executor(config: ClusterConfig, epoch: Epoch) -> Executor:
    """Return the executor that `config` asks for. It loads nothing before its `start`."""
    if config.engine.tensor_parallel_size > 1:
        return WorkerExecutor(config, epoch)
    return InProcessExecutor(config, epoch)
