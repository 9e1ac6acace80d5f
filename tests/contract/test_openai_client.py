"""The `openai` package, both of its clients, against a whole router with toy nodes behind it."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import openai
import pytest

from baton.protocol.config import ClusterConfig
from baton.router.text.chat_template import ChatTemplate
from tests.support.async_tests import AsyncTest, Test, with_bench
from tests.support.http_bench import TEXT, HttpBench, hello, lost, served
from tests.support.router_bench import PROMPT, REMOTE, RouterBench
from tests.support.scripted_nodes import VOCAB_SIZE, toy_answer

TEMPLATE = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {})


def serving() -> Callable[[AsyncTest], Test]:
    """Run an async test with a served router as `http`, and two toy nodes."""

    def run(use: AsyncTest, folder: Path) -> None:
        async def go(bench: RouterBench) -> None:
            await bench.toy_pair()
            async with HttpBench(
                bench.router, ClusterConfig(router=REMOTE), TEMPLATE
            ) as http:
                await use(http)
            await bench.settled()

        RouterBench(folder).run(go)

    return with_bench("http", run=run)


def async_client(http: HttpBench) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{http.url}/v1", api_key="none", max_retries=0)


def text_of(token_ids: list[int]) -> str:
    return TEXT.decode(token_ids)


def use_sync_client(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        (model,) = client.models.list().data
        assert client.models.retrieve(model.id) == model
        whole = client.completions.create(
            model=model.id, prompt=PROMPT, max_tokens=20, temperature=0
        )
        expected = text_of(toy_answer(PROMPT, 20))
        assert whole.choices[0].text == expected
        assert whole.choices[0].finish_reason == "length"
        assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (6, 20)
        assert whole._request_id.startswith("req-")
        stream = client.completions.create(
            model=model.id, prompt=PROMPT, max_tokens=20, temperature=0, stream=True
        )
        assert "".join(chunk.choices[0].text for chunk in stream) == expected


@serving()
async def test_the_sync_client_completes_streams_and_lists_models(http):
    await asyncio.to_thread(use_sync_client, http.url)


@serving()
async def test_the_async_client_streams_choices_with_usage(http):
    async with async_client(http) as client:
        texts = ["", "", ""]
        usages = []
        async for chunk in await client.completions.create(
            model="",
            prompt=PROMPT,
            max_tokens=12,
            n=3,
            stream=True,
            stream_options={"include_usage": True},
        ):
            for choice in chunk.choices:
                texts[choice.index] += choice.text
            if chunk.usage is not None:
                usages.append(chunk.usage)
        assert texts == [text_of(toy_answer(PROMPT, 12, choice)) for choice in range(3)]
        (usage,) = usages
        assert (usage.prompt_tokens, usage.completion_tokens) == (6, 36)


@serving()
async def test_chats_work_whole_and_streamed(http):
    async with async_client(http) as client:
        whole = await client.chat.completions.create(
            model="",
            messages=[{"role": "user", "content": "xyz"}],
            max_completion_tokens=8,
        )
        expected = text_of(toy_answer(TEXT.encode_now("xyz"), 8))
        assert whole.choices[0].message.content == expected
        streamed = ""
        async for chunk in await client.chat.completions.create(
            model="",
            messages=[{"role": "user", "content": "xyz"}],
            max_tokens=8,
            stream=True,
        ):
            streamed += chunk.choices[0].delta.content or ""
        assert streamed == expected


@pytest.mark.parametrize(
    ("fields", "kind", "param"),
    [
        ({"model": "gpt-4"}, openai.NotFoundError, "model"),
        ({"prompt": [VOCAB_SIZE]}, openai.BadRequestError, "prompt"),
        ({"max_tokens": 0}, openai.BadRequestError, "max_tokens"),
        ({"extra_body": {"lora_path": "x"}}, openai.BadRequestError, "lora_path"),
    ],
)
@serving()
async def test_errors_are_typed_and_name_the_field(http, fields, kind, param):
    body: dict[str, object] = {"model": "", "prompt": PROMPT, **fields}
    async with async_client(http) as client:
        for stream in (False, True):
            with pytest.raises(kind) as caught:
                await client.completions.create(**body, stream=stream)
            assert caught.value.param == param


@served(script=lost)
async def test_a_stream_that_is_lost_ends_in_an_api_error(bench):
    async with async_client(bench) as client:
        stream = await client.completions.create(model="", prompt=PROMPT, stream=True)
        with pytest.raises(openai.APIError) as caught:
            assert [chunk.choices[0].text async for chunk in stream] == [" hello"]
        assert caught.value.code == "node_lost"


@served(silence_s=0.02)
async def test_silence_between_tokens_is_no_event(bench, engine):
    async with async_client(bench) as client:
        asking = client.completions.create(model="", prompt=PROMPT, stream=True)
        task = asyncio.create_task(asking)
        stream = await engine.stream()
        engine.say(stream, " hello")
        chunks = aiter(await task)
        assert (await anext(chunks)).choices[0].text == " hello"
        await asyncio.sleep(0.2)
        engine.say(stream, " world", "length")
        stream.finish()
        assert [chunk.choices[0].text async for chunk in chunks] == [" world"]


@served(script=hello, chat_template=TEMPLATE)
async def test_a_message_can_be_sent_back(bench, engine):
    async with async_client(bench) as client:
        said = await client.chat.completions.create(
            model="", messages=[{"role": "user", "content": "the end"}]
        )
        back = said.choices[0].message.model_dump()
        assert None in back.values()
        await client.chat.completions.create(model="", messages=[back])
    assert engine.streams[1].prompt_token_ids == TEXT.encode_now(" hello")
