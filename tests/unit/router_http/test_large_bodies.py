"""Another process reads large bodies, so they delay no other request and cost the router little."""

import asyncio
import json
import os
import re
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from baton.protocol.config import ClusterConfig, ModelConfig
from baton.router.text.chat_template import ChatTemplate
from tests.support.async_tests import on_a_loop
from tests.support.http_bench import JSON, HttpBench, Reply, ScriptedEngine, hello
from tests.support.router_process import WAIT_S, ask, wait_until_ready, with_toy_nodes
from tests.support.scripted_nodes import toy_answer
from tests.support.small_tokenizers import write_tokenizer

PADDING = "x" * 200_000
CHAT = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


def model_in(folder: Path) -> ClusterConfig:
    path = write_tokenizer(folder / "tiny")
    (folder / "tiny" / "chat_template.jinja").write_text(CHAT)
    return ClusterConfig(model=ModelConfig(path=path))


class Bench:
    """A server with a model folder, before a scripted engine."""

    def __init__(self, folder: Path) -> None:
        self.engine = ScriptedEngine(hello)
        self.http = HttpBench(self.engine, model_in(folder), ChatTemplate(CHAT, {}))

    async def __aenter__(self) -> "Bench":
        await self.http.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.http.__aexit__(*error)
        self.engine.close()
        assert body_processes(os.getpid()) == []

    async def both(self, body: dict[str, object], path: str) -> tuple[Reply, Reply]:
        """The answers to a body as it is and as a large one."""
        return await self.http.post({**body}, path), await self.large(body, path)

    async def large(
        self, body: dict[str, object], path: str = "/v1/completions"
    ) -> Reply:
        return await self.http.post({**body, "user": PADDING}, path)


def body_processes(pid: int) -> list[psutil.Process]:
    children = psutil.Process(pid).children()
    return [
        child
        for child in children
        if "baton.router.http.api.large_bodies" in child.cmdline()
    ]


def shown(reply: Reply) -> dict[str, object]:
    """An answer without what differs between any two."""
    drop = ("id", "created", "created_at", "user")
    output = [{**item, "id": ""} for item in reply.json.get("output", ())]
    return {
        **{key: value for key, value in reply.json.items() if key not in drop},
        "output": output,
    }


