"""What is asked of a server, and the loads that no server could be asked."""

import json

import pytest

from baton.bench.client.request import body_of
from baton.bench.records import Message, Planned
from baton.bench.settings import Target, place_of
from baton.protocol.errors import ConfigError

PLANNED = Planned(index=0, at_s=None, output_tokens=5, prompt_ids=(1, 2))
CHAT = Planned(index=0, at_s=None, output_tokens=5, messages=(Message("user", "hi"),))


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("127.0.0.1:8000", "http://host:port"),
        ("ftp://a", "http://host:port"),
        ("http://", "http://host:port"),
        ("http://a:port", "not a URL"),
        ("http://me:secret@a", "keys have a flag"),
        ("http://a/?key=secret", "keys have a flag"),
        ("http://me:secret@a:port", "not a URL"),
        ("me:secret@a:8000", "http://host:port"),
        ("http://a/x y", "plain ASCII"),
    ],
)
def test_an_address_that_is_none_is_refused_without_its_password(url: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        place_of(url)
    assert "secret" not in caught.value.message


@pytest.mark.parametrize(
    ("target", "planned", "body"),
    [
        # A request forces its length, and asks for a stream with usage.
        (
            Target(model="m", token_ids=False),
            PLANNED,
            {"prompt": [1, 2], "ignore_eos": True, "stream_options": {"include_usage": True}},
        ),
        # Extensions are asked for by name, and the rest is the user's.
        (
            Target(
                model="m", api="chat", ignore_eos=False,
                extra_body='{"temperature": 0.5, "seed": 1}',
            ),
            CHAT,
            {
                "messages": [{"role": "user", "content": "hi"}], "temperature": 0.5, "seed": 1,
                "return_token_ids": True,
                "stream_options": {"include_usage": True},
            },
        ),
        # A prompt of text is a chat of one message.
        (
            Target(model="m", api="chat", token_ids=False, usage=False),
            Planned(index=0, at_s=None, output_tokens=5, prompt="hi"),
            {"messages": [{"role": "user", "content": "hi"}], "ignore_eos": True},
        ),
    ],
)  # fmt: skip
def test_the_body_of_a_request(target: Target, planned: Planned, body: dict[str, object]) -> None:
    always = {"model": "m", "max_tokens": 5, "temperature": 0, "stream": True}
    assert json.loads(body_of(target, planned)) == always | body
