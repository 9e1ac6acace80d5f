"""Blocks are read chunk by chunk, while prefill computes on."""

import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from baton.async_llm import AsyncLLM
from baton.engine.records import ReadRecord, StepRecord
from baton.kv_transfer import agent
from baton.kv_transfer.host_pool import HostPool
from baton.kv_transfer.interfaces import PoolMemory, Transport
from baton.protocol.config import ClusterConfig, EngineConfig, ModelConfig, TransferConfig
from baton.protocol.ids import Epoch
from baton.protocol.sampling import SamplingParams
from tests.support.checkpoints import model_folder
from tests.support.faulty_transport import Faults, FaultyTransport
from tests.support.node_threads import NodeThreads, never_local
from tests.support.oracle import prompt

CHUNK, CHUNKS, PROMPTS = 256, 4, 3
READ_S = 0.05  # far above what a busy machine puts between two chunks


class SlowTransport(FaultyTransport):
    """Every read lasts `READ_S` at least, as over a slow network."""

    def __init__(self, inner: Transport, pool: HostPool) -> None:
        super().__init__(inner, Faults(), 0, pool.buffer, pool.shape.block_bytes)
        self._due_s: dict[int, float] = {}

    def read(
        self, peer: Epoch, remote: Sequence[int], local: Sequence[int], generations: Sequence[int]
    ) -> int:
        handle = super().read(peer, remote, local, generations)
        self._due_s[handle] = time.monotonic() + READ_S
        return handle

    def test(self, handle: int) -> bool:
        return time.monotonic() >= self._due_s[handle] and super().test(handle)


async def serve(llm: AsyncLLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    for salt in range(PROMPTS):
        async for _ in llm.generate(prompt(CHUNKS * CHUNK, salt), params):
            pass


def test_blocks_are_read_while_the_next_chunk_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = agent.make_transports

    def make_slow(
        pool: HostPool | PoolMemory, epoch: Epoch, config: TransferConfig
    ) -> list[Transport]:
        assert isinstance(pool, HostPool)
        return [SlowTransport(inner, pool) for inner in make(pool, epoch, config)]

    monkeypatch.setattr(agent, "make_transports", make_slow)
    # Wide, so that a chunk takes longer than a read.
    folder = model_folder("qwen3", hidden_size=768, intermediate_size=1024, num_kv_heads=4)
    config = ClusterConfig(
        model=ModelConfig(path=str(folder)), engine=EngineConfig(chunk_tokens=CHUNK)
    )
    nodes = NodeThreads(tmp_path, never_local(config))
    nodes.run(serve)
    chunks = [record for record in nodes.records("prefill-0") if isinstance(record, StepRecord)]
    reads = [record for record in nodes.records("decode-0") if isinstance(record, ReadRecord)]
    assert [step.num_prompt_tokens for step in chunks] == [CHUNK] * CHUNKS * PROMPTS
    assert len(reads) == CHUNKS * PROMPTS
    for index, (read, done) in enumerate(zip(reads, chunks, strict=True)):
        assert read.posted_s >= done.ended_s, "read before it was computed"
        if index % CHUNKS != CHUNKS - 1:  # a chunk of the same prompt follows
            assert chunks[index + 1].started_s < read.ended_s, "prefill waited for the read"
            assert read.posted_s < chunks[index + 1].ended_s, "read only after the next chunk"
