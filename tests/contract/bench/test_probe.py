"""Probing finds what a server can do before a load, and names an obstacle in one clear line."""

import os
import socket
from collections.abc import Sequence

import pytest

from baton.bench.client.http import body_of
from baton.bench.client.probe import Probed, probe
from baton.bench.compare import connect
from baton.bench.experiment import Experiment
from baton.bench.records import Planned
from baton.bench.settings import CompareSettings, LoadSettings, Target
from baton.protocol.errors import BatonError, ConfigError
from tests.support.scripted_server import (
    DONE,
    MODEL,
    Call,
    Play,
    ScriptedServer,
    error,
    token,
    usage,
)

TWO_MODELS = {"data": [{"id": "one"}, {"id": "two"}]}


FIELDS = ("return_token_ids",)


def giving(*refused: str, told: Sequence[str] = (*FIELDS, "usage")) -> Play:
    """A server that refuses these fields, accepts all others, and answers what is `told`."""

    async def play(call: Call) -> None:
        if named := [name for name in refused if name in str(call.body)]:
            await call.reply(400, error(f"unknown field {named[0]}"))
            return
        asked = [name for name in FIELDS if name in told and name in str(call.body)]
        ids = [7] if "return_token_ids" in asked else None
        for _ in range(call.num_tokens):
            await call.write(token(" a", ids))
        await call.send(usage(call.num_tokens) if "usage" in told else b"", DONE)

    return play


def replies(status: int, body: bytes = b"", kind: str = "text/plain") -> Play:
    return lambda call: call.reply(status, body, kind)


OPENAIS = giving("return_token_ids", "ignore_eos")
MUTE = giving(told=())  # ignores every wish, that for usage too
STRICT = giving("stream_options", told=())


def test_a_server_is_found_out_and_the_target_fitted():
    with ScriptedServer(giving()) as server:
        target = Target(server.url)
        probed = probe(target)
    assert probed == Probed(
        model=MODEL,
        server="scripted",
        gives=frozenset({"usage", "ignore_eos", "token_ids"}),
    )
    fitted = probed.fit(target)
    assert (fitted.model, fitted.token_ids) == (MODEL, True)
    assert not probed.fit(Target(target.url, token_ids=False)).token_ids


@pytest.mark.parametrize(
    ("play", "knows_usage", "forces"),
    [(OPENAIS, True, False), (MUTE, False, True), (STRICT, False, True)],
)
def test_what_a_server_does_not_know_is_not_asked_for(play, knows_usage, forces):
    with ScriptedServer(play) as server:
        fitted = probe(Target(server.url)).fit(Target(server.url))
    assert fitted.token_ids is False
    assert (fitted.usage, fitted.ignore_eos) == (knows_usage, forces)


@pytest.mark.parametrize(
    ("models", "kind", "words"),
    [
        (replies(200, b"<html>"), ConfigError, "not a server with OpenAI's API"),
        (replies(401, b"key?"), ConfigError, "wants an API key, and it is missing"),
        (replies(503, b"starting"), BatonError, r"\(status 503\): starting"),
        (TWO_MODELS, ConfigError, "serves one, two: name one with --model"),
        ({"data": [{"id": "\x1b[2Jm"}]}, ConfigError, r"serves \[2Jm: name one"),
    ],
)
def test_a_list_of_models_that_is_none_is_told(models, kind, words):
    with (
        ScriptedServer(pages={"/v1/models": models}) as server,
        pytest.raises(kind, match=words),
    ):
        probe(Target(server.url))


def test_a_server_that_does_not_stream_is_told():
    whole = replies(200, b'{"choices": []}')
    with (
        ScriptedServer(whole) as server,
        pytest.raises(
            ConfigError, match=r"does not stream a response: .* one JSON body"
        ),
    ):
        probe(Target(server.url))


def test_a_probe_ends_when_it_is_told_to():
    read_end, write_end = os.pipe()
    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = f"http://127.0.0.1:{mute.getsockname()[1]}"
        os.write(write_end, b"!")
        with pytest.raises(BatonError, match=f"interrupted while {url} was asked"):
            probe(Target(url), read_end)
    os.close(read_end)
    os.close(write_end)


def test_arms_of_a_comparison_are_asked_for_what_all_of_them_give():
    settings = CompareSettings(load=LoadSettings(requests=1))
    with (
        ScriptedServer(giving()) as rich,
        ScriptedServer(giving(told=("usage",))) as poor,
        Experiment("compare", settings, [None], settings.arrival) as experiment,
    ):
        arms = connect(experiment, {"a": Target(rich.url), "b": Target(poor.url)})
    asked = Planned(index=0, at_s=None, output_tokens=2, prompt="Once upon a time")
    assert body_of(arms["a"].target, asked) == body_of(arms["b"].target, asked)
    assert arms["a"].described.endswith("giving usage")
