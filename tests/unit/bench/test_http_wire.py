"""Answers in HTTP/1.1 are read from bytes in any pieces, and nonsense is named."""

import pytest

from baton.bench.client.http_wire import ResponseParser, WireError

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
BODY = b"5\r\nhello\r\n1F;name=x\r\n" + b"x" * 31 + b"\r\n0\r\nTrailer: y\r\n\r\n"
TEXT = b"hello" + b"x" * 31


def read(*pieces: bytes) -> tuple[ResponseParser, bytes]:
    parser = ResponseParser()
    return parser, b"".join(part for piece in pieces for part in parser.feed(piece))


@pytest.mark.parametrize("cut", range(len(CHUNKED + BODY) + 1))
def test_a_chunked_body_is_whole_wherever_it_was_cut(cut: int) -> None:
    data = CHUNKED + BODY
    parser, body = read(data[:cut], data[cut:])
    assert (parser.status, body) == (200, TEXT)
    assert parser.is_complete
    assert parser.keep_alive


def test_a_piece_is_out_before_its_chunk_is_complete() -> None:
    parser = ResponseParser()
    assert parser.feed(CHUNKED + b"5\r\nhel") == [b"hel"]
    assert parser.feed(b"lo\r\n") == [b"lo"]
    assert not parser.is_complete


@pytest.mark.parametrize("cut", [0, 10, 60, 75])
def test_a_body_of_known_length_ends_by_itself(cut: int) -> None:
    data = HEAD + b"Content-Length: 5\r\n\r\nhello"
    parser, body = read(data[:cut], data[cut:])
    assert (body, parser.is_complete, parser.keep_alive) == (b"hello", True, True)


def test_a_body_may_end_with_its_connection() -> None:
    parser, body = read(HEAD + b"\r\nhel", b"lo")
    assert (body, parser.is_complete, parser.keep_alive) == (b"hello", False, False)
    assert parser.end_of_input()


def test_a_body_with_an_end_of_its_own_does_not_end_with_its_connection() -> None:
    parser, _ = read(CHUNKED + b"5\r\nhello\r\n")
    assert not parser.end_of_input()


@pytest.mark.parametrize(
    ("head", "body"),
    [
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", b""),
    ],
)
def test_an_answer_may_have_no_body(head: bytes, body: bytes) -> None:
    parser, found = read(head)
    assert (found, parser.is_complete) == (body, True)


def test_interim_answers_are_skipped() -> None:
    parser, body = read(b"HTTP/1.1 100 Continue\r\n\r\n" + CHUNKED + BODY)
    assert (parser.status, body) == (200, TEXT)


def test_a_server_may_want_to_close_the_connection() -> None:
    parser, _ = read(HEAD + b"Connection: close\r\nContent-Length: 0\r\n\r\n")
    assert not parser.keep_alive
    parser, _ = read(b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n")
    assert not parser.keep_alive


def test_bytes_after_the_end_spoil_the_connection_only() -> None:
    parser, body = read(CHUNKED + BODY + b"more")
    assert (body, parser.is_complete, parser.keep_alive) == (TEXT, True, False)


def test_names_of_headers_are_lower_case_and_repeated_ones_joined() -> None:
    parser, _ = read(b"HTTP/1.1 200\r\nX-A: 1\r\nx-a:2\r\nContent-Length: 0\r\n\r\n")
    assert parser.headers == {"x-a": "1, 2", "content-length": "0"}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"SSH-2.0-OpenSSH\r\n", "not HTTP"),
        (b"\x15\x03\x01\x00\x02", "https://"),
        (b"HTTP/1.1 2x0 OK\r\n\r\n", "not HTTP"),
        (b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n", "colon"),
        (b"HTTP/1.1 101 Switching\r\n\r\n", "another protocol"),
        (HEAD + b"Content-Encoding: gzip\r\n\r\n", "compressed"),
        (HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n", "transfer encoding"),
        (HEAD + b"Content-Length: -1\r\n\r\n", "length"),
        (CHUNKED + b"hello\r\n", "chunked"),
        (CHUNKED + b"-5\r\nhello\r\n", "chunked"),
        (CHUNKED + b"5\r\nhello!\r\n", "chunked"),
        (CHUNKED + b"1" * 20_000, "chunked"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000, "not HTTP"),
    ],
)
def test_what_is_not_http_is_named(data: bytes, words: str) -> None:
    with pytest.raises(WireError, match=words):
        ResponseParser().feed(data)
