"""A whole cluster in one process: the real router library, and real nodes on threads.

Everything but the processes is real: ZMQ over ipc, memfd pools, transports, schedulers, models. It
starts in well under a second, so the parity matrix can afford hundreds of clusters, and a test can
reach into a node. `tests.support.cluster` is the same with processes.
"""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest

from baton.async_llm import AsyncLLM
from baton.decode_node.scheduler import DecodeScheduler
from baton.kv_transfer import agent
from baton.kv_transfer.interfaces import Transport
from baton.kv_transfer.pools import DevicePool, HostPool
from baton.model.executors import make_executor
from baton.node.node import EngineNode, MakeExecutor, MakeScheduler
from baton.node.records import ReadRecord, Record, StepRecord, read_records
from baton.prefill_node.scheduler import PrefillScheduler
from baton.protocol.config import ClusterConfig, LogConfig, RouterConfig, TransferConfig
from baton.protocol.ids import Epoch
from baton.protocol.messages import Role
from baton.runtime.host import threads_per_rank

START_TIMEOUT_S = 60.0

T = TypeVar("T")
SCHEDULERS: dict[Role, MakeScheduler] = {
    "prefill": PrefillScheduler,
    "decode": DecodeScheduler,
}


class NodeThread:
    """One engine node on a thread; `error` is what ended it."""

    def __init__(
        self,
        config: ClusterConfig,
        role: Role,
        make_executor: MakeExecutor = make_executor,
    ) -> None:
        self.node = EngineNode(config, role, SCHEDULERS[role], make_executor)
        self.error: Exception | None = None
        self._thread = threading.Thread(
            target=self._run, name=config.node.id, daemon=True
        )
        self._thread.start()

    def _run(self) -> None:
        try:
            self.node.serve()
        except Exception as error:  # noqa: BLE001  raised again by `stop`, in the test's thread
            self.error = error

    def drain(self) -> None:
        """Let it end as a node does that is told to, which takes its time."""
        self.node.drain()
        self._thread.join(START_TIMEOUT_S)
        assert not self._thread.is_alive(), f"{self.node.node_id} does not end"

    def stop(self) -> None:
        self.node.stop()
        self._thread.join(START_TIMEOUT_S)
        assert not self._thread.is_alive(), f"{self.node.node_id} does not stop"
        if self.error is not None:
            raise self.error


class NodeThreads:
    """`config.prefill` and `config.decode` nodes behind one `AsyncLLM`, in `folder`.

    `prefix` overrides `cache.enable_prefix_caching` for a role, and `ranks` its
    `engine.tensor_parallel_size`.
    """

    def __init__(
        self,
        folder: Path,
        config: ClusterConfig,
        prefix: Mapping[Role, bool] | None = None,
        ranks: Mapping[Role, int] | None = None,
    ) -> None:
        self.folder = folder
        self.block_bytes = block_bytes(Path(config.model.path), config.cache.block_size)
        self._prefix = prefix or {}
        self._ranks = ranks or {}
        self.nodes: dict[str, NodeThread] = {}
        control = f"ipc://{folder}/control"
        self.config = msgspec.structs.replace(
            config,
            engine=msgspec.structs.replace(
                config.engine,
                threads=threads_per_rank(config.engine, config.prefill + config.decode),
            ),
            router=msgspec.structs.replace(config.router, control=control, port=0),
            node=msgspec.structs.replace(
                config.node, routers=(control,), bind=f"ipc://{folder}/peers"
            ),
            log=LogConfig(records=str(folder / "records"), stats_s=0),
        )

    def run(self, use: Callable[[AsyncLLM], Awaitable[T]]) -> T:
        """Start everything, `use` it, stop everything; a node's error is raised here."""
        return asyncio.run(self._run(use))

    async def _run(self, use: Callable[[AsyncLLM], Awaitable[T]]) -> T:
        llm = AsyncLLM(config=self.config, start_nodes=False)
        nodes = [self._node("prefill", i) for i in range(self.config.prefill)]
        nodes += [self._node("decode", i) for i in range(self.config.decode)]
        self.nodes = {str(one.node.node_id): one for one in nodes}
        try:
            await llm.start()
            await llm.ready(START_TIMEOUT_S)
            return await use(llm)
        finally:
            await llm.shutdown()
            for node in nodes:
                await asyncio.to_thread(node.stop)

    def _node(self, role: Role, index: int) -> NodeThread:
        name = f"{role}-{index}"
        node = msgspec.structs.replace(
            self.config.node, id=name, bind=f"ipc://{self.folder}/peers-{name}"
        )
        cache = msgspec.structs.replace(
            self.config.cache,
            enable_prefix_caching=self._prefix.get(
                role, self.config.cache.enable_prefix_caching
            ),
        )
        degree = self._ranks.get(role, self.config.engine.tensor_parallel_size)
        engine = msgspec.structs.replace(
            self.config.engine, tensor_parallel_size=degree
        )
        config = msgspec.structs.replace(
            self.config, node=node, cache=cache, engine=engine
        )
        return NodeThread(config, role)

    def records(self, name: str) -> list[Record]:
        """What that node did."""
        return read_records(self.folder / "records" / f"{name}.jsonl")

    def prompt_tokens_computed(self, name: str) -> int:
        """Prompt tokens that went through that node's model."""
        steps = [
            record for record in self.records(name) if isinstance(record, StepRecord)
        ]
        return sum(step.num_prompt_tokens for step in steps)

    def num_bytes_read(self, name: str) -> int:
        """Bytes that node read from others."""
        reads = [
            record for record in self.records(name) if isinstance(record, ReadRecord)
        ]
        assert all(read.failure is None for read in reads)
        return sum(read.num_bytes for read in reads)


def block_bytes(model: Path, block_size: int) -> int:
    """Bytes of one KV block over all ranks, from the checkpoint alone."""
    shape = json.loads((model / "config.json").read_text())
    heads = shape["num_key_value_heads"]
    layers = shape.get("num_hidden_layers") or len(shape["layers_block_type"])
    head_dim = (
        shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]
    )
    dtype = shape.get("dtype") or shape.get("torch_dtype")
    item_bytes = {"float32": 4, "bfloat16": 2}[dtype]
    return int(layers * 2 * block_size * heads * head_dim * item_bytes)


def never_local(config: ClusterConfig) -> ClusterConfig:
    """`config` with every prompt computed by a prefill node."""
    return msgspec.structs.replace(config, router=RouterConfig(local_prefill="never"))


def always_local(config: ClusterConfig) -> ClusterConfig:
    """`config` with decode nodes alone: the aggregated engine."""
    router = RouterConfig(local_prefill="always")
    return msgspec.structs.replace(config, router=router, prefill=0)


def wrap_transports(
    monkeypatch: pytest.MonkeyPatch, wrap: Callable[[Transport, HostPool], Transport]
) -> None:
    """Put `wrap` around every transport that this process makes from now on."""
    make = agent.make_transports

    def make_wrapped(
        pool: HostPool | DevicePool, epoch: Epoch, config: TransferConfig
    ) -> list[Transport]:
        assert isinstance(pool, HostPool)
        return [wrap(inner, pool) for inner in make(pool, epoch, config)]

    monkeypatch.setattr(agent, "make_transports", make_wrapped)
