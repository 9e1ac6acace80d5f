"""Strategies of attacks: requests from the router's description, and ways to send them."""

import gzip
import itertools
import json
import zlib
from collections.abc import Mapping, Sequence

from hypothesis import strategies as st

from baton.router.http.app import document
from tests.fuzz.client import Attack
from tests.fuzz.values import Schema, fields_with_a_form, large_fields, object_of

JSON_TYPE = "Content-Type: application/json\r\n"
MAX_VOLLEY = 4
MAX_BODY_BYTES = 12 << 20
TAIL_PIECES = 400  # of a body that comes byte by byte


def _described() -> tuple[Mapping[str, Mapping[str, Schema]], Mapping[str, Schema]]:
    described = json.loads(document())
    return described["paths"], described["components"]["schemas"]


PATHS, SCHEMAS = _described()
POSTS = tuple(path for path, methods in PATHS.items() if "post" in methods)
GETS = tuple(path for path, methods in PATHS.items() if "get" in methods)


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, bytes]:
    """Draw a path and a body for it."""
    path = draw(st.sampled_from(POSTS))
    kind = draw(st.sampled_from(("described", "described", "form", "large")))
    fields: dict[str, str] = {}
    if kind == "form":
        fields = draw(fields_with_a_form(path))
    elif kind == "large":
        fields = draw(large_fields(path))
    schema = SCHEMAS[_schema_name(path)]
    text = (
        draw(object_of(schema, SCHEMAS, fields))
        if kind == "described"
        else _object(fields)
    )
    return path, text.encode("utf-8", "surrogatepass")[:MAX_BODY_BYTES]


def _object(fields: Mapping[str, str]) -> str:
    return "{" + ",".join(f'"{name}":{text}' for name, text in fields.items()) + "}"


def _schema_name(path: str) -> str:
    asked = PATHS[path]["post"]["requestBody"]["content"]  # type: ignore[index]
    return str(asked["application/json"]["schema"]["$ref"]).rpartition("/")[2]


def head(method: str, path: str, *more: str) -> bytes:
    lines = "".join(f"{line}\r\n" for line in more)
    return f"{method} {path} HTTP/1.1\r\nHost: x\r\n{lines}\r\n".encode(
        "latin-1", "replace"
    )


@st.composite
def whole_requests(draw: st.DrawFn) -> tuple[str, bytes]:
    """Draw a request that is well-formed as HTTP, and what it is."""
    if draw(st.integers(0, 3)) == 0:
        path = draw(st.sampled_from(GETS))
        path = path.replace("{name}", "tiny")
        return f"GET {path[:40]}", head("GET", path)
    path, body = draw(bodies())
    more = draw(
        st.sampled_from(
            (
                (),
                (),
                (),
                ("Expect: 100-continue",),
                ("Accept: text/event-stream",),
                ("Last-Event-ID: cmpl-1:0.0",),
                ("Last-Event-ID: cmpl-" + "0" * 24 + ":1-1:1@00000001",),
                ("Last-Event-ID: cmpl-1:" + "9" * 500,),
                ("X-Request-Id: a",),
            )
        )
    )
    lines = ("Content-Type: application/json", f"Content-Length: {len(body)}", *more)
    return f"POST {path}", head("POST", path, *lines) + body


@st.composite
def plain(draw: st.DrawFn) -> Attack:
    name, data = draw(whole_requests())
    copies = draw(st.sampled_from((1, 1, 4, 16)))
    leaves_early = draw(st.booleans())
    return Attack(name, (data,), 0.0, 1, copies, leaves_early)


@st.composite
def torn(draw: st.DrawFn) -> Attack:
    """Draw a request in pieces, of which the last may be missing."""
    name, data = draw(whole_requests())
    cuts = draw(st.lists(st.integers(1, min(len(data), 4_000)), max_size=12))
    pieces = _cut(data, cuts)
    pause_s = draw(st.sampled_from((0.0, 0.001, 0.02)))
    if draw(st.booleans()):
        return Attack(f"torn {name}", pieces, pause_s, 1)
    return Attack(f"torn and left {name}", pieces[:-1] or (b"G",), pause_s)


