"""Blocks that a node finds in its tiers, after its pool has lost them or after a restart."""

import asyncio
import os
from pathlib import Path

import msgspec
import pytest

from baton.async_llm import AsyncLLM
from baton.protocol.config import ClusterConfig
from baton.protocol.messages import Role
from baton.router.outputs import RequestOutput
from tests.integration.test_split_parity import BLOCK, greedy, oracle, settings
from tests.support.checkpoints import model_folder
from tests.support.depth import nightly
from tests.support.node_threads import NodeThreads, always_local, never_local
from tests.support.oracle import count_ties, prompt

NUM_PROMPT, NUM_OUTPUT = 160, 8
NUM_CACHED = (NUM_PROMPT - 1) // BLOCK * BLOCK
SAVED_S = 0.6  # three times what it takes
FOLDER_GIB = 1 / 64  # a node lists all its slots when it starts
POOL_BLOCKS = 2 * NUM_PROMPT // BLOCK


def small(config: ClusterConfig, **cache: object) -> ClusterConfig:
    """`config` with pools that hold about two prompts."""
    changed = msgspec.structs.replace(
        config.cache,
        num_blocks=POOL_BLOCKS,
        memory_mib=0,
        prefix_reads="off",
        folder_size=FOLDER_GIB,
        **cache,
    )
    return msgspec.structs.replace(config, cache=changed)


async def ask(llm: AsyncLLM, salt: int) -> RequestOutput:
    output = await greedy(llm, prompt(NUM_PROMPT, salt=salt), NUM_OUTPUT)
    await asyncio.sleep(SAVED_S)  # its blocks are saved meanwhile
    return output


async def ask_and_forget(llm: AsyncLLM) -> list[RequestOutput]:
    """Ask one thing, others until the pool has lost it, and the first thing again."""
    return [await ask(llm, salt) for salt in (0, 1, 2, 3, 0)]


async def ask_once(llm: AsyncLLM) -> list[RequestOutput]:
    return [await ask(llm, salt=0)]


def check(outputs: list[RequestOutput]) -> None:
    folder = model_folder("qwen3")
    for output in outputs:
        expected = oracle(folder).greedy(output.prompt_token_ids, NUM_OUTPUT)
        assert not count_ties(expected, output.outputs[0].token_ids)


@pytest.mark.parametrize("tier", ["memory", "folder"])
@pytest.mark.parametrize(
    "split", [never_local, always_local], ids=["prefill", "decode"]
)
@pytest.mark.parametrize("num_ranks", [1, nightly(2)])
def test_what_a_pool_has_lost_is_read_from_a_tier(tier, split, num_ranks, tmp_path):
    cache = {"folder": str(tmp_path / "cache")}
    if tier == "memory":
        cache = {"kv_offloading_size": 0.01}
    config = split(small(settings(model_folder("qwen3")), **cache))
    ranks: dict[Role, int] = {"prefill": num_ranks, "decode": num_ranks}
    outputs = NodeThreads(tmp_path, config, ranks=ranks).run(ask_and_forget)
    check(outputs)
    cached = [output.metrics.num_cached_tokens for output in outputs]
    assert cached == [0, 0, 0, 0, NUM_CACHED]
    assert outputs[-1].metrics.num_read_tokens == NUM_CACHED
    assert outputs[-1].metrics.prefix_read_s > 0


def run(tmp_path: Path, config: ClusterConfig) -> RequestOutput:
    """A cluster of its own, on the folder of those before it."""
    sockets = tmp_path / f"{len(list(tmp_path.iterdir()))}"
    sockets.mkdir()
    [output] = NodeThreads(sockets, config).run(ask_once)
    check([output])
    return output


def test_a_node_that_restarts_finds_what_it_had(tmp_path):
    config = small(settings(model_folder("qwen3")), folder=str(tmp_path / "cache"))
    config = never_local(config)
    assert run(tmp_path, config).metrics.num_cached_tokens == 0
    assert run(tmp_path, config).metrics.num_cached_tokens == NUM_CACHED


@pytest.mark.parametrize(
    "damage", [nightly("torn"), "altered", nightly("swapped"), "index"]
)
def test_a_damaged_file_is_a_miss(damage, tmp_path):
    config = never_local(
        small(settings(model_folder("qwen3")), folder=str(tmp_path / "cache"))
    )
    run(tmp_path, config)
    [blocks] = (tmp_path / "cache/prefill-0").glob("*.blocks")
    data = bytearray(blocks.read_bytes())
    size = len(data) // (NUM_PROMPT // BLOCK)
    if damage == "torn":
        os.truncate(blocks, len(data) // 2 + 7)
    elif damage == "altered":
        data[len(data) // 2] ^= 1
        blocks.write_bytes(data)
    elif damage == "swapped":
        blocks.write_bytes(data[size : 2 * size] + data[:size] + data[2 * size :])
    else:
        os.truncate(blocks.with_suffix(".index"), 100)
    assert run(tmp_path, config).metrics.num_cached_tokens < NUM_CACHED
    # A block may count as saved until its record is read, and a slow node may end before it is.
    again = (run(tmp_path, config).metrics.num_cached_tokens for _ in range(6))
    assert NUM_CACHED in again
