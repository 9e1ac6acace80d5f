"""`python -m tools.cached_share TRACE`: the share of a trace's input that a cluster finds cached.

A row of the trace (JSON lines, as Mooncake's) names its blocks by `hash_ids`. Each id stands for a
few tokens here, so that prompts are short enough for a CPU, and rows are sent in their order. The
ideal is that of one cache that forgets nothing, by an offline pass over the same rows.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from baton.async_llm import AsyncLLM
from baton.protocol.config import (
    CacheConfig,
    ClusterConfig,
    EngineConfig,
    LogConfig,
    ModelConfig,
    RouterConfig,
)
from baton.protocol.sampling import SamplingParams

DEMO_MODEL = "deploy/demo_checkpoint"
VOCABULARY = (5, 600)
BLOCK_TOKENS = 16
NUM_NODES = 4
MAX_PROMPT_TOKENS = 8000  # that fit the demo model with their response
START_S = 120.0


class Row(msgspec.Struct):
    hash_ids: list[int]


class Arguments(msgspec.Struct):
    trace: str
    model: str
    requests: int
    skip: int
    id_tokens: int
    outputs: int
    pool_share: float
    at_once: int
    folder: bool
    folder_gib: float


def rows_of(path: Path, skip: int, num: int, max_ids: int) -> list[Row]:
    """Return rows of a trace, of each at most so many ids."""
    with path.open("rb") as lines:
        kept = [
            line for number, line in enumerate(lines) if skip <= number < skip + num
        ]
    rows = [msgspec.json.decode(line, type=Row) for line in kept]
    return [Row(row.hash_ids[:max_ids]) for row in rows]


def tokens_of(hash_id: int, num_tokens: int) -> list[int]:
    source = random.Random(hash_id)
    return [source.randrange(*VOCABULARY) for _ in range(num_tokens)]


def ideal_share(rows: Iterable[Row]) -> tuple[float, int]:
    """Return the share of ids that follow a prefix seen before, and the number of prefixes."""
    seen: set[tuple[int, int]] = set()
    num_ids = 0
    num_seen = 0
    for row in rows:
        prefix = 0
        is_known = True
        for hash_id in row.hash_ids:
            prefix = hash((prefix, hash_id))
            key = (prefix, hash_id)
            is_known = is_known and key in seen
            seen.add(key)
            num_ids += 1
            num_seen += is_known
    return num_seen / num_ids, len(seen)


def cluster(options: Arguments, num_prefixes: int, folder: str) -> ClusterConfig:
    """Return two prefill and two decode nodes whose pools hold a share of all blocks."""
    num_blocks = num_prefixes * options.id_tokens // BLOCK_TOKENS
    return ClusterConfig(
        prefill=NUM_NODES // 2,
        decode=NUM_NODES // 2,
        model=ModelConfig(path=options.model),
        cache=CacheConfig(
            num_blocks=max(int(num_blocks * options.pool_share), 256),
            folder=folder if options.folder else "",
            folder_size=options.folder_gib,
        ),
        engine=EngineConfig(threads=1),
        router=RouterConfig(max_queued_s=600.0),
        log=LogConfig(level="error"),
    )


async def cached_tokens(
    llm: AsyncLLM, options: Arguments, rows: list[Row]
) -> tuple[int, int, int]:
    """Return the tokens of all prompts, of those the cached ones, and of those the ones read."""
    totals = [0, 0, 0]
    left: Iterator[Row] = iter(rows)

    async def client() -> None:
        for row in left:
            prompt = [
                one for i in row.hash_ids for one in tokens_of(i, options.id_tokens)
            ]
            params = SamplingParams(
                temperature=0, max_tokens=options.outputs, ignore_eos=True
            )
            last = None
            async for output in llm.generate(prompt, params):
                last = output
            assert last is not None, "a stream ends with its last output"
            totals[0] += len(prompt)
            totals[1] += last.metrics.num_cached_tokens
            totals[2] += last.metrics.num_read_tokens

    await asyncio.gather(*(client() for _ in range(options.at_once)))
    return totals[0], totals[1], totals[2]


async def measure(options: Arguments) -> dict[str, float]:
    max_ids = MAX_PROMPT_TOKENS // options.id_tokens
    rows = rows_of(Path(options.trace), options.skip, options.requests, max_ids)
    ideal, num_prefixes = ideal_share(rows)
    with tempfile.TemporaryDirectory() as folder:
        config = cluster(options, num_prefixes, folder)
        llm = AsyncLLM(config=config)
        try:
            await llm.start()
            await llm.ready(START_S)
            num_tokens, num_cached, num_read = await cached_tokens(llm, options, rows)
        finally:
            await llm.shutdown()
    return {
        "requests": len(rows),
        "input_tokens": num_tokens,
        "blocks_of_a_pool": config.cache.num_blocks,
        "ideal": round(ideal, 4),
        "cached": round(num_cached / num_tokens, 4),
        "of_the_ideal": round(num_cached / num_tokens / ideal, 3),
        "read": round(num_read / num_tokens, 4),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.cached_share", description=__doc__
    )
    parser.add_argument("trace", help="a file of JSON lines with hash_ids")
    parser.add_argument(
        "--model", default=DEMO_MODEL, help="the folder of another model"
    )
    parser.add_argument("--requests", type=int, default=1000, help="rows to send")
    parser.add_argument("--skip", type=int, default=0, help="rows before the first one")
    parser.add_argument("--id-tokens", type=int, default=32, help="tokens of an id")
    parser.add_argument(
        "--outputs", type=int, default=2, help="tokens of each response"
    )
    parser.add_argument(
        "--pool-share", type=float, default=0.1, help="of all blocks, in each pool"
    )
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--folder", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument(
        "--folder-gib", type=float, default=1.0, help="of each node, at most"
    )
    options = msgspec.convert(vars(parser.parse_args(arguments)), Arguments)
    print(json.dumps(asyncio.run(measure(options))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
