"""What can be known of a server before a load, and one clear line for what stands in the way."""

import contextlib
import os
import socket
import threading

import pytest
from aiohttp import web

from baton.bench.client.probe import Probed, probe
from baton.bench.client.target import Target
from baton.protocol.errors import BatonError, ConfigError
from tests.support.scripted_openai import (
    DONE,
    Call,
    ScriptedOpenAI,
    answer,
    error,
    event,
    token,
    usage,
    usage_body,
)

TWO_MODELS = {"data": [{"id": "one"}, {"id": "two"}]}


async def standard(call: Call) -> web.StreamResponse:
    """Refuses every field that OpenAI does not have."""
    for name in ("return_token_ids", "timeline", "ignore_eos"):
        if name in call.body:
            return error(f"unknown field {name}", 400)
    if "continuous_usage_stats" in str(call.body.get("stream_options")):
        return error("unknown field", 400)
    return await answer(call)


async def generous(call: Call) -> web.StreamResponse:
    """Knows all extensions."""
    ids = [7] if "return_token_ids" in call.body else None
    running = "continuous_usage_stats" in str(call.body.get("stream_options"))
    for number in range(call.num_tokens):
        more = {"usage": usage_body(number + 1)} if running else {}
        await call.write(token(" a", ids, **more))
    if "timeline" in call.body:
        await call.write(event({"choices": [], "timeline": [{"queue_s": 0.1}]}))
    return await call.send(usage(call.num_tokens), DONE)


async def silent(call: Call) -> web.StreamResponse:
    """Ignores every wish, that for usage too."""
    return await call.send(*[token()] * call.num_tokens, DONE)


async def without_usage(call: Call) -> web.StreamResponse:
    if "stream_options" in call.body:
        return error("unknown field stream_options", 400)
    return await silent(call)


async def all_at_once(_: Call) -> web.StreamResponse:
    return web.json_response({"choices": [{"index": 0, "text": "a"}]})


async def broken(_: Call) -> web.StreamResponse:
    return error("out of memory", 500)


def wants_all(url: str, model: str = "") -> Target:
    return Target(url, model, token_ids=True, timeline=True)


def test_a_server_is_found_out_and_the_target_fitted() -> None:
    with ScriptedOpenAI(generous) as server:
        target = wants_all(server.url)
        probed = probe(target)
    assert probed == Probed(
        model="tiny",
        server=probed.server,
        version="",
        usage=True,
        ignore_eos=True,
        token_ids=True,
        timeline=True,
        continuous_usage=True,
    )
    assert "aiohttp" in probed.server
    fitted = probed.fit(target)
    assert (fitted.model, fitted.token_ids, fitted.timeline) == ("tiny", True, True)
    assert not fitted.continuous_usage
    assert probed.fit(Target(target.url, token_ids=False)).continuous_usage


@pytest.mark.parametrize(
    ("play", "knows_usage", "forces"),
    [(standard, True, False), (silent, False, True), (without_usage, False, True)],
)
def test_what_a_server_does_not_know_is_not_asked_for(
    play: object, knows_usage: bool, forces: bool
) -> None:
    with ScriptedOpenAI(play) as server:  # type: ignore[arg-type]
        fitted = probe(wants_all(server.url)).fit(wants_all(server.url))
    assert (fitted.token_ids, fitted.timeline, fitted.continuous_usage) == (False,) * 3
    assert (fitted.usage, fitted.ignore_eos) == (knows_usage, forces)


def test_a_model_that_is_not_served_is_refused_with_those_that_are() -> None:
    with (
        ScriptedOpenAI(models=TWO_MODELS) as server,
        pytest.raises(ConfigError, match=r"does not serve the model 'three'; it serves one, two"),
    ):
        probe(Target(server.url, "three"))


def test_one_of_several_models_has_to_be_named() -> None:
    with ScriptedOpenAI(models=TWO_MODELS) as server:
        with pytest.raises(ConfigError, match=r"serves one, two: name one with --model"):
            probe(Target(server.url, ""))
        assert probe(Target(server.url, "two")).model == "two"


@pytest.mark.parametrize(
    ("models", "kind", "words"),
    [
        (web.Response(text="<html>"), ConfigError, "no server with OpenAI's API"),
        ({"models": []}, ConfigError, "no server with OpenAI's API"),
        (web.Response(text="key?", status=401), ConfigError, "wants an API key, and it is missing"),
        (
            web.Response(status=404),
            ConfigError,
            r"has no /v1/models \(status 404\): correct the path",
        ),
        (web.Response(text="starting", status=503), BatonError, r"\(status 503\): starting"),
        ({"data": []}, ConfigError, "serves no model"),
        ({"data": [{"id": "\x1b[2Jm"}]}, ConfigError, r"serves '\[2Jm', which is no name"),
        ({"data": [{"id": "\x1b[2Jm"}, {"id": "n"}]}, ConfigError, r"serves \[2Jm, n: name one"),
    ],
)
def test_a_list_of_models_that_is_none_is_told(
    models: object, kind: type[BatonError], words: str
) -> None:
    with ScriptedOpenAI(models=models) as server, pytest.raises(kind, match=words):
        probe(Target(server.url, ""))


@pytest.mark.parametrize(
    ("play", "kind", "words"),
    [
        (all_at_once, ConfigError, "does not stream an answer: the answer is one JSON body"),
        (broken, BatonError, r"does not stream an answer \(status 500\): out of memory"),
    ],
)
def test_a_server_that_does_not_stream_is_told(
    play: object, kind: type[BatonError], words: str
) -> None:
    with ScriptedOpenAI(play) as server, pytest.raises(kind, match=words):  # type: ignore[arg-type]
        probe(Target(server.url, ""))


def test_a_server_that_is_not_there_is_told() -> None:
    with ScriptedOpenAI() as server:
        url = server.url
    with pytest.raises(ConfigError, match=f"cannot reach {url}: connection refused"):
        probe(Target(url, ""))
    with pytest.raises(ConfigError, match=r"cannot reach http://nowhere\.invalid: "):
        probe(Target("http://nowhere.invalid", ""))


def test_a_program_that_speaks_before_it_is_asked_is_told() -> None:
    def greet(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                with listener.accept()[0] as connection:
                    connection.sendall(b"SSH-2.0-a server of another kind\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=greet, args=(listener,))
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        try:
            with pytest.raises(ConfigError, match=rf"{url} (spoke or hung up|gives no answer)"):
                probe(Target(url, "", timeout_s=5.0))
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_a_probe_ends_when_it_is_told_to() -> None:
    read_end, write_end = os.pipe()
    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = f"http://127.0.0.1:{mute.getsockname()[1]}"
        os.write(write_end, b"!")
        with pytest.raises(BatonError, match=f"interrupted while {url} was asked"):
            probe(Target(url, ""), read_end)
    os.close(read_end)
    os.close(write_end)


def test_chats_are_probed_as_chats() -> None:
    with ScriptedOpenAI(answer) as server:
        assert probe(Target(server.url, "", api="chat")).usage
        assert all("messages" in body for body in server.bodies)
