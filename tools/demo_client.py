"""What tools that measure clusters share: a cluster on this host, and a client that times it."""

import json
import random
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import msgspec

from baton.protocol.config import ClusterConfig
from tools.soak.cluster import SoakCluster

DEMO_MODEL = "deploy/demo_checkpoint"
SERVED_NAME = "demo"
VOCABULARY = (5, 600)
_DATA = b"data: "


class Reply(msgspec.Struct):
    """The response to one completion. The times are of the client's clock."""

    status: int
    first_s: float = 0.0  # until the first event of a stream
    token_ids: list[int] = []
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0


async def cluster_at(stack: AsyncExitStack, config: ClusterConfig) -> str:
    """Start a cluster that runs until `stack` ends, and return its URL."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    cluster = await stack.enter_async_context(SoakCluster(folder, config))
    return cluster.url


def random_prompt(source: random.Random, length: int) -> list[int]:
    return [source.randrange(*VOCABULARY) for _ in range(length)]


async def ask(
    client: aiohttp.ClientSession,
    url: str,
    prompt: Sequence[int],
    num_output: int,
    *,
    is_streamed: bool = True,
    model: str = SERVED_NAME,
) -> Reply:
    """Ask for exactly `num_output` greedy tokens, and read the response to its end."""
    body: dict[str, object] = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": num_output,
        "temperature": 0,
        "ignore_eos": True,
        "stream": is_streamed,
    }
    if is_streamed:
        body |= {"stream_options": {"include_usage": True}, "return_token_ids": True}
    began_s = time.perf_counter()
    async with client.post(f"{url}/v1/completions", json=body) as response:
        reply = Reply(response.status)
        async for line in response.content:
            if not line.startswith(_DATA + b"{"):
                continue
            reply.first_s = reply.first_s or time.perf_counter() - began_s
            chunk = json.loads(line.removeprefix(_DATA))
            for choice in chunk.get("choices", ()):
                reply.token_ids += choice.get("token_ids") or []
            if usage := chunk.get("usage"):
                reply.num_prompt_tokens = usage["prompt_tokens"]
                details = usage.get("prompt_tokens_details") or {}
                reply.num_cached_tokens = details.get("cached_tokens") or 0
    return reply
