"""Measure steps: eager, replayed, and as they are served, planned by the real scheduler.

`served` keeps two steps launched, as the engine's loop does, and takes the time from one result to
the next. The idle share is the excess over steps that follow each other on the device without the
host.
"""

import statistics
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import msgspec
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from baton.decode_node.admission import MAX_PASSING
from baton.decode_node.scheduler import DecodeScheduler
from baton.model.runner.cuda_start import buckets_up_to
from baton.model.runner.runner import Runner
from baton.node.scheduling.block_pool import BlockPool
from baton.node.scheduling.plan import Slice, StepPlan, StepResult
from baton.node.scheduling.scheduler import NodeLimits
from baton.protocol.ids import Key, RequestId
from baton.protocol.messages import Decode
from baton.protocol.sampling import Sampling
from tools.gpu.cases import StepCase
from tools.gpu.floors import decode_work, prefill_work
from tools.gpu.rows import Check, Measured
from tools.gpu.section import Desk
from tools.gpu.timing import timing_of

GREEDY = Sampling(seed=0, max_tokens=1 << 20, temperature=0.0)
BLOCK_SIZE = 16
WARM_UPS = 3
MAX_LAUNCHED = 2  # the same number as in the engine's loop
FIRST_TOKEN = 3
MAX_PROMPT = 2048  # tokens of a prompt, or of a chunk of one, that is replayed
BURST = 8  # steps that are launched without a look at their results
CAPTURE = "capture"
IDLE = "idle share"
GRAPH_IS_EAGER = "a replayed step has the bits of the eager step of its bucket"
WAITS = "waits in a replayed step"
COPIES = "copies to the device in a replayed step"


def run(
    desk: Desk,
    runner: Runner,
    cases: Sequence[StepCase],
    prompts: Sequence[StepCase],
    rounds: int,
) -> None:
    """Report capture, checks and rows of the decode cases and prompts of one model and pool."""
    name = cases[0].model
    largest = max(case.batch for case in cases)
    desk.check(
        f"{CAPTURE} of {name}", partial(capture, desk, runner, name, largest), 10.0
    )
    for case in prompts:
        key = f"{case.key}, graph"
        desk.check(
            f"{GRAPH_IS_EAGER}, {case.key}", partial(graph_is_eager, runner, case)
        )
        desk.measure(Measured(key, "ms"), partial(prefill, runner, case, key, rounds))
    for case in cases:
        desk.check(
            f"{GRAPH_IS_EAGER}, {case.key}", partial(graph_is_eager, runner, case)
        )
        desk.check(f"{WAITS}, {case.key}", partial(waits, desk, runner, case))
        key = f"{case.key}, graph"
        desk.measure(Measured(key, "ms"), partial(decode, runner, case, key, rounds))
        desk.measure(
            Measured(case.key, "ms"), partial(served, desk, runner, case, rounds), 12.0
        )


def capture(desk: Desk, runner: Runner, name: str, largest: int) -> Check:
    """Capture every bucket that a node would, and report the time and the memory that it takes.

    A node is ready before the last ones are captured, so that time is reported, too.
    """
    # Others take minutes there.
    most_tokens = MAX_PROMPT if desk.device.type == "cuda" else 64
    buckets = buckets_up_to(largest, most_tokens)
    free = desk.watch.free_bytes()
    start_s = time.perf_counter()
    runner.capture(buckets, lambda *_: None)
    desk.watch.synchronize()  # the capture's own work belongs to it
    ready_s = time.perf_counter() - start_s
    while runner.has_uncaptured:
        runner.capture_next()
    desk.watch.synchronize()
    took_s = time.perf_counter() - start_s
    taken = (free - desk.watch.free_bytes()) / 2**30
    key = f"{CAPTURE} of {name}"
    desk.emit(Measured(f"{key}, until a node is ready", "s", value=ready_s))
    desk.emit(Measured(f"{key}, time", "s", value=took_s))
    desk.emit(Measured(f"{key}, memory", "GiB", value=taken))
    return Check(
        key, True, f"{len(buckets)} buckets, decode steps up to {largest} rows"
    )


