"""Requests as bytes, and responses in HTTP/1.1 read from bytes in any pieces."""

import asyncio
import json

import httptools
import pytest

from baton.bench.client.http import Exchange, body_of
from baton.bench.records import Message, Planned
from baton.bench.settings import Target, place_of
from baton.protocol.errors import ConfigError


def read(*pieces: bytes, ends: bool = False) -> Exchange:
    """The pieces come at 1 s, 2 s, ..., then the connection may end."""

    async def feed() -> Exchange:
        exchange = Exchange(is_chat=False)
        parser = httptools.HttpResponseParser(exchange)
        for at_s, piece in enumerate(pieces, 1):
            exchange.feed(parser, piece, float(at_s))
        if ends:
            exchange.lost("the connection was closed", 9.0)
        return exchange

    return asyncio.run(feed())


def test_a_piece_of_a_stream_is_stamped_before_its_chunk_is_complete():
    head = (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    found = read(head, b"ff\r\ndata: [DO", b"NE]\n\n")
    assert (found.first_byte_s, found.end_s, found.problem) == (2.0, 3.0, None)
    assert found.reader.done
    assert not found.is_complete


PLANNED = Planned(index=0, at_s=None, output_tokens=5, prompt_ids=(1, 2))
CHAT = Planned(index=0, at_s=None, output_tokens=5, messages=(Message("user", "hi"),))


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("127.0.0.1:8000", "http://host:port"),
        ("http://me:secret@a", "keys have a flag"),
        ("http://a/?key=secret", "keys have a flag"),
        ("http://me:secret@a:port", "not a URL"),
        ("http://a/x y", "plain ASCII"),
    ],
)
def test_an_address_that_is_none_is_refused_without_its_password(url, words):
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
    ],
)  # fmt: skip
def test_the_body_of_a_request(target, planned, body):
    always = {"model": "m", "max_tokens": 5, "temperature": 0, "stream": True}
    assert json.loads(body_of(target, planned)) == always | body
