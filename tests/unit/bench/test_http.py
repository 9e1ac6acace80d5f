"""Answers in HTTP/1.1 are read from bytes in any pieces, and what is none of them is named."""

import asyncio
import re

import httptools
import pytest

from baton.bench.client.http import Exchange
from baton.bench.records import Outcome

HEAD = b"HTTP/1.1 404 Not Found\r\n"  # whose body is kept as it came
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
BODY = b"5\r\nhello\r\n1F;name=x\r\n" + b"x" * 31 + b"\r\n0\r\nTrailer: y\r\n\r\n"
TEXT = b"hello" + b"x" * 31


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


def test_a_chunked_body_is_whole_wherever_it_was_cut() -> None:
    data = b"HTTP/1.1 100 Continue\r\n\r\n" + CHUNKED + BODY
    for cut in range(len(data) + 1):
        found = read(*filter(None, (data[:cut], data[cut:])))
        assert (found.status, bytes(found.body), found.is_complete) == (404, TEXT, True)
        assert found.keep_alive
        assert found.headers == {"transfer-encoding": "chunked"}


def test_a_piece_of_a_stream_is_stamped_before_its_chunk_is_complete() -> None:
    head = (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    found = read(head, b"ff\r\ndata: [DO", b"NE]\n\n")
    assert (found.first_byte_s, found.end_s, found.problem) == (2.0, 3.0, None)
    assert found.reader.done
    assert not found.is_complete


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"SSH-2.0-OpenSSH\r\n", "not HTTP"),
        (b"HTTP/1.1 101 Switching\r\n\r\n", "another protocol"),
        (HEAD + b"Content-Encoding: gzip\r\n\r\n", "compressed"),
        (CHUNKED + b"hello\r\n", "chunk size"),
    ],
)
def test_what_is_not_http_is_named(data: bytes, words: str) -> None:
    found = read(data, b"more")
    assert found.problem.outcome is Outcome.MALFORMED
    assert re.search(words, found.problem.detail)
