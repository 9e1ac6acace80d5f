"""Measure tokens a second with a draft, with n-gram guesses and without any.

A cluster for each way serves the same prompts in turns: texts of the demo model's kind that no
draft was trained on. The model is the demo model, or what `tools.draft_head.grow` wrote. The ways
must say the same tokens. Beside tokens a second there are tokens for each second that the CPUs
compute, which other work on the machine changes less.
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
import psutil
from tokenizers import Tokenizer

from baton.deploy.model_folder import CHECKPOINT
from baton.protocol.config import CacheConfig, ClusterConfig, EngineConfig, ModelConfig
from tools.demo_model.lessons import LessonMaker
from tools.soak.cluster import SoakCluster

SEED = 1_000_003  # of no training
SHARES = {"recall": 0.6, "exercise": 0.4}
PROMPT_TOKENS = 64


class Round(msgspec.Struct):
    tokens_per_s: float
    tokens_per_cpu_s: float  # of all processes of the cluster
    said: list[list[int]]


def ways(options: "Arguments") -> dict[str, EngineConfig]:
    plain = EngineConfig(threads=options.threads)
    guessing = msgspec.structs.replace(plain, num_speculative_tokens=options.guesses)
    head = msgspec.structs.replace(
        guessing, speculative_method="eagle3", speculative_model=options.draft
    )
    return {"none": plain, "ngram": guessing, "head": head}


class Measurement:
    def __init__(
        self, client: aiohttp.ClientSession, temperature: float, num_tokens: int
    ) -> None:
        self._client = client
        self._temperature = temperature
        self._num_tokens = num_tokens
        tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
        self._lessons = LessonMaker(tokenizer, random.Random(SEED))

    def prompts(self, count: int) -> list[list[int]]:
        return [self._lessons.draw(PROMPT_TOKENS, SHARES)[0] for _ in range(count)]

    async def run(
        self, cluster: SoakCluster, prompts: list[list[int]], num_clients: int
    ) -> Round:
        """Let clients take the prompts from one list, one after the other."""
        waiting = list(enumerate(prompts))
        said: list[list[int]] = [[] for _ in prompts]

        async def serve_client() -> None:
            while waiting:
                number, prompt = waiting.pop()
                said[number] = await self._complete(cluster.url, prompt, number)

        before_s = cpu_seconds(cluster)
        began_s = time.perf_counter()
        await asyncio.gather(*(serve_client() for _ in range(num_clients)))
        num_tokens = sum(map(len, said))
        num_s = time.perf_counter() - began_s
        return Round(
            num_tokens / num_s, num_tokens / (cpu_seconds(cluster) - before_s), said
        )

    async def _complete(self, url: str, prompt: list[int], seed: int) -> list[int]:
        body = {
            "model": "demo",
            "prompt": prompt,
            "max_tokens": self._num_tokens,
            "temperature": self._temperature,
            "top_k": -1,
            "seed": seed,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        async with self._client.post(f"{url}/v1/completions", json=body) as response:
            response.raise_for_status()
            token_ids: list[int] = json.loads(await response.read())["choices"][0][
                "token_ids"
            ]
        return token_ids

    async def accepted(self, url: str) -> float:
        """Return the share of the guesses so far that were right."""
        async with self._client.get(f"{url}/metrics") as response:
            lines = (await response.text()).splitlines()

        def total(name: str) -> float:
            own = (
                line
                for line in lines
                if line.startswith(f"baton_spec_decode_num_{name}_")
            )
            return sum(float(line.rpartition(" ")[2]) for line in own)

        return total("accepted_tokens") / max(1.0, total("draft_tokens"))


def cpu_seconds(cluster: SoakCluster) -> float:
    """Return how long the processes of a cluster have computed."""
    times = [
        psutil.Process(child.pid).cpu_times() for child in cluster.children.values()
    ]
    return float(sum(each.user + each.system for each in times))


async def measure(options: "Arguments") -> None:
    async with AsyncExitStack() as stack:
        clusters = {}
        for name, engine in ways(options).items():
            config = ClusterConfig(
                model=ModelConfig(path=options.model, served_model_name="demo"),
                cache=CacheConfig(memory_mib=100),
                engine=engine,
            )
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            clusters[name] = await stack.enter_async_context(
                SoakCluster(folder, config)
            )
        timeout = aiohttp.ClientTimeout(total=600.0)
        client = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout))
        task = Measurement(client, options.temperature, options.output)
        measured: dict[str, list[Round]] = {name: [] for name in clusters}
        for _ in range(1 + options.rounds):  # the first one warms up
            prompts = task.prompts(options.requests)
            for name, cluster in clusters.items():
                measured[name].append(await task.run(cluster, prompts, options.clients))
                assert measured[name][-1].said == measured["none"][-1].said, (
                    "other tokens"
                )
        for name, cluster in clusters.items():
            print(
                f"{name:6} {shown(measured, name, 'tokens_per_s')}; of a CPU "
                f"{shown(measured, name, 'tokens_per_cpu_s')}; "
                f"{await task.accepted(cluster.url):.0%} of the guesses right"
            )


def shown(measured: dict[str, list[Round]], name: str, rate: str) -> str:
    """Return the median of a rate, and how many times that of a cluster that guesses nothing."""
    own, base = (
        [getattr(each, rate) for each in measured[key][1:]] for key in (name, "none")
    )
    gains = [mine / other for mine, other in zip(own, base, strict=True)]
    spread = f"{min(gains):.2f}-{max(gains):.2f}"
    return f"{statistics.median(own):.0f} tokens/s, {statistics.median(gains):.2f} ({spread})"


class Arguments(msgspec.Struct):
    draft: str
    model: str
    clients: int
    requests: int
    output: int
    rounds: int
    guesses: int
    threads: int
    temperature: float


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.draft_head.measure", description=__doc__
    )
    parser.add_argument("draft", help="the folder that tools.draft_head.train wrote")
    parser.add_argument("--model", default=str(CHECKPOINT), help="the folder to serve")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--requests", type=int, default=16, help="of a round")
    parser.add_argument("--output", type=int, default=128, help="tokens of a response")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--guesses", type=int, default=4, help="num_speculative_tokens")
    parser.add_argument("--threads", type=int, default=1, help="of a node")
    parser.add_argument("--temperature", type=float, default=1.0)
    options = msgspec.convert(vars(parser.parse_args(arguments)), Arguments)
    asyncio.run(measure(options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
