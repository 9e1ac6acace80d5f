"""Requests as bytes; of responses every token is counted once, and contradictions are named."""

import asyncio
import json
from itertools import pairwise

import httptools
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.bench.client.http import Exchange, body_of
from baton.bench.client.response import EventParser, ResponseReader, message_of
from baton.bench.records import Message, Outcome, Planned, Record
from baton.bench.settings import Target, server_address
from baton.protocol.errors import ConfigError
from tests.support.scripted_server import DONE, delta, event, token, usage, usage_body

STREAM = (
    b"\xef\xbb\xbf: a comment after a byte order mark\n\n"
    b'id: 7\nevent: chunk\ndata: {"a": 1}\n\n'
    b"data:no space\r\n\r\n"
    b"data: first\ndata:  second\r\ndata\n\n"
    b"retry: 3\n\n"
    b"\n\n"
    b"data: \xef\xbb\xbf[DONE]\n\n"
)
EVENTS = [b'{"a": 1}', b"no space", b"first\n second\n", b"\xef\xbb\xbf[DONE]"]
Counts = list[tuple[float, int]]


def parse(*pieces: bytes) -> list[bytes]:
    parser = EventParser()
    return [event for piece in pieces for event in parser.feed(piece)]


def read(
    *pieces: bytes, forced: int = 0, asked: int = 3, chat: bool = False, cut: str = ""
) -> Record:
    """The pieces arrive at 1 s, 2 s, ..."""
    reader = ResponseReader(chat)
    for number, piece in enumerate(pieces, start=1):
        if reader.feed(piece, float(number)):
            break
    if cut:
        reader.cut(cut)
    record = Record(
        index=0,
        intended_s=0.0,
        sent_s=0.0,
        end_s=9.0,
        outcome=Outcome.UNREACHABLE,
        forced_tokens=forced,
    )
    reader.fill(record, num_requested=forced or asked)
    return record


def counts(record: Record) -> Counts:
    return [(arrival.at_s, arrival.num_tokens) for arrival in record.arrivals]


@given(st.lists(st.integers(0, len(STREAM))))
def test_many_cuts_change_no_event(cuts):
    places = [0, *sorted(cuts), len(STREAM)]
    assert parse(*(STREAM[a:b] for a, b in pairwise(places))) == EVENTS


@pytest.mark.parametrize(
    ("pieces", "num_tokens", "found"),
    [
        # Token ids say how many tokens a chunk carries.
        (
            [token("", []), token("a", [1]), token("", [2, 3]), usage(3)],
            3,
            [(2, 1), (3, 2)],
        ),
        # Else each chunk with text is a token.
        (
            [token(""), token("a"), token("b"), token("c", end="length")],
            3,
            [(2, 1), (3, 1), (4, 1)],
        ),
        (
            [token("a"), token("b"), token("", end="length"), usage(2)],
            2,
            [(1, 1), (2, 1)],
        ),
        ([token("a") + token("b"), token("c")], 3, [(1, 2), (2, 1)]),
        # An event counts when its last byte is there.
        ([token("a")[:9], token("a")[9:-1], token("a")[-1:]], 1, [(3, 1)]),
        # Usage may come with the chunks.
        (
            [token("a"), token("b"), token("c", end="length", usage=usage_body(3))],
            3,
            [(1, 1), (2, 1), (3, 1)],
        ),
        (
            [
                token("a", usage=usage_body(0)),
                token("b", usage=usage_body(0)),
                usage(2),
            ],
            2,
            [(1, 1), (2, 1)],
        ),
        # Token ids that come after the text do not move its tokens.
        (
            [token("a"), token("b"), token("c", [1, 2, 3], end="length"), usage(3)],
            3,
            [(1, 1), (2, 1), (3, 1)],
        ),
    ],
)
def test_tokens_are_counted_by_what_the_server_says(pieces, num_tokens, found):
    record = read(*pieces, DONE, forced=num_tokens)
    assert (record.outcome, record.detail) == (Outcome.ANSWERED, "")
    assert counts(record) == found


def test_the_usage_of_the_server_is_kept():
    record = read(token("a", [1]), token("", [2, 3]), usage(3, 8, 4), DONE, forced=3)
    assert record.token_ids == [1, 2, 3]
    assert (record.output_tokens, record.prompt_tokens, record.cached_tokens) == (
        3,
        8,
        4,
    )


def test_the_role_of_a_chat_is_no_token_and_reasoning_is_one():
    thought = event({"choices": [{"index": 0, "delta": {"reasoning_content": "hm"}}]})
    record = read(delta(""), thought, delta("b"), DONE, asked=2, chat=True)
    assert record.outcome is Outcome.ANSWERED
    assert counts(record) == [(2, 1), (3, 1)]


