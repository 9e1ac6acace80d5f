"""An OpenAI-compatible server whose token times are known: a process of its own on 127.0.0.1.

The self-test and tests of clients start it through `ScriptedServer`; by hand it is
`python -m baton.bench.selftest.scripted_server`. It plays a script per request and keeps when it
really wrote what, so that the truth is what was written, not what was planned. A request without a
script is answered at an even pace. It must never share code with the client or the metrics that are
held against it.
"""

import argparse
import asyncio
import contextlib
import gc
import http.client
import queue
import re
import struct
import sys
from collections import Counter
from socket import SO_LINGER, SOL_SOCKET
from typing import Self
from urllib.parse import urlsplit

import msgspec

from baton.bench.selftest.scripted_answers import ERROR, Part, Question, Stream, headers, whole
from baton.bench.selftest.scripts import MODEL, Answer, Ending, Script, Write, steady
from baton.protocol.errors import BatonError, NodeError
from baton.runtime.clock import monotonic
from baton.runtime.process import Child, Command, die_with_parent

HOST = "127.0.0.1"
START_TIMEOUT_S = 30.0
CONTROL_TIMEOUT_S = 30.0
# How long a silent answer waits for its client to leave.
SILENCE_LIMIT_S = 120.0
MAX_HEADER_BYTES, MAX_BODY_BYTES = 1 << 16, 1 << 26
MAX_TOKENS = 100_000
# Between the writes of an answer, however late they are: the kernel hands closer ones to the reader
# as one, and then nobody can tell when the first of them came.
SPACING_S = 0.002
MAX_FRAME_END = 7  # bytes of HTTP after the data of a write
DRIP_S = 0.0002  # between the writes of an answer that drips, so that they are read one by one
# After these the body is not complete, as HTTP sees it.
UNFINISHED = (Ending.CUT, Ending.RESET, Ending.HALF_EVENT, Ending.SILENCE)

Scripts = dict[int, list[Script]]


class Pace(msgspec.Struct, frozen=True):
    """Of answers without a script."""

    first_ms: float = 0.0
    gap_ms: float = 0.0


class ScriptedServer:
    """The process, from the outside. Use it in a `with` block."""

    def __init__(self) -> None:
        lines: queue.Queue[str] = queue.Queue()
        command = Command("scripted-server", (), "baton.bench.selftest.scripted_server")
        self._child = Child(command, lambda _, line: lines.put(line))
        self.url = self._wait_for_url(lines)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def play(self, scripts: Scripts) -> None:
        """From now on; forgets all scripts and answers before.

        A number is the first id of a prompt, or N where a text says "script N". Its n-th request
        gets its n-th script, and the last one again after that.
        """
        self._control("PUT", "/scripts", msgspec.json.encode(scripts))

    def answers(self) -> list[Answer]:
        """What was asked since, in the order in which it came."""
        return msgspec.json.decode(self._control("GET", "/answers"), type=list[Answer])

    def close(self) -> None:
        self._child.stop(grace_s=0.0)

    def _wait_for_url(self, lines: queue.Queue[str]) -> str:
        deadline_s = monotonic() + START_TIMEOUT_S
        while self._child.poll() is None and monotonic() < deadline_s:
            with contextlib.suppress(queue.Empty):
                line = lines.get(timeout=0.2)
                if line.startswith("http://"):
                    return line
        self._child.stop()
        raise NodeError(f"the scripted server did not start: {' | '.join(self._child.tail)}")

    def _control(self, method: str, path: str, body: bytes = b"") -> bytes:
        # No urllib: a proxy in the environment must not come between.
        link = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=CONTROL_TIMEOUT_S)
        with contextlib.closing(link):
            link.request(method, path, body)
            reply = link.getresponse()
            data = reply.read()
        if reply.status != 200:
            raise BatonError(f"the scripted server refused {path}: {data.decode()[:200]}")
        return data


class Request(msgspec.Struct, frozen=True):
    method: str
    path: str
    body: bytes