def _cut(data: bytes, cuts: Sequence[int]) -> tuple[bytes, ...]:
    places = [0, *sorted(set(cuts) - {len(data)}), len(data)]
    return tuple(data[begin:end] for begin, end in itertools.pairwise(places))


@st.composite
def chunked(draw: st.DrawFn) -> Attack:
    """Draw a body in chunks of odd sizes, some of which are malformed."""
    path, body = draw(bodies())
    sizes = draw(
        st.lists(st.sampled_from((1, 1, 2, 7, 100, 5_000, 70_000)), min_size=1)
    )
    extension = draw(st.sampled_from((b"", b"", b";a=b", b";" + b"x" * 3_000)))
    start = head(
        "POST", path, "Content-Type: application/json", "Transfer-Encoding: chunked"
    )
    chunks = []
    position = 0
    index = 0
    while position < len(body) and len(chunks) < 50_000:
        part = body[position : position + sizes[index % len(sizes)]]
        chunks.append(b"%x%s\r\n%s\r\n" % (len(part), extension, part))
        position = position + len(part)
        index = index + 1
    end = draw(
        st.sampled_from(
            (
                b"0\r\n\r\n",
                b"0\r\n\r\n",
                b"0\r\na: b\r\n\r\n",
                b"zz\r\n",
                b"-1\r\n\r\n",
                b"ffffffffffffffff\r\n",
                b"0\r\n" + b"a: b\r\n" * 500,
                b"",
            )
        )
    )
    is_whole = end == b"0\r\n\r\n" and position >= len(body)
    if draw(st.booleans()):
        pieces: tuple[bytes, ...] = (start + b"".join(chunks) + end,)
    else:
        pieces = (start, *chunks[:TAIL_PIECES], b"".join(chunks[TAIL_PIECES:]) + end)
    return Attack(
        f"chunked {path}", pieces, 0.0, int(is_whole), draw(st.sampled_from((1, 1, 8)))
    )


