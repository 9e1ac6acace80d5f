"""`LLM` and `AsyncLLM` as users call them, over toy nodes that live on their event loop."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from baton import (
    LLM,
    AsyncLLM,
    LoRARequest,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)
from baton.async_llm import Launcher
from baton.deploy.model_folder import CHECKPOINT
from baton.protocol.config import ClusterConfig
from baton.protocol.errors import (
    BatonError,
    Cancelled,
    ConfigError,
    NodeError,
    RequestError,
)
from tests.support.adapters import write_adapter
from tests.support.async_tests import on_a_loop
from tests.support.refusals import raises
from tests.support.scripted_nodes import toy_answer
from tests.support.small_tokenizers import END, Family
from tests.support.toy_cluster import (
    BrokenCluster,
    StalledCluster,
    StillbornCluster,
    ToyCluster,
    toy_model,
)

READY_S = 60.0
GREEDY = SamplingParams(temperature=0, max_tokens=6)


def toy_llm(folder: Path, **settings: Any) -> LLM:
    return LLM(model=toy_model(folder), launcher=ToyCluster, **settings)


def test_prompts_may_be_text_ids_or_dicts_alone_or_in_lists(tmp_path):
    with toy_llm(tmp_path) as llm:
        ids = llm.get_tokenizer().encode("xyz")
        forms = [
            llm.generate("xyz", GREEDY, use_tqdm=False),
            llm.generate(ids, GREEDY, use_tqdm=False),
            llm.generate([{"prompt_token_ids": ids}], GREEDY, use_tqdm=False),
            llm.generate(
                {"prompt_token_ids": ids, "prompt": "shown"}, GREEDY, use_tqdm=False
            ),
        ]
        for (output,) in forms:
            assert output.outputs[0].token_ids == toy_answer(ids, 6)
        shown = [output.prompt for (output,) in forms]
        assert shown == ["xyz", None, None, "shown"]
        assert llm.generate([], GREEDY, use_tqdm=False) == []
        assert len(llm.generate("xyz", use_tqdm=False)[0].outputs[0].token_ids) == 16


def test_the_progress_bar_is_shown_on_the_error_stream_only_when_wanted(
    tmp_path, capsys
):
    with toy_llm(tmp_path) as llm:
        llm.generate(["xyz", "q"], GREEDY)
        shown = capsys.readouterr()
        assert "2/2" in shown.err
        assert shown.out == ""
        llm.generate(["xyz"], GREEDY, use_tqdm=False)
        assert capsys.readouterr().err == ""


BAD_PROMPTS: list[Any] = [
    [[1, 2], []],
    [None],
    [[1, 2.0]],
    {"prompt_token_ids": ["x"]},
]


def test_a_bad_prompt_is_an_error_and_the_next_call_works(tmp_path):
    with toy_llm(tmp_path) as llm:
        for prompts in BAD_PROMPTS:
            with raises(RequestError, "invalid_request", "prompt"):
                llm.generate(prompts, GREEDY, use_tqdm=False)
        with raises(RequestError, "invalid_request", "sampling_params"):
            llm.generate("a", {"max_tokens": 5}, use_tqdm=False)
        with pytest.raises(ValueError, match="2 prompts"):
            llm.generate(["a", "b"], [GREEDY], use_tqdm=False)
        (output,) = llm.generate([[1, 2]], GREEDY, use_tqdm=False)
        assert output.outputs[0].token_ids == toy_answer([1, 2], 6)


def test_what_cannot_start_raises_and_what_was_shut_down_says_so(tmp_path):
    model = toy_model(tmp_path)
    with pytest.raises(NodeError, match="cannot start"):
        LLM(model=model, launcher=BrokenCluster)
    with toy_llm(tmp_path) as llm:
        pass
    llm.shutdown()  # a second time
    with raises(BatonError, "shutting_down"):
        llm.generate("xyz", GREEDY, use_tqdm=False)


def test_a_seed_of_the_constructor_repeats_the_seeds_of_requests(tmp_path):
    """The toy nodes sample nothing, so this looks at the seeds that they were sent."""

    def sent(seed: int | None) -> list[int]:
        clusters: list[ToyCluster] = []

        def launch(config: ClusterConfig, endpoint: str) -> ToyCluster:
            clusters.append(ToyCluster(config, endpoint))
            return clusters[0]

        with LLM(toy_model(tmp_path), seed=seed, launcher=launch) as llm:
            params = [
                SamplingParams(max_tokens=2, seed=given) for given in (None, 5, None)
            ]
            llm.generate([[1, 2], [3, 4], [5, 6]], params, use_tqdm=False)
        return [order.sampling.seed for order in clusters[0].decode_orders()]

    first, again, other, unset = map(sent, (7, 7, 8, None))
    assert first == again
    assert first[1] == other[1] == unset[1] == 5
    assert len({*first, *other, *unset}) == 7


def test_defaults_come_from_the_checkpoint_and_given_params_stand_alone(tmp_path):
    defaults = {
        "temperature": 0.6,
        "top_k": 20,
        "max_new_tokens": 3,
        "repetition_penalty": 1.05,
    }
    path = toy_model(tmp_path) / "generation_config.json"
    path.write_text(json.dumps({**defaults, "eos_token_id": 2, "top_p": None}))
    with LLM(path.parent, launcher=ToyCluster) as llm:
        expected = SamplingParams(
            temperature=0.6, top_k=20, max_tokens=3, repetition_penalty=1.05
        )
        assert llm.get_default_sampling_params() == expected
        (by_default,) = llm.generate([1, 2], use_tqdm=False)
        (given,) = llm.generate([1, 2], SamplingParams(), use_tqdm=False)
        assert len(by_default.outputs[0].token_ids) == 3
        assert len(given.outputs[0].token_ids) == 16
    for wrong in ("[", '{"temperature": "hot"}', '{"top_p": 7}'):
        path.write_text(wrong)
        with pytest.raises(ConfigError, match=r"generation_config\.json"):
            LLM(path.parent, launcher=ToyCluster)


TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[bot]{% endif %}{{ mood }}"
)
TALK = [{"role": "system", "content": "be"}, {"role": "user", "content": "hello"}]


def test_the_tokenizer_needs_no_event_loop(tmp_path):
    model = toy_model(tmp_path)
    with LLM(model, launcher=ToyCluster) as llm:
        tokenizer = llm.get_tokenizer()
        with raises(RequestError, "no_chat_template"):
            tokenizer.apply_chat_template(TALK)
        (model / "chat_template.jinja").write_text(TEMPLATE)
        ids = tokenizer.encode("hello world")
        assert (tokenizer.decode(ids), tokenizer.decode(ids[0])) == (
            "hello world",
            "hello",
        )
        end = tokenizer.encode(END)
        assert (
            tokenizer.decode(end),
            tokenizer.decode(end, skip_special_tokens=True),
        ) == (END, "")
        assert (
            tokenizer.apply_chat_template(TALK, tokenize=False)
            == "[system]be[user]hello"
        )
        parts = [
            {"role": "user", "content": [{"type": "text", "text": t} for t in "ab"]}
        ]
        asked = tokenizer.apply_chat_template(
            parts, add_generation_prompt=True, mood="!"
        )
        assert asked == tokenizer.encode("[user]a\nb[bot]!", add_special_tokens=False)
        with pytest.raises(RequestError):
            tokenizer.apply_chat_template([{"role": "user", "content": 5}])


@on_a_loop
async def test_the_first_generate_starts_an_async_llm_and_may_be_cancelled(tmp_path):
    llm = AsyncLLM(toy_model(tmp_path), launcher=ToyCluster)
    assert not llm.is_running
    first = asyncio.ensure_future(anext(llm.generate([1, 2], GREEDY)))
    await asyncio.sleep(0)  # it has started the nodes and waits for them
    assert llm.is_running
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    many = [last(llm.generate([1, number], GREEDY)) for number in (2, 3)]
    for number, output in zip((2, 3), await asyncio.gather(*many), strict=True):
        assert output.outputs[0].token_ids == toy_answer([1, number], 6)
    await llm.shutdown()
    with raises(BatonError, "shutting_down"):
        await last(llm.generate([1, 2], GREEDY))


@on_a_loop
async def test_an_async_llm_is_ready_inside_its_context_and_gone_after_it(tmp_path):
    async with AsyncLLM(toy_model(tmp_path), launcher=ToyCluster) as llm:
        assert llm.health().status == "ready"
        deltas = GREEDY.clone(output_kind=RequestOutputKind.DELTA)
        got = [output.outputs[0] async for output in llm.generate([1, 2], deltas)]
        assert [i for delta in got for i in delta.token_ids] == toy_answer([1, 2], 6)
        own = [1, 2]  # which its caller may go on with
        async for output in llm.generate(own, deltas):
            own += output.outputs[0].token_ids
        assert own == [1, 2, *toy_answer([1, 2], 6)]
    assert not llm.is_running


@on_a_loop
async def test_adapters_may_be_added_at_once_and_none_while_a_request_begins(tmp_path):
    one, other, third = (
        LoRARequest(
            name, lora_path=str(write_adapter(CHECKPOINT, ("q_proj",), seed=seed))
        )
        for seed, name in enumerate(("one", "other", "third"))
    )
    launchers = iter([ToyCluster, ToyCluster, ToyCluster, BrokenCluster])

    def launch(config: ClusterConfig, endpoint: str) -> ToyCluster:
        return next(launchers)(config, endpoint)

    async with AsyncLLM(toy_model(tmp_path), launcher=launch) as llm:
        await asyncio.gather(llm.add_lora(one), llm.add_lora(other), llm.add_lora(one))
        names = [module.partition("=")[0] for module in llm.config.model.lora_modules]
        assert names == ["one", "other"]
        adding = asyncio.ensure_future(llm.add_lora(third))
        await last(llm.generate([1, 2], GREEDY))  # which is the first to run
        with raises(RequestError, "invalid_request", "lora_request"):
            await adding
        with pytest.raises(NodeError):
            await llm.add_lora(third)
        assert not llm.is_running


async def last(outputs: AsyncIterator[RequestOutput]) -> RequestOutput:
    async for output in outputs:
        latest = output
    return latest


@asynccontextmanager
async def toy_async_llm(
    folder: Path, launcher: Launcher = ToyCluster, family: Family = "byte_level"
) -> AsyncIterator[AsyncLLM]:
    llm = AsyncLLM(toy_model(folder, family), launcher=launcher)
    await llm.start()
    try:
        await llm.ready(READY_S)
        assert llm.is_running
        yield llm
    finally:
        await llm.shutdown()
        assert not llm.is_running
        assert not llm.errored


@on_a_loop
async def test_an_abort_by_name_ends_the_reader_and_frees_the_name(tmp_path):
    async with toy_async_llm(tmp_path, StalledCluster) as llm:
        reader = llm.generate([1, 2], GREEDY, request_id="mine")
        await anext(reader)
        with raises(RequestError, "invalid_request", "request_id"):
            await anext(llm.generate([1, 2], GREEDY, request_id="mine"))
        await llm.abort("mine")
        with pytest.raises(Cancelled):
            async for _ in reader:
                pass
        await llm.abort("mine")
        again = llm.generate([1, 2], GREEDY, request_id="mine")
        output = await anext(again)
        assert output.request_id == "mine"
        assert output.outputs[0].token_ids[:1] == toy_answer([1, 2], 1)
        await again.aclose()


@on_a_loop
async def test_an_abort_while_the_prompt_is_tokenized_is_not_forgotten(tmp_path):
    async with toy_async_llm(tmp_path, family="word_piece") as llm:
        # So long that another thread encodes it, but few tokens.
        reader = llm.generate("hello world " * 20, GREEDY, request_id="mine")
        first = asyncio.ensure_future(anext(reader))
        await asyncio.sleep(0)  # the reader waits for a thread of the tokenizer now
        await llm.abort("mine")
        with pytest.raises(Cancelled):
            await first


@on_a_loop
async def test_nodes_that_die_at_their_start_are_told_to_all_who_wait(tmp_path):
    llm = AsyncLLM(toy_model(tmp_path), launcher=StillbornCluster)
    await llm.start()
    try:
        with raises(NodeError, "start_failed"):
            await llm.ready(READY_S)
        assert llm.errored
        with raises(NodeError, "start_failed"):
            await anext(llm.generate([1, 2], GREEDY))
    finally:
        await llm.shutdown()