class Connection:
    """One client's connection: its requests, one after the other."""

    def __init__(
        self, stage: "Stage", reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._stage = stage
        self._reader = reader
        self._writer = writer

    async def serve(self) -> None:
        try:
            while (request := await self._read()) is not None:
                if not await self._answer(request):
                    break
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # the client left, or speaks no HTTP
        finally:
            self._writer.close()

    async def _read(self) -> Request | None:
        try:
            head = await self._reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return None
        method, path, _ = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ", 2)
        length = re.search(rb"\r\ncontent-length: *(\d+)\r\n", head, re.IGNORECASE)
        size = int(length[1]) if length else 0
        if size > MAX_BODY_BYTES:
            return None
        return Request(method, path, await self._reader.readexactly(size))

    async def _answer(self, request: Request) -> bool:
        """Whether the connection can serve another request."""
        path = request.path.partition("?")[0]
        match request.method, path:
            case "GET", "/v1/models":
                model = {"id": MODEL, "object": "model", "created": 1, "owned_by": "bench"}
                return self._json(200, {"object": "list", "data": [model]})
            case "GET", "/health":
                return self._json(200, {"status": "ok"})
            case "GET", "/answers":
                return self._json(200, self._stage.answers)
            case "PUT", "/scripts":
                return self._take_scripts(request.body)
            case "POST", "/v1/completions" | "/v1/chat/completions":
                return await self._play(request.body)
        return self._json(404, {"error": {**ERROR, "message": f"no {path}"}})

    def _take_scripts(self, body: bytes) -> bool:
        try:
            self._stage.prepare(msgspec.json.decode(body, type=Scripts))
        except msgspec.ValidationError as error:
            return self._json(400, {"error": {**ERROR, "message": str(error)}})
        return self._json(200, {})

    async def _play(self, body: bytes) -> bool:
        received_s = monotonic()
        try:
            question = msgspec.json.decode(body, type=Question)
        except msgspec.DecodeError as error:
            return self._json(400, {"error": {**ERROR, "message": str(error)}})
        if question.model != MODEL:
            message = f"the model {question.model!r} does not exist"
            return self._json(404, {"error": {**ERROR, "message": message}})
        script, answer = self._stage.next(question, received_s)
        answer.status = script.status
        whole_body = script.status != 200 or script.body != "stream" or not question.stream
        parts = (
            [_whole_part(script, question, answer)]
            if whole_body
            else Stream(script, question, answer.number or 0).parts()
        )
        wire = [part.data for part in parts] if whole_body else _on_the_wire(script, parts)
        free_s = received_s
        for part, data in zip(parts, wire, strict=True):
            if not await self._until(max(received_s + part.at_ms / 1e3, free_s)):
                answer.client_left = True
                return False
            num_idle = len(data) - len(part.data) - MAX_FRAME_END + part.num_idle
            self._write(answer, await self._drip(data, num_idle, script.drip_bytes), part)
            free_s = monotonic() + SPACING_S
        if whole_body or script.ending is not Ending.SILENCE:
            answer.ended_s = monotonic()
        return whole_body or await self._end(script, answer)

    async def _end(self, script: Script, answer: Answer) -> bool:
        """Whether the connection can serve another request."""
        match script.ending:
            case Ending.CUT | Ending.HALF_EVENT:
                return False
            case Ending.RESET:
                link = self._writer.get_extra_info("socket")
                link.setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))
                self._writer.transport.abort()
                return False
            case Ending.SILENCE:
                answer.client_left = not await self._until(monotonic() + SILENCE_LIMIT_S)
                return False
        return script.chunked

    async def _drip(self, data: bytes, num_idle: int, size: int) -> bytes:
        """Writes pieces of what tells nothing by itself; returns the rest, which has the tokens."""
        while 0 < size <= num_idle:
            self._writer.transport.write(data[:size])
            data, num_idle = data[size:], num_idle - size
            await asyncio.sleep(DRIP_S)
        return data

    def _write(self, answer: Answer, data: bytes, part: Part) -> None:
        transport = self._writer.transport
        began_s = monotonic()
        transport.write(data)
        took_s = monotonic() - began_s
        answer.held_writes += transport.get_write_buffer_size() > 0
        answer.writes.append(Write(began_s, took_s, part.num_tokens, bool(part.data)))

    async def _until(self, due_s: float) -> bool:
        """Waits; whether the client is still there."""
        while (rest_s := due_s - monotonic()) > 0:
            if self._reader.at_eof() or self._writer.transport.is_closing():
                return False
            # In steps, because nothing wakes this when the client leaves.
            await asyncio.sleep(min(rest_s, 0.5))
        return not (self._reader.at_eof() or self._writer.transport.is_closing())

    def _json(self, status: int, value: object) -> bool:
        self._writer.write(_with_length(status, msgspec.json.encode(value), {}))
        return True


