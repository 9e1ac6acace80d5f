"""Time the linear layers of a model alone: the floor under any engine's step on this machine.

It times plain torch matrix products with the model's shapes and nothing else: no attention, norms
or sampling. Print it beside serving figures: absolute times of shared machines mean little. With
`--steps` it also runs baton's own steps beside their floors, which takes some minutes.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import torch

from baton.engine.model_config import DecoderConfig, read_decoder_config
from tools.steps import Case, StepRow, measure_steps

REPEATS = 9


class Floor(msgspec.Struct, frozen=True):
    """The milliseconds for one pass of `rows` tokens through all linear layers.

    The LM head counts for decode steps only; a prompt needs one row of it.
    """

    rows: int
    threads: int
    layers_ms: float
    lm_head_ms: float


def shapes(config: DecoderConfig) -> list[tuple[int, int]]:
    """Return (in, out) of each linear layer of a decoder layer, fused where engines fuse them."""
    heads = config.num_heads * config.head_dim
    kv = config.num_kv_heads * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    return [(hidden, heads + 2 * kv), (heads, hidden), (hidden, 2 * inner), (inner, hidden)]


def measure(config: DecoderConfig, rows: int, threads: int) -> Floor:
    torch.set_num_threads(threads)
    dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
    weights = [
        [torch.randn(out, inner, dtype=dtype) for inner, out in shapes(config)]
        for _ in range(config.num_layers)
    ]
    head = torch.randn(config.vocab_size, config.hidden_size, dtype=dtype)
    inputs = {inner: torch.randn(rows, inner, dtype=dtype) for inner, _ in shapes(config)}
    inputs[config.hidden_size] = torch.randn(rows, config.hidden_size, dtype=dtype)

    def layers() -> None:
        for layer in weights:
            for weight in layer:
                torch.nn.functional.linear(inputs[weight.shape[1]], weight)

    def lm_head() -> None:
        torch.nn.functional.linear(inputs[config.hidden_size], head)

    with torch.inference_mode():
        return Floor(rows, threads, _median_ms(layers), _median_ms(lm_head))


def _median_ms(work: Callable[[], None]) -> float:
    work()
    took = []
    for _ in range(REPEATS):
        start_s = time.perf_counter()
        work()
        took.append(1e3 * (time.perf_counter() - start_s))
    return statistics.median(took)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.floor", description=__doc__)
    parser.add_argument("model", type=Path, help="Hugging Face folder")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 512], help="tokens at once")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="file for the figures of the linear layers")
    parser.add_argument(
        "--steps", action="store_true", help="time prompts and decode steps of baton as well"
    )
    parser.add_argument(
        "--prompts", type=int, nargs="*", default=[512, 2048, 8192], help="tokens, with --steps"
    )
    parser.add_argument(
        "--batches", type=int, nargs="*", default=[1, 8, 32, 64], help="sequences, with --steps"
    )
    parser.add_argument(
        "--contexts", type=int, nargs="*", default=[128, 1024, 4096], help="tokens, with --steps"
    )
    parser.add_argument("--rounds", type=int, default=5, help="repetitions, with --steps")
    given = parser.parse_args(arguments)
    config = read_decoder_config(given.model)
    floors = [measure(config, rows, given.threads) for rows in given.rows]
    for floor in floors:
        print(
            f"rows={floor.rows} threads={floor.threads} layers={floor.layers_ms:.2f} ms "
            f"lm_head={floor.lm_head_ms:.2f} ms"
        )
    if given.json:
        given.json.write_bytes(msgspec.json.encode(floors))
    if given.steps:
        cases = [Case(0, length) for length in given.prompts]
        cases += [Case(batch, context) for batch in given.batches for context in given.contexts]
        print("| step | ms | floor ms | multiple | linears | attention | sampling | rest | host |")
        print("|---|---|---|---|---|---|---|---|---|")
        for row in measure_steps(given.model, given.threads, cases, given.rounds):
            print(table_line(row), flush=True)
    return 0


def table_line(row: StepRow) -> str:
    parts = list(row.parts_ms.values())
    rest = row.step_ms - sum(parts)
    shown = (row.step_ms, row.floor_ms, row.multiple, *parts, rest, row.host_ms)
    return f"| {row.case.name} | " + " | ".join(f"{value:.2f}" for value in shown) + " |"


if __name__ == "__main__":
    sys.exit(main())
