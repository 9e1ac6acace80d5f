"""One rank of a process group, as a process: `python -m tests.support.group_rank RANK SIZE MEMORY`.

It prints one line of JSON: what collectives of the group give, and of a runner whose decode steps
are replayed which collectives it called, in order, and what it said.
"""

import json
import os
import sys

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from baton.model.runner.cuda_start import buckets_up_to
from baton.model.tensor_parallel import GroupRanks, Ranks, join, least
from baton.node.scheduling.plan import Slice, StepPlan
from baton.protocol.ids import Key, RequestId
from baton.protocol.sampling import Sampling
from tests.support.compute import no_progress
from tests.support.graph_stand_in import RecordingQueue, stand_in

JOIN_S = 120.0
NUM_BLOCKS = 48
BLOCKS_EACH = 6
LENGTHS = (3, 7, 1, 5, 9)
NUM_STEPS = 6
GREEDY = Sampling(seed=1, max_tokens=100, temperature=0.0)


class Collectives(TorchDispatchMode):
    """Notes the collectives that are called, by the engine or by a replay, with their shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, list[int]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func.namespace == "c10d":
            shapes = [
                list(leaf.shape)
                for leaf in tree_leaves(args)
                if isinstance(leaf, Tensor)
            ]
            self.calls.append((func.overloadpacket.__name__, shapes[0]))
        return func(*args, **(kwargs or {}))


def plans() -> list[StepPlan]:
    """Prompts of all sequences, then steps of fewer and fewer of them."""
    made = [
        StepPlan(
            0, tuple(_part(number, 0, length) for number, length in enumerate(LENGTHS))
        )
    ]
    for step in range(NUM_STEPS):
        going = enumerate(LENGTHS[: max(1, len(LENGTHS) - step)])
        made.append(
            StepPlan(1 + step, tuple(_part(n, length + step, 1) for n, length in going))
        )
    return made


def _part(number: int, start: int, length: int) -> Slice:
    tokens = (
        tuple(3 + (7 * number + 5 * i) % 90 for i in range(length))
        if start == 0
        else ()
    )
    blocks = tuple(range(number * BLOCKS_EACH, (number + 1) * BLOCKS_EACH))
    key = Key(RequestId(f"s{number}"))
    return Slice(key, start, length, tokens, blocks, (0,), GREEDY, LENGTHS[number])


def said(ranks: Ranks | None = None) -> tuple[list[object], int]:
    """What each step draws on a runner with captured decode steps, and how many were replayed."""
    queue = RecordingQueue()
    runner = stand_in(NUM_BLOCKS, queue, ranks=ranks)
    runner.capture(buckets_up_to(len(LENGTHS)), no_progress)
    return [runner.execute(plan).tokens for plan in plans()], queue.num_replays


def sums(ranks: GroupRanks) -> dict[str, object]:
    own = torch.arange(6.0).view(2, 3) + 10 * ranks.rank
    return {
        "sum": ranks.all_reduce(own.clone()).tolist(),
        "gathered": ranks.all_gather(own).tolist(),
        "none": list(ranks.all_gather(torch.zeros(0, 3)).shape),
        "least": least(ranks, 7 - ranks.rank, torch.device("cpu")),
        "is_batch_invariant": ranks.is_batch_invariant,
    }


def main(rank: int, size: int, memory: int) -> None:
    ranks = join(torch.device("cpu"), (rank, size), memory, JOIN_S, is_ordered=False)
    ordered = GroupRanks(ranks.group, is_ordered=True)
    shown: dict[str, object] = {"any": sums(ranks), "ordered": sums(ordered)}
    with Collectives() as collectives:
        shown["said"], shown["num_replays"] = said(ranks)
    ranks.leave()
    print(json.dumps(shown | {"calls": collectives.calls}), flush=True)
    # A thread of gloo that still lets go of a tensor would abort an orderly end.
    os._exit(0)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
