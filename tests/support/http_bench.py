"""The HTTP side of the router on a free port, before an engine that a test plays word by word.

`ScriptedEngine` stands in for `TextRouter` behind the handlers' own interface; streams,
detokenizers and the server are the real ones.
"""

import asyncio
import io
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import aiohttp
import msgspec

from baton.protocol.config import ClusterConfig
from baton.protocol.errors import BatonError, NodeError, Overloaded
from baton.protocol.ids import Key, NodeId, RequestId
from baton.protocol.messages import FinishReason
from baton.protocol.sampling import SamplingParams
from baton.router.core.health import Health, ServedModel
from baton.router.core.request import NO_CALLER, Attempt, Caller
from baton.router.core.stream import ReceivedPart, RequestStream
from baton.router.http.app import App
from baton.router.http.request_log import Tracer
from baton.router.http.server import Server
from baton.router.text.chat_template import ChatTemplate
from baton.router.text.response_parser import Parsing
from baton.router.text.tokenizer import Text
from baton.runtime.tls import server_context
from tests.support.async_tests import AsyncTest, Test, with_bench
from tests.support.small_tokenizers import small_text

TEXT = small_text()
MODEL = ServedModel(
    "tiny",
    "/models/tiny",
    "model",
    "layout",
    256,
    400,
    16,
    lora_modules=("sql", "poems"),
    other_names=("small",),
)
WAIT_S = 20.0
JSON = {"Content-Type": "application/json"}


def hello(stream: RequestStream) -> None:
    """Answer " hello" in every choice."""
    for choice in range(stream.params.n):
        stream.push(choice, TEXT.encode_now(" hello"), "length")
    stream.finish()


def placed(stream: RequestStream) -> None:
    """Give the request a pair of nodes, of which prefill took a quarter of a second."""
    metrics = stream.metrics
    metrics.num_attempts = 1
    metrics.prefill_s = 0.25
    metrics.begin(Attempt(Key(RequestId("r"), 0, 0), (0,), 1, asked_at_s=0.0))
    metrics.attempts[0].prefill_node = NodeId("p0")
    metrics.attempts[0].decode_node = NodeId("d0")


def well(stream: RequestStream) -> None:
    placed(stream)
    hello(stream)


def lost(stream: RequestStream) -> None:
    """Say " hello" and lose the decode node."""
    placed(stream)
    stream.push(0, TEXT.encode_now(" hello"), None)
    stream.finish(NodeError("d0 is lost"))


# The tags that Qwen3's template has.
QWEN = ChatTemplate(
    "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{# </think> #}"
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}{% endfor %}",
    {},
)


def saying(text: str) -> Callable[[RequestStream], None]:
    """Return a script that sends the tokens of `text` one by one, then the end."""

    def script(stream: RequestStream) -> None:
        for token_id in TEXT.encode_now(text):
            stream.push(0, [token_id], None)
        stream.push(0, [], "stop")
        stream.finish()

    return script


def posted(body: dict[str, object], version: str = "1.1") -> bytes:
    """Return the bytes of a request for a completion."""
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/{version}\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += "Accept: text/event-stream\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


class ScriptedEngine:
    """Takes every request, and answers with what the test (or `script`, at once) says."""

    def __init__(self, script: Callable[[RequestStream], None] | None = None) -> None:
        self.script = script
        self.refusal: BatonError | None = None
        self.is_ready = True
        self.errored = False
        self.streams: list[RequestStream] = []
        self.closed: list[str] = []  # by callers, before their end
        self.caller = NO_CALLER  # of the last request
        self._text = small_text()
        self._changed = asyncio.Event()

    async def submit(
        self,
        prompt: str | list[int],
        params: SamplingParams,
        request_id: str | None = None,
        parsing: Parsing | None = None,
        caller: Caller = NO_CALLER,
        received: Sequence[ReceivedPart] = (),
    ) -> RequestStream:
        self.caller = caller
        ids = await self._text.encode(prompt) if isinstance(prompt, str) else prompt
        if self.refusal is not None:
            raise self.refusal
        numbers = range(params.n)
        detokenizers = [
            self._text.detokenizer(ids, params, i, parsing) for i in numbers
        ]
        name = request_id or "request"
        on_close = partial(self._closed, name)
        stream = RequestStream(
            name, ids, params, detokenizers, on_close, received=received
        )
        self.streams.append(stream)
        self._changed.set()
        if self.script is not None:
            asyncio.get_running_loop().call_soon(self.script, stream)
        return stream

    def health(self) -> Health:
        if self.is_ready:
            return Health("ready", (), 0, 0)
        return Health("starting", (), 0, 0, "nodes are starting")

    def get_model_config(self) -> ServedModel:
        if not self.is_ready:
            raise Overloaded("no node is ready yet", code="not_ready")
        return MODEL

    def get_tokenizer(self) -> Text:
        return self._text

    async def stream(self, index: int = 0) -> RequestStream:
        """The request with that number, once it is there."""
        await self._until(lambda: len(self.streams) > index)
        return self.streams[index]

    async def is_closed(self, num: int = 1) -> None:
        """Return once so many callers gave up."""
        await self._until(lambda: len(self.closed) >= num)

    def say(
        self,
        stream: RequestStream,
        text: str,
        end: FinishReason | None = None,
        choice: int = 0,
    ) -> None:
        """The tokens of `text`, one push each; `end` comes with the last."""
        token_ids = self._text.encode_now(text)
        for token_id in token_ids[:-1]:
            stream.push(choice, [token_id], None)
        stream.push(choice, token_ids[-1:], end)

    def close(self) -> None:
        self._text.close()

    def _closed(self, name: str) -> None:
        self.closed.append(name)
        self._changed.set()

    async def _until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not holds():
                self._changed.clear()
                await self._changed.wait()


