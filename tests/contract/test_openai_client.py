"""The `openai` package, both of its clients, against a whole router with toy nodes behind it."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import openai
import pytest

from baton.protocol.config import ClusterConfig, RouterConfig
from baton.router.stream import RequestStream
from baton.router.text.chat_template import ChatTemplate
from tests.support.async_tests import AsyncTest, Test, with_bench
from tests.support.http_bench import HttpBench, ScriptedEngine, served
from tests.support.router_bench import PROMPT, REMOTE, RouterBench
from tests.support.scripted_nodes import VOCAB_SIZE, node_info, toy_answer
from tests.support.small_tokenizers import small_text

TEXT = small_text()
TEMPLATE = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {})


def serving(
    router: RouterConfig = REMOTE, *, with_nodes: bool = True
) -> Callable[[AsyncTest], Test]:
    """Run an async test with a served router as `http` and its `bench`, and two toy nodes."""

    def run(use: AsyncTest, folder: Path) -> None:
        async def go(bench: RouterBench) -> None:
            if with_nodes:
                await bench.toy_pair()
            async with HttpBench(bench.router, ClusterConfig(router=router), TEMPLATE) as http:
                await use(http, bench)
            await bench.settled()

        RouterBench(folder, router).run(go)

    return with_bench("http", "bench", run=run)


def answer_hello(stream: RequestStream) -> None:
    stream.push(0, TEXT.encode_now(" hello"), "length")
    stream.finish()


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
        assert whole.usage is not None
        assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (6, 20)
        assert whole._request_id.startswith("req-")
        stream = client.completions.create(
            model=model.id, prompt=PROMPT, max_tokens=20, temperature=0, stream=True
        )
        assert "".join(chunk.choices[0].text for chunk in stream) == expected


@serving()
async def test_the_sync_client_completes_streams_and_lists_models(http: HttpBench) -> None:
    await asyncio.to_thread(use_sync_client, http.url)


@serving()
async def test_the_async_client_streams_choices_with_usage(http: HttpBench) -> None:
    async with async_client(http) as client:
        texts, usages = ["", "", ""], []
        async for chunk in await client.completions.create(
            model="", prompt=PROMPT, max_tokens=12, n=3, stream=True,
            stream_options={"include_usage": True},
        ):  # fmt: skip
            for choice in chunk.choices:
                texts[choice.index] += choice.text
            if chunk.usage is not None:
                usages.append(chunk.usage)
        assert texts == [text_of(toy_answer(PROMPT, 12, choice)) for choice in range(3)]
        (usage,) = usages
        assert (usage.prompt_tokens, usage.completion_tokens) == (6, 36)


@serving()
async def test_a_batch_of_prompts_is_answered_in_order(http: HttpBench) -> None:
    prompts = [[5, 6, 7], [9], [1, 2, 3, 4]]
    async with async_client(http) as client:
        answer = await client.completions.create(model="", prompt=prompts, max_tokens=9)
    assert [choice.text for choice in answer.choices] == [
        text_of(toy_answer(prompt, 9)) for prompt in prompts
    ]


@serving()
async def test_a_stop_string_ends_the_text_before_it(http: HttpBench) -> None:
    whole = text_of(toy_answer(PROMPT, 20))
    stop = next(char for char in whole[5:] if char.isascii() and char.isprintable())
    async with async_client(http) as client:
        answer = await client.completions.create(
            model="", prompt=PROMPT, max_tokens=20, stop=[stop]
        )
    assert answer.choices[0].text == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


@serving()
async def test_chats_work_whole_and_streamed(http: HttpBench) -> None:
    async with async_client(http) as client:
        whole = await client.chat.completions.create(
            model="", messages=[{"role": "user", "content": "xyz"}], max_completion_tokens=8
        )
        expected = text_of(toy_answer(TEXT.encode_now("xyz"), 8))
        assert whole.choices[0].message.content == expected
        streamed = ""
        async for chunk in await client.chat.completions.create(
            model="", messages=[{"role": "user", "content": "xyz"}], max_tokens=8, stream=True
        ):
            streamed += chunk.choices[0].delta.content or ""
        assert streamed == expected


@pytest.mark.parametrize(
    ("fields", "kind", "param"),
    [
        ({"model": "gpt-4"}, openai.NotFoundError, "model"),
        ({"prompt": ""}, openai.BadRequestError, "prompt"),
        ({"prompt": [VOCAB_SIZE]}, openai.BadRequestError, "prompt"),
        ({"prompt": [-1]}, openai.BadRequestError, "prompt"),
        ({"prompt": [1] * 200}, openai.BadRequestError, "prompt"),
        ({"max_tokens": 0}, openai.BadRequestError, "max_tokens"),
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"logprobs": 2}, openai.BadRequestError, "logprobs"),
        ({"n": 0}, openai.BadRequestError, "n"),
        ({"extra_body": {"lora": "x"}}, openai.BadRequestError, "lora"),
        (
            {"extra_body": {"min_tokens": 199}, "max_tokens": 199},
            openai.BadRequestError,
            "min_tokens",
        ),
    ],
)
@serving()
async def test_errors_are_typed_and_name_the_field(
    http: HttpBench,
    fields: dict[str, object],
    kind: type[openai.APIStatusError],
    param: str,
) -> None:
    body: dict[str, object] = {"model": "", "prompt": PROMPT, **fields}
    async with async_client(http) as client:
        for stream in (False, True):
            with pytest.raises(kind) as caught:
                await client.completions.create(**body, stream=stream)  # type: ignore[call-overload]
            assert caught.value.param == param


@serving()
async def test_asking_for_more_than_fits_is_cut_and_said(http: HttpBench) -> None:
    async with async_client(http) as client:
        raw = await client.completions.with_raw_response.create(
            model="", prompt=PROMPT, max_tokens=5000
        )
        assert raw.headers["Baton-Max-Tokens"] == "194"
        answer = raw.parse()
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 194
    assert answer.choices[0].finish_reason == "length"


@serving(with_nodes=False)
async def test_no_nodes_is_an_error_to_come_back_after(http: HttpBench) -> None:
    async with async_client(http) as client:
        with pytest.raises(openai.InternalServerError) as caught:
            await client.completions.create(model="", prompt=PROMPT)
        assert caught.value.status_code == 503
        assert caught.value.code == "not_ready"
        assert caught.value.response.headers["retry-after-ms"] == "1000"
        with pytest.raises(openai.InternalServerError):
            await client.models.list()


@serving(RouterConfig(local_prefill="never", max_queued=0, max_inflight=1), with_nodes=False)
async def test_a_full_line_is_a_rate_limit_error(http: HttpBench, bench: RouterBench) -> None:
    await bench.toy(node_info("p0", "prefill"))
    await bench.toy(node_info("d0", "decode"), max_steps=2)
    async with async_client(http) as client:
        stream = await client.completions.create(model="", prompt=PROMPT, max_tokens=9, stream=True)
        with pytest.raises(openai.RateLimitError) as caught:
            await client.completions.create(model="", prompt=PROMPT)
        assert caught.value.code == "queue_full"
        assert int(caught.value.response.headers["retry-after"]) >= 1
        await stream.close()


@serving(with_nodes=False)
async def test_closing_a_stream_cancels_both_legs(http: HttpBench, bench: RouterBench) -> None:
    prefill = await bench.toy(node_info("p0", "prefill"))
    decode = await bench.toy(node_info("d0", "decode"), max_steps=3)
    async with async_client(http) as client:
        stream = await client.completions.create(
            model="", prompt=PROMPT, max_tokens=50, stream=True
        )
        chunks = aiter(stream)
        for _ in range(3):
            await anext(chunks)
        await stream.close()
    await bench.until(lambda: bool(decode.cancelled))
    assert decode.cancelled[0].request_id == prefill.orders[0].key.request_id


@serving(RouterConfig(local_prefill="never", max_attempts=1), with_nodes=False)
async def test_a_stream_whose_nodes_are_lost_for_good_ends_in_an_api_error(
    http: HttpBench, bench: RouterBench
) -> None:
    await bench.toy(node_info("p0", "prefill"))
    decode = await bench.toy(node_info("d0", "decode"), max_steps=3)
    async with async_client(http) as client:
        stream = await client.completions.create(
            model="", prompt=PROMPT, max_tokens=50, stream=True
        )
        chunks = aiter(stream)
        for _ in range(3):
            await anext(chunks)
        decode.die()
        await bench.until(lambda: bench.core.health().num_queued == 1)
        bench.clock.advance(300.0)  # as long as a stream that began waits for a node
        with pytest.raises(openai.APIError) as caught:
            await anext(chunks)
        assert caught.value.code == "no_nodes"


@served(silence_s=0.02)
async def test_silence_between_tokens_is_no_event(bench: HttpBench, engine: ScriptedEngine) -> None:
    async with async_client(bench) as client:
        asking = client.completions.create(model="", prompt=PROMPT, stream=True)
        task = asyncio.create_task(asking)  # type: ignore[arg-type]
        stream = await engine.stream()
        engine.say(stream, " hello")
        chunks = aiter(await task)
        assert (await anext(chunks)).choices[0].text == " hello"
        await asyncio.sleep(0.2)
        engine.say(stream, " world", "length")
        stream.finish()
        assert [chunk.choices[0].text async for chunk in chunks] == [" world"]


@served(config=ClusterConfig(router=RouterConfig(api_keys=("right",))))
async def test_a_wrong_key_is_an_authentication_error(bench: HttpBench) -> None:
    async with async_client(bench) as client:
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()
        assert (await client.with_options(api_key="right").models.list()).data


@served(script=answer_hello, chat_template=TEMPLATE)
async def test_a_message_can_be_sent_back(bench: HttpBench, engine: ScriptedEngine) -> None:
    async with async_client(bench) as client:
        said = await client.chat.completions.create(
            model="", messages=[{"role": "user", "content": "the end"}]
        )
        back = said.choices[0].message.model_dump()
        assert None in back.values()
        await client.chat.completions.create(model="", messages=[back])  # type: ignore[list-item]
    assert engine.streams[1].prompt_token_ids == TEXT.encode_now(" hello")


@serving()
async def test_health_and_metrics_tell_about_each_node(http: HttpBench, bench: RouterBench) -> None:
    def have_beaten() -> bool:
        for node in bench.nodes:  # a beat that overtakes its node's Hello is dropped
            node.beat()
        return all(node.load.free_blocks for node in bench.core.health().nodes)

    await bench.until(have_beaten)
    health = (await http.get("/health")).json
    assert health["status"] == "ready"
    nodes = health["nodes"]
    assert isinstance(nodes, list)
    assert [(node["node_id"], node["load"]["free_blocks"]) for node in nodes] == [
        ("d0", 64),
        ("p0", 64),
    ]
    metrics = (await http.get("/metrics")).text
    assert 'role="decode",state="ready"} 1.0' in metrics
    assert 'node="p0",role="prefill"} 64.0' in metrics