def graph_is_eager(runner: Runner, case: StepCase) -> Check:
    """Compare a replay with the eager step: tokens, log probabilities, keys and values."""
    if case.kind == "prefill":
        *_, plan = prompt(case.context, case.max_num_batched_tokens or case.context)
    else:
        plan = StepPlan(0, decoding(case.batch, case.context))
    shown = msgspec.structs.replace(GREEDY, logprobs=2)
    slices = [
        msgspec.structs.replace(part, sampling=part.sampling and shown)
        for part in plan.slices
    ]
    plan = msgspec.structs.replace(plan, slices=tuple(slices))
    last = torch.tensor([part.block_table[-1] for part in plan.slices])
    found = []
    for is_replayed in (True, False):
        graphs = runner._graphs
        if not is_replayed:
            runner._graphs = None
        try:
            result = runner.execute(plan)
        finally:
            runner._graphs = graphs
        blocks = runner.cache.pool[last.to(runner.device)].clone()
        found.append(((result.tokens, result.logprobs), blocks))
    (replayed, ours), (eager, theirs) = found
    is_equal = replayed == eager and torch.equal(
        ours.view(torch.int16), theirs.view(torch.int16)
    )
    detail = (
        "tokens, log probabilities, keys and values are equal"
        if is_equal
        else "they differ"
    )
    return Check(f"{GRAPH_IS_EAGER}, {case.key}", is_equal, detail)


def waits(desk: Desk, runner: Runner, case: StepCase) -> Check:
    """Check that the launch of a replayed step neither waits nor copies to the device twice."""
    plan = StepPlan(0, decoding(case.batch, case.context))
    is_cuda = runner.device.type == "cuda"
    if is_cuda:
        torch.cuda.set_sync_debug_mode("error")
    try:
        with CopiesToDevice() as copies:
            runner.launch(plan)
    finally:
        if is_cuda:
            torch.cuda.set_sync_debug_mode("default")
    runner.collect()
    detail = f"{copies.count}, at most 1 wanted"
    desk.emit(Check(f"{COPIES}, {case.key}", copies.count <= 1, detail))
    return Check(f"{WAITS}, {case.key}", True, "0")


class CopiesToDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations that bring host memory to a device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        out = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
        results = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        from_host = any(
            tensor.device.type == "cpu" and tensor.dim() for tensor in tensors
        )
        to_device = any(tensor.device.type == "cuda" for tensor in results)
        self.count += from_host and to_device
        return out


def served(desk: Desk, runner: Runner, case: StepCase, rounds: int) -> Measured:
    """Measure steps of a full batch under the real scheduler; report the device's idle share."""
    stamps = stamps_of(runner, case, WARM_UPS + rounds + 1)
    took = [after - before for before, after in pairwise(stamps)]
    timing = timing_of(took[WARM_UPS:])
    busy_s = _busy_s(runner, case)
    idle = max(0.0, 1.0 - busy_s / timing.median_s)
    desk.emit(Measured(f"{IDLE}, {case.key}", "%", value=100 * idle))
    work = decode_work(case.shape, case.batch, case.context)
    return Measured(case.key, "ms", work, timing, note="served by the loop")


def stamps_of(runner: Runner, case: StepCase, num_steps: int) -> list[float]:
    """Return the ends of `num_steps` steps in which every sequence decodes."""
    scheduler = _scheduler(runner, case, num_steps)
    stamps: list[float] = []
    launched: deque[StepPlan] = deque()
    while len(stamps) < num_steps:
        while len(launched) < MAX_LAUNCHED and (plan := scheduler.plan(0.0)):
            is_full = len(plan.slices) == case.batch and all(
                p.length == 1 for p in plan.slices
            )
            if is_full:
                runner.launch(plan)
                launched.append(plan)
            # Prompts are admitted; the random pool serves as their keys and values.
            else:
                assert not launched, "a sequence ended before it was measured"
                tokens = tuple(
                    (FIRST_TOKEN,) * len(part.samples) for part in plan.slices
                )
                scheduler.settle(0.0, plan, StepResult(plan.step_id, tokens, 0.0, 0.0))
        plan = launched.popleft()
        result = runner.collect()
        scheduler.settle(0.0, plan, result)
        scheduler.outputs.take_router_messages()
        stamps.append(time.perf_counter())
    for _ in launched:
        runner.collect()
    return stamps


