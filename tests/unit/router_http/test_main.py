"""The router as a process: what it prints, how it ends, what it never loads."""

import asyncio
import os
import signal
import socket
import urllib.request
from pathlib import Path

import msgspec
import pytest

from baton.protocol.config import LogConfig
from tests.support.completions import post
from tests.support.router_process import WAIT_S, ask, wait_until_ready, with_toy_nodes
from tests.support.scripted_nodes import toy_answer


def test_it_serves_logs_stats_but_no_prompt_and_ends_on_sigterm(config, start):
    router = start(config)
    url = router.wait_for_url()
    prompt = [5, 6, 7]
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": 4,
        "return_token_ids": True,
    }
    data = asyncio.run(with_toy_nodes(config, lambda: ask(url, body)))
    answer = msgspec.json.decode(data)
    assert answer["choices"][0]["token_ids"] == toy_answer(prompt, 4)
    assert "output_tokens_per_s=" in router.wait_for("stats")
    router.end_well()
    assert "5, 6, 7" not in "".join(router.lines)


def test_prompts_are_logged_on_request_and_cut(config, start):
    logging = msgspec.structs.replace(config, log=LogConfig(prompts=True))
    router = start(logging)
    url = router.wait_for_url()
    body = {"prompt": "y" * 150 + "z" * 49, "max_tokens": 1}
    asyncio.run(with_toy_nodes(logging, lambda: ask(url, body)))
    assert "y" * 150 in router.wait_for("text=")
    router.end_well(signal.SIGINT)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stream_that_cannot_finish_in_time_is_told_of_the_end(number, config, start):
    """SIGTERM waits for `shutdown_timeout_s`, longer than this test waits if SIGINT took it."""
    shutdown_timeout_s = 2.0 if number == signal.SIGTERM else 10 * WAIT_S
    limited = msgspec.structs.replace(
        config.router, shutdown_timeout_s=shutdown_timeout_s
    )
    router = start(msgspec.structs.replace(config, router=limited))
    url = router.wait_for_url()
    body = {"prompt": [5, 6, 7], "max_tokens": 50, "stream": True}

    def read_and_end() -> list[bytes]:
        wait_until_ready(url)
        request = post(url, body)
        with urllib.request.urlopen(request, timeout=WAIT_S) as reply:
            lines = [reply.readline()]
            os.kill(router.process.pid, number)
            return lines + reply.readlines()

    lines = asyncio.run(with_toy_nodes(config, read_and_end, max_steps=3))
    router.end()
    assert router.process.returncode == 0, router.lines
    events = [line for line in lines if line.startswith(b"data: ")]
    assert msgspec.json.decode(events[-1][6:])["error"]["code"] == "shutting_down"
    assert "Traceback" not in "".join(router.lines)


@pytest.mark.parametrize(
    ("section", "field", "said"),
    [
        ("router", "port", "port {port} on 127.0.0.1 is in use"),
        ("model", "path", "{folder} has no tokenizer.json"),
        ("model", "chat_template", "/nowhere.jinja"),
    ],
)
def test_what_a_router_cannot_start_with_is_one_clear_line(
    section, field, said, tmp_path, config, start
):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        wrong = {
            "port": port,
            "path": str(tmp_path),
            "chat_template": "/nowhere.jinja",
        }[field]
        changed = msgspec.structs.replace(getattr(config, section), **{field: wrong})
        router = start(msgspec.structs.replace(config, **{section: changed}))
        router.end()
    assert router.process.returncode == 1
    (line,) = router.lines
    assert said.format(port=port, folder=tmp_path) in line


@pytest.mark.parametrize(("source", "total"), [("auto", 4), ("none", 200)])
def test_a_chat_takes_the_sampling_defaults_of_the_model(source, total, config, start):
    folder = Path(config.model.path)
    (folder / "generation_config.json").write_text('{"max_new_tokens": 3}')
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    model = msgspec.structs.replace(config.model, generation_config=source)
    url = start(msgspec.structs.replace(config, model=model)).wait_for_url()

    def chat() -> bytes:
        wait_until_ready(url)
        body = {"messages": [{"role": "user", "content": "y"}]}
        request = post(url, body, "/v1/chat/completions")
        with urllib.request.urlopen(request, timeout=WAIT_S) as reply:
            data: bytes = reply.read()
        return data

    usage = msgspec.json.decode(asyncio.run(with_toy_nodes(config, chat)))["usage"]
    assert (usage["prompt_tokens"], usage["total_tokens"]) == (1, total)


def test_an_open_address_without_keys_is_warned_of(config, start):
    opened = msgspec.structs.replace(config.router, host="0.0.0.0")
    router = start(msgspec.structs.replace(config, router=opened))
    assert "--api-key" in router.wait_for("anyone who can reach")
    router.end_well()
