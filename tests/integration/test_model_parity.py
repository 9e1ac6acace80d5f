"""Greedy tokens of real schedulers over real executors equal those of transformers, per family."""

import select
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from baton.decode_node.scheduler import DecodeScheduler
from baton.engine.block_pool import BlockPool
from baton.engine.executor import ExecutorInfo
from baton.engine.local_executor import InProcessExecutor
from baton.engine.plan import StepPlan, StepResult
from baton.engine.scheduler import NodeLimits, Scheduler
from baton.kv_transfer.interfaces import (
    AddPeer,
    AgentCommand,
    AgentEvent,
    Land,
    Landed,
    PeerUp,
    Read,
    ReadEnded,
    Released,
)
from baton.prefill_node.scheduler import PrefillScheduler
from baton.protocol.ids import Epoch
from baton.protocol.messages import End, Span
from tests.support.checkpoints import FAMILIES, model_folder
from tests.support.compute import compute_config, no_progress, random_tokens
from tests.support.drive import Drive, handed, key, local, offered, prefill
from tests.support.oracle import Oracle, count_ties

NUM_TOKENS = 24
PROMPTS = {name: random_tokens(length, seed=length) for name, length in
           (("short", 5), ("block", 32), ("tile", 128), ("long", 301))}  # fmt: skip


class Node:
    """A scheduler, driven by hand, over an executor of its own; stands in for `ToyExecutor`."""

    def __init__(self, executor: InProcessExecutor, kind: type[Scheduler], epoch: str) -> None:
        self.executor = executor
        self.epoch = Epoch(epoch)
        self.info: ExecutorInfo = executor.start(no_progress)
        pool = BlockPool(self.info.num_blocks, 16, cache_prefixes=True)
        limits = NodeLimits(96, 8, self.info.max_model_len)
        self.drive = Drive(kind(pool, limits), self)  # type: ignore[call-arg, arg-type]

    def run(self, plan: StepPlan) -> StepResult:
        self.executor.submit(plan)
        while (result := self.executor.poll()) is None:
            assert select.select([self.executor.fileno()], [], [], 60)[0], "no result"
        return result

    def ask(self, command: AgentCommand) -> AgentEvent:
        """Have the transfer agent do it; its answer."""
        port = self.executor.ports[0]
        port.send(command)
        assert select.select([port.fileno()], [], [], 30)[0], "the agent does not answer"
        (event,) = port.poll()
        return event


@contextmanager
def node(family: str, kind: type[Scheduler], epoch: str) -> Iterator[Node]:
    executor = InProcessExecutor(compute_config(model_folder(family), num_blocks=96), Epoch(epoch))
    try:
        yield Node(executor, kind, epoch)
    finally:
        executor.close()


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def oracle(family: str) -> Oracle:
    return Oracle(model_folder(family))


def assert_greedy(oracle: Oracle, prompt: list[int], got: list[int]) -> None:
    assert count_ties(oracle.greedy(prompt, NUM_TOKENS), got) == 0


def test_a_batch_that_decode_computes_alone(family: str, oracle: Oracle) -> None:
    """Chunked prompts beside running sequences, each step planned before the last is settled."""
    with node(family, DecodeScheduler, "d") as decode:
        for name, prompt in PROMPTS.items():
            decode.drive.scheduler.add(0.0, "router", local(name, prompt, NUM_TOKENS))
        decode.drive.run(depth=2)
        for name, prompt in PROMPTS.items():
            assert_greedy(oracle, prompt, decode.drive.output(name, prompt))
        prompt = PROMPTS["long"]  # again, now from the prefix cache
        decode.drive.said.clear()
        decode.drive.scheduler.add(0.0, "router", local("again", prompt, NUM_TOKENS))
        decode.drive.run(depth=2)
        assert decode.drive.plans[-NUM_TOKENS].slices[0].start == 288
        assert_greedy(oracle, prompt, decode.drive.output("again", prompt))


def test_a_prompt_that_is_handed_over(family: str, oracle: Oracle) -> None:
    """Prefill computes, decode reads the blocks through the transport and goes on."""
    prompt = PROMPTS["long"]
    with node(family, PrefillScheduler, "p") as source, node(family, DecodeScheduler, "d") as sink:
        up = sink.ask(
            AddPeer(source.epoch, "shm", source.info.ranks[0], 96, source.info.layout.block_bytes)
        )
        assert isinstance(up, PeerUp)
        source.drive.scheduler.add(0.0, "router", prefill("r", prompt))
        source.drive.run(depth=2)
        sink.drive.scheduler.add(0.0, "router", handed("r", prompt, NUM_TOKENS))
        num_blocks = -(-len(prompt) // 16)
        sink.drive.scheduler.on_report(0.0, offered("r", len(prompt), num_blocks))
        sink.drive.launch()
        (land,) = [event for event in sink.drive.asked if isinstance(event, Land)]
        spans = [event for event in source.drive.asked if isinstance(event, Span)]
        remote = [block for span in spans for block in span.block_ids]
        generations = [generation for span in spans for generation in span.generations]
        read = sink.ask(Read(1, source.epoch, tuple(remote), land.block_ids, tuple(generations)))
        assert isinstance(read, ReadEnded)
        assert read.failure is None
        (end,) = [event for event in source.drive.asked if isinstance(event, End)]
        source.drive.scheduler.on_report(0.0, Released(key("r")))
        landed = Landed(key("r"), end.tokens, read.num_bytes, 0.0, 0.0)
        sink.drive.scheduler.on_report(0.0, landed)
        sink.drive.run(depth=2)
        first = [token.token_id for token in end.tokens]
        got = sink.drive.output("r", prompt)
        assert got[:1] == first
        assert_greedy(oracle, prompt, got)
