"""`AsyncLLM` as an event loop uses it, over toy nodes that live on the same loop."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from baton import AsyncLLM, RequestOutput, RequestOutputKind, SamplingParams
from baton.async_llm import Launcher
from baton.protocol.errors import BatonError, Cancelled, NodeError, RequestError
from tests.support.async_tests import on_a_loop
from tests.support.scripted_nodes import toy_answer
from tests.support.small_tokenizers import Family
from tests.support.toy_cluster import (
    BrokenCluster,
    StalledCluster,
    StillbornCluster,
    ToyCluster,
    toy_model,
)

READY_S = 60.0
GREEDY = SamplingParams(temperature=0, max_tokens=6)


@on_a_loop
async def test_the_first_generate_starts_an_async_llm_and_may_be_cancelled(tmp_path: Path) -> None:
    llm = AsyncLLM(toy_model(tmp_path), launcher=ToyCluster)
    assert not llm.is_running
    first = asyncio.ensure_future(anext(llm.generate([1, 2], GREEDY)))
    await asyncio.sleep(0)  # it has started the nodes and waits for them
    assert llm.is_running
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    many = [last(llm.generate([1, number], GREEDY)) for number in (2, 3)]
    for number, output in zip((2, 3), await asyncio.gather(*many), strict=True):
        assert output.outputs[0].token_ids == toy_answer([1, number], 6)
    await llm.shutdown()
    with pytest.raises(BatonError, match="shutting down"):
        await last(llm.generate([1, 2], GREEDY))


@on_a_loop
async def test_an_async_llm_is_ready_inside_its_context_and_gone_after_it(tmp_path: Path) -> None:
    async with AsyncLLM(toy_model(tmp_path), launcher=ToyCluster) as llm:
        assert llm.health().status == "ready"
        deltas = GREEDY.clone(output_kind=RequestOutputKind.DELTA)
        got = [output.outputs[0] async for output in llm.generate([1, 2], deltas)]
        assert [i for delta in got for i in delta.token_ids] == toy_answer([1, 2], 6)
        own = [1, 2]  # which its caller may go on with
        async for output in llm.generate(own, deltas):
            own += output.outputs[0].token_ids
        assert own == [1, 2, *toy_answer([1, 2], 6)]
    assert not llm.is_running
    never_started = AsyncLLM(toy_model(tmp_path), launcher=ToyCluster)
    await never_started.shutdown()
    with pytest.raises(BatonError, match="shut down"):
        await never_started.start()
    broken = AsyncLLM(toy_model(tmp_path), launcher=BrokenCluster)
    with pytest.raises(NodeError, match="cannot start"):
        async with broken:
            pass


async def last(outputs: AsyncIterator[RequestOutput]) -> RequestOutput:
    async for output in outputs:
        latest = output
    return latest


@asynccontextmanager
async def toy_async_llm(
    folder: Path, launcher: Launcher = ToyCluster, family: Family = "byte_level"
) -> AsyncIterator[AsyncLLM]:
    llm = AsyncLLM(toy_model(folder, family), launcher=launcher)
    await llm.start()
    try:
        await llm.ready(READY_S)
        assert llm.is_running
        yield llm
    finally:
        await llm.shutdown()
        assert not llm.is_running
        assert not llm.errored


@on_a_loop
async def test_an_abort_by_name_ends_the_reader_and_frees_the_name(tmp_path: Path) -> None:
    async with toy_async_llm(tmp_path, StalledCluster) as llm:
        reader = llm.generate([1, 2], GREEDY, request_id="mine")
        await anext(reader)
        with pytest.raises(RequestError, match="in use"):
            await anext(llm.generate([1, 2], GREEDY, request_id="mine"))
        await llm.abort("mine")
        with pytest.raises(Cancelled):
            async for _ in reader:
                pass
        await llm.abort("mine")
        again = llm.generate([1, 2], GREEDY, request_id="mine")
        output = await anext(again)
        assert output.request_id == "mine"
        assert output.outputs[0].token_ids[:1] == toy_answer([1, 2], 1)
        await again.aclose()


@on_a_loop
async def test_an_abort_while_the_prompt_is_tokenized_is_not_forgotten(tmp_path: Path) -> None:
    async with toy_async_llm(tmp_path, family="word_piece") as llm:
        # So long that another thread encodes it, but few tokens.
        reader = llm.generate("hello world " * 20, GREEDY, request_id="mine")
        first = asyncio.ensure_future(anext(reader))
        await asyncio.sleep(0)  # the reader waits for a thread of the tokenizer now
        await llm.abort("mine")
        with pytest.raises(Cancelled):
            await first


@on_a_loop
async def test_nodes_that_die_at_their_start_are_told_to_all_who_wait(tmp_path: Path) -> None:
    llm = AsyncLLM(toy_model(tmp_path), launcher=StillbornCluster)
    await llm.start()
    try:
        with pytest.raises(NodeError, match="no such model"):
            await llm.ready(READY_S)
        assert llm.errored
        with pytest.raises(NodeError, match="no such model"):
            await anext(llm.generate([1, 2], GREEDY))
    finally:
        await llm.shutdown()