@st.composite
def compressed(draw: st.DrawFn) -> Attack:
    """Draw a compressed body, or what says that it is one."""
    path, body = draw(bodies())
    kind = draw(st.sampled_from(("gzip", "deflate", "x-gzip", "br", "gzip, gzip")))
    zeros = b" " * draw(st.sampled_from((0, 0, 1 << 20, 1 << 24, 1 << 27)))
    data = (
        zlib.compress(body + zeros, 1)
        if kind == "deflate"
        else gzip.compress(body + zeros, 1)
    )
    match draw(st.sampled_from(("whole", "whole", "cut", "twice", "wrong", "more"))):
        case "cut":
            data = data[: len(data) // 2]
        case "twice":
            data = gzip.compress(data)
        case "wrong":
            data = body
        case "more":
            data += b"x" * 100_000
    lines = ("Content-Type: application/json", f"Content-Length: {len(data)}")
    start = head("POST", path, *lines, f"Content-Encoding: {kind}")
    copies = draw(st.sampled_from((1, 1, 4, 16)))
    return Attack(f"{kind} {path}", (start + data,), 0.0, 1, copies)


@st.composite
def pipelined(draw: st.DrawFn) -> Attack:
    """Draw several requests in one go."""
    requests = draw(st.lists(whole_requests(), min_size=1, max_size=4))
    times = draw(st.sampled_from((1, 1, 10, 300)))
    data = b"".join(one for _, one in requests)
    if len(data) * times > 1 << 24:
        times = 1
    names = ", ".join(name for name, _ in requests)
    return Attack(f"{times} times pipelined {names}", (data * times,))


@st.composite
def malformed(draw: st.DrawFn) -> Attack:
    """Draw what is no request, or one that servers disagree about."""
    num = draw(st.sampled_from((10, 1_000, 20_000, 1_000_000)))
    post = "POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + JSON_TYPE
    text = draw(
        st.sampled_from(
            (
                "GET /" + "a" * num + " HTTP/1.1\r\n\r\n",
                "GET / HTTP/1.1\r\n" + "a: b\r\n" * num + "\r\n",
                "GET / HTTP/1.1\r\nCookie: " + "c" * num + "\r\n\r\n",
                "GET /live HTTP/1.0\r\n\r\n",
                "GET /live HTTP/1.1\r\n\r\n",
                "GET /live\r\n\r\n",
                "GET /live HTTP/9.9\r\nHost: x\r\n\r\n",
                "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
                "GET * HTTP/1.1\r\nHost: x\r\n\r\n",
                "GET http://[::1 HTTP/1.1\r\nHost: x\r\n\r\n",
                "GET /%ff%00?%zz=1#x HTTP/1.1\r\nHost: x\r\n\r\n",
                "CONNECT a:1 HTTP/1.1\r\nHost: x\r\n\r\n",
                "OPTIONS * HTTP/1.1\r\nHost: x\r\nOrigin: http://a\r\n\r\n",
                "TRACE /live HTTP/1.1\r\nHost: x\r\n\r\n",
                "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
                "\0" * num,
                "\r\n" * num,
                "GET /live HTTP/1.1\nHost: x\n\n",
                "GET /live HTTP/1.1\r\nHost: x\r\n folded: y\r\n\r\n",
                "GET /live HTTP/1.1\r\nHost : x\r\n\r\n",
                "GET /live HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                "Sec-WebSocket-Key: a\r\n\r\n",
                post + "Expect: 999\r\nContent-Length: 2\r\n\r\n{}",
                post + "Expect: 100-continue\r\nContent-Length: 2\r\n\r\n{}",
                "GET /live HTTP/1.1\r\nHost: x\r\nExpect: x\r\n\r\n",
                post + "Content-Length: -1\r\n\r\n{}",
                post + "Content-Length: 2\r\nContent-Length: 3\r\n\r\n{} ",
                post
                + "Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
                post + "Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
                post + "Transfer-Encoding: identity\r\n\r\n{}",
                post + "Content-Length: 99999999999999999999\r\n\r\n{}",
                post + f"Content-Length: {num}\r\n\r\n" + "{",
                post.replace("json", "xml") + "Content-Length: 2\r\n\r\n{}",
                post.replace("json", 'json; charset="utf-16"')
                + "Content-Length: 2\r\n\r\n{}",
                post.replace("json", "json; " + "a=b; " * 2_000)
                + "Content-Length: 2\r\n\r\n{}",
                "POST /live HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc",
                "DELETE /v1/completions HTTP/1.1\r\nHost: x\r\n\r\n",
                "HEAD /v1/models HTTP/1.1\r\nHost: x\r\n\r\n",
                "GET /v1/models/" + "%41" * 900 + " HTTP/1.1\r\nHost: x\r\n\r\n",
                "GET /live HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\r\n\r\n",
                "GET /live HTTP/1.1\r\nHost: x\r\nX-Request-Id: \x01\x02\r\n\r\n",
            )
        )
    )
    data = text.encode("latin-1")
    copies = draw(st.sampled_from((1, 1, 4, 16)))
    cuts = draw(st.lists(st.integers(1, min(len(data), 400)), max_size=4))
    pieces = _cut(data, cuts)
    return Attack(f"malformed {text[:60]!r}", pieces, 0.001 if cuts else 0.0, 0, copies)


def volleys() -> st.SearchStrategy[list[Attack]]:
    """Return a strategy of attacks at once."""
    attacks = st.one_of(
        plain(), plain(), torn(), chunked(), compressed(), pipelined(), malformed()
    )
    return st.lists(attacks, min_size=1, max_size=MAX_VOLLEY)
