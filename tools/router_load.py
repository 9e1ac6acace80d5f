"""The nodes and the clients of `router_scale`, in a process of their own.

It reads one `Crowd` per line from its input and answers each with `STARTED` when it runs and with a
line of JSON, a `CrowdFigures`, when it has run. The nodes compute nothing: they send the tokens of
the prompt over and over.
"""

import asyncio
import json
import sys
import time
from collections import deque
from collections.abc import Iterable

import msgspec
import zmq

from baton.protocol.codec import to_node_codec, to_router_codec
from baton.protocol.ids import Epoch, Key, NodeId
from baton.protocol.messages import (
    PROTOCOL_VERSION,
    Accepted,
    Cancel,
    CancelDone,
    Decode,
    FinishReason,
    FirstToken,
    FirstTokens,
    Heartbeat,
    Hello,
    KVLayout,
    Load,
    NodeInfo,
    Prefill,
    Ready,
    Role,
    TokenEntry,
    Tokens,
    ToNode,
    ToRouter,
)
from baton.runtime.channels.dialer import Dialer, Disconnected
from baton.runtime.host import raise_descriptor_limit

STARTED = b"started\n"
PROMPT = "The second runner never looks behind. "
HEARTBEAT_S = 1.0
LAYOUT = KVLayout(block_size=16, block_bytes=1024, fingerprint="layout")
DIALS = 64  # connections that are opened side by side
NUM_CONNECTIONS = 128  # for short requests
LONG = 1 << 16  # more tokens than any stream gets
_TOKEN = b'"finish_reason":null'


class Crowd(msgspec.Struct, frozen=True):
    """`num` streams for `seconds`, or with `rate` short requests of two tokens.

    With `step_s`, each stream gets a token at that interval; without it, the streams stay idle
    after their first. An event has `stream_interval` tokens.
    """

    num: int
    seconds: float
    step_s: float | None = None
    rate: float | None = None
    stream_interval: int = 1


class CrowdFigures(msgspec.Struct, frozen=True):
    """The clients' results. A lag is the time from a node's sending of a token to its arrival."""

    num_ended: int  # tokens of streams, or short requests
    seconds: float
    lag_p50_ms: float = 0.0
    lag_p99_ms: float = 0.0


class PlayedNode:
    """A node whose tokens come when `step` is called."""

    def __init__(self, endpoint: str, name: str, role: Role) -> None:
        self.info = NodeInfo(
            NodeId(name),
            Epoch("epoch"),
            role,
            "",
            1 << 20,
            LAYOUT,
            (),
            "model",
            1 << 18,
            1 << 18,
        )
        self.running: dict[Key, Decode] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._main = self._dial(endpoint, name)
        self._heartbeats = self._dial(endpoint, f"heartbeats:{name}")
        loop = asyncio.get_running_loop()
        loop.add_reader(self._main.fileno(), self._read)
        loop.add_reader(self._heartbeats.fileno(), self._read)

    def join(self) -> None:
        self._main.send(
            Hello(PROTOCOL_VERSION, self.info.node_id, self.info.role, self.info.epoch)
        )
        self._main.send(Ready(self.info))
        self._heartbeat()

    def step(self, index: int) -> None:
        """Send token number `index` of every request; 1 repeats 0, as after every handoff."""
        entries: list[TokenEntry] = []
        for key, order in list(self.running.items()):
            prompt = order.token_ids
            first = 0 if index == 1 else index
            token_ids = [
                prompt[number % len(prompt)] for number in range(first, index + 1)
            ]
            is_last = index + 1 >= order.sampling.max_tokens
            reason: FinishReason | None = "length" if is_last else None
            entries.append(TokenEntry(key, len(prompt) + first, token_ids, reason))
            if is_last:
                del self.running[key]
        if entries:
            self._main.send(Tokens(entries))

    def _heartbeat(self) -> None:
        self._heartbeats.send(Heartbeat(self.info.node_id, self.info.epoch, Load()))
        asyncio.get_running_loop().call_later(HEARTBEAT_S, self._heartbeat)

    def _dial(self, endpoint: str, identity: str) -> Dialer[ToRouter, ToNode]:
        return Dialer(
            endpoint,
            identity.encode(),
            to_router_codec(),
            to_node_codec(),
            self._context,
        )

    def _read(self) -> None:
        while (message := self._main.receive()) is not None:
            if not isinstance(message, Disconnected):
                self._answer(message)
        while self._heartbeats.receive() is not None:
            pass

    def _answer(self, message: ToNode) -> None:
        match message:
            case Prefill(key=key, token_ids=token_ids):
                first = FirstToken(token_ids[0])
                self._main.send(FirstTokens(key, len(token_ids), (first,)))
            case Decode(key=key):
                self._main.send(Accepted(key))
                self.running[key] = message
                if message.sampling.max_tokens == 2:
                    self.step(1)
            case Cancel(keys=keys):
                for key in keys:
                    self.running.pop(key, None)
                self._main.send(CancelDone(keys))
            case _:
                pass


