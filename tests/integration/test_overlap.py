"""Blocks are read chunk by chunk, while prefill computes on."""

from collections.abc import Sequence
from pathlib import Path
from threading import Event

import pytest

from baton.async_llm import AsyncLLM
from baton.engine.compute.runner import Runner
from baton.engine.process.records import ReadRecord, StepRecord
from baton.engine.scheduling.plan import StepPlan, StepResult
from baton.kv_transfer.interfaces import Transport
from baton.protocol.ids import Epoch
from baton.protocol.sampling import SamplingParams
from tests.support.checkpoints import tiny_cluster
from tests.support.node_threads import NodeThreads, never_local, wrap_transports
from tests.support.oracle import prompt
from tests.support.watched_transport import WatchedTransport

CHUNK, CHUNKS, PROMPTS = 64, 4, 3
NUM_STEPS = CHUNKS * PROMPTS
DEADLINE_S = 60.0


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
        launch, collect, steps = Runner.launch, Runner.collect, iter(range(NUM_STEPS))
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
                    assert self.is_posted[step - 1].wait(DEADLINE_S), "read only after the chunk"
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

    def read(
        self, peer: Epoch, remote: Sequence[int], local: Sequence[int], generations: Sequence[int]
    ) -> int:
        handle = super().read(peer, remote, local, generations)
        step = self._steps[handle] = len(self._steps)
        self._meeting.is_posted[step].set()
        return handle

    def test(self, handle: int) -> bool:
        following = self._steps[handle] + 1
        is_last = following % CHUNKS == 0
        return (is_last or self._meeting.is_computed[following].is_set()) and super().test(handle)


async def serve(llm: AsyncLLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    for salt in range(PROMPTS):
        async for _ in llm.generate(prompt(CHUNKS * CHUNK, salt), params):
            pass


def test_blocks_are_read_while_the_next_chunk_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meeting = Meeting()
    meeting.compute(monkeypatch)
    wrap_transports(monkeypatch, lambda inner, _: meeting.transport(inner))
    nodes = NodeThreads(
        tmp_path, never_local(tiny_cluster(engine={"max_num_batched_tokens": CHUNK}))
    )
    nodes.run(serve)
    chunks = [record for record in nodes.records("prefill-0") if isinstance(record, StepRecord)]
    reads = [record for record in nodes.records("decode-0") if isinstance(record, ReadRecord)]
    assert [step.num_prompt_tokens for step in chunks] == [CHUNK] * NUM_STEPS
    assert len(reads) == NUM_STEPS
    for read, done in zip(reads, chunks, strict=True):
        assert read.posted_s >= done.ended_s, "read before it was computed"