@pytest.mark.parametrize(
    ("pieces", "found", "note"),
    [
        (
            [token("a b"), token(" c d e"), usage(5)],
            [(1, 2), (2, 3)],
            "5 tokens in 2 chunks",
        ),
        # A token that completes no text comes with one that does.
        (
            [token("a"), token(""), token("b"), usage(3)],
            [(1, 1), (3, 2)],
            "3 tokens in 2 chunks",
        ),
    ],
)
def test_tokens_without_a_chunk_of_their_own_are_spread_and_marked(pieces, found, note):
    record = read(*pieces, DONE, forced=sum(count for _, count in found))
    assert record.outcome is Outcome.ANSWERED
    assert counts(record) == found
    assert note in record.detail


THREE = [token("a"), token("b"), token("c")]


@pytest.mark.parametrize(
    ("pieces", "outcome", "words"),
    [
        (
            [token("a", [1]), token("b", [2]), usage(3)],
            "wrong_usage",
            "says 3 tokens, 2 token ids",
        ),
        ([*THREE, usage(2)], "wrong_usage", "usage says 2 tokens, 3 chunks"),
        ([usage(3)], "wrong_usage", "usage says 3 tokens, 0 chunks"),
        # A forced length is verified, and one that cannot be is wrong.
        (
            [token("a", [1, 2]), token("", [], end="stop"), usage(2)],
            "wrong_length",
            "2 tokens instead of 3, finish reason stop",
        ),
        ([token("a", [1, 2, 3, 4]), usage(4)], "wrong_length", "4 tokens instead of 3"),
        ([token("a b c")], "wrong_length", "by chunks with text"),
    ],
)
def test_a_contradiction_is_named(pieces, outcome, words):
    record = read(*pieces, DONE, forced=3)
    assert record.outcome == outcome
    assert words in record.detail


@pytest.mark.parametrize(
    ("data", "outcome", "words"),
    [
        (
            event({"error": {"message": "node lost", "code": 502}}),
            "error_in_stream",
            "node lost",
        ),
        (
            event({"object": "error", "message": "too long"}),
            "error_in_stream",
            "too long",
        ),
        (b"data: {'a': 1}\n\n", "malformed", "not JSON: {'a': 1}"),
        (b'data: {"choices": [{"text": "\xff"}]}\n\n', "malformed", "not JSON"),
        (event({"status": "busy"}), "malformed", "neither choices nor usage"),
        (event({"choices": [{"index": 1, "text": "a"}]}), "malformed", "not requested"),
        (event({"choices": [{"index": 0}]}), "malformed", "no text"),
    ],
)
def test_an_event_that_should_not_be_ends_the_answer(data, outcome, words):
    record = read(token("a"), data, token("b"), DONE)
    assert record.outcome == outcome
    assert words in record.detail
    assert counts(record) == [(1.0, 1)]


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        ([], "without [DONE], after 0"),
        ([token("a"), b"data: {"], "within an event, after 1"),
    ],
)
def test_an_answer_without_its_end_is_truncated(pieces, words):
    record = read(*pieces, cut="the connection was closed")
    assert record.outcome is Outcome.TRUNCATED
    assert record.detail == f"the connection was closed {words} chunks"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "no  room\\n", "code": 1}}', "no room"),
        (b'{"detail": [{"msg": "x"}]}', '[{"msg":"x"}]'),
        (b"<html>\x00bad \xff</html>", "<html> bad \N{REPLACEMENT CHARACTER}</html>"),
        (b"[" * 100_000, "[" * 199 + "…"),
    ],
)
def test_the_message_of_an_error_is_one_short_line(body, message):
    assert message_of(body) == message


def exchanged(*pieces: bytes, ends: bool = False) -> Exchange:
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
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n"
    )
    found = exchanged(head, b"ff\r\ndata: [DO", b"NE]\n\n")
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
        server_address(url)
    assert "secret" not in caught.value.message


@pytest.mark.parametrize(
    ("target", "planned", "body"),
    [
        # A request forces its length, and asks for a stream with usage.
        (
            Target(model="m", token_ids=False),
            PLANNED,
            {
                "prompt": [1, 2],
                "ignore_eos": True,
                "stream_options": {"include_usage": True},
            },
        ),
        # Extensions are asked for by name, and the rest is the user's.
        (
            Target(
                model="m",
                api="chat",
                ignore_eos=False,
                extra_body='{"temperature": 0.5, "seed": 1}',
            ),
            CHAT,
            {
                "messages": [{"role": "user", "content": "hi"}],
                "temperature": 0.5,
                "seed": 1,
                "return_token_ids": True,
                "stream_options": {"include_usage": True},
            },
        ),
    ],
)
def test_the_body_of_a_request(target, planned, body):
    always = {"model": "m", "max_tokens": 5, "temperature": 0, "stream": True}
    assert json.loads(body_of(target, planned)) == always | body
