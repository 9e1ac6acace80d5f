"""The demo model recalls facts from its whole prompt, so one wrong KV block is a wrong fact.

What baton answers, split over two nodes, is what the same model answers in plain transformers, to
the letter. A block that is damaged on its way costs the facts that it held and no others.
"""

from collections.abc import Callable
from functools import cache

from baton.async_llm import AsyncLLM
from baton.deploy.model_folder import CHECKPOINT
from baton.kv_transfer.interfaces import BlockSlice, Transport
from baton.kv_transfer.pools import HostPool
from baton.node.records import ReadRecord, StepRecord
from baton.protocol.config import ClusterConfig
from baton.protocol.messages import Role
from baton.protocol.sampling import SamplingParams
from tests.support.checkpoints import tiny_cluster
from tests.support.node_threads import NodeThreads, never_local, wrap_transports
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
    return sum(
        said == question.answer for said, question in zip(answers, asked, strict=True)
    )


def settings(num_guesses: int = 0) -> ClusterConfig:
    return tiny_cluster(
        CHECKPOINT,
        cache={"num_blocks": 1200},
        engine={"max_num_batched_tokens": 512, "num_speculative_tokens": num_guesses},
        router={"local_prefill": "never"},
        transfer={"transport": "shm"},
    )


async def recalled(llm: AsyncLLM) -> list[str]:
    params = SamplingParams(temperature=0, max_tokens=8, output_kind="final")
    answers = []
    for question in memory().questions:
        async for output in llm.generate(memory().told + question.prompt, params):
            last = output
        answers.append(last.outputs[0].text)
    return answers


def test_it_recalls_what_transformers_recalls_and_a_damaged_block_costs_facts(
    tmp_path, monkeypatch
):
    """Decode reads the prompt once and caches it, so all questions meet the same damage."""
    assert score(expected()) >= 0.99 * len(memory().questions)
    steps = []
    for num_guesses in (0, 4):
        folder = tmp_path / f"guesses-{num_guesses}"
        folder.mkdir()
        nodes = NodeThreads(folder, settings(num_guesses))
        assert nodes.run(recalled) == expected()
        steps.append(
            len(
                [
                    one
                    for one in nodes.records("decode-0")
                    if isinstance(one, StepRecord)
                ]
            )
        )
    assert steps[1] < 0.7 * steps[0], "its answers stand in the prompt"
    reads: list[tuple[int, ...]] = []

    def blanking(inner: Transport, pool: HostPool) -> Transport:
        def landed(local: tuple[int, ...], _: BlockSlice) -> None:
            reads.append(local)
            if len(reads) == 2:  # that of the second chunk
                start = local[len(local) // 2] * pool.shape.block_bytes
                pool.buffer[start : start + pool.shape.block_bytes] = bytes(
                    pool.shape.block_bytes
                )

        return WatchedTransport(inner, landed=landed)

    wrap_transports(monkeypatch, blanking)
    (tmp_path / "damaged").mkdir()
    damaged = NodeThreads(tmp_path / "damaged", settings()).run(recalled)
    told = memory()
    whole = expected()
    lost = [
        told.told.index(question.answer)
        for question, said, knew in zip(told.questions, damaged, whole, strict=True)
        if said != knew
    ]
    assert score(damaged) < score(whole)
    # All of them stood in that block or across its edges: two neighbours and a half, at most four.
    assert 1 <= len(lost) <= 4
    assert max(lost) - min(lost) < 4 * LONGEST_FACT


PROMPT = [10 + (i * i + 7 * i) % 241 for i in range(6 * 16 + 5)]
PARAMS = SamplingParams(
    temperature=0, max_tokens=40, ignore_eos=True, output_kind="final"
)


async def answer(llm: AsyncLLM) -> list[int]:
    async for output in llm.generate(PROMPT, PARAMS):
        last = output
    return last.outputs[0].token_ids


def blank_one_slice() -> Callable[[Transport, HostPool], Transport]:
    """Blank what the first read that any transport ends has brought of its first block, once."""
    blanked: list[int] = []

    def wrap(inner: Transport, pool: HostPool) -> Transport:
        def landed(local: tuple[int, ...], part: BlockSlice) -> None:
            if not blanked:
                start = local[0] * pool.shape.block_bytes + part.local_offset
                blanked.append(start)
                pool.buffer[start : start + part.num_bytes] = bytes(part.num_bytes)

        return WatchedTransport(inner, landed=landed)

    return wrap


def test_blocks_that_are_verified_are_read_again_when_they_came_with_other_bytes(
    tmp_path, monkeypatch, caplog
):
    wrap_transports(monkeypatch, blank_one_slice())
    cache = {"num_blocks": 64, "enable_prefix_caching": False}
    config = tiny_cluster(
        cache=cache, engine={"max_num_batched_tokens": 16}, transfer={"verify_kv": True}
    )
    ranks: dict[Role, int] = {"prefill": 2}
    nodes = NodeThreads(tmp_path, never_local(config), ranks=ranks)
    answered = nodes.run(answer)
    reads = [read for read in nodes.records("decode-0") if isinstance(read, ReadRecord)]
    # The other reads of that attempt may be cancelled, and nothing else fails.
    found = [read.failure for read in reads if read.failure not in (None, "cancelled")]
    assert found == ["corrupt_blocks"]
    told = [
        record for record in caplog.records if "with other bytes" in record.getMessage()
    ]
    assert [vars(record)["fields"]["so_far"] for record in told] == [1]
    (tmp_path / "whole").mkdir()
    monkeypatch.undo()
    whole = NodeThreads(tmp_path / "whole", never_local(config), ranks=ranks).run(
        answer
    )
    assert answered == whole
