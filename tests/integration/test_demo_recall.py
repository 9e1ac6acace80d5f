"""The demo model recalls facts from its whole prompt, so one wrong KV block is a wrong fact.

What baton answers, split over two nodes, is what the same model answers in plain transformers, to
the letter. A block that is damaged on its way costs the facts that it held and no others.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path

import pytest

from baton.async_llm import AsyncLLM
from baton.deploy.demo_model import CHECKPOINT
from baton.kv_transfer.interfaces import BlockPiece, Transport
from baton.kv_transfer.pools import HostPool
from baton.protocol.config import ClusterConfig
from baton.protocol.sampling import SamplingParams
from tests.support.checkpoints import tiny_cluster
from tests.support.cluster import Cluster
from tests.support.node_threads import NodeThreads, wrap_transports
from tests.support.watched_transport import WatchedTransport
from tools.demo_model import exam
from tools.demo_model.evaluate import Examiner

NUM_TOKENS = 2048


@cache
def examiner() -> Examiner:
    return Examiner(CHECKPOINT)


@cache
def memory(num_tokens: int = NUM_TOKENS) -> exam.Memory:
    return exam.recall(examiner().tokenizer, num_tokens=num_tokens, seed=0)


@cache
def expected(num_tokens: int = NUM_TOKENS) -> list[str]:
    """What transformers answers."""
    return examiner().answers(memory(num_tokens).questions, memory(num_tokens).told)


def score(answers: list[str], num_tokens: int = NUM_TOKENS) -> int:
    asked = memory(num_tokens).questions
    return sum(said == question.answer for said, question in zip(answers, asked, strict=True))


def settings() -> ClusterConfig:
    return tiny_cluster(
        CHECKPOINT, cache={"num_blocks": 1200}, engine={"chunk_tokens": 512},
        router={"local_prefill": "never"}, transfer={"transport": "shm"},
    )  # fmt: skip


def completion(cluster: Cluster, question: exam.Question) -> str:
    prompt = memory().told + question.prompt
    answer = cluster.complete(model="tiny", prompt=prompt, max_tokens=8, temperature=0)
    return answer["choices"][0]["text"]  # type: ignore[index,no-any-return]


def test_split_it_recalls_what_transformers_recalls(tmp_path: Path) -> None:
    assert score(expected()) >= 0.99 * exam.NUM_FACTS
    with Cluster(tmp_path, settings()) as cluster, ThreadPoolExecutor(8) as clients:
        answers = list(clients.map(partial(completion, cluster), memory().questions))
        assert sum(read.num_bytes for read in cluster.reads("decode-0")) > 0
        assert sum(step.num_prompt_tokens for step in cluster.steps("decode-0")) == 0
    assert answers == expected()


DENSE = 1024  # tokens; no block is without a fact
LONGEST_FACT = 36  # characters


async def recalled(llm: AsyncLLM) -> list[str]:
    params = SamplingParams(temperature=0, max_tokens=8, output_kind="final")
    answers = []
    for question in memory(DENSE).questions:
        async for output in llm.generate(memory(DENSE).told + question.prompt, params):
            last = output
        answers.append(last.outputs[0].text)
    return answers


def test_a_block_damaged_in_transit_costs_facts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode reads the prompt once and caches it, so all questions meet the same damage."""
    (tmp_path / "whole").mkdir()
    assert NodeThreads(tmp_path / "whole", settings()).run(recalled) == expected(DENSE)
    reads: list[tuple[int, ...]] = []

    def blanking(inner: Transport, pool: HostPool) -> Transport:
        def landed(local: tuple[int, ...], _: BlockPiece) -> None:
            reads.append(local)
            if len(reads) == 2:  # that of the second chunk
                start = local[len(local) // 2] * pool.shape.block_bytes
                pool.buffer[start : start + pool.shape.block_bytes] = bytes(pool.shape.block_bytes)

        return WatchedTransport(inner, landed=landed)

    wrap_transports(monkeypatch, blanking)
    (tmp_path / "damaged").mkdir()
    damaged = NodeThreads(tmp_path / "damaged", settings()).run(recalled)
    told, whole = memory(DENSE), expected(DENSE)
    lost = [
        told.told.index(question.answer)
        for question, said, knew in zip(told.questions, damaged, whole, strict=True)
        if said != knew
    ]
    assert score(damaged, DENSE) < score(whole, DENSE)
    # All of them stood in that block or across its edges: two neighbours and a half, at most four.
    assert 1 <= len(lost) <= 4
    assert max(lost) - min(lost) < 4 * LONGEST_FACT