class Lags:
    """When the tokens of each stream were sent, by its seed, until they have arrived."""

    def __init__(self) -> None:
        self.sent_s: dict[int, deque[float]] = {}
        self.lags_s: list[float] = []
        self.is_counting = False

    def sent(self, orders: Iterable[Decode]) -> None:
        now_s = time.monotonic()
        for order in orders:
            self.sent_s.setdefault(order.sampling.seed, deque()).append(now_s)

    def came(self, seed: int, num_tokens: int) -> None:
        now_s = time.monotonic()
        waiting = self.sent_s.get(seed, ())
        for _ in range(min(num_tokens, len(waiting))):
            lag_s = now_s - waiting.popleft()  # type: ignore[union-attr]
            if self.is_counting:
                self.lags_s.append(lag_s)


class StreamReader(asyncio.Protocol):
    """One client's stream. `opened` is done when its first token has come."""

    def __init__(self, seed: int, lags: Lags, stream_interval: int) -> None:
        self._seed = seed
        self._lags = lags
        self._stream_interval = stream_interval
        self._has_begun = False
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        interval = self._stream_interval
        request = request_of(
            LONG, is_streamed=True, seed=self._seed, stream_interval=interval
        )
        transport.write(request)

    def data_received(self, data: bytes) -> None:
        if self._has_begun:
            num_events = data.count(_TOKEN)
            self._lags.came(self._seed, num_events * self._stream_interval)
        elif _TOKEN in data:
            self._has_begun = True
            self.opened.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.opened.done():
            self.opened.set_exception(
                exc or ConnectionError("the router closed a connection")
            )


