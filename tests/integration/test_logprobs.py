"""Log probabilities are transformers', and the same bits however they are served."""

import asyncio
import json
import urllib.request
from functools import cache
from itertools import accumulate

import pytest
import torch

from baton.async_llm import AsyncLLM
from baton.protocol.config import ClusterConfig
from baton.protocol.messages import Role
from baton.protocol.sampling import SamplingParams
from baton.router.outputs import CompletionOutput, Logprob, PromptScores
from tests.support.checkpoints import model_folder, tiny_cluster
from tests.support.completions import ask, post
from tests.support.node_threads import NodeThreads, always_local, never_local
from tests.support.oracle import Oracle, prompt

LENGTHS = (1, 2, 17, 70, 130)
NUM_TOP = 4
NUM_TOKENS = 12
PLAIN = SamplingParams(seed=5, max_tokens=30, ignore_eos=True)
SAMPLED = PLAIN.clone(
    n=2, temperature=0.8, max_tokens=NUM_TOKENS, logprobs=NUM_TOP, presence_penalty=1.0
)


def settings(budget: int = 64) -> ClusterConfig:
    return tiny_cluster(
        model_folder("llama"),
        cache={"block_size": 16, "num_blocks": 700},
        engine={"max_num_batched_tokens": budget, "max_num_seqs": 16},
    )


async def said(llm: AsyncLLM) -> list[list[CompletionOutput]]:
    async def one(length: int) -> list[CompletionOutput]:
        async for output in llm.generate(prompt(length), SAMPLED):
            last = output
        return last.outputs

    return await asyncio.gather(*map(one, LENGTHS[2:]))


async def scores(llm: AsyncLLM) -> list[list[PromptScores]]:
    """Those of all prompts at once, beside others, then with all blocks cached, and alone."""

    async def one(length: int, **params: object) -> PromptScores:
        asked = PLAIN.clone(
            max_tokens=1 + length % 3, prompt_logprobs=NUM_TOP, **params
        )
        async for output in llm.generate(prompt(length), asked):
            last = output
        assert len(last.outputs[0].token_ids) == 1 + length % 3
        assert last.prompt_logprobs is not None
        return last.prompt_logprobs

    async def other(salt: int, num_top: int | None) -> None:
        asked = PLAIN.clone(prompt_logprobs=num_top, logprobs=num_top)
        async for output in llm.generate(prompt(90, salt), asked):
            assert (output.prompt_logprobs is None) == (num_top is None)

    async def asked() -> list[PromptScores]:
        return list(await asyncio.gather(*map(one, LENGTHS)))

    cold, *_ = await asyncio.gather(asked(), other(1, None), other(2, 9))
    hot = await asked()
    choices = await one(LENGTHS[-1], n=3)
    fewer = await one(LENGTHS[-1], logprobs=1)
    async for output in llm.generate(prompt(LENGTHS[-1]), PLAIN):
        last = output
    assert last.num_cached_tokens >= 112  # they have been there all the time
    return [cold, hot, [*hot[:-1], choices], [*hot[:-1], fewer]]


CASES = [
    never_local(settings()),
    always_local(settings()),
    never_local(settings(budget=16)),
    always_local(settings(budget=23)),
]


@cache
def oracle() -> Oracle:
    return Oracle(model_folder("llama"))


def values_of(token_ids: list[int]) -> torch.Tensor:
    """What transformers gives for the token that follows each of these."""
    with torch.inference_mode():
        return (
            oracle().model(torch.tensor([token_ids])).logits[0].double().log_softmax(-1)
        )


def check_one(found: dict[int, Logprob], token_id: int, row: torch.Tensor) -> None:
    """The token comes first, then the likeliest, with their ranks."""
    assert next(iter(found)) == token_id
    assert NUM_TOP <= len(found) <= NUM_TOP + 1
    for other, one in found.items():
        assert abs(one.logprob - float(row[other])) < 1e-4
    best = sorted(found.values(), key=lambda one: one.rank)[:NUM_TOP]
    assert [one.rank for one in best] == list(range(1, NUM_TOP + 1))
    assert abs(best[0].logprob - float(row.max())) < 1e-4


def check(found: list[PromptScores]) -> None:
    for length, scored in zip(LENGTHS, found, strict=True):
        token_ids = prompt(length)
        assert scored[0] is None
        assert len(scored) == length
        rows = values_of(token_ids)[:-1]
        for token_id, one, row in zip(token_ids[1:], scored[1:], rows, strict=True):
            assert one is not None
            check_one(one, token_id, row)


def test_those_of_outputs_are_equal_split_and_aggregated(tmp_path):
    found = []
    for index, config in enumerate(CASES[:2]):
        (folder := tmp_path / str(index)).mkdir()
        found.append(NodeThreads(folder, config).run(said))
    split, together = found
    assert [[one.logprobs for one in outputs] for outputs in split] == [
        [one.logprobs for one in outputs] for outputs in together
    ]
    for length, outputs in zip(LENGTHS[2:], split, strict=True):
        for output in outputs:
            assert output.logprobs is not None
            assert output.cumulative_logprob is not None
            assert output.cumulative_logprob < 0
            assert len(output.logprobs) == len(output.token_ids) == NUM_TOKENS
            rows = values_of(prompt(length) + output.token_ids)[length - 1 : -1]
            for one in zip(output.logprobs, output.token_ids, rows, strict=True):
                check_one(*one)


