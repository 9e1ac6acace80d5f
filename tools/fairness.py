"""Measure how long a polite client waits beside one that floods.

Two clusters of the demo model run on this host. A client sends two streams a second to the first
of them: alone, while another client floods the second cluster, and while it floods the same one.
The flood of another cluster shares only the CPUs, so it is what fairness can be judged by on a
host where all processes share a few of them.
"""

import argparse
import asyncio
import multiprocessing
import random
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack

import aiohttp
import msgspec

from baton.protocol.config import CacheConfig, ClusterConfig, EngineConfig, ModelConfig
from tools.demo_client import DEMO_MODEL, SERVED_NAME, ask, cluster_at, random_prompt

# Without API keys a client is its address.
POLITE_ADDRESS = "127.0.0.1"
FLOOD_ADDRESS = "127.0.0.2"
POLITE_EVERY_S = 0.5
LEAD_S = 3.0
PROMPT_LEN = 64
OUTPUT_LEN = 24


def client_at(address: str) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(local_addr=(address, 0), limit=0),
        timeout=aiohttp.ClientTimeout(total=90.0),
    )


async def seconds_to_first(
    client: aiohttp.ClientSession, url: str, prompt: list[int]
) -> float:
    reply = await ask(client, url, prompt, OUTPUT_LEN)
    if reply.status != 200:
        raise RuntimeError(f"the polite client got {reply.status}")
    return reply.first_s


async def be_polite(url: str, seconds: float) -> float:
    """Return the median of seconds to the first token of a stream each half second."""
    source = random.Random()
    async with client_at(POLITE_ADDRESS) as client:
        streams = []
        for _ in range(int(seconds / POLITE_EVERY_S)):
            prompt = random_prompt(source, PROMPT_LEN)
            streams.append(asyncio.create_task(seconds_to_first(client, url, prompt)))
            await asyncio.sleep(POLITE_EVERY_S)
        return statistics.median(await asyncio.gather(*streams))


async def flood(url: str, rate: float, seconds: float) -> None:
    """Send `rate` requests a second, however many of them have ended."""
    source = random.Random()
    prompts = [random_prompt(source, PROMPT_LEN) for _ in range(1000)]
    async with client_at(FLOOD_ADDRESS) as client, asyncio.TaskGroup() as group:
        began_s = time.perf_counter()
        sent = 0
        while (passed_s := time.perf_counter() - began_s) < seconds:
            while sent < passed_s * rate:
                prompt = prompts[sent % len(prompts)]
                group.create_task(
                    ask(client, url, prompt, OUTPUT_LEN, is_streamed=False)
                )
                sent += 1
            await asyncio.sleep(0.01)


def run_flood(url: str, rate: float, seconds: float) -> None:
    asyncio.run(flood(url, rate, seconds))


async def beside(url: str, flooded: str, rate: float, seconds: float) -> float:
    """Return what a polite client at `url` sees while a process of its own floods `flooded`."""
    spawn = multiprocessing.get_context("spawn")
    process = spawn.Process(
        target=run_flood, args=(flooded, rate, LEAD_S + seconds), daemon=True
    )
    process.start()
    await asyncio.sleep(LEAD_S)
    median_s = await be_polite(url, seconds)
    await asyncio.to_thread(process.join)
    return median_s


async def measure(
    rate: float, seconds: float, rounds: int
) -> list[tuple[float, float, float]]:
    """Return the median of each round: alone, beside the other cluster, beside the same one."""
    config = ClusterConfig(
        model=ModelConfig(path=DEMO_MODEL, served_model_name=SERVED_NAME),
        cache=CacheConfig(memory_mib=200),
        engine=EngineConfig(threads=1),
    )
    figures = []
    async with AsyncExitStack() as stack:
        same = await cluster_at(stack, config)
        other = await cluster_at(stack, config)
        await be_polite(same, seconds / 2)
        for _ in range(rounds):
            alone_s = await be_polite(same, seconds)
            other_s = await beside(same, other, rate, seconds)
            same_s = await beside(same, same, rate, seconds)
            figures.append((alone_s, other_s, same_s))
    return figures


class Arguments(msgspec.Struct):
    rate: float
    seconds: float
    rounds: int


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.fairness", description=__doc__
    )
    parser.add_argument(
        "--rate", type=float, default=120.0, help="requests of the flood a second"
    )
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=3)
    options = msgspec.convert(vars(parser.parse_args(arguments)), Arguments)
    print("ms to the first token of a polite client, median")
    print("alone  beside a flood elsewhere  beside a flood here  here / elsewhere")
    for alone_s, other_s, same_s in asyncio.run(
        measure(options.rate, options.seconds, options.rounds)
    ):
        milliseconds = [
            f"{1000 * seconds:.1f}" for seconds in (alone_s, other_s, same_s)
        ]
        print(*milliseconds, f"{same_s / other_s:.2f}", sep="  ")
    return 0


if __name__ == "__main__":
    sys.exit(main())
