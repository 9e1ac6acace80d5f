"""A server with OpenAI's API on 127.0.0.1, in a thread of its own, that plays scripted answers.

`Stage` plays scripts and keeps the time of each actual write, so that the truth is what was written
and not what was planned. It shares nothing with the client's parser.
"""

import asyncio
import itertools
import json
import re
import ssl
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Literal, Self

import msgspec

from baton.bench.records import Arrival
from baton.runtime.clock import monotonic

DONE = b"data: [DONE]\n\n"
# Answers consist of these token ids. The first id of a prompt names its script and may be any id.
LOWEST_ID, NUM_IDS = 300, 7_000


def event(body: object) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def token(
    text: str = " a", token_ids: Sequence[int] | None = None, end: str | None = None, **more: object
) -> bytes:
    """Return a chunk of a completion; `more` holds further fields of the event."""
    choice = {"index": 0, "text": text, "finish_reason": end}
    ids = {} if token_ids is None else {"token_ids": list(token_ids)}
    return event({"choices": [choice | ids], **more})


def delta(
    text: str = " a", token_ids: Sequence[int] | None = None, end: str | None = None, **more: object
) -> bytes:
    """Return a chunk of a chat; a chunk without text opens the chat with a role."""
    said = {"content": text} if text else {"role": "assistant", "content": ""}
    choice = {"index": 0, "delta": said, "finish_reason": end}
    ids = {} if token_ids is None else {"token_ids": list(token_ids)}
    return event({"choices": [choice | ids], **more})


def usage(num_tokens: int, num_prompt: int = 3, num_cached: int | None = None) -> bytes:
    """Return the last chunk before the end."""
    return event({"choices": [], "usage": usage_body(num_tokens, num_prompt, num_cached)})


def usage_body(
    num_tokens: int, num_prompt: int = 3, num_cached: int | None = None
) -> dict[str, object]:
    body: dict[str, object] = {"prompt_tokens": num_prompt, "completion_tokens": num_tokens}
    if num_cached is not None:
        body["prompt_tokens_details"] = {"cached_tokens": num_cached}
    return body


def error(message: str) -> bytes:
    """Return the body of a refusal."""
    return json.dumps({"error": {"message": message, "type": "server_error"}}).encode()


class Chunk(msgspec.Struct, frozen=True):
    """One event; without a token it is an empty delta, as at the start of a chat."""

    at_ms: float  # since the whole request had arrived
    num_tokens: int = 1


class Script(msgspec.Struct, frozen=True):
    """One streamed answer, and how it ends."""

    chunks: tuple[Chunk, ...] = ()
    tail: bytes | None = None  # the end after the chunks; None: usage if asked for, then [DONE]
    then: Literal["end", "close", "hang"] = "end"  # the last two cut the answer
    end_ms: float | None = None  # None: with the last chunk
    cached_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)


# The moment, the bytes of the body in one write, and the number of tokens in them.
Part = tuple[float, bytes, int]


def parts_of(script: Script, asked: Mapping[str, object], number: int) -> list[Part]:
    """Return the parts of the answer to the body `asked`; events of one moment are one part."""
    ids, position = answer_ids(number, script.num_tokens), 0
    options, prompt = str(asked.get("stream_options")), prompt_of(asked)
    say, events = delta if "messages" in asked else token, list[Part]()
    for chunk in script.chunks:
        sent = ids[position : position + chunk.num_tokens]
        position += chunk.num_tokens
        is_end = bool(sent) and position == len(ids) and script.tail is None
        data = say(
            "".join(f" t{one}" for one in sent),
            sent if asked.get("return_token_ids") else None,
            "length" if is_end else None,
        )
        events.append((chunk.at_ms, data, chunk.num_tokens))
    tail = script.tail
    if tail is None:
        num_prompt = len(prompt if isinstance(prompt, list) else prompt.split())
        told = usage(len(ids), num_prompt, script.cached_tokens)
        tail = (told if "include_usage" in options else b"") + DONE
    last_ms = script.chunks[-1].at_ms if script.chunks else 0.0
    events.append((last_ms if script.end_ms is None else script.end_ms, tail, 0))
    return [
        (at_ms, b"".join(data for _, data, _ in found), sum(count for _, _, count in found))
        for at_ms, group in itertools.groupby(events, lambda part: part[0])
        if (found := list(group))
    ]


def prompt_of(asked: Mapping[str, object]) -> list[int] | str:
    """Return the token ids, the text, or the last message that a request asks about."""
    messages = asked.get("messages")
    found = messages[-1]["content"] if isinstance(messages, list) else asked.get("prompt")
    return found if isinstance(found, list) else str(found)


