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
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import msgspec

from baton.protocol.config import CacheConfig, ClusterConfig, EngineConfig, ModelConfig
from tools.soak.cluster import SoakCluster

# Without API keys a client is its address.
POLITE_ADDRESS = "127.0.0.1"
FLOOD_ADDRESS = "127.0.0.2"
DEMO_MODEL = "deploy/demo_checkpoint"
POLITE_EVERY_S = 0.5
LEAD_S = 3.0
VOCABULARY = (5, 600)
PROMPT_LEN = 64
OUTPUT_LEN = 24


def body(source: random.Random, *, stream: bool) -> dict[str, object]:
    return {
        "model": "demo",
        "prompt": [source.randrange(*VOCABULARY) for _ in range(PROMPT_LEN)],
        "max_tokens": OUTPUT_LEN,
        "temperature": 0,
        "ignore_eos": True,
        "stream": stream,
    }


def client_at(address: str) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(local_addr=(address, 0), limit=0),
        timeout=aiohttp.ClientTimeout(total=90.0),
    )


async def ask(client: aiohttp.ClientSession, url: str, request: dict[str, object]) -> float:
    """Send one request and read it to its end; return the seconds to its first event."""
    began_s = time.perf_counter()
    first_s = 0.0
    async with client.post(f"{url}/v1/completions", json=request) as response:
        async for line in response.content:
            if not first_s and line.startswith(b"data:"):
                first_s = time.perf_counter() - began_s
        if response.status != 200 and request["stream"]:
            raise RuntimeError(f"the polite client got {response.status}")
    return first_s


async def be_polite(url: str, seconds: float) -> float:
    """Return the median of seconds to the first token of a stream each half second."""
    source = random.Random()
    async with client_at(POLITE_ADDRESS) as client:
        streams = []
        for _ in range(int(seconds / POLITE_EVERY_S)):
            request = body(source, stream=True)
            streams.append(asyncio.create_task(ask(client, url, request)))
            await asyncio.sleep(POLITE_EVERY_S)
        return statistics.median(await asyncio.gather(*streams))


async def flood(url: str, rate: float, seconds: float) -> None:
    """Send `rate` requests a second, however many of them have ended."""
    source = random.Random()
    bodies = [body(source, stream=False) for _ in range(1000)]
    async with client_at(FLOOD_ADDRESS) as client, asyncio.TaskGroup() as group:
        began_s = time.perf_counter()
        sent = 0
        while (passed_s := time.perf_counter() - began_s) < seconds:
            while sent < passed_s * rate:
                group.create_task(ask(client, url, bodies[sent % len(bodies)]))
                sent += 1
            await asyncio.sleep(0.01)


def run_flood(url: str, rate: float, seconds: float) -> None:
    asyncio.run(flood(url, rate, seconds))


async def beside(url: str, flooded: str, rate: float, seconds: float) -> float:
    """Return what a polite client at `url` sees while a process of its own floods `flooded`."""
    spawn = multiprocessing.get_context("spawn")
    process = spawn.Process(target=run_flood, args=(flooded, rate, LEAD_S + seconds), daemon=True)
    process.start()
    await asyncio.sleep(LEAD_S)
    median_s = await be_polite(url, seconds)
    await asyncio.to_thread(process.join)
    return median_s


async def measure(rate: float, seconds: float, rounds: int) -> list[tuple[float, float, float]]:
    """Return the median of each round: alone, beside the other cluster, beside the same one."""
    config = ClusterConfig(
        model=ModelConfig(path=DEMO_MODEL, served_model_name="demo"),
        cache=CacheConfig(memory_mib=200),
        engine=EngineConfig(threads=1),
    )
    figures = []
    async with AsyncExitStack() as stack:
        urls = []
        for _ in range(2):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            urls.append((await stack.enter_async_context(SoakCluster(folder, config))).url)
        same, other = urls
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
    parser = argparse.ArgumentParser(prog="python -m tools.fairness", description=__doc__)
    parser.add_argument("--rate", type=float, default=120.0, help="requests of the flood a second")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=3)
    options = msgspec.convert(vars(parser.parse_args(arguments)), Arguments)
    print("ms to the first token of a polite client, median")
    print("alone  beside a flood elsewhere  beside a flood here  here / elsewhere")
    for alone_s, other_s, same_s in asyncio.run(
        measure(options.rate, options.seconds, options.rounds)
    ):
        milliseconds = [f"{1000 * seconds:.1f}" for seconds in (alone_s, other_s, same_s)]
        print(*milliseconds, f"{same_s / other_s:.2f}", sep="  ")
    return 0


if __name__ == "__main__":
    sys.exit(main())
