"""Nodes for the library that start in no time: they live on its event loop and compute nothing."""

import asyncio
import shutil
from pathlib import Path

from baton.deploy.model_folder import CHECKPOINT
from baton.protocol.config import ClusterConfig
from baton.protocol.errors import NodeError
from baton.protocol.messages import Decode, Prefill
from baton.runtime.process import Exit
from tests.support.scripted_nodes import ToyNode, node_info
from tests.support.small_tokenizers import Family, write_tokenizer


class ToyCluster:
    """What `LocalCluster` is to processes."""

    max_steps: int | None = None  # of the decode nodes

    def __init__(self, config: ClusterConfig, endpoint: str) -> None:
        self._config = config
        self._endpoint = endpoint
        self._loop = asyncio.get_running_loop()
        self._nodes: list[ToyNode] = []

    def start(self) -> None:
        prefills = [node_info(f"p{i}", "prefill") for i in range(self._config.prefill)]
        decodes = [node_info(f"d{i}", "decode") for i in range(self._config.decode)]
        self._nodes = [ToyNode(self._endpoint, info) for info in prefills]
        self._nodes += [
            ToyNode(self._endpoint, info, self.max_steps) for info in decodes
        ]
        for node in self._nodes:
            node.join()

    def poll(self) -> list[Exit]:
        for node in self._nodes:
            node.heartbeat()
        return []

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(10.0)

    def decode_orders(self) -> list[Prefill | Decode]:
        """Return the orders of the decode nodes in the order of their prompts."""
        orders = [
            order
            for node in self._nodes
            for order in node.orders
            if node.info.role == "decode"
        ]
        return sorted(orders, key=lambda order: order.token_ids)

    async def _end(self) -> None:
        for node in self._nodes:
            node.die()


class BrokenCluster(ToyCluster):
    def start(self) -> None:
        raise NodeError("cannot start")


class StalledCluster(ToyCluster):
    """Each decode node stops after two steps."""

    max_steps = 2


class StillbornCluster(ToyCluster):
    """One of the nodes ends at once."""

    def start(self) -> None:
        self._exits = [Exit("decode-0", 1, ("no such model",), 1, 0.5)]

    def poll(self) -> list[Exit]:
        exits = self._exits
        self._exits = []
        return exits


def toy_model(folder: Path, family: Family = "byte_level") -> Path:
    """Return a folder that passes for a model; toy nodes need its tokenizer only."""
    model = Path(write_tokenizer(folder / "model", family))
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(CHECKPOINT / name, model / name)
    return model