BODIES: list[dict[str, object]] = [
    {"prompt": "the end"},
    {"prompt": [5, 6, 7], "echo": True},
    {"prompt": ["the", "end"], "n": 2, "echo": True, "max_tokens": 3, "stop": ["x"]},
    {"prompt": [[1, 2], [3]], "return_token_ids": True},
    {"prompt": ["the", "end"], "echo": True, "max_tokens": 0},
    {"messages": [{"role": "user", "content": "hello"}]},
    {"prompt": [5], "structured_outputs": {"json": {"type": "object"}}},
    {"prompt": [5], "structured_outputs": {"choice": ["a", "b"]}},
    {
        "prompt": [5],
        "structured_outputs": {"structural_tag": {"structures": [], "triggers": []}},
    },
    {"prompt": [5], "structured_outputs": {"json": {"a": "x" * 300_000}}},
    {"input": "hello", "instructions": "the end"},
    {"input": "hello", "store": True},
    {"prompt": "x", "model": "other"},
    {"prompt": [400], "echo": True},
    {"prompt": [2**40]},
    {"prompt": "x", "wish": 1},
    {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
]


@on_a_loop
async def test_a_large_body_gets_the_answer_of_a_small_one(tmp_path):
    paths = {"messages": "/v1/chat/completions", "input": "/v1/responses"}
    async with Bench(tmp_path) as bench:
        for body in BODIES:
            path = next(
                (paths[name] for name in body if name in paths), "/v1/completions"
            )
            bench.engine.streams.clear()
            small, large = await bench.both(body, path)
            assert (small.status, shown(small)) == (large.status, shown(large)), body
            streams = bench.engine.streams
            half = len(streams) // 2
            for first, second in zip(streams[:half], streams[half:], strict=True):
                assert first.prompt_token_ids == second.prompt_token_ids
                assert first.params == second.params


@on_a_loop
async def test_what_the_model_cannot_take_is_refused_there(tmp_path):
    async with Bench(tmp_path) as bench:
        for prompt in ([5] * 300, "the end " * 300, "x" * 500_000, [5, 400]):
            refused = await bench.large({"prompt": prompt})
            code = (
                "invalid_request" if prompt == [5, 400] else "context_length_exceeded"
            )
            assert (refused.status, refused.error["code"]) == (400, code)
        assert bench.engine.streams == []


@on_a_loop
async def test_others_are_served_while_a_large_body_is_read(tmp_path):
    async with Bench(tmp_path) as bench:
        assert (await bench.large({"prompt": [5]})).status == 200
        (process,) = body_processes(os.getpid())
        process.suspend()
        waiting = [asyncio.create_task(bench.large({"prompt": [5]})) for _ in range(3)]
        for _ in range(20):
            assert (await bench.http.post({"prompt": "the end"})).status == 200
        waiting[1].cancel()  # its client leaves
        process.resume()
        for task in (waiting[0], waiting[2]):
            assert (await task).status == 200
        assert body_processes(os.getpid()) == [process]


@on_a_loop
async def test_a_template_that_cannot_be_used_leaves_completions(tmp_path):
    async with Bench(tmp_path) as bench:
        (tmp_path / "tiny" / "chat_template.jinja").write_text("{% foo %}")
        assert (await bench.large({"prompt": [5]})).status == 200


@on_a_loop
async def test_bodies_of_the_tokenizers_endpoints_get_the_answers_of_small_ones(
    tmp_path,
):
    turns = [{"role": "user", "content": "hello"}]
    bodies: list[tuple[str, dict[str, object]]] = [
        ("/tokenize", {"prompt": "the end", "return_token_strs": True}),
        ("/tokenize", {"messages": turns}),
        ("/tokenize", {"prompt": "the end", "messages": turns}),
        ("/detokenize", {"tokens": [5, 6]}),
        ("/detokenize", {"tokens": [400]}),
        ("/v1/messages/count_tokens", {"messages": turns}),
        ("/v1/responses/input_tokens", {"input": turns, "speed": "fast"}),
        ("/v1/messages/count_tokens", {"messages": [], "model": "x"}),
    ]
    async with Bench(tmp_path) as bench:
        for path, body in bodies:
            data = json.dumps(body)
            small = await bench.http.post(data.encode(), path)
            large = await bench.http.post((data + " " * len(PADDING)).encode(), path)
            assert (small.status, small.text) == (large.status, large.text), body
        assert len(body_processes(os.getpid())) == 1


def test_hostile_bodies_leave_a_router_small_and_serving(config, start):
    router = start(config)
    url = router.wait_for_url()
    mib = 2**20

    def refused(body: bytes) -> int:
        request = urllib.request.Request(f"{url}/v1/completions", body, JSON)
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=WAIT_S)
        with caught.value as error:
            return error.code

    def attack() -> bytes:
        wait_until_ready(url)
        hostile = [
            b'{"prompt":"' + b"hello 1 " * (mib // 2 - 8) + b'"}',
            b'{"prompt":[' + b"5," * (2 * mib - 50) + b"5]}",
            b'{"prompt":[' + b"{}," * mib + b"{}]}",
            b'{"prompt":"x","prompt_embeds":"' + b"k" * (4 * mib - 50) + b'"}',
        ]
        with ThreadPoolExecutor(4) as pool:
            assert set(pool.map(refused, hostile)) == {400}
        assert refused(b'{"prompt":"' + b"x" * (16 * mib) + b'"}') == 413
        for number in range(40):
            stops = [f"{number} {index} " + "y" * 1_000 for index in range(4)]
            ask(url, {"prompt": [5], "max_tokens": 1, "stop": stops})
        return ask(url, {"prompt": [5, 6], "max_tokens": 3, "return_token_ids": True})

    answer = json.loads(asyncio.run(with_toy_nodes(config, attack)))
    assert answer["choices"][0]["token_ids"] == toy_answer([5, 6], 3)
    status = Path(f"/proc/{router.process.pid}/status").read_text()
    (peak_kib,) = re.findall(r"VmHWM:\s+(\d+) kB", status)
    assert int(peak_kib) * 1024 < 300 * mib
    router.end_well()
