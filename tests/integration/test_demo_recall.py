"""The demo model recalls facts from its whole prompt, so one wrong KV block is a wrong fact.

What baton answers, split over two nodes, is what the same model answers in plain transformers, to
the letter. A block that is damaged on its way costs the facts that it held and no others.
"""

from functools import cache
from pathlib import Path

import pytest

from baton.async_llm import AsyncLLM
from baton.deploy.model_folder import CHECKPOINT
from baton.engine.process.records import StepRecord
from baton.kv_transfer.interfaces import BlockSlice, Transport
from baton.kv_transfer.pools import HostPool
from baton.protocol.config import ClusterConfig
from baton.protocol.sampling import SamplingParams
from tests.support.checkpoints import tiny_cluster
from tests.support.node_threads import NodeThreads, wrap_transports
from tests.support.watched_transport import WatchedTransport
from tools.demo_model import exam
from tools.demo_model.evaluate import Examiner

NUM_TOKENS = 1024  # so few that no block is without a fact
LONGEST_FACT = 36  # characters


@cache
def examiner() -> Examiner:
    return Examiner(CHECKPOINT)


@cache
def memory() -> exam.Memory:
    return exam.recall(examiner().tokenizer, num_tokens=NUM_TOKENS, seed=0)


@cache
def expected() -> list[str]:
    """What transformers answers."""
    return examiner().answers(memory().questions, memory().told)


def score(answers: list[str]) -> int:
    asked = memory().questions
    return sum(said == question.answer for said, question in zip(answers, asked, strict=True))


def settings(num_guesses: int = 0) -> ClusterConfig:
    return tiny_cluster(
        CHECKPOINT, cache={"num_blocks": 1200},
        engine={"max_num_batched_tokens": 512, "num_speculative_tokens": num_guesses},
        router={"local_prefill": "never"}, transfer={"transport": "shm"},
    )  # fmt: skip


async def recalled(llm: AsyncLLM) -> list[str]:
    params = SamplingParams(temperature=0, max_tokens=8, output_kind="final")
    answers = []
    for question in memory().questions:
        async for output in llm.generate(memory().told + question.prompt, params):
            last = output
        answers.append(last.outputs[0].text)
    return answers


def test_it_recalls_what_transformers_recalls_and_a_damaged_block_costs_facts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode reads the prompt once and caches it, so all questions meet the same damage."""
    assert score(expected()) >= 0.99 * len(memory().questions)
    steps = []
    for num_guesses in (0, 4):
        folder = tmp_path / f"guesses-{num_guesses}"
        folder.mkdir()
        nodes = NodeThreads(folder, settings(num_guesses))
        assert nodes.run(recalled) == expected()
        steps.append(len([one for one in nodes.records("decode-0") if isinstance(one, StepRecord)]))
    assert steps[1] < 0.7 * steps[0], "its answers stand in the prompt"
    reads: list[tuple[int, ...]] = []

    def blanking(inner: Transport, pool: HostPool) -> Transport:
        def landed(local: tuple[int, ...], _: BlockSlice) -> None:
            reads.append(local)
            if len(reads) == 2:  # that of the second chunk
                start = local[len(local) // 2] * pool.shape.block_bytes
                pool.buffer[start : start + pool.shape.block_bytes] = bytes(pool.shape.block_bytes)

        return WatchedTransport(inner, landed=landed)

    wrap_transports(monkeypatch, blanking)
    (tmp_path / "damaged").mkdir()
    damaged = NodeThreads(tmp_path / "damaged", settings()).run(recalled)
    told, whole = memory(), expected()
    lost = [
        told.told.index(question.answer)
        for question, said, knew in zip(told.questions, damaged, whole, strict=True)
        if said != knew
    ]
    assert score(damaged) < score(whole)
    # All of them stood in that block or across its edges: two neighbours and a half, at most four.
    assert 1 <= len(lost) <= 4
    assert max(lost) - min(lost) < 4 * LONGEST_FACT
