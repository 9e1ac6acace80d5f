"""Measure steps that the runner executes one by one: a decode step, and a prompt in its chunks.

The engine section of the GPU benchmark calls it, and so does `serving`, which compares served steps
with these. The block tables are scattered over a pool with random contents.
"""

import torch

from baton.engine.plan import Slice, StepPlan
from baton.engine.runner import Runner
from baton.protocol.ids import Key, RequestId
from baton.protocol.sampling import Sampling
from tools.gpu.cases import StepCase
from tools.gpu.floors import decode_work, prefill_work
from tools.gpu.rows import Measured
from tools.gpu.timing import timing_of

GREEDY = Sampling(seed=0, max_tokens=1 << 20, temperature=0.0)
BLOCK_SIZE = 16
WARM_UPS = 3


def decode(runner: Runner, case: StepCase, key: str, rounds: int) -> Measured:
    """Measure one step again and again; it stores the same keys and values every time."""
    plan = StepPlan(0, decoding(case))
    took = [_step_s(runner, plan) for _ in range(WARM_UPS + rounds)][WARM_UPS:]
    work = decode_work(case.shape, case.batch, case.context)
    return Measured(key, "ms", work, timing_of(took))


def prefill(runner: Runner, case: StepCase, rounds: int) -> Measured:
    """Measure a prompt from its first token to its first sampled one."""
    chunk = case.chunk_tokens or case.context
    plans = [
        StepPlan(number, (_chunk(case, start, min(chunk, case.context - start)),))
        for number, start in enumerate(range(0, case.context, chunk))
    ]
    took = []
    for number in range(1 + max(3, rounds // 2)):
        seconds = sum(_step_s(runner, plan) for plan in plans)
        if number:
            took.append(seconds)
    note = f"{len(plans)} steps" if len(plans) > 1 else ""
    work = prefill_work(case.shape, case.context)
    return Measured(case.key, "ms", work, timing_of(took), note=note)


def _step_s(runner: Runner, plan: StepPlan) -> float:
    result = runner.execute(plan)
    return result.ended_s - result.started_s


def decoding(case: StepCase) -> tuple[Slice, ...]:
    """Return one token each for sequences whose blocks are scattered over the pool."""
    per = -(-case.context // BLOCK_SIZE)
    order = torch.randperm(case.batch * per, generator=torch.Generator().manual_seed(1)).tolist()
    return tuple(
        Slice(
            Key(RequestId(f"sequence-{number}")), case.context - 1, 1, (number % 600 + 3,),
            tuple(order[number * per : (number + 1) * per]), (0,), GREEDY, 1,
        )
        for number in range(case.batch)
    )  # fmt: skip


def _chunk(case: StepCase, start: int, length: int) -> Slice:
    tokens = tuple(3 + (7 * position) % 600 for position in range(start, start + length))
    is_last = start + length == case.context
    table = tuple(range(-(-(start + length) // BLOCK_SIZE)))
    return Slice(
        Key(RequestId("prompt")), start, length, tokens, table, (0,) if is_last else (),
        GREEDY if is_last else None, case.context,
    )  # fmt: skip
