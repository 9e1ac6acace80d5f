"""Run the steps of one rank on this CPU, and print them beside the least time they can take.

`python -m tools.floor MODEL` calls it. A prompt goes through in chunks of 512 tokens, as a node
computes it; a decode step adds one token to each of `batch` sequences. The floor of either is the
matrix products alone: those of the linear layers as the rank itself computes them, and for a prompt
those of attention at the rate of torch's bf16 products. A decode step also has to read its keys and
values, at the rate at which this machine reads memory. Step and floor are measured in turn, since
other work on the machine slows both. The host's part is the time of a step whose kernels and
products compute nothing.
"""

import dataclasses
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from baton.engine.attention.backend import Backend
from baton.engine.attention.cpu import CpuBackend
from baton.engine.layers.linear import Linear
from baton.engine.model_config import DecoderConfig
from baton.engine.models.decoder import Decoder
from baton.engine.plan import Slice, StepPlan
from baton.engine.rank import keep_freed_memory, load_runner, plan_rank
from baton.engine.runner import Runner
from baton.engine.sampler import Draws, Sampler
from baton.engine.tensor_parallel import SingleRank
from baton.kernels.cpu_library import CpuLibrary
from baton.kv_transfer.pools import HostPool
from baton.protocol.config import CacheConfig, ClusterConfig, EngineConfig, ModelConfig
from baton.protocol.ids import Key, RequestId
from baton.protocol.sampling import Sampling

CHUNK = 512
BLOCK = 16
READ_BYTES = 256 << 20  # more than a cache holds
PARTS = ("linears", "attention", "sampling")


