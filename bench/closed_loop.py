"""A closed-loop load on any OpenAI-compatible server: C clients, each asking again when answered.

Speaks HTTP only, so it measures every server alike. Prompts are seeded random token ids and never
repeat; output lengths are forced (`ignore_eos`) and verified; a request that fails is counted and
shown. In a closed loop the intended arrival is the moment of sending.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import aiohttp
import msgspec

LOWEST_ID, HIGHEST_ID = 300, 8000
DEFINITIONS = {
    "ttft": "first token's bytes at the client - sent",
    "itl": "gaps between events that carry tokens",
    "tpot": "(last token - first token) / (tokens - 1)",
    "gap_max": "largest itl of a request",
    "e2e": "last byte - sent",
}


class Sample(msgspec.Struct):
    """One request; stamps are seconds from its sending. `error` is empty when it was answered."""

    stamps: list[float]
    e2e_s: float
    num_tokens: int
    error: str = ""


class Load(msgspec.Struct, frozen=True):
    url: str
    model: str
    num_requests: int
    concurrency: int
    prompt_tokens: int
    output_tokens: int
    seed: int


class Report(msgspec.Struct):
    """Milliseconds but for tokens_per_s; `samples` are raw."""

    load: Load
    num_answered: int
    wall_s: float
    tokens_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    tpot_p50_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    gap_max_p50_ms: float
    e2e_p50_ms: float
    errors: list[str]
    samples: list[Sample]


async def measure(load: Load) -> Report:
    rng = random.Random(load.seed)
    prompts = [
        [rng.randrange(LOWEST_ID, HIGHEST_ID) for _ in range(load.prompt_tokens)]
        for _ in range(load.num_requests)
    ]
    waiting = iter(prompts)
    samples: list[Sample] = []
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def client() -> None:
            for prompt in waiting:
                samples.append(await _ask(session, load, prompt))

        start_s = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(load.concurrency)))
        wall_s = time.perf_counter() - start_s
    return _report(load, samples, wall_s)


async def _ask(session: aiohttp.ClientSession, load: Load, prompt: list[int]) -> Sample:
    body = {
        "model": load.model,
        "prompt": prompt,
        "max_tokens": load.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    stamps: list[float] = []
    num_tokens, done, error = 0, False, ""
    sent_s = time.perf_counter()
    try:
        async with session.post(f"{load.url}/v1/completions", json=body) as reply:
            if reply.status != 200:
                error = f"HTTP {reply.status}: {(await reply.text())[:200]}"
            async for line in reply.content:
                now_s = time.perf_counter() - sent_s
                if not line.startswith(b"data: "):
                    continue
                if line.startswith(b"data: [DONE]"):
                    done = True
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    error = str(event["error"])[:200]
                if event.get("choices"):
                    stamps.append(now_s)
                if event.get("usage"):
                    num_tokens = event["usage"]["completion_tokens"]
    except (aiohttp.ClientError, TimeoutError, ValueError) as problem:
        error = repr(problem)
    if not error and not done:
        error = "no [DONE]"
    if not error and num_tokens != load.output_tokens:
        error = f"{num_tokens} tokens instead of {load.output_tokens}"
    return Sample(stamps, time.perf_counter() - sent_s, num_tokens, error)


def _report(load: Load, samples: list[Sample], wall_s: float) -> Report:
    good = [sample for sample in samples if not sample.error]
    gaps = [[b - a for a, b in zip(s.stamps, s.stamps[1:], strict=False)] for s in good]
    all_gaps = [gap for request in gaps for gap in request]
    tpots = [(s.stamps[-1] - s.stamps[0]) / max(1, s.num_tokens - 1) for s in good]
    return Report(
        load,
        len(good),
        wall_s,
        sum(sample.num_tokens for sample in good) / wall_s,
        _ms([s.stamps[0] for s in good], 0.5),
        _ms([s.stamps[0] for s in good], 0.99),
        _ms(tpots, 0.5),
        _ms(all_gaps, 0.5),
        _ms(all_gaps, 0.99),
        _ms([max(request, default=0.0) for request in gaps], 0.5),
        _ms([s.e2e_s for s in good], 0.5),
        sorted({s.error for s in samples if s.error}),
        samples,
    )


def _ms(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return 1e3 * ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def _line(report: Report) -> str:
    return (
        f"c={report.load.concurrency} answered={report.num_answered}/{report.load.num_requests} "
        f"tok/s={report.tokens_per_s:.0f} ttft_p50={report.ttft_p50_ms:.1f} "
        f"ttft_p99={report.ttft_p99_ms:.1f} tpot_p50={report.tpot_p50_ms:.2f} "
        f"itl_p99={report.itl_p99_ms:.1f} e2e_p50={report.e2e_p50_ms:.1f} ms"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m baton.bench.closed_loop", description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", required=True, help="its name in the API")
    parser.add_argument("--requests", type=int, default=32, help="per run")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write raw samples and summaries here")
    given = parser.parse_args(arguments)
    reports = []
    for run in range(given.runs):
        load = Load(
            given.url.rstrip("/"), given.model, given.requests, given.concurrency,
            given.prompt_tokens, given.output_tokens, given.seed + run,
        )  # fmt: skip
        report = asyncio.run(measure(load))
        print(_line(report), *report.errors, sep="\n  ", flush=True)
        reports.append(report)
    middle = statistics.median_low([report.tokens_per_s for report in reports])
    print("median:", _line(next(r for r in reports if r.tokens_per_s == middle)))
    if given.json:
        given.json.write_bytes(msgspec.json.encode({"definitions": DEFINITIONS, "runs": reports}))
    return 0 if all(report.num_answered == given.requests for report in reports) else 1


if __name__ == "__main__":
    sys.exit(main())
