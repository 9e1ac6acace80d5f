"""What the step records prove: batching, chunking, joining and leaving."""

import asyncio
import itertools
from pathlib import Path

from baton.async_llm import AsyncLLM
from baton.engine.records import StepRecord
from baton.protocol.config import CacheConfig, ClusterConfig, EngineConfig, ModelConfig
from baton.protocol.sampling import SamplingParams
from tests.support.checkpoints import model_folder
from tests.support.node_threads import NodeThreads, always_local, never_local

CHUNK = 64


def settings() -> ClusterConfig:
    return ClusterConfig(
        model=ModelConfig(path=str(model_folder("qwen3"))),
        cache=CacheConfig(num_blocks=256),
        engine=EngineConfig(chunk_tokens=CHUNK, max_num_seqs=16),
    )


async def run(llm: AsyncLLM, length: int, num_tokens: int, salt: int = 0) -> None:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    token_ids = [10 + (i * i + 31 * salt) % 241 for i in range(length)]
    async for output in llm.generate(token_ids, params):
        last = output
    assert len(last.outputs[0].token_ids) == num_tokens


def keys(step: StepRecord) -> set[str]:
    return {part.key.request_id for part in step.slices}


def test_sequences_share_decode_steps_join_and_leave(tmp_path: Path) -> None:
    async def use(llm: AsyncLLM) -> None:
        await asyncio.gather(*(run(llm, 20 + i, 10 * (i + 1), salt=i) for i in range(6)))

    cluster = NodeThreads(tmp_path, never_local(settings()))
    cluster.run(use)
    steps = [r for r in cluster.records("decode-0") if isinstance(r, StepRecord)]
    batches = [keys(step) for step in steps]
    assert max(len(batch) for batch in batches) >= 4
    pairs = list(itertools.pairwise(batches))
    assert any(before < after for before, after in pairs), "nobody joined a running batch"
    assert any(before > after for before, after in pairs), "nobody left a running batch"


def test_prompt_chunks_run_between_decode_steps(tmp_path: Path) -> None:
    async def use(llm: AsyncLLM) -> None:
        stream = asyncio.ensure_future(run(llm, 8, 200))
        await asyncio.sleep(0)
        await asyncio.gather(stream, run(llm, 6 * CHUNK, 2, salt=1))

    cluster = NodeThreads(tmp_path, always_local(settings()))
    cluster.run(use)
    steps = [r for r in cluster.records("decode-0") if isinstance(r, StepRecord)]
    mixed = [
        step
        for step in steps
        if any(part.length > 1 for part in step.slices)
        and any(part.length == 1 and part.start >= 8 for part in step.slices)
    ]
    assert len(mixed) >= 4
    assert all(sum(part.length for part in step.slices) <= CHUNK for step in steps)
