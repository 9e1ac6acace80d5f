"""Time baton's steps beside their floors, the least time that any engine needs on this machine.

Both are timed in turn, since other work on the machine slows both. The floor of a step is the
matrix products alone: those of the linear layers as the rank itself computes them, and for a prompt
those of attention at the rate of torch's bf16 products. A decode step also has to read its keys and
values, at the rate at which this machine reads memory.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from baton.kv_transfer.pools import HostPool
from baton.model.config.decoder_config import DecoderConfig
from baton.model.runner.rank import keep_freed_memory, load_runner
from baton.model.runner.rank_plan import plan_rank
from baton.model.runner.runner import Runner
from baton.model.tensor_parallel import SingleRank
from baton.node.scheduling.plan import StepPlan
from baton.protocol.config import CacheConfig, ClusterConfig, EngineConfig, ModelConfig
from tools.gpu.serving import BLOCK_SIZE, decoding, prompt

CHUNK = 512
READ_BYTES = 256 << 20  # more than a cache holds


class Case(msgspec.Struct, frozen=True):
    """A prompt of `context` tokens if `batch` is 0, else a decode step of `batch` sequences."""

    batch: int
    context: int

    @property
    def name(self) -> str:
        return (
            f"decode {self.batch} x {self.context}"
            if self.batch
            else f"prompt {self.context}"
        )

    def plans(self) -> list[StepPlan]:
        if self.batch:
            return [StepPlan(0, decoding(self.batch, self.context))]
        return prompt(self.context, CHUNK)


class StepRow(msgspec.Struct, frozen=True):
    """Milliseconds, medians of the rounds; `multiple` is the median of step / floor."""

    case: Case
    step_ms: float
    floor_ms: float
    multiple: float


def measure_steps(
    model: Path, threads: int, cases: Sequence[Case], rounds: int
) -> Iterator[StepRow]:
    """Yield the row of each case as soon as it is measured."""
    keep_freed_memory()
    torch.set_num_threads(threads)
    num_blocks = max(
        max(1, case.batch) * -(-case.context // BLOCK_SIZE) for case in cases
    )
    config = ClusterConfig(
        model=ModelConfig(path=str(model)),
        cache=CacheConfig(num_blocks=num_blocks, block_size=BLOCK_SIZE),
        engine=EngineConfig(device="cpu", threads=threads),
    )
    plan = plan_rank(config, 1)
    assert isinstance(plan.decoder, DecoderConfig), (
        "the floors are those of baton's own decoder"
    )
    assert plan.decoder.experts is None, "the floors are those of dense layers"
    runner, pool = load_runner(plan, config, SingleRank(), lambda *_: None)
    # The CPU time of one thread, else the clock's.
    now = time.process_time if threads == 1 else time.perf_counter
    try:
        _fill(runner.cache.pool)
        floor = StepFloors(plan.decoder, runner, now)
        for case in cases:
            yield _measure_step(runner, floor, case, rounds)
    finally:
        if isinstance(pool, HostPool):
            pool.close()


def _measure_step(
    runner: Runner, floor: "StepFloors", case: Case, rounds: int
) -> StepRow:
    plans = case.plans()
    steps = []
    floors = []
    for number in range(rounds + 1):
        step_s = floor.time(lambda: [runner.execute(plan) for plan in plans])
        if number:  # the first round warms up
            steps.append(step_s)
            with torch.inference_mode():
                floors.append(floor.seconds(case))
    ratios = [step_s / floor_s for step_s, floor_s in zip(steps, floors, strict=True)]
    return StepRow(
        case,
        1e3 * statistics.median(steps),
        1e3 * statistics.median(floors),
        statistics.median(ratios),
    )


class StepFloors:
    """The least time of a case, measured anew at every call."""

    def __init__(
        self, config: DecoderConfig, runner: Runner, now: Callable[[], float]
    ) -> None:
        self._config = config
        self._now = now
        *self._layers, self._head = runner.decoder.linears()
        self._dtype = runner.cache.pool.dtype
        self._token_bytes = runner.cache.pool[0].nbytes // BLOCK_SIZE
        self._memory = torch.ones(READ_BYTES // 8, dtype=torch.int64)
        self._queries = torch.randn(config.num_heads, CHUNK, config.head_dim).bfloat16()
        self._keys = torch.randn(
            config.num_heads, config.head_dim, 4 * CHUNK
        ).bfloat16()

    def seconds(self, case: Case) -> float:
        if case.batch:
            num_bytes = case.batch * case.context * self._token_bytes
            read_s = self.time(self._memory.sum) * num_bytes / READ_BYTES
            return (
                self._products_s(case.batch, case.batch)
                + self._head_s(case.batch)
                + read_s
            )
        chunks = [
            min(CHUNK, case.context - start) for start in range(0, case.context, CHUNK)
        ]
        products_s = sum(self._products_s(num_rows, 0) for num_rows in chunks[:-1])
        products_s += self._products_s(chunks[-1], 1) + self._head_s(1)
        # Queries by keys, then weights by values; each query sees half of the keys. The last layer
        # needs one query of the prompt.
        share = case.context * case.context / (CHUNK * 4 * CHUNK)
        one_s = self.time(lambda: torch.bmm(self._queries, self._keys))
        return products_s + share * one_s * (self._config.num_layers - 1)

    def _products_s(self, num_rows: int, num_drawn: int) -> float:
        """Time the layers; what follows the last attention is computed for `num_drawn` rows."""
        config = self._config
        hidden = config.hidden_size
        inner = config.intermediate_size
        wide = config.num_heads * config.head_dim
        widths = (hidden, wide, hidden, inner)
        inputs = [self._rows(num_rows, width) for width in widths]
        drawn = [self._rows(num_drawn, width) for width in widths]

        def compute() -> None:
            for number, layer in enumerate(self._layers[:-3]):
                layer.product(inputs[number % 4])
            for layer, x in zip(self._layers[-3:], drawn[1:], strict=True):
                if num_drawn:
                    layer.product(x)

        return self.time(compute)

    def _head_s(self, num_rows: int) -> float:
        rows = self._rows(num_rows, self._config.hidden_size)
        return self.time(lambda: self._head.product(rows))

    def time(self, work: Callable[[], object]) -> float:
        began_s = self._now()
        work()
        return self._now() - began_s

    def _rows(self, num_rows: int, width: int) -> Tensor:
        return torch.randn(num_rows, width).to(self._dtype)


def _fill(pool: Tensor) -> None:
    """Give every page of the pool memory of its own, and numbers that are quick to compute."""
    part = torch.randn(min(1 << 22, pool.numel())).to(pool.dtype)
    flat = pool.view(-1)
    for start in range(0, len(flat), len(part)):
        flat[start : start + len(part)].copy_(part[: len(flat) - start])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.floor", description=__doc__)
    parser.add_argument("model", type=Path, help="Hugging Face folder")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--prompts",
        type=int,
        nargs="*",
        default=[512, 2048, 8192],
        help="tokens of each prompt",
    )
    parser.add_argument(
        "--batches",
        type=int,
        nargs="*",
        default=[1, 8, 32, 64],
        help="sequences of a decode step",
    )
    parser.add_argument(
        "--contexts",
        type=int,
        nargs="*",
        default=[128, 1024, 4096],
        help="tokens of each sequence",
    )
    parser.add_argument("--rounds", type=int, default=5, help="repetitions")
    given = parser.parse_args(arguments)
    cases = [Case(0, length) for length in given.prompts]
    cases += [
        Case(batch, context) for batch in given.batches for context in given.contexts
    ]
    print("| step | ms | floor ms | multiple |\n|---|---|---|---|")
    for row in measure_steps(given.model, given.threads, cases, given.rounds):
        figures = (row.step_ms, row.floor_ms, row.multiple)
        print(
            f"| {row.case.name} | {' | '.join(f'{one:.2f}' for one in figures)} |",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