def steady(first_ms: float, gap_ms: float, num_tokens: int) -> tuple[Chunk, ...]:
    """Return a token per chunk at an even pace."""
    return tuple(Chunk(first_ms + gap_ms * position) for position in range(num_tokens))


def paced(first_ms: float, gaps_ms: Sequence[float], sizes: Sequence[int]) -> tuple[Chunk, ...]:
    """Return chunks of these sizes; `gaps_ms` lie between them, so there is one gap less."""
    moments = itertools.accumulate(gaps_ms, initial=first_ms)
    return tuple(Chunk(at_ms, size) for at_ms, size in zip(moments, sizes, strict=True))


def answer_ids(number: int, num_tokens: int) -> list[int]:
    """Return the tokens of a number's answer, the same at every call."""
    # Both factors are coprime to the number of ids, so an answer repeats no id.
    return [LOWEST_ID + (number * 1_009 + at * 2_003) % NUM_IDS for at in range(num_tokens)]


HOST = "127.0.0.1"
MODEL = "scripted"
MODELS = {"object": "list", "data": [{"id": MODEL, "object": "model"}]}
STREAM = ("Content-Type: text/event-stream; charset=utf-8", "Transfer-Encoding: chunked")
START_TIMEOUT_S = 30.0
# A silent answer waits this long for its client to leave.
SILENCE_LIMIT_S = 120.0
MAX_HEADER_BYTES = 1 << 16
MAX_CALLS = 1_000  # the number of calls that are kept
# The least time between the writes of an answer, even of late ones: the kernel would hand closer
# writes to the reader as one, and then the arrival of the first of them would be unknown.
SPACING_S = 0.002
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)