class Stage:
    """What the connections share: the scripts, and what became of them."""

    def __init__(self, pace: Pace) -> None:
        self.answers: list[Answer] = []
        self._pace = pace
        self._scripts: Scripts = {}
        self._calls: Counter[int] = Counter()

    def prepare(self, scripts: Scripts) -> None:
        gc.collect()
        self._scripts = scripts
        self._calls.clear()
        # A new list: an answer of before that is still being played must not turn up in it.
        self.answers = []

    def next(self, question: Question, received_s: float) -> tuple[Script, Answer]:
        number = _number(question)
        if number is None or not self._scripts.get(number):
            num_tokens = min(question.num_tokens, MAX_TOKENS)
            script = Script(chunks=steady(self._pace.first_ms, self._pace.gap_ms, num_tokens))
            answer = Answer(number=None, call=0, received_s=received_s)
        else:
            call = self._calls[number]
            self._calls[number] += 1
            script = self._scripts[number][min(call, len(self._scripts[number]) - 1)]
            answer = Answer(number=number, call=call, received_s=received_s)
        self.answers.append(answer)
        return script, answer


def _number(question: Question) -> int | None:
    text = question.messages[-1].content if question.messages else question.prompt
    if isinstance(text, list):
        return text[0] if text else None
    found = re.search(r"\bscript (\d+)\b", text)
    return int(found[1]) if found else None


def _on_the_wire(script: Script, parts: list[Part]) -> list[bytes]:
    """A stream's parts as HTTP: headers with the first, the end of the body with the last."""
    fields = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
    fields |= {"Transfer-Encoding": "chunked"} if script.chunked else {"Connection": "close"}
    wire = [_frame(part.data) if script.chunked else part.data for part in parts]
    if wire:
        wire[0] = headers(200, fields) + wire[0]
    if wire and script.chunked and script.ending not in UNFINISHED:
        wire[-1] += b"0\r\n\r\n"
    return wire


def _whole_part(script: Script, question: Question, answer: Answer) -> Part:
    """Headers and body of an answer that is no stream."""
    if script.status != 200:
        retry = script.retry_after_s
        fields = {} if retry is None else {"Retry-After": f"{retry:g}"}
        data = _with_length(script.status, msgspec.json.encode({"error": ERROR}), fields)
    elif script.body == "html":
        data = _with_length(200, b"<html>busy</html>", {"Content-Type": "text/html"})
    else:
        data = _with_length(200, whole(script, question, answer.number or 0), {})
    return Part(script.last_ms, data)


def _with_length(status: int, body: bytes, fields: dict[str, str]) -> bytes:
    kind = {"Content-Type": "application/json", "Content-Length": str(len(body))}
    return headers(status, kind | fields) + body


def _frame(data: bytes) -> bytes:
    """One chunk of a chunked body; an empty one would end it."""
    return data and b"%x\r\n%b\r\n" % (len(data), data)


async def _serve(port: int, pace: Pace) -> None:
    stage = Stage(pace)

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await Connection(stage, reader, writer).serve()

    server = await asyncio.start_server(connected, HOST, port, limit=MAX_HEADER_BYTES)
    print(f"http://{HOST}:{server.sockets[0].getsockname()[1]}", flush=True)
    async with server:
        await server.serve_forever()


def main(arguments: list[str]) -> int:
    die_with_parent()
    parser = argparse.ArgumentParser("python -m baton.bench.selftest.scripted_server")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--first-ms", type=float, default=0.0, help="of answers without a script")
    parser.add_argument("--gap-ms", type=float, default=0.0, help="of answers without a script")
    parsed = parser.parse_args(arguments)
    # A collection in mid-answer would be a stall that no script asked for.
    gc.freeze()
    gc.disable()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(parsed.port, Pace(parsed.first_ms, parsed.gap_ms)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
