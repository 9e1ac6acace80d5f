"""A server with OpenAI's API on 127.0.0.1, in a thread of its own, that answers as it is told.

The self-test and tests of clients start it. A `Play` gets each request and answers it byte by byte
if need be; `Stage` is the one that plays scripts and keeps when it really wrote what, so that the
truth is what was written, not what was planned. Nothing here may be shared with the client or the
metrics that are held against it. By hand: `python -m baton.bench.selftest.scripted_server`.
"""

import argparse
import asyncio
import contextlib
import functools
import gc
import json
import re
import ssl
import struct
import sys
import threading
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from socket import SO_LINGER, SOL_SOCKET
from typing import Self

import msgspec

from baton.bench.selftest.answers import error
from baton.bench.selftest.scripts import Part, Script, Wanted, parts_of, steady
from baton.runtime.clock import monotonic

HOST = "127.0.0.1"
MODEL = "scripted"
MODELS = {"object": "list", "data": [{"id": MODEL, "object": "model"}]}
START_TIMEOUT_S = 30.0
# How long a silent answer waits for its client to leave.
SILENCE_LIMIT_S = 120.0
MAX_HEADER_BYTES = 1 << 16
MAX_TOKENS = 100_000
MAX_CALLS = 1_000  # that are kept
# Between the writes of an answer, however late they are: the kernel hands closer ones to the reader
# as one, and then it cannot be told when the first of them came.
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
        self.data = data
        self.keep_alive = True  # the connection, after the answer; to be set before it begins
        self.transport = writer.transport
        self._reader, self._writer = reader, writer
        self._has_begun = False

    @functools.cached_property
    def body(self) -> dict[str, object]:
        found: dict[str, object] = json.loads(self.data)
        return found

    @property
    def num_tokens(self) -> int:
        return int(str(self.body.get("max_tokens") or self.body.get("max_completion_tokens") or 16))

    @property
    def wanted(self) -> Wanted:
        body, prompt = self.body, self.prompt
        options = body.get("stream_options")
        options = options if isinstance(options, dict) else {}
        return Wanted(
            is_chat="messages" in body,
            token_ids=bool(body.get("return_token_ids")),
            usage=bool(options.get("include_usage")),
            running_usage=bool(options.get("continuous_usage_stats")),
            num_prompt=len(prompt if isinstance(prompt, list) else prompt.split()),
        )

    @property
    def prompt(self) -> list[int] | str:
        messages = self.body.get("messages")
        found = messages[-1]["content"] if isinstance(messages, list) else self.body.get("prompt")
        return found if isinstance(found, list) else str(found)

    async def write(self, *pieces: bytes) -> None:
        """Send bytes of a stream, each piece as a chunk of its own."""
        close = () if self.keep_alive else ("Connection: close",)
        wire = b"" if self._has_begun else head_of(200, *STREAM, *close)
        self._has_begun = True
        await self.put(wire + b"".join(framed(piece) for piece in pieces))

    async def send(self, *pieces: bytes) -> None:
        """Send the rest of a stream and its end."""
        await self.write(*pieces)
        await self.put(b"0\r\n\r\n")

    async def cut(self, *pieces: bytes) -> None:
        """End the connection in the middle of the answer."""
        await self.write(*pieces)
        self.keep_alive = False

    async def reply(
        self, status: int, body: bytes, kind: str = "application/json", **fields: str
    ) -> None:
        """Send an answer that is no stream; in the names of `fields` a _ is a dash."""
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

    async def until(self, due_s: float) -> bool:
        """Wait; return whether the client is still there."""
        # In steps, because nothing wakes this when the client leaves.
        while (rest_s := due_s - monotonic()) > 0 and not self.client_left:  # noqa: ASYNC110
            await asyncio.sleep(min(rest_s, 0.5))
        return not self.client_left

    @property
    def client_left(self) -> bool:
        return self._reader.at_eof() or self.transport.is_closing()


Play = Callable[[Call], Awaitable[object]]
STREAM = ("Content-Type: text/event-stream; charset=utf-8", "Transfer-Encoding: chunked")


def head_of(status: int, *fields: str) -> bytes:
    lines = (f"HTTP/1.1 {status} Scripted", "Server: scripted", *fields)
    return "".join(f"{line}\r\n" for line in (*lines, "")).encode()


def framed(data: bytes) -> bytes:
    """Return one chunk of a chunked body; an empty one would end it."""
    return data and b"%x\r\n%b\r\n" % (len(data), data)


