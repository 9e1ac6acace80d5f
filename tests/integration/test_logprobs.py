"""Log probabilities are transformers', the same split and aggregated, and one for each token."""

import asyncio
import json
from pathlib import Path

import torch

from baton.async_llm import AsyncLLM
from baton.protocol.config import ClusterConfig
from baton.protocol.sampling import SamplingParams
from baton.router.outputs import CompletionOutput
from tests.support.checkpoints import model_folder, tiny_cluster
from tests.support.cluster import Cluster
from tests.support.completions import ask
from tests.support.node_threads import NodeThreads, always_local, never_local
from tests.support.oracle import Oracle, prompt

NUM_TOKENS, NUM_TOP = 12, 4
ASKED = SamplingParams(
    n=2, seed=5, temperature=0.8, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=NUM_TOP,
    presence_penalty=1.0,
)  # fmt: skip


def settings() -> ClusterConfig:
    return tiny_cluster(
        model_folder("llama"), cache={"block_size": 16, "num_blocks": 700},
        engine={"max_num_batched_tokens": 64, "max_num_seqs": 16},
    )  # fmt: skip


async def said(llm: AsyncLLM) -> list[list[CompletionOutput]]:
    async def one(length: int) -> list[CompletionOutput]:
        async for output in llm.generate(prompt(length), ASKED):
            last = output
        return last.outputs

    return await asyncio.gather(*map(one, (5, 70, 130)))


def test_they_are_those_of_transformers_and_equal_split_and_aggregated(tmp_path: Path) -> None:
    split = NodeThreads(tmp_path, never_local(settings())).run(said)
    together = NodeThreads(tmp_path, always_local(settings())).run(said)
    assert [[one.logprobs for one in outputs] for outputs in split] == [
        [one.logprobs for one in outputs] for outputs in together
    ]
    model = Oracle(model_folder("llama")).model
    for length, outputs in zip((5, 70, 130), split, strict=True):
        for output in outputs:
            assert output.logprobs is not None
            assert len(output.logprobs) == len(output.token_ids) == NUM_TOKENS
            tokens = prompt(length) + output.token_ids
            with torch.inference_mode():
                logits = model(torch.tensor([tokens])).logits[0, length - 1 : -1].double()
            expected = logits.log_softmax(-1)
            for token_id, found, row in zip(
                output.token_ids, output.logprobs, expected, strict=True
            ):
                assert NUM_TOP <= len(found) <= NUM_TOP + 1
                assert next(iter(found)) == token_id
                for other, one in found.items():
                    assert abs(one.logprob - float(row[other])) < 1e-4
                best = sorted(found.values(), key=lambda one: one.rank)
                assert [one.rank for one in best[:NUM_TOP]] == list(range(1, NUM_TOP + 1))
                assert abs(best[0].logprob - float(row.max())) < 1e-4
            assert output.cumulative_logprob is not None
            assert output.cumulative_logprob < 0


def test_the_forms_of_openai_have_an_entry_for_each_token(cluster: Cluster) -> None:
    asked = {"prompt": prompt(9), "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    (whole,) = cluster.complete(**asked, logprobs=2)["choices"]
    found = whole["logprobs"]
    assert {len(found[name]) for name in ("tokens", "token_logprobs", "top_logprobs")} == {6}
    assert found["text_offset"][0] == 0
    lengths = [len(token) for token in found["tokens"]]
    assert found["text_offset"][1:] == [sum(lengths[: i + 1]) for i in range(5)]
    with ask(cluster.url(""), {**asked, "logprobs": 2, "stream": True}) as reply:
        lines = [line[6:] for line in reply.read().decode().splitlines() if line[:5] == "data:"]
    parts = [json.loads(line)["choices"][0]["logprobs"] for line in lines if line != "[DONE]"]
    assert [value for part in parts for value in part["token_logprobs"]] == found["token_logprobs"]
    assert [value for part in parts for value in part["text_offset"]] == found["text_offset"]
    (plain,) = cluster.complete(**asked)["choices"]
    assert (plain["text"], plain["logprobs"]) == (whole["text"], None)
