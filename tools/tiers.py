"""`python -m tools.tiers`: what a cached prefix costs, by where it is, and what a restart keeps.

Each row is the first token of prompts whose first tokens a prefill node computes, has in its
pool, or reads from host memory, from a folder, or, over shm or NIXL, from the decode node that made
them.
"""

import argparse
import asyncio
import itertools
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from typing import Literal

import msgspec

from baton.async_llm import AsyncLLM
from baton.protocol.config import (
    CacheConfig,
    ClusterConfig,
    EngineConfig,
    LogConfig,
    ModelConfig,
    PrefixReads,
    RouterConfig,
    TransferConfig,
)
from baton.protocol.sampling import SamplingParams
from baton.router.outputs import RequestOutput

DEMO_MODEL = "deploy/demo_checkpoint"
VOCABULARY = (5, 600)
BLOCK_TOKENS = 16
NUM_NEW = 32  # tokens after the prefix
PAUSE_S = 0.5  # in which blocks are saved and announced
START_S = 120.0
GIB = 1.0

Place = Literal["computed", "pool", "memory", "folder", "shm", "nixl"]
PLACES: tuple[Place, ...] = ("computed", "pool", "memory", "folder", "shm", "nixl")


class Arguments(msgspec.Struct):
    model: str
    tokens: list[int]
    samples: int
    places: list[Place]


class Prompts:
    """Prompts that have nothing in common."""

    def __init__(self) -> None:
        self._seeds = itertools.count()

    def next(self, num_tokens: int) -> list[int]:
        source = random.Random(next(self._seeds))
        return [source.randrange(*VOCABULARY) for _ in range(num_tokens)]


def cluster(model: str, most_tokens: int, place: Place, folder: str) -> ClusterConfig:
    """Return a prefill node and a decode node. A pool holds about a prompt where others count."""
    is_read = place in ("shm", "nixl")
    in_pools = place in ("computed", "pool") or is_read
    num_prompts = 8 if in_pools else 1.5
    num_blocks = int(num_prompts * most_tokens + 4 * NUM_NEW) // BLOCK_TOKENS
    reads: PrefixReads = "equal" if is_read else "off"
    return ClusterConfig(
        prefill=1,
        decode=1,
        model=ModelConfig(path=model),
        cache=CacheConfig(
            num_blocks=num_blocks,
            prefix_reads=reads,
            kv_offloading_size=GIB if place == "memory" else 0.0,
            folder=folder if place == "folder" else "",
            folder_size=GIB,
        ),
        engine=EngineConfig(threads=1),
        transfer=TransferConfig(
            transport="nixl" if place == "nixl" else "auto",
            device="lo" if place == "nixl" else "",
        ),
        router=RouterConfig(local_prefill="never"),
        log=LogConfig(level="error"),
    )


async def ask(llm: AsyncLLM, prompt: list[int], num_output: int = 1) -> RequestOutput:
    params = SamplingParams(temperature=0, max_tokens=num_output, ignore_eos=True)
    last: RequestOutput | None = None
    async for output in llm.generate(prompt, params):
        last = output
    assert last is not None, "a stream ends with its last output"
    await asyncio.sleep(PAUSE_S)
    return last


async def sample(
    llm: AsyncLLM, prompts: Prompts, place: Place, num_tokens: int
) -> RequestOutput:
    """Return the request whose prefix of so many tokens is in `place`."""
    if place in ("shm", "nixl"):
        before = await ask(llm, prompts.next(NUM_NEW), num_tokens)
        prefix = [*before.prompt_token_ids, *before.outputs[0].token_ids]
        return await ask(llm, prefix + prompts.next(NUM_NEW))
    prefix = prompts.next(num_tokens)
    if place != "computed":
        await ask(llm, prefix)
    if place in ("memory", "folder"):
        for _ in range(3):  # the pool forgets the prefix
            await ask(llm, prompts.next(num_tokens))
    return await ask(llm, prefix + prompts.next(NUM_NEW))


async def measure(
    options: Arguments, place: Place, num_tokens: int
) -> list[RequestOutput]:
    """Return requests with prefixes of so many tokens, from a cluster of their own."""
    prompts = Prompts()
    found: list[RequestOutput] = []

    async def use(llm: AsyncLLM) -> None:
        await ask(llm, prompts.next(NUM_NEW))
        for _ in range(options.samples):
            found.append(await sample(llm, prompts, place, num_tokens))

    with tempfile.TemporaryDirectory() as folder:
        await run(cluster(options.model, num_tokens, place, folder), use)
    return found


async def restart(options: Arguments) -> tuple[float, float]:
    """Return the cached share of prompts that come again before and after a restart."""
    prompts = Prompts()
    chats = [prompts.next(max(options.tokens)) for _ in range(options.samples)]
    shares: list[float] = []

    async def use(llm: AsyncLLM) -> None:
        asked = [await ask(llm, chat) for chat in chats]
        if not shares:
            asked = [await ask(llm, chat) for chat in chats]
        metrics = [one.metrics for one in asked]
        cached = sum(one.num_cached_tokens for one in metrics)
        shares.append(cached / sum(one.num_prompt_tokens for one in metrics))

    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):
            await run(
                cluster(options.model, max(options.tokens), "folder", folder), use
            )
    return shares[0], shares[1]


async def run(
    config: ClusterConfig, use: Callable[[AsyncLLM], Coroutine[None, None, None]]
) -> None:
    llm = AsyncLLM(config=config)
    try:
        await llm.start()
        await llm.ready(START_S)
        await use(llm)
    finally:
        await llm.shutdown()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.tiers", description=__doc__)
    parser.add_argument(
        "--model", default=DEMO_MODEL, help="the folder of another model"
    )
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[128, 512, 2000], help="lengths"
    )
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--places", nargs="+", choices=PLACES, default=PLACES)
    options = msgspec.convert(vars(parser.parse_args(arguments)), Arguments)
    print("place     tokens  cached  first token ms (least, median)  of it the read")
    for place, num_tokens in itertools.product(options.places, options.tokens):
        outputs = asyncio.run(measure(options, place, num_tokens))
        metrics = [output.metrics for output in outputs]
        cached = statistics.median(one.num_cached_tokens for one in metrics)
        firsts = [1000 * (one.time_to_first_token_s or 0.0) for one in metrics]
        read_ms = statistics.median(1000 * one.prefix_read_s for one in metrics)
        row = f"{min(firsts):.1f}  {statistics.median(firsts):.1f}  {read_ms:.1f}"
        print(f"{place:9} {num_tokens:6}  {cached:6.0f}  {row}", flush=True)
    before, after = asyncio.run(restart(options))
    print(
        f"cached share of the same prompts again: {before:.3f}, after a restart {after:.3f}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
