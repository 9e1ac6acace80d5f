"""The polite side, in processes of its own: nodes, and a client that measures how long it waits.

Its time is that of the router alone: what the router or the client waited for a core of a busy
machine, as the kernel tells it, does not count, nor does a step that the nodes made late.
"""

import asyncio
import contextlib
import os
import time
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from baton.protocol.messages import Decode, Prefill, ToNode
from tests.fuzz.client import RESPONSE_S
from tests.support.router_process import HEARTBEAT_S
from tests.support.scripted_nodes import ToyNode, node_info, toy_answer

PROBE_S = 0.01
PACE_S = 0.02  # between two tokens of a stream
MAX_MODEL_LEN = 1 << 18  # so that bodies of many megabytes are taken
NUM_BLOCKS = 1 << 20
# Python keeps small integers, so prompts of those alone cost less than others.
VOCAB_SIZE = 1000
PROMPT = [5, 6, 7]
NUM_TOKENS = 400
MAX_HOSTILE_TOKENS = 30
LIVE = b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n"


class Waits(msgspec.Struct):
    """The longest waits since they were last taken, in seconds."""

    live_s: float = 0.0
    stream_s: float = 0.0
    problems: list[str] = []


def watch(port: int, router_pid: int, pipe: Connection) -> None:
    """Be the polite client until the other end of the pipe closes; answer each message on it."""
    asyncio.run(_Watcher(port, router_pid).run(pipe))


class _Watcher:
    def __init__(self, port: int, router_pid: int) -> None:
        self._port = port
        self._pids = router_pid, os.getpid()
        self._waits = Waits()

    async def run(self, pipe: Connection) -> None:
        loop = asyncio.get_running_loop()
        closed = asyncio.Event()

        def take() -> None:
            try:
                pipe.recv()
            except EOFError:
                loop.remove_reader(pipe.fileno())
                closed.set()
                return
            waits = self._waits
            self._waits = Waits()
            pipe.send(msgspec.json.encode(waits))

        loop.add_reader(pipe.fileno(), take)
        tasks = [
            asyncio.create_task(self._probe()),
            asyncio.create_task(self._stream()),
        ]
        await closed.wait()
        for task in tasks:
            task.cancel()

    async def _probe(self) -> None:
        """Ask for /live again and again, on one connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        while True:
            began_s = time.monotonic()
            delayed_s = self._delay_s()
            try:
                writer.write(LIVE)
                async with asyncio.timeout(RESPONSE_S):
                    head = await reader.readuntil(b"}")
                if b" 200 " not in head:
                    self._waits.problems.append(f"/live: {head!r}")
            except (OSError, EOFError, TimeoutError) as error:
                self._waits.problems.append(f"/live: {error!r}")
                reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            waited_s = time.monotonic() - began_s - (self._delay_s() - delayed_s)
            self._waits.live_s = max(self._waits.live_s, waited_s)
            await asyncio.sleep(PROBE_S)

    async def _stream(self) -> None:
        while True:
            try:
                await self._one_stream()
            except (OSError, EOFError, TimeoutError, AssertionError) as error:
                self._waits.problems.append(f"the stream broke: {error!r}")
                await asyncio.sleep(0.5)

    async def _one_stream(self) -> None:
        """Read one stream, whose tokens must be those of the nodes."""
        body = {
            "prompt": PROMPT,
            "max_tokens": NUM_TOKENS,
            "stream": True,
            "return_token_ids": True,
        }
        data = msgspec.json.encode(body)
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n"
        writer.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + data)
        try:
            token_ids: list[int] = []
            heard_s = time.monotonic()
            delayed_s = self._delay_s()
            while True:
                async with asyncio.timeout(RESPONSE_S):
                    line = await reader.readline()
                assert line, "it ended early"
                if not line.startswith(b"data: "):
                    continue
                if line.startswith(b"data: [DONE]"):
                    break
                event = msgspec.json.decode(line[6:])
                assert "error" not in event, event
                for choice in event["choices"]:
                    token_ids += choice["token_ids"]
                now_s = time.monotonic()
                now_delayed_s = self._delay_s()
                waited_s = now_s - heard_s - (now_delayed_s - delayed_s)
                if len(token_ids) > 1:  # the first waits for its nodes
                    self._waits.stream_s = max(self._waits.stream_s, waited_s)
                heard_s = now_s
                delayed_s = now_delayed_s
            assert token_ids == toy_answer(PROMPT, NUM_TOKENS), "other tokens"
        finally:
            with contextlib.suppress(OSError):
                writer.close()

    def _delay_s(self) -> float:
        """Return how long the main threads of both processes have waited for a core."""
        return sum(run_delay_s(pid) for pid in self._pids)


def run_delay_s(pid: int) -> float:
    try:
        return (
            int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[1]) / 1e9
        )
    except OSError:  # it has ended, or the kernel does not count
        return 0.0


class _CurtNode(ToyNode):
    """A node that ends all streams soon, except the polite client's."""

    def on_message(self, message: ToNode) -> None:
        if (
            isinstance(message, Prefill | Decode)
            and message.token_ids[: len(PROMPT)] != PROMPT
        ):
            num_tokens = min(message.sampling.max_tokens, MAX_HOSTILE_TOKENS)
            sampling = msgspec.structs.replace(message.sampling, max_tokens=num_tokens)
            message = msgspec.structs.replace(message, sampling=sampling)
        super().on_message(message)


def serve_nodes(control: str, pipe: Connection) -> None:
    """Be one node of each role; answer each message with the longest delay of a step since."""
    asyncio.run(_nodes(control, pipe))


async def _nodes(control: str, pipe: Connection) -> None:
    infos = [
        msgspec.structs.replace(
            node_info(name, role, num_blocks=NUM_BLOCKS),
            max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCAB_SIZE,
        )
        for name, role in (("p0", "prefill"), ("d0", "decode"))  # type: ignore[attr-defined]
    ]
    nodes = [_CurtNode(control, info, pace_s=PACE_S) for info in infos]
    for node in nodes:
        node.join()
    longest_s = 0.0
    last_s = time.monotonic()
    beat_s = 0.0
    with contextlib.suppress(EOFError):
        while True:
            await asyncio.sleep(PACE_S)
            now_s = time.monotonic()
            longest_s = max(longest_s, now_s - last_s - PACE_S)
            last_s = now_s
            if now_s - beat_s > HEARTBEAT_S:
                beat_s = now_s
                for node in nodes:
                    node.heartbeat()
            if pipe.poll():
                pipe.recv()
                pipe.send(longest_s)
                longest_s = 0.0
    for node in nodes:
        node.die()
