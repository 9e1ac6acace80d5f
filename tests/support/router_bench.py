"""A router in a folder, on a clock that the test moves, and the nodes that dial it."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from baton.protocol.config import ClusterConfig, RouterConfig
from baton.protocol.messages import NodeInfo, Peers
from baton.protocol.sampling import SamplingParams
from baton.router.core.router_core import RouterCore
from baton.router.core.stream import RequestStream
from baton.router.outputs import Merged, RequestOutput
from baton.router.text_router import TextRouter
from tests.support.async_tests import AsyncTest, Test, with_bench
from tests.support.scripted_nodes import ScriptedNode, ToyNode, node_info
from tests.support.small_tokenizers import Family, small_text
from tests.support.virtual_clock import VirtualClock

T = TypeVar("T")
PROMPT = [5, 6, 7, 8, 9, 10]
GREEDY = SamplingParams(temperature=0, max_tokens=8)
REMOTE = RouterConfig(local_prefill="never")


class RouterBench:
    """`run` starts the router, uses it and ends everything."""

    def __init__(
        self,
        folder: Path,
        router: RouterConfig = REMOTE,
        tokenizer: Family = "byte_level",
    ) -> None:
        self.clock = VirtualClock()
        config = ClusterConfig(
            router=msgspec.structs.replace(router, control=f"ipc://{folder}/control")
        )
        self.core = RouterCore(config, self.clock)
        self.router = TextRouter(config, self.core, small_text(tokenizer))
        self.endpoint = config.control
        self.nodes: list[ScriptedNode] = []

    def run(self, use: Callable[["RouterBench"], Awaitable[T]]) -> T:
        return asyncio.run(self._run(use))

    async def _run(self, use: Callable[["RouterBench"], Awaitable[T]]) -> T:
        self.router.start(self.endpoint)
        try:
            async with asyncio.timeout(60.0):
                return await use(self)
        finally:
            for node in self.nodes:
                node.die()
            self.router.close()

    async def scripted(self, info: NodeInfo) -> ScriptedNode:
        node = ScriptedNode(self.endpoint, info)
        await self._join(node)
        return node

    async def toy(self, info: NodeInfo, max_steps: int | None = None) -> ToyNode:
        node = ToyNode(self.endpoint, info, max_steps)
        await self._join(node)
        return node

    async def _join(self, node: ScriptedNode) -> None:
        self.nodes.append(node)
        node.join()
        await node.hear(Peers)

    async def pair(self) -> tuple[ScriptedNode, ScriptedNode]:
        prefill = await self.scripted(node_info("p0", "prefill"))
        return prefill, await self.scripted(node_info("d0", "decode"))

    async def toy_pair(self) -> tuple[ToyNode, ToyNode]:
        prefill = await self.toy(node_info("p0", "prefill"))
        return prefill, await self.toy(node_info("d0", "decode"))

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(20.0):
            while not holds():  # noqa: ASYNC110 - what it waits for has no event
                await asyncio.sleep(0.01)

    async def settled(self) -> None:
        """No request is left, and no node carries a charge."""
        await self.until(lambda: not self.core.num_active)
        assert all(
            node.num_attempts == node.num_tokens == 0
            for node in self.core.health().nodes
        )


async def collected(stream: RequestStream) -> RequestOutput:
    """The whole answer of a request."""
    merged = Merged(stream.params.n)
    stream.send_to(merged.add)
    await stream.ended()
    return stream.output(merged.outputs())


async def whole(
    router: TextRouter, params: SamplingParams = GREEDY, prompt: list[int] = PROMPT
) -> RequestOutput:
    """The last output of a request."""
    stream = await router.submit(prompt, params)
    async for output in stream.outputs():
        last = output
    assert last.finished
    return last


def routed(
    router: RouterConfig = REMOTE, tokenizer: Family = "byte_level"
) -> Callable[[AsyncTest], Test]:
    """Run an async test with a `RouterBench` as its `bench`."""
    return with_bench(
        "bench", run=lambda use, folder: RouterBench(folder, router, tokenizer).run(use)
    )
