"""What is asked of a server, and the loads that no server could be asked."""

import json

import pytest

from baton.bench.client.target import Place, Target, body_of, check, place_of
from baton.bench.records import Message, Planned
from baton.protocol.errors import ConfigError

TARGET = Target("http://127.0.0.1:8000", "tiny", token_ids=False, timeline=False)
PLANNED = Planned(index=0, at_s=None, output_tokens=5, prompt_ids=(1, 2))


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("http://a:8000", Place("a", 8000, False, "/v1")),
        ("http://a:8000/v1/", Place("a", 8000, False, "/v1")),
        ("https://a/llm", Place("a", 443, True, "/llm/v1")),
        ("http://[::1]:80", Place("::1", 80, False, "/v1")),
    ],
)
def test_an_address_may_end_in_v1(url: str, place: Place) -> None:
    assert place_of(url) == place


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("127.0.0.1:8000", "http://host:port"),
        ("ftp://a", "http://host:port"),
        ("http://", "http://host:port"),
        ("http://a:port", "no URL"),
        ("http://me:secret@a", "keys have a flag"),
        ("http://a/?key=secret", "keys have a flag"),
        ("http://a/x y", "plain ASCII"),
    ],
)
def test_an_address_that_is_none_is_refused(url: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        place_of(url)
    assert "secret" not in caught.value.message


def test_the_name_of_a_host_has_the_port_unless_it_is_the_usual_one() -> None:
    assert place_of("http://a:80").authority == "a"
    assert place_of("https://a:80").authority == "a:80"
    assert place_of("http://[::1]:8000").authority == "[::1]:8000"


def test_a_request_forces_its_length_and_asks_for_a_stream_with_usage() -> None:
    assert json.loads(body_of(TARGET, PLANNED)) == {
        "model": "tiny",
        "prompt": [1, 2],
        "max_tokens": 5,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }


def test_extensions_are_asked_for_by_name_and_the_rest_is_the_users() -> None:
    target = Target(
        url="http://a",
        model="tiny",
        api="chat",
        token_ids=True,
        timeline=True,
        continuous_usage=True,
        ignore_eos=False,
        extra_body='{"temperature": 0.5, "seed": 1}',
    )
    planned = Planned(index=0, at_s=None, output_tokens=5, messages=(Message("user", "hi"),))
    body = json.loads(body_of(target, planned))
    assert body["messages"] == [{"role": "user", "content": "hi"}]
    assert body["return_token_ids"] is True
    assert body["timeline"] is True
    assert body["stream_options"]["continuous_usage_stats"] is True
    assert "ignore_eos" not in body
    assert (body["temperature"], body["seed"]) == (0.5, 1)


def test_a_prompt_of_text_is_a_chat_of_one_message() -> None:
    target = Target(url="http://a", model="tiny", api="chat")
    body = json.loads(body_of(target, Planned(index=0, at_s=None, output_tokens=1, prompt="hi")))
    assert body["messages"] == [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("target", "more", "words"),
    [
        ({"api": "chat"}, {"prompt_ids": (1,)}, "chat API takes none"),
        ({}, {"messages": (Message("user", "hi"),)}, "completions API takes none"),
        ({"token_ids": False}, {"prompt_ids": (1,), "turn": 1}, "returns token ids"),
        ({"extra_body": '{"stream": false}'}, {}, "must not set stream"),
        ({"extra_body": '{"model": "other"}'}, {}, "must not set model"),
        ({"api_key": "a\nb"}, {}, "printable"),
        ({"url": "nowhere"}, {}, "http://host:port"),
        ({}, {"output_tokens": 0}, "no output token"),
    ],
)
def test_a_load_that_cannot_be_asked_for_is_refused(
    target: dict[str, object], more: dict[str, object], words: str
) -> None:
    fields: dict[str, object] = {"url": "http://a", "model": "tiny", **target}
    planned = {"index": 0, "at_s": None, "output_tokens": 1, **more}
    with pytest.raises(ConfigError, match=words):
        check(Target(**fields), [Planned(**planned)])  # type: ignore[arg-type]


@pytest.mark.parametrize("url", ["http://me:hidden@a:port", "me:hidden@a:8000", "http://me:hid@a"])
def test_a_password_in_an_address_is_not_shown(url: str) -> None:
    with pytest.raises(ConfigError) as refused:
        place_of(url)
    assert "hid" not in refused.value.message
