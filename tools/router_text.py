"""What a streamed token costs the router: detokenized, checked for stops, made a chunk, written.

Runs the real HTTP side over loopback before an engine that only pushes tokens, and counts the CPU
time of the thread that serves. Messages from nodes are not part of it. Needs a model folder with a
tokenizer.json and nothing else.
"""

import argparse
import asyncio
import json
import socket
import sys
import threading
import time
from collections.abc import Sequence

from baton.protocol.config import ClusterConfig
from baton.protocol.sampling import SamplingParams
from baton.router.app import App, Server
from baton.router.registry import Health, ServedModel
from baton.router.stream import RequestStream
from baton.router.text import Text

TOKENS_PER_STEP = 100
PROMPT = "The second runner never looks behind. "
STOPS = ["\n\nQuestion:", "<|never|>", "hexagonal"]


class PushedEngine:
    """Takes one request at a time and leaves its tokens to the caller."""

    errored = False

    def __init__(self, text: Text) -> None:
        self._text = text
        self.came: asyncio.Queue[RequestStream] = asyncio.Queue()

    async def submit(
        self, prompt: str | list[int], params: SamplingParams, request_id: str | None = None
    ) -> RequestStream:
        ids = await self._text.encode(prompt) if isinstance(prompt, str) else prompt
        detokenizers = [self._text.detokenizer(ids, params)]
        stream = RequestStream(request_id or "", None, ids, params, detokenizers)
        self.came.put_nowait(stream)
        return stream

    def health(self) -> Health:
        return Health("ready", (), 0, 0)

    def get_model_config(self) -> ServedModel:
        return ServedModel("bench", "", "", "", 1 << 20, 1 << 20, 16)

    def get_tokenizer(self) -> Text:
        return self._text


async def measure(text: Text, num_tokens: int, stops: list[str]) -> float:
    """Microseconds of CPU per token."""
    engine = PushedEngine(text)
    server = Server(App(engine, ClusterConfig()), "127.0.0.1", 0)
    host, port = (await server.start()).removeprefix("http://").split(":")
    body = {"prompt": PROMPT, "stream": True, "stop": stops or None}
    client = threading.Thread(target=_read, args=(host, int(port), json.dumps(body).encode()))
    client.start()
    token_ids = text.encode_now(PROMPT * 3)
    stream, cpu_s = await engine.came.get(), 0.0
    stream.push(0, token_ids[:1], None)
    for start in range(0, num_tokens, TOKENS_PER_STEP):
        # Lets the client read, as the time between two steps of a model does.
        await asyncio.sleep(0.001)
        before_s = time.thread_time()
        for index in range(start, start + TOKENS_PER_STEP):
            stream.push(0, [token_ids[index % len(token_ids)]], None)
        cpu_s += time.thread_time() - before_s
    stream.push(0, token_ids[:1], "length")
    stream.finish()
    await asyncio.to_thread(client.join)
    await server.stop()
    return cpu_s / num_tokens * 1e6


def _read(host: str, port: int, body: bytes) -> None:
    with socket.create_connection((host, port)) as connection:
        head = "POST /v1/completions HTTP/1.1\r\nHost: bench\r\nConnection: close\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        while connection.recv(1 << 20):
            pass


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="folder with a tokenizer.json")
    parser.add_argument("--tokens", type=int, default=20_000)
    given = parser.parse_args(arguments)
    text = Text.load(given.model)
    for name, stops in (("no stop strings", []), ("three stop strings", STOPS)):
        best_us = min(asyncio.run(measure(text, given.tokens, stops)) for _ in range(3))
        print(f"{name}: {best_us:.1f} us per token")
    text.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
