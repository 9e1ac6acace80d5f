"""A conversation whose responses are read from the decode node that made them."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from baton.async_llm import AsyncLLM
from baton.node.scheduling.prefix_cache import INTERVAL_S
from baton.protocol.messages import Role
from baton.router.outputs import RequestOutput
from tests.integration.test_split_parity import BLOCK, greedy, oracle, settings
from tests.support.checkpoints import model_folder
from tests.support.depth import nightly
from tests.support.foreign_checkpoints import foreign_folder
from tests.support.node_threads import NodeThreads, never_local
from tests.support.oracle import count_ties, prompt

NUM_TURNS = 3
NUM_NEW, NUM_OUTPUT = 40, 100  # tokens of a turn
NUM_ALONE = 120  # of a prompt that no decode node gets


async def conversation(llm: AsyncLLM) -> list[RequestOutput]:
    turns: list[RequestOutput] = []
    history: list[int] = []
    for turn in range(NUM_TURNS):
        history = [*history, *prompt(NUM_NEW, salt=turn)]
        turns.append(await greedy(llm, history, NUM_OUTPUT))
        history += turns[-1].outputs[0].token_ids
        # Until the router knows what the node has cached.
        await asyncio.sleep(2 * INTERVAL_S)
    return turns


def check_tokens(folder: Path, turns: list[RequestOutput]) -> None:
    num_ties = 0
    for turn in turns:
        expected = oracle(folder).greedy(turn.prompt_token_ids, NUM_OUTPUT)
        num_ties += count_ties(expected, turn.outputs[0].token_ids)
        assert turn.metrics.path == "disaggregated"
    assert num_ties <= 1


@pytest.mark.parametrize(
    ("folder", "prefill", "decode"),
    [
        (lambda: model_folder("qwen3"), 1, 1),
        (lambda: model_folder("qwen3"), 1, 2),
        nightly(lambda: model_folder("qwen3"), 2, 1),
        (lambda: foreign_folder("deepseek_v3"), 1, 1),
    ],
    ids=["equal", "from two ranks", "to two ranks", "latent"],
)
def test_a_turn_computes_only_what_is_new(folder, prefill, decode, tmp_path):
    ranks: dict[Role, int] = {"prefill": prefill, "decode": decode}
    # Nodes with other numbers of ranks compute other bits.
    config = never_local(settings(folder(), verify=True, prefix_reads="any"))
    turns = NodeThreads(tmp_path, config, ranks=ranks).run(conversation)
    check_tokens(folder(), turns)
    assert turns[0].metrics.num_cached_tokens == 0
    for turn in turns[1:]:
        # The last token of a response is in no block, as nothing followed it.
        num_old = (len(turn.prompt_token_ids) - NUM_NEW - 1) // BLOCK * BLOCK
        assert turn.metrics.num_cached_tokens == num_old
        assert turn.metrics.num_read_tokens >= NUM_OUTPUT // BLOCK * BLOCK
        assert turn.metrics.prefix_read_s > 0


def test_a_turn_computes_the_response_where_nodes_do_not_lend(tmp_path):
    folder = model_folder("qwen3")
    config = never_local(settings(folder, prefix_reads="off"))
    turns = NodeThreads(tmp_path, config).run(conversation)
    check_tokens(folder, turns)
    assert [turn.metrics.num_read_tokens for turn in turns] == [0] * NUM_TURNS
    assert turns[1].metrics.num_cached_tokens == NUM_NEW // BLOCK * BLOCK


def test_a_node_that_drains_hands_its_cache_over(tmp_path):
    """Prefill has what a decode node leaves, and decode lends what a prefill node leaves."""
    folder = model_folder("qwen3")
    config = msgspec.structs.replace(
        never_local(settings(folder, verify=True)), prefill=2, decode=2
    )
    threads = NodeThreads(tmp_path, config)

    async def turns_and_drains(llm: AsyncLLM) -> list[RequestOutput]:
        history = prompt(NUM_NEW)
        first = await greedy(llm, history, NUM_OUTPUT)
        history += first.outputs[0].token_ids
        await asyncio.sleep(2 * INTERVAL_S)
        leaver = max(
            ("decode-0", "decode-1"), key=lambda name: len(threads.records(name))
        )
        await asyncio.to_thread(threads.nodes[leaver].drain)
        await asyncio.sleep(2 * INTERVAL_S)
        second = await greedy(llm, [*history, *prompt(NUM_NEW, salt=1)], NUM_OUTPUT)
        alone = await greedy(llm, prompt(NUM_ALONE, salt=2), 1)
        leaver = max(
            ("prefill-0", "prefill-1"), key=lambda name: _computed_last(threads, name)
        )
        await asyncio.sleep(2 * INTERVAL_S)
        await asyncio.to_thread(threads.nodes[leaver].drain)
        await asyncio.sleep(2 * INTERVAL_S)
        return [
            first,
            second,
            alone,
            await greedy(llm, prompt(NUM_ALONE, salt=2), NUM_OUTPUT),
        ]

    first, second, alone, again = threads.run(turns_and_drains)
    check_tokens(folder, [first, second, again])
    num_old = (NUM_NEW + NUM_OUTPUT - 1) // BLOCK * BLOCK
    assert second.metrics.num_cached_tokens == num_old
    assert alone.metrics.path == "prefill_only"
    assert again.metrics.num_cached_tokens == NUM_ALONE // BLOCK * BLOCK
    assert again.metrics.num_read_tokens == NUM_ALONE // BLOCK * BLOCK


def _computed_last(threads: NodeThreads, name: str) -> float:
    return max((record.ended_s for record in threads.records(name)), default=0.0)
