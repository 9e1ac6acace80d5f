"""Outputs that have a form have it wherever they are computed, and are the same everywhere."""

import asyncio
import json
import re
from pathlib import Path

import msgspec

from baton.async_llm import AsyncLLM
from baton.protocol.config import ClusterConfig
from baton.protocol.sampling import SamplingParams, StructuredOutputsParams
from baton.router.outputs import CompletionOutput
from tests.support.checkpoints import model_folder, tiny_cluster
from tests.support.node_threads import NodeThreads, always_local, never_local
from tests.support.oracle import prompt

EOS = 2
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMS = (
    StructuredOutputsParams(json=PERSON),
    StructuredOutputsParams(json_object=True),
    StructuredOutputsParams(regex="[a-c]{3,20}-[0-9]{2}"),
    StructuredOutputsParams(choice=["yes", "no", "per haps"]),
    StructuredOutputsParams(grammar='start: "sum " NUM ("+" NUM)*\nNUM: /[0-9]{1,3}/'),
    StructuredOutputsParams(grammar='root ::= "a" | "b" root'),
    StructuredOutputsParams(
        structural_tag={
            "structures": [{"begin": "<f>", "schema": PERSON, "end": "</f>"}], "triggers": ["<f>"],
        }
    ),
)  # fmt: skip


def settings() -> ClusterConfig:
    return tiny_cluster(
        model_folder("llama", eos_token_id=EOS), cache={"block_size": 16, "num_blocks": 700},
        engine={"max_num_batched_tokens": 64, "max_num_seqs": 16},
    )  # fmt: skip


async def said(llm: AsyncLLM, length: int, params: SamplingParams) -> list[CompletionOutput]:
    final = msgspec.structs.replace(params, output_kind="final", detokenize=True)
    async for output in llm.generate(prompt(length), final):
        last = output
    return last.outputs


async def all_forms(llm: AsyncLLM) -> list[list[CompletionOutput]]:
    asked = [
        said(llm, 33 + 20 * index, SamplingParams(seed=index, max_tokens=120, n=2,
             temperature=0.9, structured_outputs=form))
        for index, form in enumerate(FORMS)
    ]  # fmt: skip
    free = said(llm, 90, SamplingParams(seed=3, max_tokens=60))
    return [*await asyncio.gather(*asked), await free]


def check(form: StructuredOutputsParams, output: CompletionOutput) -> None:
    text = output.text
    if output.finish_reason == "length":
        return
    if form.json is not None:
        found = json.loads(text)
        assert found.keys() == {"name", "age"}
        assert isinstance(found["age"], int)
    elif form.json_object:
        assert isinstance(json.loads(text), dict)
    elif form.regex is not None:
        assert re.fullmatch(form.regex, text)
    elif form.choice is not None:
        assert text in form.choice
    elif form.grammar is not None:
        assert re.fullmatch(r"sum \d{1,3}(\+\d{1,3})*|b*a", text)


def test_every_form_is_kept_and_equal_split_and_aggregated(tmp_path: Path) -> None:
    split = NodeThreads(tmp_path, never_local(settings())).run(all_forms)
    together = NodeThreads(tmp_path, always_local(settings())).run(all_forms)
    ended = 0
    for form, ours, theirs in zip((*FORMS, None), split, together, strict=True):
        assert [one.token_ids for one in ours] == [one.token_ids for one in theirs]
        for one in ours if form is not None else ():
            check(form, one)
            ended += one.finish_reason == "stop"
    assert ended >= 8
