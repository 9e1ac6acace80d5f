"""A server with OpenAI's API on 127.0.0.1, in a thread of its own, whose answers a test plays.

It shares nothing with the client's parser.
"""

import asyncio
import json
import re
import ssl
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Self

DONE = b"data: [DONE]\n\n"
# Answers consist of these token ids.
LOWEST_ID = 300
NUM_IDS = 7_000


def event(body: object) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def token(
    text: str = " a",
    token_ids: Sequence[int] | None = None,
    end: str | None = None,
    **more: object,
) -> bytes:
    """Return a chunk of a completion; `more` holds further fields of the event."""
    choice = {"index": 0, "text": text, "finish_reason": end}
    ids = {} if token_ids is None else {"token_ids": list(token_ids)}
    return event({"choices": [choice | ids], **more})


def delta(
    text: str = " a",
    token_ids: Sequence[int] | None = None,
    end: str | None = None,
    **more: object,
) -> bytes:
    """Return a chunk of a chat; a chunk without text opens the chat with a role."""
    said = {"content": text} if text else {"role": "assistant", "content": ""}
    choice = {"index": 0, "delta": said, "finish_reason": end}
    ids = {} if token_ids is None else {"token_ids": list(token_ids)}
    return event({"choices": [choice | ids], **more})


def usage(num_tokens: int, num_prompt: int = 3, num_cached: int | None = None) -> bytes:
    """Return the last chunk before the end."""
    return event(
        {"choices": [], "usage": usage_body(num_tokens, num_prompt, num_cached)}
    )


def usage_body(
    num_tokens: int, num_prompt: int = 3, num_cached: int | None = None
) -> dict[str, object]:
    body: dict[str, object] = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_tokens,
    }
    if num_cached is not None:
        body["prompt_tokens_details"] = {"cached_tokens": num_cached}
    return body


def error(message: str) -> bytes:
    """Return the body of a refusal."""
    return json.dumps({"error": {"message": message, "type": "server_error"}}).encode()


def prompt_of(asked: Mapping[str, object]) -> list[int] | str:
    """Return the token ids, the text, or the last message that a request asks about."""
    messages = asked.get("messages")
    found = (
        messages[-1]["content"] if isinstance(messages, list) else asked.get("prompt")
    )
    return found if isinstance(found, list) else str(found)


def answer_ids(number: int, num_tokens: int) -> list[int]:
    """Return the tokens of a number's answer, the same at every call."""
    # Both factors are coprime to the number of ids, so an answer repeats no id.
    return [
        LOWEST_ID + (number * 1_009 + at * 2_003) % NUM_IDS for at in range(num_tokens)
    ]


HOST = "127.0.0.1"
MODEL = "scripted"
MODELS = {"object": "list", "data": [{"id": MODEL, "object": "model"}]}
STREAM = (
    "Content-Type: text/event-stream; charset=utf-8",
    "Transfer-Encoding: chunked",
)
START_TIMEOUT_S = 30.0
MAX_HEADER_BYTES = 1 << 16
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)


class Call:
    """One request, and the ways to answer it."""

    def __init__(
        self,
        head: bytes,
        data: bytes,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.method, self.path, _ = head.decode("latin-1").split(" ", 2)
        self.body: dict[str, object] = json.loads(data) if data.startswith(b"{") else {}
        # Keep the connection after the answer; set it before the answer.
        self.keep_alive = True
        self.transport = writer.transport
        self._reader = reader
        self._writer = writer
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


Play = Callable[[Call], Awaitable[object]]


def head_of(status: int, *fields: str) -> bytes:
    lines = (f"HTTP/1.1 {status} Scripted", "Server: scripted", *fields)
    return "".join(f"{line}\r\n" for line in (*lines, "")).encode()


class ScriptedServer:
    """The server, in a thread. A context manager."""

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
        self.play = play or answer_all
        self.num_connections = 0  # a connection counts from its first POST
        self.url = ""
        self._pages = {"/v1/models": MODELS, **(pages or {})}
        self._tls = tls
        self._keep_alive_s = keep_alive_s
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve()), name=MODEL
        )
        self._is_up = threading.Event()

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._is_up.wait(START_TIMEOUT_S), "the scripted server did not start"
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

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

    async def _connected(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
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
        except (
            ConnectionError,
            TimeoutError,
            asyncio.IncompleteReadError,
            asyncio.CancelledError,
        ):
            pass  # the client left, or the server ends
        finally:
            writer.close()

    async def _answer(self, call: Call) -> None:
        if call.method == "POST":
            await self.play(call)
        elif call.path not in self._pages:
            await call.reply(404, error(f"no {call.path}"))
        elif callable(page := self._pages[call.path]):
            await page(call)
        else:
            await call.reply(200, json.dumps(page).encode())


async def answer_all(call: Call) -> None:
    """Answer with all tokens that are asked for, one each write, as the request wants them."""
    ids = answer_ids(
        call.prompt[0] if isinstance(call.prompt, list) else 0, call.num_tokens
    )
    say = delta if "messages" in call.body else token
    for place, one in enumerate(ids, start=1):
        shown = [one] if call.body.get("return_token_ids") else None
        await call.write(
            say(f" t{one}", shown, "length" if place == len(ids) else None)
        )
    options = str(call.body.get("stream_options"))
    told = usage(len(ids), len(call.prompt)) if "include_usage" in options else b""
    await call.send(told, DONE)