class Call:
    """One request, and the ways to answer it."""

    def __init__(
        self, head: bytes, data: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.received_s = monotonic()
        self.method, self.path, _ = head.decode("latin-1").split(" ", 2)
        self.body: dict[str, object] = json.loads(data) if data.startswith(b"{") else {}
        self.keep_alive = True  # keep the connection after the answer; set it before the answer
        self.transport = writer.transport
        self._reader, self._writer = reader, writer
        self._has_begun = False

    @property
    def num_tokens(self) -> int:
        return int(str(self.body.get("max_tokens")))

    @property
    def prompt(self) -> list[int] | str:
        return prompt_of(self.body)

    async def write(self, *pieces: bytes) -> None:
        """Send the bytes of a stream, each piece as a chunk of its own."""
        await self.put(b"".join(map(self.framed, pieces)))

    async def send(self, *pieces: bytes) -> None:
        """Send the rest of a stream and its end."""
        await self.write(*pieces)
        await self.put(self.framed(b"") + b"0\r\n\r\n")

    async def cut(self, *pieces: bytes) -> None:
        """End the connection in the middle of the answer."""
        await self.put(self.framed(b"") + b"".join(map(self.framed, pieces)))
        self.keep_alive = False

    async def reply(
        self, status: int, body: bytes, kind: str = "application/json", **fields: str
    ) -> None:
        """Send an answer that is not a stream; in the names of `fields` a _ is a dash."""
        more = [f"{name.replace('_', '-')}: {value}" for name, value in fields.items()]
        length = f"Content-Length: {len(body)}"
        await self.put(head_of(status, f"Content-Type: {kind}", length, *more) + body)

    async def raw(self, data: bytes) -> None:
        """Send any bytes instead of an answer, and end the connection."""
        await self.put(data)
        self.keep_alive = False

    async def put(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    def framed(self, data: bytes) -> bytes:
        """Return one chunk of the body, after the head if it is the first; no data is no chunk."""
        close = () if self.keep_alive else ("Connection: close",)
        head = b"" if self._has_begun else head_of(200, *STREAM, *close)
        self._has_begun = True
        return head + (data and b"%x\r\n%b\r\n" % (len(data), data))

    async def until(self, due_s: float) -> bool:
        """Wait until `due_s`; return whether the client is still there."""
        # Sleep in steps, because nothing wakes this coroutine when the client leaves.
        while not (has_left := self._reader.at_eof() or self.transport.is_closing()):
            if (rest_s := due_s - monotonic()) <= 0:
                break
            await asyncio.sleep(min(rest_s, 0.5))
        return not has_left


Play = Callable[[Call], Awaitable[object]]


def head_of(status: int, *fields: str) -> bytes:
    lines = (f"HTTP/1.1 {status} Scripted", "Server: scripted", *fields)
    return "".join(f"{line}\r\n" for line in (*lines, "")).encode()


class ScriptedServer:
    """The server, for any thread. A context manager; `calls` holds the last calls, in order."""

    def __init__(
        self,
        play: Play | None = None,
        pages: Mapping[str, object] | None = None,
        tls: ssl.SSLContext | None = None,
        keep_alive_s: float = 30.0,
    ) -> None:
        """Answer by `play`, or by default with all requested tokens.

        `pages` are answers to GET by path, each a JSON value or a `Play`.
        """
        self.play = play or Stage().play
        self.calls: deque[Call] = deque(maxlen=MAX_CALLS)
        self.num_connections = 0  # a connection counts from its first POST
        self.url = ""
        self._pages = {"/v1/models": MODELS, **(pages or {})}
        self._tls, self._keep_alive_s = tls, keep_alive_s
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name=MODEL)
        self._is_up, self._was_asked = threading.Event(), threading.Event()

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._is_up.wait(START_TIMEOUT_S), "the scripted server did not start"
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

    async def asked(self) -> None:
        """Return once a request came; any event loop may await it."""
        assert await asyncio.to_thread(self._was_asked.wait, START_TIMEOUT_S), "no request came"

    async def _serve(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(
            self._connected, HOST, 0, ssl=self._tls, limit=MAX_HEADER_BYTES
        )
        scheme = "https" if self._tls else "http"
        self.url = f"{scheme}://{HOST}:{server.sockets[0].getsockname()[1]}"
        self._is_up.set()
        async with server:
            await self._over.wait()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        is_first = True
        try:
            while True:
                async with asyncio.timeout(self._keep_alive_s):
                    head = await reader.readexactly(1)
                    if not head.isalpha():  # the client speaks TLS
                        writer.write(head_of(400))
                        break
                    head += await reader.readuntil(b"\r\n\r\n")
                length = _LENGTH.search(head)
                data = await reader.readexactly(int(length[1])) if length else b""
                call = Call(head, data, reader, writer)
                self.num_connections += is_first and call.method == "POST"
                is_first = is_first and call.method != "POST"
                await self._answer(call)
                if not call.keep_alive:
                    break
        except (ConnectionError, TimeoutError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the client left, or the server ends
        finally:
            writer.close()

    async def _answer(self, call: Call) -> None:
        if call.method == "POST":
            self.calls.append(call)
            self._was_asked.set()
            await self.play(call)
        elif call.path not in self._pages:
            await call.reply(404, error(f"no {call.path}"))
        elif callable(page := self._pages[call.path]):
            await page(call)
        else:
            await call.reply(200, json.dumps(page).encode())


class Answer(msgspec.Struct):
    """One request as the server saw it. Seconds on CLOCK_MONOTONIC."""

    number: int | None  # None if the request belongs to no script
    received_s: float  # the time at which the whole request had arrived
    writes: list[Arrival]  # the bytes that were handed to the kernel at once, with their tokens


class Stage:
    """The player of scripts. A request without a script gets all tokens that it asks for at once.

    A script's number is the first id of a prompt, or N in a text with "script N".
    """

    def __init__(self, scripts: Mapping[int, Script] | None = None) -> None:
        self.answers: list[Answer] = []
        self._scripts = scripts or {}

    async def play(self, call: Call) -> None:
        prompt, free_s = call.prompt, 0.0
        if isinstance(prompt, str):
            found = re.search(r"\bscript (\d+)\b", prompt)
            prompt = [int(found[1])] if found else []
        number = prompt[0] if prompt else None
        script = None if number is None else self._scripts.get(number)
        answer = Answer(None if script is None else number, call.received_s, [])
        self.answers.append(answer)
        if script is None:
            script = Script(steady(0.0, 0.0, call.num_tokens))
        call.keep_alive = script.then == "end"
        parts = parts_of(script, call.body, answer.number or 0)
        for place, (at_ms, body, num_tokens) in enumerate(parts, start=1):
            if not await call.until(max(call.received_s + at_ms / 1e3, free_s)):
                return
            data = call.framed(body)
            data += b"0\r\n\r\n" if script.then == "end" and place == len(parts) else b""
            answer.writes.append(Arrival(monotonic(), num_tokens))
            call.transport.write(data)
            free_s = monotonic() + SPACING_S
        if script.then == "hang":
            await call.until(monotonic() + SILENCE_LIMIT_S)