def test_those_of_prompts_are_the_same_split_aggregated_cached_in_chunks_and_beside_others(
    tmp_path,
):
    found = []
    for index, config in enumerate(CASES):
        (folder := tmp_path / str(index)).mkdir()
        found += NodeThreads(folder, config).run(scores)
    assert all(one == found[0] for one in found)
    check(found[0])


@pytest.mark.release
def test_ranks_give_them_too(tmp_path):
    ranks: dict[Role, int] = {"prefill": 2, "decode": 2}
    split = NodeThreads(tmp_path, never_local(settings()), ranks=ranks).run(scores)
    assert all(one == split[0] for one in split)
    check(split[0])


def test_the_forms_of_openai_have_an_entry_for_each_token(cluster):
    asked = {"prompt": prompt(9), "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    (whole,) = cluster.complete(**asked, logprobs=2)["choices"]
    found = whole["logprobs"]
    assert {
        len(found[name]) for name in ("tokens", "token_logprobs", "top_logprobs")
    } == {6}
    assert found["text_offset"][0] == 0
    lengths = [len(token) for token in found["tokens"]]
    assert found["text_offset"][1:] == [sum(lengths[: i + 1]) for i in range(5)]
    with ask(cluster.url(""), {**asked, "logprobs": 2, "stream": True}) as reply:
        lines = [
            line[6:]
            for line in reply.read().decode().splitlines()
            if line[:5] == "data:"
        ]
    parts = [
        json.loads(line)["choices"][0]["logprobs"] for line in lines if line != "[DONE]"
    ]
    assert [value for part in parts for value in part["token_logprobs"]] == found[
        "token_logprobs"
    ]
    assert [value for part in parts for value in part["text_offset"]] == found[
        "text_offset"
    ]
    (plain,) = cluster.complete(**asked)["choices"]
    assert (plain["text"], plain["logprobs"]) == (whole["text"], None)


ASKED = {
    "prompt": [prompt(9), prompt(33, 1)],
    "max_tokens": 3,
    "temperature": 0,
    "ignore_eos": True,
}
COLUMNS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def test_an_echo_has_them_before_those_of_the_output(cluster):
    plain = cluster.complete(**ASKED, logprobs=2)["choices"]
    asked = {**ASKED, "echo": True, "logprobs": 2, "n": 2, "prompt_logprobs": 1}
    choices = cluster.complete(**asked)["choices"]
    assert [one["index"] for one in choices] == [0, 1, 2, 3]
    for index, choice in enumerate(choices):
        own = plain[index // 2]
        found = choice["logprobs"]
        ids = ASKED["prompt"][index // 2]
        assert {len(found[name]) for name in COLUMNS} == {len(ids) + 3}
        assert found["token_logprobs"][-3:] == own["logprobs"]["token_logprobs"]
        assert "".join(found["tokens"]).endswith(own["text"])
        assert choice["text"].endswith(own["text"])
        # Names like `bytes:\\xe6` are parts of characters.
        lengths = [
            1 if one.startswith("bytes:") else len(one) for one in found["tokens"]
        ]
        assert found["text_offset"][1:] == [*accumulate(lengths)][:-1]
        assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
        rows = choice["prompt_logprobs"]
        assert rows[0] is None
        for place, (token_id, row) in enumerate(zip(ids[1:], rows[1:], strict=True), 1):
            assert row[str(token_id)]["logprob"] == found["token_logprobs"][place]
            assert 1 <= len(row) <= 2 <= len(found["top_logprobs"][place]) <= 3
    alone = cluster.complete(**{**asked, "max_tokens": 0})
    assert alone["usage"]["completion_tokens"] == 0
    for choice, one in zip(choices, alone["choices"], strict=True):
        assert one["finish_reason"] == "length"
        assert one["logprobs"] == {
            name: choice["logprobs"][name][:-3] for name in COLUMNS
        }
        assert choice["text"].startswith(one["text"])
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
    with urllib.request.urlopen(
        post(cluster.url(""), {**chat, "prompt_logprobs": 0}, "/v1/chat/completions")
    ) as reply:
        body = json.loads(reply.read())
    assert len(body["prompt_logprobs"]) == body["usage"]["prompt_tokens"]


@pytest.mark.parametrize("max_tokens", [3, 0])
def test_a_streamed_echo_has_the_same(cluster, max_tokens):
    asked = {**ASKED, "echo": True, "logprobs": 1, "n": 2, "max_tokens": max_tokens}
    asked["return_tokens_as_token_ids"] = True
    whole = cluster.complete(**asked)["choices"]
    with ask(cluster.url(""), {**asked, "stream": True}) as reply:
        lines = [
            line[6:]
            for line in reply.read().decode().splitlines()
            if line[:5] == "data:"
        ]
    parts = [json.loads(line)["choices"][0] for line in lines if line != "[DONE]"]
    for index, choice in enumerate(whole):
        own = [part for part in parts if part["index"] == index]
        assert "".join(part["text"] for part in own) == choice["text"]
        for name in COLUMNS:
            shown = [
                one
                for part in own
                if part["logprobs"]
                for one in part["logprobs"][name]
            ]
            assert shown == choice["logprobs"][name]
        ids = ASKED["prompt"][index // 2]
        assert choice["logprobs"]["tokens"][: len(ids)] == [
            f"token_id:{one}" for one in ids
        ]
