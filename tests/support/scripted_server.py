"""A server with OpenAI's API on 127.0.0.1, in a thread of its own, that plays scripted answers.

`Stage` plays scripts and keeps the time of each actual write, so that the truth is what was written
and not what was planned. It shares nothing with the client's parser.
"""

import asyncio
import json
import re
import ssl
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Self

import msgspec

from baton.bench.records import Arrival
from baton.runtime.clock import monotonic
from tests.support.scripted_answers import Script, error, parts_of, prompt_of, steady

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
        first, *lines = head.decode("latin-1").strip().split("\r\n")
        self.method, self.path, _ = first.split(" ", 2)
        fields = [line.partition(":") for line in lines]
        self.headers = {name: value.strip() for name, _, value in fields}
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
        self.num_calls = self.num_connections = 0  # a connection counts from its first POST
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
        self.num_calls += 1
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