class Case(msgspec.Struct, frozen=True):
    """A prompt of `context` tokens if `batch` is 0, else a decode step of `batch` sequences."""

    batch: int
    context: int

    @property
    def name(self) -> str:
        return f"decode {self.batch} x {self.context}" if self.batch else f"prompt {self.context}"

    @property
    def blocks_each(self) -> int:
        return -(-(self.context + 1) // BLOCK)

    def plans(self) -> list[StepPlan]:
        sampling = Sampling(seed=1, max_tokens=1 << 20)
        if not self.batch:
            chunks = range(0, self.context, CHUNK)
            return [StepPlan(1, (self._slice(0, start, sampling),)) for start in chunks]
        slices = (self._slice(number, self.context, sampling) for number in range(self.batch))
        return [StepPlan(1, tuple(slices))]

    def _slice(self, number: int, start: int, sampling: Sampling) -> Slice:
        length = 1 if self.batch else min(CHUNK, self.context - start)
        # Scattered, as blocks of a pool that has been used for a while are.
        table = torch.randperm(
            max(1, self.batch) * self.blocks_each, generator=torch.Generator().manual_seed(7)
        ).tolist()[number * self.blocks_each : (number + 1) * self.blocks_each]
        draws = (0,) if start + length >= self.context else ()
        tokens = tuple(3 + (start + i) % 50 for i in range(length))
        key = Key(RequestId(f"r{number}"))
        return Slice(key, start, length, tokens, tuple(table), draws, sampling, self.context)


class StepRow(msgspec.Struct, frozen=True):
    """Milliseconds, medians of the rounds; `multiple` is the median of step / floor."""

    case: Case
    step_ms: float
    floor_ms: float
    multiple: float
    host_ms: float
    parts_ms: dict[str, float]


class Stopwatch:
    """Adds up seconds by name: of this process's CPU for one thread, else of the clock.

    Of threads that compute rows side by side it counts the one that made it.
    """

    def __init__(self, threads: int) -> None:
        self.now = time.process_time if threads == 1 else time.perf_counter
        self.spent_s: defaultdict[str, float] = defaultdict(float)
        self._thread = threading.get_ident()

    @contextmanager
    def running(self, name: str) -> Iterator[None]:
        began_s = self.now()
        yield
        if threading.get_ident() == self._thread:
            self.spent_s[name] += self.now() - began_s

    def seconds(self, work: Callable[[], object]) -> float:
        began_s = self.now()
        work()
        return self.now() - began_s


def measure_steps(
    model: Path, threads: int, cases: Sequence[Case], rounds: int
) -> Iterator[StepRow]:
    """Yield the row of each case as soon as it is measured."""
    keep_freed_memory()
    torch.set_num_threads(threads)
    watch = Stopwatch(threads)
    num_blocks = max(max(1, case.batch) * case.blocks_each for case in cases)
    config = ClusterConfig(
        model=ModelConfig(path=str(model)),
        cache=CacheConfig(num_blocks=num_blocks, block_size=BLOCK),
        engine=EngineConfig(device="cpu", threads=threads),
    )
    plan = plan_rank(config, 1)
    runner, pool = load_runner(plan, config, SingleRank(), lambda *_: None)
    try:
        _fill(runner.cache.pool)
        floor, library = Floors(plan.decoder, runner, watch), None
        if isinstance(runner.backend, CpuBackend):
            library = runner.backend.library
        _time_parts(runner, watch)
        for case in cases:
            row = _measure(runner, watch, floor, case, rounds)
            with hollow(runner, library):
                host_ms = _host_ms(runner, watch, case, rounds)
            yield msgspec.structs.replace(row, host_ms=host_ms)
    finally:
        if isinstance(pool, HostPool):
            pool.close()


def _measure(runner: Runner, watch: Stopwatch, floor: "Floors", case: Case, rounds: int) -> StepRow:
    plans = case.plans()
    steps, floors, parts = [], [], []
    for number in range(rounds + 1):
        watch.spent_s.clear()
        step_s = watch.seconds(lambda: [runner.execute(plan) for plan in plans])
        if number:  # the first round warms up
            steps.append(step_s)
            parts.append(dict(watch.spent_s))
            with torch.inference_mode():
                floors.append(floor.seconds(case))
    ratios = [step_s / floor_s for step_s, floor_s in zip(steps, floors, strict=True)]
    return StepRow(
        case,
        1e3 * statistics.median(steps),
        1e3 * statistics.median(floors),
        statistics.median(ratios),
        0.0,
        {name: 1e3 * statistics.median(part[name] for part in parts) for name in PARTS},
    )


def _host_ms(runner: Runner, watch: Stopwatch, case: Case, rounds: int) -> float:
    plans = case.plans()
    took = [
        watch.seconds(lambda: [runner.execute(plan) for plan in plans]) for _ in range(4 * rounds)
    ]
    return 1e3 * statistics.median(took)


@contextmanager
def hollow(runner: Runner, library: CpuLibrary | None) -> Iterator[None]:
    """Let the kernels and the products of torch's library compute nothing."""

    def empty(linear: Linear) -> Linear:
        if linear.ordered is not None:  # a kernel
            return linear
        outputs = linear.weight.shape[0]
        return Linear(linear.weight, None, ordered=lambda x, _: x.new_empty(len(x), outputs))

    decoder = runner.decoder
    kernels = dict(library.kernels) if library else {}
    if library:
        library.kernels.update(dict.fromkeys(kernels, lambda *_: 0))
    runner.decoder = _with_linears(decoder, empty)
    try:
        yield
    finally:
        runner.decoder = decoder
        if library:
            library.kernels.update(kernels)


class Floors:
    """The least time of a case, measured anew at every call."""

    def __init__(self, config: DecoderConfig, runner: Runner, watch: Stopwatch) -> None:
        self._config, self._watch = config, watch
        *self._layers, self._head = runner.decoder.linears()
        self._dtype = runner.cache.pool.dtype
        self._token_bytes = runner.cache.pool[0].nbytes // BLOCK
        self._memory = torch.ones(READ_BYTES // 8, dtype=torch.int64)
        self._queries = torch.randn(config.num_heads, CHUNK, config.head_dim).bfloat16()
        self._keys = torch.randn(config.num_heads, config.head_dim, 4 * CHUNK).bfloat16()

    def seconds(self, case: Case) -> float:
        if case.batch:
            num_bytes = case.batch * case.context * self._token_bytes
            read_s = self._watch.seconds(self._memory.sum) * num_bytes / READ_BYTES
            return self._products_s(case.batch, case.batch) + self._head_s(case.batch) + read_s
        chunks = [min(CHUNK, case.context - start) for start in range(0, case.context, CHUNK)]
        products_s = sum(self._products_s(num_rows, 0) for num_rows in chunks[:-1])
        products_s += self._products_s(chunks[-1], 1) + self._head_s(1)
        # Queries by keys, then weights by values; each query sees half of the keys. The last layer
        # needs one query of the prompt.
        share = case.context * case.context / (CHUNK * 4 * CHUNK)
        one_s = self._watch.seconds(lambda: torch.bmm(self._queries, self._keys))
        return products_s + share * one_s * (self._config.num_layers - 1)

    def _products_s(self, num_rows: int, num_drawn: int) -> float:
        """Time the layers; what follows the last attention is computed for `num_drawn` rows."""
        config = self._config
        hidden, inner = config.hidden_size, config.intermediate_size
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

        return self._watch.seconds(compute)

    def _head_s(self, num_rows: int) -> float:
        rows = self._rows(num_rows, self._config.hidden_size)
        return self._watch.seconds(lambda: self._head.product(rows))

    def _rows(self, num_rows: int, width: int) -> Tensor:
        return torch.randn(num_rows, width).to(self._dtype)


def _fill(pool: Tensor) -> None:
    """Give every page of the pool memory of its own, and numbers that are quick to compute."""
    part = torch.randn(min(1 << 22, pool.numel())).to(pool.dtype)
    flat = pool.view(-1)
    for start in range(0, len(flat), len(part)):
        flat[start : start + len(part)].copy_(part[: len(flat) - start])


# --- the parts of a step ---------------------------------------------------------------------


@dataclasses.dataclass(slots=True, frozen=True)
class TimedLinear(Linear):
    watch: Stopwatch = dataclasses.field(default_factory=lambda: Stopwatch(1))

    def __call__(self, x: Tensor) -> Tensor:
        with self.watch.running("linears"):
            return Linear.__call__(self, x)


class TimedBackend:
    """A backend whose attention, the store of keys and values included, is timed."""

    def __init__(self, backend: Backend, watch: Stopwatch) -> None:
        self._backend, self._watch = backend, watch
        self.name, self.is_batch_invariant = backend.name, backend.is_batch_invariant
        self.table_blocks = backend.table_blocks
        self.begin, self.silu_mul = backend.begin, backend.silu_mul
        self.add_rms_norm = backend.add_rms_norm

    def attend(
        self, layer: int, qkv: Tensor, head_norms: Tensor | None, rows: Tensor | None = None
    ) -> Tensor:
        with self._watch.running("attention"):
            return self._backend.attend(layer, qkv, head_norms, rows)


class TimedSampler(Sampler):
    def __init__(self, sampler: Sampler, watch: Stopwatch) -> None:
        super().__init__(sampler.eos_token_ids)
        self._sampler, self._watch = sampler, watch

    def draw(self, logits: Tensor, draws: Draws) -> Tensor:
        with self._watch.running("sampling"):
            return self._sampler.draw(logits, draws)


def _time_parts(runner: Runner, watch: Stopwatch) -> None:
    def timed(linear: Linear) -> TimedLinear:
        return TimedLinear(
            linear.weight, linear.bias, linear.rule, linear.ordered, linear.trial, watch
        )

    runner.decoder = _with_linears(runner.decoder, timed)
    runner.backend = TimedBackend(runner.backend, watch)
    runner.sampler = TimedSampler(runner.sampler, watch)


def _with_linears(decoder: Decoder, changed: Callable[[Linear], Linear]) -> Decoder:
    layers = tuple(
        dataclasses.replace(
            layer,
            qkv=changed(layer.qkv),
            output=changed(layer.output),
            gate_up=changed(layer.gate_up),
            down=changed(layer.down),
        )
        for layer in decoder.layers
    )
    return dataclasses.replace(decoder, layers=layers, head=changed(decoder.head))
