"""A small OpenAI-compatible server that answers each request as a test says.

It runs in a thread of its own on a free port of 127.0.0.1. A test gives it a `Play`: a coroutine
that gets one request and sends whatever it wants, byte by byte if need be. Truth about times is the
scripted server of the bench itself; this one is about what answers look like.
"""

import asyncio
import json
import ssl
import threading
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Self

from aiohttp import web

DONE = b"data: [DONE]\n\n"
STREAM_HEADERS = {"Content-Type": "text/event-stream"}
MODELS = {"object": "list", "data": [{"id": "tiny", "object": "model"}]}


class Call:
    """One request under way, and the ways to answer it."""

    def __init__(self, request: web.Request, body: dict[str, object]) -> None:
        self.request = request
        self.body = body
        self.num_tokens = int(str(body.get("max_tokens", 0)))
        self.keep_alive = True  # the connection, after the answer; before the first `write`
        self._stream: web.StreamResponse | None = None

    async def write(self, *pieces: bytes) -> None:
        """Bytes of a stream, each piece by itself."""
        if self._stream is None:
            self._stream = web.StreamResponse(headers=STREAM_HEADERS)
            if not self.keep_alive:
                self._stream.force_close()
            await self._stream.prepare(self.request)
        for piece in pieces:
            await self._stream.write(piece)

    async def end(self) -> web.StreamResponse:
        await self.write()
        assert self._stream is not None
        await self._stream.write_eof()
        return self._stream

    async def send(self, *pieces: bytes) -> web.StreamResponse:
        await self.write(*pieces)
        return await self.end()

    async def cut(self, *pieces: bytes) -> web.StreamResponse:
        """The connection ends in the middle of the answer."""
        await self.write(*pieces)
        transport = self.request.transport
        assert transport is not None
        transport.close()
        return await self.end_quietly()

    async def raw(self, data: bytes) -> web.StreamResponse:
        """Whatever bytes, instead of an answer; then the connection ends."""
        transport = self.request.transport
        assert isinstance(transport, asyncio.Transport)
        transport.write(data)
        transport.close()
        return await self.end_quietly()

    async def end_quietly(self) -> web.StreamResponse:
        # Nothing that is returned from here on reaches the client.
        return self._stream or web.Response()


Play = Callable[[Call], Awaitable[web.StreamResponse]]


def event(body: object) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def token(
    text: str | None = " a",
    ids: Sequence[int] | None = None,
    end: str | None = None,
    **more: object,
) -> bytes:
    """A chunk of a completion."""
    choice: dict[str, object] = {"index": 0, "text": text, "finish_reason": end}
    if ids is not None:
        choice["token_ids"] = list(ids)
    return event({"object": "text_completion", "choices": [choice], **more})


def delta(content: str | None = " a", end: str | None = None, **more: object) -> bytes:
    """A chunk of a chat."""
    choice = {"index": 0, "delta": {"content": content, **more}, "finish_reason": end}
    return event({"object": "chat.completion.chunk", "choices": [choice]})


def usage(num_tokens: int, num_prompt: int = 3, num_cached: int | None = None) -> bytes:
    """The last chunk before the end."""
    return event({"choices": [], "usage": usage_body(num_tokens, num_prompt, num_cached)})


def usage_body(
    num_tokens: int, num_prompt: int = 3, num_cached: int | None = None
) -> dict[str, object]:
    body: dict[str, object] = {"prompt_tokens": num_prompt, "completion_tokens": num_tokens}
    if num_cached is not None:
        body["prompt_tokens_details"] = {"cached_tokens": num_cached}
    return body


def error(message: str, status: int = 400, **headers: str) -> web.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return web.json_response({"error": {"message": message}}, status=status, headers=named)


async def answer(call: Call) -> web.StreamResponse:
    """As many tokens as were asked for, with ids 0, 1, 2 ... and usage."""
    is_chat = "messages" in call.body
    ids = bool(call.body.get("return_token_ids"))
    for number in range(call.num_tokens):
        if is_chat:
            await call.write(delta(f" {number}"))
        else:
            await call.write(token(f" {number}", [number] if ids else None))
    return await call.send(usage(call.num_tokens), DONE)


class ScriptedOpenAI:
    """A context manager. `bodies` are those of the requests that came, in their order."""

    def __init__(
        self,
        play: Play = answer,
        models: object = MODELS,
        tls: ssl.SSLContext | None = None,
        keep_alive_s: float = 30.0,
    ) -> None:
        self.play = play
        self.bodies: list[dict[str, object]] = []
        self.headers: list[dict[str, str]] = []
        self.num_connections = 0
        self.url = ""
        self._models, self._tls, self._keep_alive_s = models, tls, keep_alive_s
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="scripted openai")
        self._runner: web.AppRunner | None = None
        self._peers: set[object] = set()
        self._was_asked = threading.Event()

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(20.0)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._runner is not None
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(20.0)
        self._end()

    async def asked(self) -> None:
        """Returns once a request came; from any loop."""
        assert await asyncio.to_thread(self._was_asked.wait, 20.0), "no request came"

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _start(self) -> None:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_get("/v1/models", self._list)
        app.router.add_post("/v1/completions", self._answer)
        app.router.add_post("/v1/chat/completions", self._answer)
        self._runner = web.AppRunner(
            app, keepalive_timeout=self._keep_alive_s, shutdown_timeout=0.1, access_log=None
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=self._tls)
        await site.start()
        scheme = "https" if self._tls else "http"
        self.url = f"{scheme}://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _list(self, request: web.Request) -> web.StreamResponse:
        if isinstance(self._models, web.Response):
            found = self._models
            return web.Response(body=found.body, status=found.status, content_type="text/plain")
        return web.json_response(self._models)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self._peers.add(request.transport)
        self.num_connections = len(self._peers)
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        self._was_asked.set()
        return await self.play(Call(request, body))
