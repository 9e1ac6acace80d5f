"""Step records prove batching, chunking, joining and leaving, and reads while prefill computes."""

import itertools
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from threading import Event

import pytest

from baton.async_llm import AsyncLLM
from baton.kv_transfer.interfaces import Read, Transport
from baton.model.runner.runner import Runner
from baton.node.records import ReadRecord, StepRecord
from baton.node.scheduling.plan import StepPlan, StepResult
from baton.protocol.sampling import SamplingParams
from baton.router.outputs import RequestOutput
from tests.support.checkpoints import tiny_cluster
from tests.support.node_threads import (
    NodeThreads,
    always_local,
    never_local,
    wrap_transports,
)
from tests.support.oracle import prompt
from tests.support.watched_transport import WatchedTransport

CHUNK = 64
CHUNKS = 4
PROMPTS = 3
NUM_STEPS = CHUNKS * PROMPTS
DEADLINE_S = 60.0
# Some thousand steps: such a request still runs when others come and go, however slow this is.
MANY_TOKENS = 3000


def generated(
    llm: AsyncLLM, length: int, num_tokens: int, salt: int = 0
) -> AsyncGenerator[RequestOutput, None]:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    return llm.generate(prompt(length, salt), params)


async def whole(llm: AsyncLLM, length: int, num_tokens: int, salt: int) -> None:
    async for output in generated(llm, length, num_tokens, salt):
        last = output
    assert len(last.outputs[0].token_ids) == num_tokens


def test_sequences_join_and_leave_decode_steps_and_prompt_chunks_run_in_these(tmp_path):
    async def use(llm: AsyncLLM) -> None:
        async with AsyncExitStack() as stack:
            for salt in range(4):
                long = generated(llm, 8, MANY_TOKENS, salt)
                await anext(await stack.enter_async_context(aclosing(long)))
            await whole(llm, 6 * CHUNK, 10, salt=4)

    engine = {"max_num_batched_tokens": CHUNK, "max_num_seqs": 16}
    config = tiny_cluster(cache={"num_blocks": 256}, engine=engine)
    cluster = NodeThreads(tmp_path, always_local(config))
    cluster.run(use)
    steps = [
        record
        for record in cluster.records("decode-0")
        if isinstance(record, StepRecord)
    ]
    batches = [{part.key.request_id for part in step.slices} for step in steps]
    assert max(len(batch) for batch in batches) >= 4
    # One may join in the very step in which another leaves.
    pairs = [
        (before, after)
        for before, after in itertools.pairwise(batches)
        if before & after
    ]
    assert any(after - before for before, after in pairs), (
        "nothing joined a running batch"
    )
    assert any(before - after for before, after in pairs), (
        "nothing left a running batch"
    )
    mixed = [
        step
        for step in steps
        if any(part.length > 1 for part in step.slices)
        and any(part.length == 1 and part.start >= 8 for part in step.slices)
    ]
    assert len(mixed) >= 6
    assert all(sum(part.length for part in step.slices) <= CHUNK for step in steps)


class Meeting:
    """Holds each side until the other has come as far as it must, on any machine.

    A chunk is not done before the blocks of the chunk before it are being read, and a read does not
    end before the chunk that follows is computed. Without overlap one of them waits in vain.
    """

    def __init__(self) -> None:
        self.is_posted = [Event() for _ in range(NUM_STEPS)]
        self.is_computed = [Event() for _ in range(NUM_STEPS)]

    def compute(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Count and hold the chunks of prompts, which prefill alone computes here."""
        launch = Runner.launch
        collect = Runner.collect
        steps = iter(range(NUM_STEPS))
        chunks: set[tuple[Runner, int]] = set()

        def noted(runner: Runner, plan: StepPlan) -> None:
            if plan.slices[0].length == CHUNK:
                chunks.add((runner, plan.step_id))
            launch(runner, plan)

        def held(runner: Runner) -> StepResult:
            result = collect(runner)
            if (runner, result.step_id) in chunks:
                step = next(steps)
                if step % CHUNKS:
                    assert self.is_posted[step - 1].wait(DEADLINE_S), (
                        "read only after the chunk"
                    )
                self.is_computed[step].set()
            return result

        monkeypatch.setattr(Runner, "launch", noted)
        monkeypatch.setattr(Runner, "collect", held)

    def transport(self, inner: Transport) -> Transport:
        return HeldTransport(inner, self)


class HeldTransport(WatchedTransport):
    def __init__(self, inner: Transport, meeting: Meeting) -> None:
        super().__init__(inner)
        self._meeting = meeting
        self._steps: dict[int, int] = {}

    def read(self, command: Read) -> int:
        handle = super().read(command)
        step = self._steps[handle] = len(self._steps)
        self._meeting.is_posted[step].set()
        return handle

    def test(self, handle: int) -> bool:
        following = self._steps[handle] + 1
        is_last = following % CHUNKS == 0
        return (
            is_last or self._meeting.is_computed[following].is_set()
        ) and super().test(handle)


def test_blocks_are_read_while_the_next_chunk_computes(tmp_path, monkeypatch):
    meeting = Meeting()
    meeting.compute(monkeypatch)
    wrap_transports(monkeypatch, lambda inner, _: meeting.transport(inner))
    nodes = NodeThreads(
        tmp_path, never_local(tiny_cluster(engine={"max_num_batched_tokens": CHUNK}))
    )

    async def use(llm: AsyncLLM) -> None:
        for salt in range(PROMPTS):
            await whole(llm, CHUNKS * CHUNK, 4, salt)

    nodes.run(use)
    chunks = [
        record
        for record in nodes.records("prefill-0")
        if isinstance(record, StepRecord)
    ]
    reads = [
        record for record in nodes.records("decode-0") if isinstance(record, ReadRecord)
    ]
    assert [step.num_prompt_tokens for step in chunks] == [CHUNK] * NUM_STEPS
    assert len(reads) == NUM_STEPS
    for read, done in zip(reads, chunks, strict=True):
        assert read.posted_s >= done.ended_s, "read before it was computed"
