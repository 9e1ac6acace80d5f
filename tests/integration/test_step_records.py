"""Step records prove batching, chunking, joining and leaving."""

import itertools
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing
from pathlib import Path

from baton.async_llm import AsyncLLM
from baton.engine.process.records import StepRecord
from baton.protocol.config import ClusterConfig
from baton.protocol.sampling import SamplingParams
from baton.router.outputs import RequestOutput
from tests.support.checkpoints import tiny_cluster
from tests.support.node_threads import NodeThreads, always_local, never_local
from tests.support.oracle import prompt

CHUNK = 64
# Some thousand steps: such a request still runs when others come and go, however slow this is.
MANY_TOKENS = 3000


def steps_of(
    tmp_path: Path,
    use: Callable[[AsyncLLM], Awaitable[None]],
    place: Callable[[ClusterConfig], ClusterConfig],
) -> list[StepRecord]:
    """Return what the decode node computed."""
    engine = {"max_num_batched_tokens": CHUNK, "max_num_seqs": 16}
    config = tiny_cluster(cache={"num_blocks": 256}, engine=engine)
    cluster = NodeThreads(tmp_path, place(config))
    cluster.run(use)
    return [record for record in cluster.records("decode-0") if isinstance(record, StepRecord)]


def generated(
    llm: AsyncLLM, length: int, num_tokens: int, salt: int = 0
) -> AsyncGenerator[RequestOutput, None]:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    return llm.generate(prompt(length, salt), params)


async def whole(llm: AsyncLLM, length: int, num_tokens: int, salt: int) -> None:
    async for output in generated(llm, length, num_tokens, salt):
        last = output
    assert len(last.outputs[0].token_ids) == num_tokens


def test_sequences_share_decode_steps_join_and_leave(tmp_path: Path) -> None:
    async def use(llm: AsyncLLM) -> None:
        async with AsyncExitStack() as stack:
            for salt in range(4):
                long = generated(llm, 20, MANY_TOKENS, salt)
                await anext(await stack.enter_async_context(aclosing(long)))
            await whole(llm, 30, 10, salt=4)

    steps = steps_of(tmp_path, use, never_local)
    batches = [{part.key.request_id for part in step.slices} for step in steps]
    assert max(len(batch) for batch in batches) >= 4
    # One may join in the very step in which another leaves.
    pairs = [(before, after) for before, after in itertools.pairwise(batches) if before & after]
    assert any(after - before for before, after in pairs), "nothing joined a running batch"
    assert any(before - after for before, after in pairs), "nothing left a running batch"


def test_prompt_chunks_run_between_decode_steps(tmp_path: Path) -> None:
    async def use(llm: AsyncLLM) -> None:
        async with aclosing(generated(llm, 8, MANY_TOKENS)) as long:
            await anext(long)
            await whole(llm, 6 * CHUNK, 2, salt=1)

    steps = steps_of(tmp_path, use, always_local)
    mixed = [
        step
        for step in steps
        if any(part.length > 1 for part in step.slices)
        and any(part.length == 1 and part.start >= 8 for part in step.slices)
    ]
    assert len(mixed) >= 6
    assert all(sum(part.length for part in step.slices) <= CHUNK for step in steps)
