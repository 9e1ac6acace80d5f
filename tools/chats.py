"""Measure what the turns of chats cost, with and without prefixes that are read from decode nodes.

Two clusters of a model, each of two prefill and two decode nodes, serve the same chats one
after the other. Each turn sends the whole history and some new tokens. Servers that run already,
named as `baton bench compare` names them, take the place of the clusters.
"""

import argparse
import asyncio
import random
import statistics
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack

import aiohttp
import msgspec

from baton.protocol.config import (
    CacheConfig,
    ClusterConfig,
    EngineConfig,
    ModelConfig,
    PrefixReads,
)
from tools.demo_client import (
    DEMO_MODEL,
    SERVED_NAME,
    Reply,
    ask,
    cluster_at,
    random_prompt,
)

NUM_NEW, NUM_OUTPUT = 200, 150  # tokens of a turn
PAUSE_S = 0.3  # in which a client reads the response
KINDS: tuple[PrefixReads, ...] = ("off", "equal")


class Server(msgspec.Struct, frozen=True):
    url: str
    model: str


class Turn(msgspec.Struct):
    number: int
    reply: Reply


async def chat(
    client: aiohttp.ClientSession, server: Server, seed: str, num_turns: int
) -> list[Turn]:
    source = random.Random(seed)
    history: list[int] = []
    turns = []
    for number in range(num_turns):
        history += random_prompt(source, NUM_NEW)
        reply = await ask(client, server.url, history, NUM_OUTPUT, model=server.model)
        assert reply.status == 200, f"{server.url} answered {reply.status}"
        history += reply.token_ids
        turns.append(Turn(number, reply))
        await asyncio.sleep(PAUSE_S)
    return turns


async def measure(
    servers: dict[str, Server], num_chats: int, num_turns: int, rounds: int
) -> dict[str, list[list[Turn]]]:
    """Return the turns of each round, by server."""
    found: dict[str, list[list[Turn]]] = {name: [] for name in servers}
    timeout = aiohttp.ClientTimeout(total=600.0)
    async with aiohttp.ClientSession(timeout=timeout) as client:
        for number in range(rounds):
            for name, server in servers.items():
                seeds = [f"{number} {one}" for one in range(num_chats)]
                chats = [chat(client, server, seed, num_turns) for seed in seeds]
                turns = [turn for one in await asyncio.gather(*chats) for turn in one]
                found[name].append(turns)
    return found


async def measure_clusters(
    model: str, num_chats: int, num_turns: int, rounds: int
) -> dict[str, list[list[Turn]]]:
    """Return the turns of each round, by what nodes lend."""
    async with AsyncExitStack() as stack:
        servers = {}
        for kind in KINDS:
            config = ClusterConfig(
                prefill=2,
                decode=2,
                model=ModelConfig(path=model, served_model_name=SERVED_NAME),
                cache=CacheConfig(memory_mib=400, prefix_reads=kind),
                engine=EngineConfig(threads=1),
            )
            url = await cluster_at(stack, config)
            servers[f"prefix_reads {kind}"] = Server(url, SERVED_NAME)
        return await measure(servers, num_chats, num_turns, rounds)


class Arguments(msgspec.Struct):
    servers: list[str]
    model: str
    chats: int
    turns: int
    rounds: int


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.chats", description=__doc__)
    parser.add_argument("servers", nargs="*", metavar="NAME=URL#MODEL")
    parser.add_argument(
        "--model", default=DEMO_MODEL, help="the folder of another model"
    )
    parser.add_argument("--chats", type=int, default=32, help="at once")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    options = msgspec.convert(vars(parser.parse_args(arguments)), Arguments)
    sizes = options.chats, options.turns, options.rounds
    if options.servers:
        servers = dict(named_server(word) for word in options.servers)
        found = asyncio.run(measure(servers, *sizes))
    else:
        found = asyncio.run(measure_clusters(options.model, *sizes))
    print(
        f"turns 2 to {options.turns}, by round: prompt tokens computed in a turn, of which"
    )
    print(
        f"{NUM_NEW} are new; ms to the first token, p50; cached share of the prompt tokens"
    )
    for name, rounds in found.items():
        for turns in rounds:
            replies = [turn.reply for turn in turns]
            later = [turn.reply for turn in turns if turn.number > 0]
            num_computed = statistics.mean(
                r.num_prompt_tokens - r.num_cached_tokens for r in later
            )
            num_cached = sum(reply.num_cached_tokens for reply in replies)
            share = num_cached / sum(reply.num_prompt_tokens for reply in replies)
            first_ms = 1000 * statistics.median(reply.first_s for reply in later)
            print(f"{name}  {num_computed:.0f}  {first_ms:.0f}  {share:.3f}")
    return 0


def named_server(word: str) -> tuple[str, Server]:
    name, _, address = word.partition("=")
    url, _, model = address.partition("#")
    return name, Server(url, model)


if __name__ == "__main__":
    sys.exit(main())
