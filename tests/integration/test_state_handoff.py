"""Models whose layers keep a state, served by nodes that hand it over with the keys and values."""

import asyncio

import msgspec
import pytest

from baton.async_llm import AsyncLLM
from baton.protocol.config import ClusterConfig
from baton.protocol.messages import Role
from baton.protocol.sampling import SamplingParams
from baton.router.outputs import RequestOutput
from tests.integration.test_split_parity import (
    BLOCK,
    LENGTHS,
    expected_of,
    greedy,
    settings,
)
from tests.support.depth import nightly
from tests.support.foreign_checkpoints import foreign_folder
from tests.support.node_threads import NodeThreads, always_local, never_local
from tests.support.oracle import count_ties, prompt

KINDS = ("qwen3_next", "qwen3_5_text")
STATE_BLOCKS = {
    "qwen3_next": 28,
    "qwen3_5_text": 28,
    "qwen3_5_moe": 28,
    "granitemoehybrid": 27,
    "lfm2": 1,
    "nemotron_h": 18,
    "lfm2_moe": 1,
    "kimi_linear": 35,
}
BLOCK_BYTES = 4096
LATENT_BYTES = 2560


def config_of(kind: str, **cache: bool) -> ClusterConfig:
    config = settings(foreign_folder(kind), verify=True, **cache)
    return msgspec.structs.replace(
        config, cache=msgspec.structs.replace(config.cache, num_blocks=900)
    )


async def all_at_once(llm: AsyncLLM) -> list[RequestOutput]:
    return await asyncio.gather(*(greedy(llm, prompt(n)) for n in LENGTHS))


@pytest.mark.parametrize(
    ("kind", "prefill", "decode"),
    [
        (KINDS[0], 1, 1),
        nightly(KINDS[0], 1, 2),
        nightly(KINDS[1], 2, 1),
        nightly("qwen3_5_moe", 1, 1),
        ("granitemoehybrid", 1, 2),
        nightly("lfm2", 2, 1),
        ("kimi_linear", 1, 1),
        nightly("lfm2_moe", 1, 2),
        nightly("lfm2_moe", 2, 1),
        nightly("nemotron_h", 1, 2),
        nightly("nemotron_h", 2, 1),
    ],
)
def test_the_state_travels_as_more_blocks_to_ranks_of_any_number(
    kind, prefill, decode, tmp_path
):
    ranks: dict[Role, int] = {"prefill": prefill, "decode": decode}
    config = never_local(config_of(kind, enable_prefix_caching=False))
    cluster = NodeThreads(tmp_path, config, ranks=ranks)
    folder = foreign_folder("qwen3_5_moe_text" if kind == "qwen3_5_moe" else kind)
    ties = 0
    for length, output in zip(LENGTHS, cluster.run(all_at_once), strict=True):
        ties += count_ties(expected_of(folder, length), output.outputs[0].token_ids)
        assert output.metrics.path == "disaggregated"
    assert ties <= 1
    assert cluster.prompt_tokens_computed("decode-0") == 0
    num_blocks = sum(-(-n // BLOCK) + STATE_BLOCKS[kind] for n in LENGTHS)
    block_bytes = LATENT_BYTES if kind == "kimi_linear" else BLOCK_BYTES
    assert cluster.num_bytes_read("decode-0") == num_blocks * block_bytes


@pytest.mark.parametrize("kind", [KINDS[0], nightly(KINDS[1])])
def test_a_decode_node_computes_prompts_of_its_own(kind, tmp_path):
    cluster = NodeThreads(tmp_path, always_local(config_of(kind)))
    for length, output in zip(LENGTHS, cluster.run(all_at_once), strict=True):
        expected = expected_of(foreign_folder(kind), length)
        assert count_ties(expected, output.outputs[0].token_ids) == 0


@pytest.mark.parametrize("is_split", [True, False])
def test_a_prompt_goes_on_from_a_checkpoint_of_the_cache(is_split, tmp_path):
    length = 197
    token_ids = prompt(197)
    cluster = NodeThreads(
        tmp_path, (never_local if is_split else always_local)(config_of(KINDS[0]))
    )

    async def thrice(llm: AsyncLLM) -> list[RequestOutput]:
        return [
            await greedy(llm, [*token_ids[:n], *prompt(length - n, 9)])
            for n in (197, 197, 70)
        ]

    first, second, third = cluster.run(thrice)
    expected = expected_of(foreign_folder(KINDS[0]), length)
    for output in (first, second):
        assert count_ties(expected, output.outputs[0].token_ids) == 0
    assert third.metrics.num_cached_tokens == 0
    computes = "prefill-0" if is_split else "decode-0"
    assert cluster.prompt_tokens_computed(computes) == 197 + 5 + 197
    if is_split:  # decode has the keys and values of whole blocks, but no state
        num_blocks = 13 + 1 + 9 + 3 * STATE_BLOCKS[KINDS[0]]
        assert cluster.num_bytes_read("decode-0") == num_blocks * BLOCK_BYTES


def test_choices_go_on_from_copies_of_one_state(tmp_path):
    """Seeded, so each choice says what it says alone."""
    token_ids = prompt(75)

    async def some(llm: AsyncLLM) -> list[list[list[int]]]:
        found = []
        for _ in range(2):
            params = SamplingParams(
                n=3, seed=5, temperature=1.0, max_tokens=20, ignore_eos=True
            )
            async for output in llm.generate(token_ids, params):
                last = output
            found.append([one.token_ids for one in last.outputs])
        return found

    said = []
    for name, where in (("split", never_local), ("local", always_local)):
        (tmp_path / name).mkdir()
        cluster = NodeThreads(tmp_path / name, where(config_of(KINDS[0])))
        said += cluster.run(some)
    assert all(one == said[0] for one in said)
    assert len({tuple(choice) for choice in said[0]}) == 3
