"""A request that breaks the node that computes it is stopped, and no other request is."""

import asyncio
import contextlib

import pytest

from baton.async_llm import AsyncLLM
from baton.model.executors.local_executor import InProcessExecutor
from baton.model.runner.runner import Runner
from baton.node.scheduling.plan import StepPlan
from baton.protocol.errors import NodeError, RequestError
from baton.protocol.sampling import SamplingParams
from tests.support.checkpoints import tiny_cluster
from tests.support.node_threads import NodeThread

POISON = 9
NUM_NODES = 3
GREEDY = SamplingParams(
    temperature=0, max_tokens=100, ignore_eos=True, output_kind="delta"
)


def make_fragile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Break every step in which a sequence starts with the token."""
    launch = Runner.launch

    def fragile(runner: Runner, plan: StepPlan) -> None:
        if any(part.start == 0 and part.token_ids[0] == POISON for part in plan.slices):
            raise RuntimeError("no kernel for this token")
        launch(runner, plan)

    monkeypatch.setattr(Runner, "launch", fragile)


class Stream:
    def __init__(self, llm: AsyncLLM, first: int) -> None:
        self.tokens: list[int] = []
        self.has_begun = asyncio.Event()
        self._outputs = llm.generate([first, 20, 21, 22], GREEDY)

    async def read(self) -> None:
        async for output in self._outputs:
            self.tokens += output.outputs[0].token_ids
            self.has_begun.set()


def test_a_request_that_breaks_its_nodes_ends_and_its_neighbours_go_on(
    tmp_path, monkeypatch
):
    make_fragile(monkeypatch)
    control = f"ipc://{tmp_path}/control"
    sections = {
        "cache": {"num_blocks": 64},
        "router": {"local_prefill": "always", "control": control},
    }
    nodes = []
    for index in range(NUM_NODES):
        own = {
            "id": f"d{index}",
            "routers": (control,),
            "bind": f"ipc://{tmp_path}/d{index}",
        }
        nodes.append(
            NodeThread(tiny_cluster(**sections, node=own), "decode", InProcessExecutor)
        )

    async def use() -> None:
        llm = AsyncLLM(
            config=tiny_cluster(**sections, decode=NUM_NODES), start_nodes=False
        )
        try:
            await llm.start()
            await llm.ready(60.0)
            neighbours = [Stream(llm, 10 + index) for index in range(NUM_NODES)]
            async with asyncio.timeout(120.0), asyncio.TaskGroup() as group:
                for stream in neighbours:
                    group.create_task(stream.read())
                    await stream.has_begun.wait()
                with pytest.raises(RequestError) as error:
                    await Stream(llm, POISON).read()
            assert (error.value.code, error.value.http_status) == (
                "request_kills_nodes",
                422,
            )
            for index, stream in enumerate(neighbours):
                undisturbed = Stream(llm, 10 + index)
                await undisturbed.read()
                assert stream.tokens == undisturbed.tokens
        finally:
            await llm.shutdown()

    asyncio.run(use())
    for node in nodes:
        with contextlib.suppress(NodeError):
            node.stop()
    assert sum(node.error is not None for node in nodes) == 2
