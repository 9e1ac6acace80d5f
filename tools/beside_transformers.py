"""Time `LLM.generate` beside transformers: `python -m tools.beside_transformers FOLDER`.

Both compute greedy tokens of the same random prompts, in turn, with all CPUs: baton in one node
that prefills and decodes, transformers in this process. A request for one token takes the time of
the prompts, and a longer one takes the time of its further tokens beyond that.
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import torch
from transformers import AutoModelForCausalLM

from baton.llm import LLM
from baton.protocol.sampling import SamplingParams

VOCABULARY = (300, 8000)

Prompts = list[list[int]]
Generate = Callable[[Prompts, int], object]


class Arguments(msgspec.Struct):
    folder: Path
    batches: list[int]
    prompt: int
    output: int
    rounds: int
    threads: int
    dtype: str


class Rates(msgspec.Struct):
    prompt: float  # prompt tokens a second
    output: float  # further tokens a second


def measure(
    arms: dict[str, Generate], options: Arguments, batch: int
) -> dict[str, list[Rates]]:
    """Return the rates of each arm, by round. The first round warms up and does not count."""
    rates: dict[str, list[Rates]] = {name: [] for name in arms}
    for number in range(options.rounds + 1):
        for name, generate in arms.items():
            source = random.Random(f"{batch} {number}")
            # A prompt that is cached would not be computed.
            pairs = [prompts_of(source, batch, options.prompt) for _ in range(2)]
            first_s = seconds(generate, pairs[0], 1)
            whole_s = seconds(generate, pairs[1], 1 + options.output)
            if number > 0:
                further_s = whole_s - first_s
                rates[name].append(
                    Rates(
                        batch * options.prompt / first_s,
                        batch * options.output / further_s,
                    )
                )
    return rates


def prompts_of(source: random.Random, batch: int, length: int) -> Prompts:
    return [
        [source.randrange(*VOCABULARY) for _ in range(length)] for _ in range(batch)
    ]


def seconds(generate: Generate, prompts: Prompts, num_tokens: int) -> float:
    began_s = time.perf_counter()
    generate(prompts, num_tokens)
    return time.perf_counter() - began_s


def by_transformers(folder: Path, dtype: str) -> Generate:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))

    def generate(prompts: Prompts, num_tokens: int) -> object:
        with torch.inference_mode():
            ids = torch.tensor(prompts)
            return model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                pad_token_id=0,
                do_sample=False,
                min_new_tokens=num_tokens,
                max_new_tokens=num_tokens,
            )

    return generate


def by_baton(llm: LLM) -> Generate:
    def generate(prompts: Prompts, num_tokens: int) -> object:
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        return llm.generate(prompts, params, use_tqdm=False)

    return generate


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.beside_transformers", description=__doc__
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    options = msgspec.convert(vars(parser.parse_args(arguments)), Arguments)
    torch.set_num_threads(options.threads)
    engine = {"threads": options.threads}
    cache = {"memory_mib": 1024}
    with LLM(
        str(options.folder),
        dtype=options.dtype,
        prefill=0,
        decode=1,
        engine=engine,
        cache=cache,
    ) as llm:
        arms = {
            "baton": by_baton(llm),
            "transformers": by_transformers(options.folder, options.dtype),
        }
        print(
            "batch, engine, prompt tokens/s, further tokens/s (medians of the rounds)"
        )
        for batch in options.batches:
            for name, rates in measure(arms, options, batch).items():
                prompt = statistics.median(one.prompt for one in rates)
                output = statistics.median(one.output for one in rates)
                print(f"{batch:5}  {name:12}  {prompt:8.0f}  {output:8.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
