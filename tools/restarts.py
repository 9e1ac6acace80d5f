"""`python -m tools.restarts`: what chats find cached after each node was restarted in its turn.

Chats take their turns together. A cluster of two prefill and two decode nodes with folder tiers
serves them whole, and another one restarts a node by SIGTERM before some turns. Both have to say
the same.
"""

import argparse
import asyncio
import random
import signal
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import aiohttp
import msgspec

from baton.protocol.config import (
    CacheConfig,
    ClusterConfig,
    EngineConfig,
    ModelConfig,
)
from tools.demo_client import DEMO_MODEL, SERVED_NAME, Reply, ask, random_prompt
from tools.soak.cluster import SoakCluster

NODES = ("prefill-0", "decode-0", "prefill-1", "decode-1")
NUM_FIRST_TURNS = 2  # before the first restart
NUM_NEW, NUM_OUTPUT = 200, 50  # tokens of a turn


class Arguments(msgspec.Struct):
    model: str
    chats: int


class Turn(msgspec.Struct):
    restarted: str  # the node before it; empty for none
    replies: list[Reply]

    @property
    def cached_share(self) -> float:
        """Return the cached part of all tokens of prompts that were sent or said before."""
        known = sum(reply.num_prompt_tokens - NUM_NEW for reply in self.replies)
        return sum(reply.num_cached_tokens for reply in self.replies) / known


def restarted_before(turn: int) -> str:
    """Return the node that is restarted before a turn: every second turn one, each once."""
    number, is_between = divmod(turn - NUM_FIRST_TURNS, 2)
    is_one = 0 <= number < len(NODES) and not is_between
    return NODES[number] if is_one else ""


async def serve(options: Arguments, folder: Path, *, restarts: bool) -> list[Turn]:
    config = ClusterConfig(
        prefill=2,
        decode=2,
        model=ModelConfig(path=options.model, served_model_name=SERVED_NAME),
        cache=CacheConfig(
            memory_mib=200, folder=str(folder / "cache"), folder_size=2.0
        ),
        engine=EngineConfig(threads=1),
    )
    source = random.Random(0)
    histories: list[list[int]] = [[] for _ in range(options.chats)]
    turns = []
    timeout = aiohttp.ClientTimeout(total=600.0)
    async with (
        SoakCluster(folder, config) as cluster,
        aiohttp.ClientSession(timeout=timeout) as client,
    ):
        for number in range(NUM_FIRST_TURNS + 2 * len(NODES)):
            name = restarted_before(number) if restarts else ""
            if name:
                await cluster.restart(name, signal.SIGTERM)
                await cluster.until(f"{name} again", partial(cluster.is_back, name))
            for history in histories:
                history.extend(random_prompt(source, NUM_NEW))
            asked = [ask(client, cluster.url, one, NUM_OUTPUT) for one in histories]
            replies = await asyncio.gather(*asked)
            for history, reply in zip(histories, replies, strict=True):
                assert reply.status == 200, f"the router answered {reply.status}"
                history.extend(reply.token_ids)
            turns.append(Turn(name, list(replies)))
            await asyncio.sleep(1.0)  # a router hears of cached blocks a little later
    return turns


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.restarts", description=__doc__
    )
    parser.add_argument(
        "--model", default=DEMO_MODEL, help="the folder of another model"
    )
    parser.add_argument("--chats", type=int, default=8, help="at once")
    options = msgspec.convert(vars(parser.parse_args(arguments)), Arguments)
    found = []
    for restarts in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            found.append(asyncio.run(serve(options, Path(folder), restarts=restarts)))
    print("turn  restarted before it  cached share of what was known: whole, restarted")
    num_wrong = 0
    for number, (whole, restarted) in enumerate(zip(*found, strict=True)):
        num_wrong += sum(
            one.token_ids != other.token_ids
            for one, other in zip(whole.replies, restarted.replies, strict=True)
        )
        if number:
            shares = f"{whole.cached_share:.3f}  {restarted.cached_share:.3f}"
            print(f"{number + 1:4}  {restarted.restarted or '-':9}  {shares}")
    print(f"responses that differ: {num_wrong}")
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