def _scheduler(runner: Runner, case: StepCase, num_steps: int) -> DecodeScheduler:
    """Return a scheduler with prompts that decode `num_steps` together, up to the case's context.

    It takes prompts in over several plans, in which those before them decode.
    """
    num_output = num_steps + MAX_LAUNCHED + 1 + case.batch // MAX_PASSING + 1
    length = max(1, case.context - num_output)
    scheduler = DecodeScheduler(
        BlockPool(len(runner.cache.pool), BLOCK_SIZE, cache_prefixes=False),
        NodeLimits(
            case.batch * case.context, max(case.batch, 2), length + num_output + 1
        ),
    )
    sampling = Sampling(seed=0, max_tokens=num_output, temperature=0.0)
    for number in range(case.batch):
        tokens = [3 + (7 * place + number) % 600 for place in range(length)]
        key = Key(RequestId(f"served-{number}"))
        scheduler.add(0.0, 0, Decode(key, tokens, length, sampling))
    return scheduler


def _busy_s(runner: Runner, case: StepCase) -> float:
    """Return the time of a step on the device: of many that are launched one behind the other."""
    plan = StepPlan(0, decoding(case.batch, case.context))
    took = []
    for _ in range(3):
        runner.execute(plan)
        start_s = time.perf_counter()
        for _ in range(BURST):
            runner.launch(plan)
        for _ in range(BURST):
            runner.collect()
        took.append((time.perf_counter() - start_s) / BURST)
    return statistics.median(took)


# --- steps one by one ---------------------------------------------------------------------------


def decode(runner: Runner, case: StepCase, key: str, rounds: int) -> Measured:
    """Measure one step again and again; it stores the same keys and values every time."""
    plan = StepPlan(0, decoding(case.batch, case.context))
    took = [_step_s(runner, plan) for _ in range(WARM_UPS + rounds)][WARM_UPS:]
    work = decode_work(case.shape, case.batch, case.context)
    return Measured(key, "ms", work, timing_of(took))


def prefill(runner: Runner, case: StepCase, key: str, rounds: int) -> Measured:
    """Measure a prompt from its first token to its first sampled one."""
    plans = prompt(case.context, case.max_num_batched_tokens or case.context)
    took = []
    for number in range(1 + max(3, rounds // 2)):
        seconds = sum(_step_s(runner, plan) for plan in plans)
        if number:
            took.append(seconds)
    note = f"{len(plans)} steps" if len(plans) > 1 else ""
    work = prefill_work(case.shape, case.context)
    return Measured(key, "ms", work, timing_of(took), note=note)


def _step_s(runner: Runner, plan: StepPlan) -> float:
    result = runner.execute(plan)
    return result.ended_s - result.started_s


def decoding(batch: int, context: int) -> tuple[Slice, ...]:
    """Return the last token of each of `batch` sequences, whose blocks are scattered."""
    tables = [_table(batch, number, context) for number in range(batch)]
    return tuple(
        Slice(
            Key(RequestId(f"sequence-{number}")),
            context - 1,
            1,
            (number % 600 + 3,),
            table,
            (0,),
            GREEDY,
            1,
        )
        for number, table in enumerate(tables)
    )


def prompt(context: int, chunk: int) -> list[StepPlan]:
    """Return the steps of a prompt in chunks; the last one samples a token."""
    table = _table(1, 0, context)
    plans: list[StepPlan] = []
    for start in range(0, context, chunk):
        length = min(chunk, context - start)
        tokens = tuple(
            3 + (7 * position) % 600 for position in range(start, start + length)
        )
        is_last = start + length == context
        part = Slice(
            Key(RequestId("prompt")),
            start,
            length,
            tokens,
            table,
            (0,) if is_last else (),
            GREEDY if is_last else None,
            context,
        )
        plans.append(StepPlan(len(plans), (part,)))
    return plans


def _table(batch: int, number: int, context: int) -> tuple[int, ...]:
    """Return blocks that are scattered, as those of a pool that has been used for a while are."""
    per = -(-context // BLOCK_SIZE)
    order = torch.randperm(
        batch * per, generator=torch.Generator().manual_seed(1)
    ).tolist()
    return tuple(order[number * per : (number + 1) * per])