class CrowdPlayer:
    """All clients of the routers at `url`, and the nodes that dial each of `controls`."""

    def __init__(self, url: str, controls: list[str], num_decodes: int) -> None:
        host, port = url.removeprefix("http://").split(":")
        self._host, self._port = host, int(port)
        self._prefills = [
            PlayedNode(control, "prefill-0", "prefill") for control in controls
        ]
        self._decodes = [
            [PlayedNode(control, f"decode-{index}", "decode") for control in controls]
            for index in range(num_decodes)
        ]
        for node in (
            *self._prefills,
            *(one for group in self._decodes for one in group),
        ):
            node.join()
        self._lags = Lags()

    async def play(self, crowd: Crowd) -> CrowdFigures:
        if crowd.rate is not None:
            return await self._ask_at(crowd.rate, crowd.seconds)
        readers = await self._open(crowd)
        say(STARTED)
        began_s = time.monotonic()
        if crowd.step_s is None:
            await asyncio.sleep(crowd.seconds)
        else:
            self._lags.is_counting = True
            async with asyncio.TaskGroup() as group:
                for index, nodes in enumerate(self._decodes):
                    offset_s = crowd.step_s * index / len(self._decodes)
                    group.create_task(self._step(nodes, crowd, began_s + offset_s))
        figures = _figures(self._lags.lags_s, time.monotonic() - began_s)
        assert figures.num_ended or crowd.step_s is None, (
            "no token was known by its stream's seed"
        )
        self._lags = Lags()
        for reader in readers:
            assert reader.transport is not None
            reader.transport.abort()
        while any(node.running for group in self._decodes for node in group):  # noqa: ASYNC110
            await asyncio.sleep(0.05)  # nothing signals that nodes were told to stop
        return figures

    async def _open(self, crowd: Crowd) -> list[StreamReader]:
        loop = asyncio.get_running_loop()
        room = asyncio.Semaphore(DIALS)

        async def open_one(seed: int) -> StreamReader:
            async with room:
                _, reader = await loop.create_connection(
                    lambda: StreamReader(seed, self._lags, crowd.stream_interval),
                    self._host,
                    self._port,
                )
                await reader.opened
                return reader

        seeds = range(crowd.num)
        return list(await asyncio.gather(*(open_one(seed) for seed in seeds)))

    async def _step(self, nodes: list[PlayedNode], crowd: Crowd, at_s: float) -> None:
        """Send a token for every sequence of a node at each interval, late ones at once."""
        assert crowd.step_s is not None
        end_s = at_s + crowd.seconds
        index = 1
        while at_s < end_s:
            await asyncio.sleep(at_s - time.monotonic())
            for node in nodes:
                self._lags.sent(node.running.values())
                node.step(index)
            at_s = at_s + crowd.step_s
            index = index + 1

    async def _ask_at(self, rate: float, seconds: float) -> CrowdFigures:
        """Send short requests at a constant rate. A lag is then the time of the whole response."""
        request = request_of(2, is_streamed=False)
        due = asyncio.Queue[float]()
        lags_s: list[float] = []

        async def ask() -> None:
            reader, writer = await asyncio.open_connection(self._host, self._port)
            while (at_s := await due.get()) >= 0:
                writer.write(request)
                head = await reader.readuntil(b"\r\n\r\n")
                assert b" 200 " in head, head
                length = (
                    head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
                )
                await reader.readexactly(int(length))
                lags_s.append(time.monotonic() - at_s)
            writer.close()

        say(STARTED)
        began_s = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for _ in range(NUM_CONNECTIONS):
                group.create_task(ask())
            for number in range(int(rate * seconds)):
                at_s = began_s + number / rate
                if (wait_s := at_s - time.monotonic()) > 0:
                    await asyncio.sleep(wait_s)
                due.put_nowait(at_s)
            for _ in range(NUM_CONNECTIONS):
                due.put_nowait(-1.0)
        return _figures(lags_s, time.monotonic() - began_s)


def request_of(
    num_tokens: int, *, is_streamed: bool, seed: int = 0, stream_interval: int = 1
) -> bytes:
    """Return a request, whose connection stays open if it is a short one."""
    fields = {
        "prompt": PROMPT,
        "max_tokens": num_tokens,
        "seed": seed,
        "stream": is_streamed,
        "stream_interval": stream_interval,
    }
    body = json.dumps(fields).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: router\r\n"
        f"Connection: {'close' if is_streamed else 'keep-alive'}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def say(line: bytes) -> None:
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()


def _figures(lags_s: list[float], seconds: float) -> CrowdFigures:
    ordered = sorted(lags_s) or [0.0]
    p50, p99 = (ordered[int(share * (len(ordered) - 1))] * 1e3 for share in (0.5, 0.99))
    return CrowdFigures(len(lags_s), seconds, p50, p99)


async def _main(url: str, controls: str, num_decodes: str) -> None:
    raise_descriptor_limit()
    player = CrowdPlayer(url, controls.split(","), int(num_decodes))
    while line := await asyncio.to_thread(sys.stdin.readline):
        figures = await player.play(msgspec.json.decode(line, type=Crowd))
        say(msgspec.json.encode(figures) + b"\n")


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