class HttpBench:
    """Serves an engine as long as its context lasts."""

    def __init__(
        self,
        engine: ScriptedEngine,
        config: ClusterConfig | None = None,
        chat_template: ChatTemplate | None = None,
        silence_s: float = WAIT_S,
        tracer: Tracer | None = None,
    ) -> None:
        config = config or ClusterConfig()
        self.app = App(engine, config, chat_template, silence_s, tracer)
        router = msgspec.structs.replace(config.router, port=0)
        self.server = Server(self.app, router, server_context(router))
        self.url = ""

    async def __aenter__(self) -> "HttpBench":
        self.url = await self.server.start()
        self.session = aiohttp.ClientSession(
            self.url, headers={"Accept": "text/event-stream"}
        )
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.session.close()
        await self.server.drain(0.0)
        await self.server.stop()

    async def post(
        self,
        body: dict[str, object] | bytes,
        path: str = "/v1/completions",
        **more: str,
    ) -> "Reply":
        """POST a body with JSON's headers and `more`."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.session.post(
            path, data=io.BytesIO(data), headers=JSON | more
        ) as reply:
            return Reply(reply.status, reply.headers, await reply.text())

    async def dial(
        self, limit: int = 2**16
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Return a bare connection, whose reader holds some `limit` bytes."""
        host, port = self.url.removeprefix("http://").split(":")
        return await asyncio.open_connection(host, int(port), limit=limit)

    async def get(self, path: str, **headers: str) -> "Reply":
        async with self.session.get(path, headers=headers) as reply:
            return Reply(reply.status, reply.headers, await reply.text())


class Reply:
    def __init__(self, status: int, headers: Mapping[str, str], text: str) -> None:
        self.status = status
        self.headers = headers
        self.text = text

    @property
    def json(self) -> dict[str, object]:
        value: dict[str, object] = json.loads(self.text)
        return value

    @property
    def error(self) -> dict[str, object]:
        error = self.json["error"]
        assert isinstance(error, dict)
        assert set(error) == {"message", "type", "param", "code"}
        return error

    @property
    def events(self) -> list[tuple[str, str]]:
        """Id and data of each event; comments are left out."""
        return events_of(self.text)


def events_of(text: str) -> list[tuple[str, str]]:
    events = []
    for block in text.split("\n\n"):
        lines = [
            line for line in block.split("\n") if line and not line.startswith(":")
        ]
        if lines:
            id_line, data_line = lines
            events.append(
                (id_line.removeprefix("id: "), data_line.removeprefix("data: "))
            )
    return events


def served(
    *,
    script: Callable[[RequestStream], None] | None = None,
    config: ClusterConfig | None = None,
    chat_template: ChatTemplate | None = None,
    silence_s: float = WAIT_S,
) -> Callable[[AsyncTest], Test]:
    """Run an async test with an `HttpBench` as its `bench` and the `engine` that it serves."""

    async def serve(use: AsyncTest) -> None:
        engine = ScriptedEngine(script)
        try:
            async with (
                asyncio.timeout(60.0),
                HttpBench(engine, config, chat_template, silence_s) as bench,
            ):
                await use(bench, engine)
        finally:
            engine.close()

    return with_bench("bench", "engine", run=lambda use, _: asyncio.run(serve(use)))