class ScriptedServer:
    """The server, from any thread. A context manager; `calls` are the last ones, in order."""

    def __init__(
        self,
        play: Play | None = None,
        models: object = MODELS,
        tls: ssl.SSLContext | None = None,
        keep_alive_s: float = 30.0,
        port: int = 0,
    ) -> None:
        """An answer without `play` has as many tokens as are wanted; `models` may be a `Play`."""
        self.play = play or Stage().play
        self.calls: deque[Call] = deque(maxlen=MAX_CALLS)
        self.num_connections = 0
        self.url = ""
        self._models, self._tls, self._keep_alive_s = models, tls, keep_alive_s
        self._port = port
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
        """Return once a request came; from any loop."""
        assert await asyncio.to_thread(self._was_asked.wait, 20.0), "no request came"

    async def _serve(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(
            self._connected, HOST, self._port, ssl=self._tls, limit=MAX_HEADER_BYTES
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
                    if not head.isalpha():  # a client of TLS
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
        except (ConnectionError, TimeoutError, asyncio.IncompleteReadError):
            pass  # the client left
        finally:
            writer.close()

    async def _answer(self, call: Call) -> None:
        if call.method == "POST":
            self.calls.append(call)
            self._was_asked.set()
            await self.play(call)
        elif call.path == "/v1/models" and callable(self._models):
            await self._models(call)
        elif call.path == "/v1/models":
            await call.reply(200, json.dumps(self._models).encode())
        else:
            await call.reply(404, error(f"no {call.path}"))


class Write(msgspec.Struct, frozen=True, array_like=True):
    """One call that handed bytes to the kernel. Seconds on CLOCK_MONOTONIC."""

    at_s: float  # before the call
    took_s: float  # until it returned: the truth lies in between
    num_tokens: tuple[int, ...]  # of each token-carrying event that these bytes completed


class Answer(msgspec.Struct, kw_only=True):
    """One request as the server saw it."""

    number: int | None  # None: of no script
    received_s: float  # the whole request was there
    writes: list[Write] = msgspec.field(default_factory=list)
    is_over: bool = False  # played to its end, or the client left
    held_writes: int = 0  # the kernel did not take all bytes at once: the stamps mean nothing


class Stage:
    """Plays scripts. A request without one is answered at an even pace."""

    def __init__(self, first_ms: float = 0.0, gap_ms: float = 0.0) -> None:
        self.answers: list[Answer] = []
        self._pace = (first_ms, gap_ms)
        self._scripts: dict[int, list[Script]] = {}
        self._calls: Counter[int] = Counter()

    def prepare(self, scripts: dict[int, list[Script]]) -> None:
        """Play these from now on, and forget all scripts and answers before.

        A number is the first id of a prompt, or N where a text says "script N". Its n-th request
        gets its n-th script, and the last one again after that.
        """
        self._scripts = scripts
        self._calls.clear()
        # A new list: an answer of before that is still being played must not turn up in it.
        self.answers = []

    async def play(self, call: Call) -> None:
        number = _number(call.prompt)
        scripts = self._scripts.get(number) if number is not None else None
        answer = Answer(number=number if scripts else None, received_s=call.received_s)
        if number is None or not scripts:
            number, script = 0, Script(steady(*self._pace, min(call.num_tokens, MAX_TOKENS)))
        else:
            script = scripts[min(self._calls[number], len(scripts) - 1)]
            self._calls[number] += 1
        self.answers.append(answer)
        try:
            await self._perform(call, script, number, answer)
        finally:
            answer.is_over = True

    async def _perform(self, call: Call, script: Script, number: int, answer: Answer) -> None:
        free_s = 0.0
        call.keep_alive = script.then == "end"
        for part in _on_the_wire(script, call.wanted, number):
            if not await call.until(max(call.received_s + part.at_ms / 1e3, free_s)):
                return
            began_s = monotonic()
            call.transport.write(part.data)
            answer.writes.append(Write(began_s, monotonic() - began_s, part.num_tokens))
            answer.held_writes += call.transport.get_write_buffer_size() > 0
            free_s = monotonic() + SPACING_S
        if script.then == "reset":
            link = call.transport.get_extra_info("socket")
            link.setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))
            call.transport.abort()
        elif script.then == "hang":
            await call.until(monotonic() + SILENCE_LIMIT_S)


def _number(prompt: list[int] | str) -> int | None:
    if isinstance(prompt, list):
        return prompt[0] if prompt else None
    found = re.search(r"\bscript (\d+)\b", prompt)
    return int(found[1]) if found else None


def _on_the_wire(script: Script, wanted: Wanted, number: int) -> list[Part]:
    """Return the parts as HTTP, the head with the first and the end of the body with the last."""
    if (body := script.body) is not None:
        wait_s = script.retry_after_s
        wait = () if wait_s is None else (f"Retry-After: {wait_s:g}",)
        fields = (f"Content-Type: {script.kind}", f"Content-Length: {len(body)}", *wait)
        return [Part(script.last_ms, head_of(script.status, *fields) + body)]
    if not script.chunks and script.then != "end":
        return []  # closed without a word
    parts = parts_of(script, wanted, number)
    wire = [framed(part.data) for part in parts]
    wire[0] = head_of(200, *STREAM) + wire[0]
    wire[-1] += b"0\r\n\r\n" if script.then == "end" else b""
    pairs = zip(parts, wire, strict=True)
    return [Part(part.at_ms, data, part.num_tokens) for part, data in pairs if data]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser("python -m baton.bench.selftest.scripted_server")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--first-ms", type=float, default=0.0, help="until the first token")
    parser.add_argument("--gap-ms", type=float, default=0.0, help="from token to token")
    parsed = parser.parse_args(arguments)
    # A collection in mid-answer would be a stall that no script asked for.
    gc.freeze()
    gc.disable()
    stage = Stage(parsed.first_ms, parsed.gap_ms)
    with (
        contextlib.suppress(KeyboardInterrupt),
        ScriptedServer(stage.play, port=parsed.port) as server,
    ):
        print(server.url, flush=True)
        threading.Event().wait()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
