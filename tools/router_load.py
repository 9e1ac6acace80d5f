"""The other side of `router_cost`: the nodes and the clients of a router, in a process of its own.

It reads one `Traffic` per line from its input, and prints a line when the streams run and when all
requests have ended. The nodes compute nothing: they send the tokens of the prompt over and over.
"""

import asyncio
import json
import sys

import msgspec
import zmq

from baton.protocol.codec import to_node_codec, to_router_codec
from baton.protocol.ids import Epoch, Key, NodeId
from baton.protocol.messages import (
    PROTOCOL_VERSION,
    Accepted,
    Beat,
    Cancel,
    CancelDone,
    Decode,
    FinishReason,
    FirstToken,
    FirstTokens,
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

STARTED, DONE = b"started\n", b"done\n"
PROMPT = "The second runner never looks behind. "
NUM_CONNECTIONS = 8  # for short requests, sent one at a time on each connection
BEAT_S = 1.0
LAYOUT = KVLayout(block_size=16, block_bytes=1024, fingerprint="layout")


class Traffic(msgspec.Struct, frozen=True):
    """Requests of `num_tokens` tokens each.

    With `step_s`, all are streamed side by side and get a token at that interval; without it, they
    are whole answers, requested as fast as the connections allow.
    """

    num_requests: int
    num_tokens: int
    step_s: float | None = None
    stop: list[str] | None = None


class PlayedNode:
    """A node whose tokens come when `step` is called."""

    def __init__(self, endpoint: str, name: str, role: Role) -> None:
        self.info = NodeInfo(
            NodeId(name), Epoch("epoch"), role, "", 1 << 20, LAYOUT, (), "model", 1 << 18, 1 << 18
        )
        self.running: dict[Key, Decode] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._main = self._dial(endpoint, name)
        self._beats = self._dial(endpoint, f"beats:{name}")
        self._came = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(self._main.fileno(), self._read)
        loop.add_reader(self._beats.fileno(), self._read)

    def join(self) -> None:
        self._main.send(Hello(PROTOCOL_VERSION, self.info.node_id, self.info.role, self.info.epoch))
        self._main.send(Ready(self.info))
        self._beat()

    async def until_running(self, num_requests: int) -> None:
        while len(self.running) < num_requests:
            self._came.clear()
            await self._came.wait()

    def step(self, index: int) -> None:
        """Send token number `index` of every request; 1 repeats 0, as after every handoff."""
        entries: list[TokenEntry] = []
        for key, order in list(self.running.items()):
            prompt, first = order.token_ids, 0 if index == 1 else index
            token_ids = [prompt[number % len(prompt)] for number in range(first, index + 1)]
            is_last = index + 1 >= order.sampling.max_tokens
            reason: FinishReason | None = "length" if is_last else None
            entries.append(TokenEntry(key, len(prompt) + first, token_ids, reason))
            if is_last:
                del self.running[key]
        if entries:
            self._main.send(Tokens(entries))

    def _beat(self) -> None:
        self._beats.send(Beat(self.info.node_id, self.info.epoch, Load()))
        asyncio.get_running_loop().call_later(BEAT_S, self._beat)

    def _dial(self, endpoint: str, identity: str) -> Dialer[ToRouter, ToNode]:
        return Dialer(
            endpoint, identity.encode(), to_router_codec(), to_node_codec(), self._context
        )

    def _read(self) -> None:
        while (message := self._main.receive()) is not None:
            if not isinstance(message, Disconnected):
                self._answer(message)
        while self._beats.receive() is not None:
            pass

    def _answer(self, message: ToNode) -> None:
        match message:
            case Prefill(key=key, token_ids=token_ids):
                first = FirstToken(token_ids[0])
                self._main.send(FirstTokens(key, len(token_ids), (first,)))
            case Decode(key=key):
                self._main.send(Accepted(key))
                self.running[key] = message
                self._came.set()
                if message.sampling.max_tokens == 2:
                    self.step(1)
            case Cancel(keys=keys):
                for key in keys:
                    self.running.pop(key, None)
                self._main.send(CancelDone(keys))
            case _:
                pass


class Player:
    """All clients of the router at `url`, and the nodes behind it."""

    def __init__(self, url: str, control: str) -> None:
        host, port = url.removeprefix("http://").split(":")
        self._host, self._port = host, int(port)
        self._prefill = PlayedNode(control, "prefill-0", "prefill")
        self._decode = PlayedNode(control, "decode-0", "decode")
        self._prefill.join()
        self._decode.join()
        self._num_left = 0

    async def until_served(self) -> None:
        while b" 200 " not in await self._get_health():  # noqa: ASYNC110 - no event signals it
            await asyncio.sleep(0.05)

    async def play(self, traffic: Traffic) -> None:
        if traffic.step_s is None:
            say(STARTED)
            self._num_left = traffic.num_requests
            await asyncio.gather(*[self._ask(traffic) for _ in range(NUM_CONNECTIONS)])
        else:
            streams = [
                asyncio.create_task(self._stream(traffic)) for _ in range(traffic.num_requests)
            ]
            await self._decode.until_running(traffic.num_requests)
            say(STARTED)
            for index in range(1, traffic.num_tokens):
                await asyncio.sleep(traffic.step_s)
                self._decode.step(index)
            await asyncio.gather(*streams)
        say(DONE)

    async def _get_health(self) -> bytes:
        reader, writer = await asyncio.open_connection(self._host, self._port)
        writer.write(b"GET /health HTTP/1.1\r\nHost: router\r\nConnection: close\r\n\r\n")
        reply = await reader.read()
        writer.close()
        return reply

    async def _stream(self, traffic: Traffic) -> None:
        reader, writer = await asyncio.open_connection(self._host, self._port)
        writer.write(request_of(traffic, "close"))
        last = b""
        while data := await reader.read(1 << 16):
            last = last[-32:] + data
        assert b"[DONE]" in last, last
        writer.close()

    async def _ask(self, traffic: Traffic) -> None:
        reader, writer = await asyncio.open_connection(self._host, self._port)
        request = request_of(traffic, "keep-alive")
        while self._num_left > 0:
            self._num_left -= 1
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            assert b" 200 " in head, head
            length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
            await reader.readexactly(int(length))
        writer.close()


def request_of(traffic: Traffic, connection: str) -> bytes:
    fields = {"prompt": PROMPT, "max_tokens": traffic.num_tokens, "temperature": 0}
    body = json.dumps(
        {**fields, "stream": traffic.step_s is not None, "stop": traffic.stop}
    ).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: router\r\nConnection: {connection}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def say(line: bytes) -> None:
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()


async def _main(url: str, control: str) -> None:
    player = Player(url, control)
    await player.until_served()
    while line := await asyncio.to_thread(sys.stdin.readline):
        await player.play(msgspec.json.decode(line, type=Traffic))


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
