"""Outputs that have a form have it wherever they are computed, and are the same everywhere.

Calls that a request demands have it, too, through OpenAI's client and a whole cluster.
"""

import asyncio
import json
import re
from typing import Any

import msgspec
import openai
import pytest

from baton.async_llm import AsyncLLM
from baton.model.sampling import token_masks
from baton.protocol.config import ClusterConfig
from baton.protocol.errors import BatonError
from baton.protocol.messages import Role
from baton.protocol.sampling import SamplingParams, StructuredOutputsParams
from baton.router.outputs import CompletionOutput
from tests.support.checkpoints import model_folder, tiny_cluster
from tests.support.node_threads import NodeThreads, always_local, never_local
from tests.support.oracle import prompt

EOS = 2
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer"},
    },
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
            "structures": [{"begin": "<f>", "schema": PERSON, "end": "</f>"}],
            "triggers": ["<f>"],
        }
    ),
)

PENALIZED = SamplingParams(
    seed=3,
    n=2,
    max_tokens=90,
    ignore_eos=True,
    presence_penalty=2.0,
    frequency_penalty=2.0,
    repetition_penalty=90.0,
    logit_bias={7: 80.0},
)


def settings() -> ClusterConfig:
    return tiny_cluster(
        model_folder("llama", eos_token_id=EOS),
        cache={"block_size": 16, "num_blocks": 700, "enable_prefix_caching": False},
        engine={"max_num_batched_tokens": 64, "max_num_seqs": 16},
    )


async def said(
    llm: AsyncLLM, length: int, params: SamplingParams
) -> list[CompletionOutput]:
    final = msgspec.structs.replace(params, output_kind="final", detokenize=True)
    async for output in llm.generate(prompt(length), final):
        last = output
    return last.outputs


async def all_forms(llm: AsyncLLM) -> list[list[CompletionOutput]]:
    asked = [
        said(
            llm,
            33 + 20 * index,
            SamplingParams(
                seed=index,
                max_tokens=120,
                n=2,
                temperature=0.9,
                structured_outputs=form,
            ),
        )
        for index, form in enumerate(FORMS)
    ]
    free = (
        SamplingParams(seed=3, max_tokens=60),
        SamplingParams(seed=3, max_tokens=60, bad_words=["a", "b"]),
        SamplingParams(seed=3, max_tokens=60, allowed_token_ids=[70, 71, 300]),
        PENALIZED,
    )
    return await asyncio.gather(*asked, *(said(llm, 90, params) for params in free))


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


def check_all(outputs: list[list[CompletionOutput]]) -> None:
    ended = 0
    for form, choices in zip(FORMS, outputs, strict=False):
        for choice in choices:
            check(form, choice)
            ended += choice.finish_reason == "stop"
    assert ended >= 8
    (free,), (without,), (allowed,), penalized = outputs[len(FORMS) :]
    assert {"a", "b"} & set(free.text)
    assert without.text
    assert {70, 71, 300} == set(allowed.token_ids)
    for choice in penalized:
        assert choice.token_ids[0] == 7, "its bias is large, until it has come"
        assert len(set(choice.token_ids)) == 90


def test_every_form_is_kept_and_equal_split_and_aggregated(tmp_path, monkeypatch):
    # Samples are repeated until it ends.
    monkeypatch.setattr(token_masks, "COMPILE_WAIT_S", 0.0)
    nodes = NodeThreads(tmp_path, never_local(settings()))
    split = nodes.run(all_forms)
    num_prompt_tokens = sum(33 + 20 * index for index in range(len(FORMS))) + 3 * 90
    assert nodes.prompt_tokens_computed("prefill-0") > num_prompt_tokens
    monkeypatch.undo()
    together = NodeThreads(tmp_path, always_local(settings())).run(all_forms)
    check_all(split)
    for ours, theirs in zip(split, together, strict=True):
        assert [one.token_ids for one in ours] == [one.token_ids for one in theirs]


@pytest.mark.release
def test_ranks_of_a_node_agree_on_every_form(tmp_path):
    ranks: dict[Role, int] = {"prefill": 1, "decode": 2}
    check_all(
        NodeThreads(tmp_path, never_local(settings()), ranks=ranks).run(all_forms)
    )


@pytest.mark.parametrize(
    "place", [never_local, pytest.param(always_local, marks=pytest.mark.release)]
)
def test_a_grammar_that_becomes_too_complex_ends_its_request_alone(place, tmp_path):
    grammar = StructuredOutputsParams(
        grammar='start: s{60}\ns: s s | s s s | "a" | "b"'
    )
    tree = SamplingParams(seed=1, max_tokens=400, n=2, structured_outputs=grammar)
    never = SamplingParams(allowed_token_ids=[6], bad_words=["$"], max_tokens=9)

    async def together(llm: AsyncLLM) -> list[object]:
        assert llm.get_tokenizer().encode("$", add_special_tokens=False) == [6]
        free = said(
            llm, 40, SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
        )
        asked = (said(llm, 50, tree), said(llm, 20, never), free)
        return await asyncio.gather(*asked, return_exceptions=True)

    *ended, free = NodeThreads(tmp_path, place(settings())).run(together)
    for error in ended:
        assert isinstance(error, BatonError)
        assert (error.code, error.http_status) == ("no_token_allowed", 422)
    assert isinstance(free, list)
    assert len(free[0].token_ids) == 80


SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "days": {"$ref": "#/$defs/days"},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"days": {"type": "integer", "minimum": 0, "maximum": 99}},
}
TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": name, "parameters": SCHEMA, "strict": True},
    }
    for name in ("weather", "tides")
]


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "tides"}}]
)
def test_demanded_calls_fit_their_schema_whole_and_streamed(cluster, choice):
    asked: Any = {
        "model": "",
        "messages": [{"role": "user", "content": "the weather?"}],
        "tools": TOOLS,
        "tool_choice": choice,
        "parallel_tool_calls": choice != "required",
        "max_tokens": 150,
        "seed": 4,
    }
    with openai.OpenAI(
        base_url=cluster.url("/v1"), api_key="none", max_retries=0
    ) as client:
        whole = client.chat.completions.create(**asked).choices[0]
        assert whole.finish_reason == "tool_calls"
        assert whole.message.content is None
        (call,) = whole.message.tool_calls or ()
        assert call.type == "function"
        arguments = json.loads(call.function.arguments)
        assert set(arguments) == {"city", "days"}
        assert 0 <= arguments["days"] <= 99
        assert call.function.name == "tides" or choice == "required"
        with client.chat.completions.stream(**asked) as stream:
            for _ in stream:
                pass
            streamed = stream.get_final_completion().choices[0]
        (again,) = streamed.message.tool_calls or ()
        assert again.function.name == call.function.name
        assert again.function.arguments == call.function.arguments
        assert streamed.finish_reason == "tool_calls"
        # The turns of a call are taken back.
        asked["messages"] += [
            whole.message.model_dump(),
            {"role": "tool", "tool_call_id": call.id, "content": "rain"},
        ]
        asked |= {"tool_choice": "none", "max_tokens": 3}
        assert (
            client.chat.completions.create(**asked).choices[0].finish_reason == "length"
        )
