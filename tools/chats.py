"""Measure what the turns of chats cost, with and without prefixes that are read from decode nodes.

Two clusters of a model, each of two prefill and two decode nodes, serve the same chats one
after the other. Each turn sends the whole history and some new tokens.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import msgspec

from baton.protocol.config import CacheConfig, ClusterConfig, EngineConfig, ModelConfig, PrefixReads
from tools.soak.cluster import SoakCluster

DEMO_MODEL = "deploy/demo_checkpoint"
VOCABULARY = (5, 600)
NUM_NEW, NUM_OUTPUT = 200, 150  # tokens of a turn
PAUSE_S = 0.3  # in which a client reads the response
KINDS: tuple[PrefixReads, ...] = ("off", "equal")


class Turn(msgspec.Struct):
    number: int
    num_prompt_tokens: int
    num_cached_tokens: int
    first_s: float


async def ask(client: aiohttp.ClientSession, url: str, history: list[int], number: int) -> Turn:
    """Send one turn and add the response to the history."""
    body = {
        "model": "demo",
        "prompt": history,
        "max_tokens": NUM_OUTPUT,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    began_s = time.perf_counter()
    first_s = 0.0
    async with client.post(f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            first_s = first_s or time.perf_counter() - began_s
            chunk = json.loads(line[len(b"data: ") :])
            for choice in chunk["choices"]:
                history += choice.get("token_ids") or []
            usage = chunk.get("usage")
    assert usage is not None, "the last chunk has the usage"
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Turn(number, usage["prompt_tokens"], cached, first_s)


async def chat(client: aiohttp.ClientSession, url: str, seed: str, num_turns: int) -> list[Turn]:
    source = random.Random(seed)
    history: list[int] = []
    turns = []
    for number in range(num_turns):
        history += [source.randrange(*VOCABULARY) for _ in range(NUM_NEW)]
        turns.append(await ask(client, url, history, number))
        await asyncio.sleep(PAUSE_S)
    return turns


async def measure(
    model: str, num_chats: int, num_turns: int, rounds: int
) -> dict[PrefixReads, list[list[Turn]]]:
    """Return the turns of each round, by what nodes lend."""
    found: dict[PrefixReads, list[list[Turn]]] = {kind: [] for kind in KINDS}
    async with AsyncExitStack() as stack:
        urls: dict[PrefixReads, str] = {}
        for kind in KINDS:
            config = ClusterConfig(
                prefill=2,
                decode=2,
                model=ModelConfig(path=model, served_model_name="demo"),
                cache=CacheConfig(memory_mib=400, prefix_reads=kind),
                engine=EngineConfig(threads=1),
            )
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            urls[kind] = (await stack.enter_async_context(SoakCluster(folder, config))).url
        timeout = aiohttp.ClientTimeout(total=600.0)
        client = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout))
        for number in range(rounds):
            for kind, url in urls.items():
                names = [f"{number} {one}" for one in range(num_chats)]
                chats = [chat(client, url, name, num_turns) for name in names]
                turns = [turn for one in await asyncio.gather(*chats) for turn in one]
                found[kind].append(turns)
    return found


class Arguments(msgspec.Struct):
    model: str
    chats: int
    turns: int
    rounds: int


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.chats", description=__doc__)
    parser.add_argument("--model", default=DEMO_MODEL, help="the folder of another model")
    parser.add_argument("--chats", type=int, default=32, help="at once")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    options = msgspec.convert(vars(parser.parse_args(arguments)), Arguments)
    found = asyncio.run(measure(options.model, options.chats, options.turns, options.rounds))
    print(f"turns 2 to {options.turns}, by round: prompt tokens computed in a turn, of which")
    print(f"{NUM_NEW} are new; ms to the first token, p50; cached share of the prompt tokens")
    for kind, rounds in found.items():
        for turns in rounds:
            later = [turn for turn in turns if turn.number > 0]
            num_computed = statistics.mean(t.num_prompt_tokens - t.num_cached_tokens for t in later)
            share = sum(t.num_cached_tokens for t in turns) / sum(
                t.num_prompt_tokens for t in turns
            )
            first_ms = 1000 * statistics.median(turn.first_s for turn in later)
            print(f"prefix_reads {kind:5}  {num_computed:.0f}  {first_ms:.0f}  {share:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
