"""Measure what the turns of chats cost, with and without prefixes that are read from decode nodes.

Two clusters of a model, each of two prefill and two decode nodes, serve the same chats one
after the other. Each turn sends the whole history and some new tokens.
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


class Turn(msgspec.Struct):
    number: int
    reply: Reply


async def chat(
    client: aiohttp.ClientSession, url: str, seed: str, num_turns: int
) -> list[Turn]:
    source = random.Random(seed)
    history: list[int] = []
    turns = []
    for number in range(num_turns):
        history += random_prompt(source, NUM_NEW)
        reply = await ask(client, url, history, NUM_OUTPUT)
        assert reply.status == 200, f"the router answered {reply.status}"
        history += reply.token_ids
        turns.append(Turn(number, reply))
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
                model=ModelConfig(path=model, served_model_name=SERVED_NAME),
                cache=CacheConfig(memory_mib=400, prefix_reads=kind),
                engine=EngineConfig(threads=1),
            )
            urls[kind] = await cluster_at(stack, config)
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
    parser.add_argument(
        "--model", default=DEMO_MODEL, help="the folder of another model"
    )
    parser.add_argument("--chats", type=int, default=32, help="at once")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    options = msgspec.convert(vars(parser.parse_args(arguments)), Arguments)
    found = asyncio.run(
        measure(options.model, options.chats, options.turns, options.rounds)
    )
    print(
        f"turns 2 to {options.turns}, by round: prompt tokens computed in a turn, of which"
    )
    print(
        f"{NUM_NEW} are new; ms to the first token, p50; cached share of the prompt tokens"
    )
    for kind, rounds in found.items():
        for turns in rounds:
            replies = [turn.reply for turn in turns]
            later = [turn.reply for turn in turns if turn.number > 0]
            num_computed = statistics.mean(
                r.num_prompt_tokens - r.num_cached_tokens for r in later
            )
            num_cached = sum(reply.num_cached_tokens for reply in replies)
            share = num_cached / sum(reply.num_prompt_tokens for reply in replies)
            first_ms = 1000 * statistics.median(reply.first_s for reply in later)
            print(
                f"prefix_reads {kind:5}  {num_computed:.0f}  {first_ms:.0f}  {share:.3f}"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
