"""Models that draft tokens, served by nodes that hand over what the head has stored."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor

from baton.async_llm import AsyncLLM
from baton.model.runner.drafting import Drafter
from baton.node.scheduling.plan import Slice
from baton.protocol.config import ClusterConfig
from baton.protocol.messages import Role
from baton.protocol.sampling import SamplingParams
from tests.support.checkpoints import tiny_cluster
from tests.support.cluster import Cluster
from tests.support.depth import nightly
from tests.support.draft_heads import (
    NextnReference,
    eagle_folder,
    eagle_model,
    nextn_folder,
)
from tests.support.node_threads import NodeThreads
from tests.support.oracle import prompt
from tests.support.stream_reader import StreamReader

LENGTHS = (15, 16, 17, 64, 70)
NUM_DRAFTS = 3
HEAD = {"num_speculative_tokens": NUM_DRAFTS, "speculative_method": "mtp"}


def head_of(kind: str) -> dict[str, object]:
    if kind != "eagle3":
        return {**HEAD}
    draft = str(eagle_folder())
    return {**HEAD, "speculative_method": "eagle3", "speculative_model": draft}


def config_of(
    kind: str, engine: dict[str, object], **sections: object
) -> ClusterConfig:
    return tiny_cluster(
        eagle_model() if kind == "eagle3" else nextn_folder(kind),
        cache={"num_blocks": 900},
        engine={"max_num_batched_tokens": 40, **engine},
        router={"local_prefill": "never"},
        transfer={"verify_kv": True},
        **sections,
    )


async def whole(llm: AsyncLLM, length: int, temperature: float) -> list[list[int]]:
    """What two choices of a prompt say."""
    how = SamplingParams(
        max_tokens=30, temperature=temperature, n=2, seed=3, ignore_eos=True
    )
    async for output in llm.generate(prompt(length), how):
        last = output
    return [choice.token_ids for choice in last.outputs]


async def all_at_once(llm: AsyncLLM) -> list[list[int]]:
    asked = [
        whole(llm, length, temperature)
        for length in LENGTHS
        for temperature in (0.0, 0.9)
    ]
    return [tokens for choices in await asyncio.gather(*asked) for tokens in choices]


def test_drafts_behind_a_handoff_are_those_of_plain_torch(tmp_path, monkeypatch):
    """Prompts are cached on both nodes the second time, and choices share their blocks."""
    noted: list[tuple[list[int], list[int]]] = []
    compute = Drafter.drafts

    def noting(
        self: Drafter, slices: Sequence[Slice], hidden: Tensor, sampled: Sequence[int]
    ) -> Tensor:
        drafts = compute(self, slices, hidden, sampled)
        ids = iter(sampled)
        for part, found in zip(slices, drafts.tolist(), strict=True):
            tokens = tuple(next(ids) for _ in range(part.num_sampled))
            own = found[: part.num_drafts or 0]
            if own and part.sampling is not None and part.sampling.temperature == 0.0:
                # Greedy choices of a prompt say the same.
                num_known = part.start + part.length - part.num_guesses
                noted.append(
                    ([num_known, part.num_prompt_tokens, *part.kept(tokens)], own)
                )
        return drafts

    monkeypatch.setattr(Drafter, "drafts", noting)
    cluster = NodeThreads(tmp_path, config_of("glm4_moe", HEAD))

    async def twice(llm: AsyncLLM) -> list[list[int]]:
        first = await all_at_once(llm)
        assert await all_at_once(llm) == first
        return first

    outputs = cluster.run(twice)
    texts = {
        length: prompt(length) + outputs[4 * i] for i, length in enumerate(LENGTHS)
    }
    reference = NextnReference("glm4_moe")
    assert {num_prompt for (_, num_prompt, *_), _ in noted} == set(LENGTHS)
    seen = set()
    for (num_known, num_prompt, *tokens), drafts in noted:
        text = texts[num_prompt][:num_known] + tokens
        if (tuple(text), len(drafts)) not in seen:
            assert drafts == reference.drafts(text, len(drafts))
        seen.add((tuple(text), len(drafts)))
    assert len(seen) > 20 * len(LENGTHS)


@pytest.mark.parametrize(
    ("kind", "prefill", "decode"),
    [
        ("glm4_moe", 1, 1),
        ("deepseek_v3", 1, 2),
        ("qwen3_5_text", 2, 1),
        nightly("qwen3_next", 1, 2),
        nightly("deepseek_v32", 1, 2),
        nightly("glm4_moe", 2, 1),
        nightly("glm4_moe", 2, 2),
        nightly("eagle3", 1, 2),
        nightly("eagle3", 2, 1),
    ],
)
def test_ranks_of_any_number_say_the_same_with_a_head(kind, prefill, decode, tmp_path):
    ranks: dict[Role, int] = {"prefill": prefill, "decode": decode}
    outputs = []
    for name, engine in (("head", head_of(kind)), ("none", {})):
        folder = tmp_path / name
        folder.mkdir()
        cluster = NodeThreads(folder, config_of(kind, engine), ranks=ranks)
        outputs.append(cluster.run(all_at_once))
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize(
    "kind", ["deepseek_v3", nightly("qwen3_5_text"), nightly("eagle3")]
)
def test_streams_whose_node_is_killed_go_on_with_the_same_tokens(kind, tmp_path):
    body: dict[str, Any] = {
        "model": "tiny",
        "prompt": prompt(50),
        "max_tokens": 200,
        "seed": 7,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    said = []
    for name, engine in (("none", {}), ("head", head_of(kind))):
        folder = tmp_path / name
        folder.mkdir()
        with Cluster(folder, config_of(kind, engine)) as cluster:
            readers = [
                StreamReader(cluster, body | {"temperature": of}) for of in (0, 0.9)
            ]
            if engine:
                readers[0].wait_for_more(20)
                cluster.kill("decode-0")
                cluster.start_node("decode", 0)
            assert [reader.join() for reader in readers] == [None, None]
            said += [[reader.token_ids for reader in readers]]
    assert [len(tokens) for tokens in said[0]] == [200, 200]
    assert said[0] == said[1]
