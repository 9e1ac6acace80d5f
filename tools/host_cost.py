"""Print the host's CPU time of a decode step: packing, launching, collecting; no GPU is needed.

`python -m tools.host_cost` runs baton's own runner on torch's `meta` device, which computes
nothing. A replayed step costs the same as in service, except for the two calls into CUDA that start
the copy and the graph. An eager step costs the dispatch of every operation; on a GPU, the launches
of kernels are added.
"""

import argparse
import sys
import time
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from baton.engine.attention.backend import Batch
from baton.engine.graphs import buckets_up_to
from baton.engine.kv_cache import KVCache
from baton.engine.plan import Slice, StepPlan
from baton.engine.runner import Runner
from baton.engine.sampler import Sampler
from baton.engine.step_queue import StepWork
from baton.protocol.ids import Key, RequestId
from baton.protocol.sampling import Sampling
from baton.runtime.clock import monotonic
from tools.gpu.engine import random_decoder
from tools.gpu.floors import QWEN3_8B

BLOCK_SIZE = 16
MAX_LEN = 40_960
STEPS, ROUNDS = 60, 7


class HollowQueue:
    """The queue of a device that computes nothing."""

    overlaps = True

    device = torch.device("meta")

    def __init__(self) -> None:
        self._num_ids: deque[int] = deque()

    def allocate(self, num_words: int) -> Tensor:
        return torch.empty(num_words, dtype=torch.int64)

    def launch(self, work: StepWork) -> None:
        with torch.inference_mode():
            self._num_ids.append(len(work()))

    def collect(self) -> list[int]:
        return [0] * self._num_ids.popleft()

    def capture(self, work: StepWork) -> StepWork:
        with torch.inference_mode():
            ids = work()
        return lambda: ids


class HollowBackend:
    """Attention and fused operations, each as one operation."""

    name = "hollow"
    is_batch_invariant = False
    table_blocks = MAX_LEN // BLOCK_SIZE

    def __init__(self, num_values: int) -> None:
        self._num_values = num_values  # of the heads' outputs

    def begin(self, batch: Batch) -> None:
        """Prepare nothing."""

    def attend(
        self, layer: int, qkv: Tensor, head_norms: Tensor | None, rows: Tensor | None = None
    ) -> Tensor:
        return qkv.new_empty((len(qkv if rows is None else rows), self._num_values))

    def add_rms_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return torch.empty_like(x), torch.empty_like(x)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return gate_up.new_empty((len(gate_up), gate_up.shape[1] // 2))


def largest(logits: Tensor, *_: Tensor) -> Tensor:
    return logits.argmax(-1)


def runner(num_blocks: int = 1) -> Runner:
    shape = QWEN3_8B
    decoder = random_decoder(shape, torch.bfloat16, HollowQueue.device)
    sizes = (num_blocks, shape.num_kv_heads, shape.num_layers, 2, BLOCK_SIZE, shape.head_dim)
    pool = torch.empty(sizes, dtype=torch.bfloat16, device=HollowQueue.device)
    cache = KVCache(pool, np.zeros(num_blocks, np.uint32))
    backend = HollowBackend(shape.num_heads * shape.head_dim)
    return Runner(decoder, backend, cache, Sampler((), largest), HollowQueue(), monotonic)


def plans(batch: int, context: int) -> list[StepPlan]:
    """Return consecutive steps, with tokens that the host does not know yet."""
    sampling = Sampling(seed=1, max_tokens=1 << 20, temperature=0.7, top_p=0.9)
    num_blocks = -(-(context + STEPS) // BLOCK_SIZE)
    tables = [tuple(range(n * num_blocks, (n + 1) * num_blocks)) for n in range(batch)]
    return [
        StepPlan(
            step,
            tuple(
                Slice(
                    Key(RequestId(f"r{number}")), context + step, 1, () if step else (1,),
                    table[: (context + step) // BLOCK_SIZE + 1], (0,), sampling, context,
                )
                for number, table in enumerate(tables)
            ),
        )
        for step in range(STEPS)
    ]  # fmt: skip


def measure(one: Runner, steps: Sequence[StepPlan]) -> tuple[float, float]:
    """Return the least milliseconds of CPU time that a launch and a collect took on average."""
    best = [float("inf"), float("inf")]
    for _ in range(ROUNDS):
        spent = [0.0, 0.0]
        for number, step in enumerate(steps):
            began_s = time.process_time()
            one.launch(step)
            launched_s = time.process_time()
            one.collect()
            if number:  # the first step sends whole block tables
                spent[0] += launched_s - began_s
                spent[1] += time.process_time() - launched_s
        best = [min(old, new / (len(steps) - 1)) for old, new in zip(best, spent, strict=True)]
    return 1e3 * best[0], 1e3 * best[1]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.host_cost", description=__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 128], help="sequences")
    parser.add_argument("--context", type=int, default=1024, help="tokens of each sequence")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print(f"{QWEN3_8B.name}, {QWEN3_8B.num_layers} layers, context {given.context}; ms of CPU time")
    print("| batch | way | launch | collect |")
    print("|---|---|---|---|")
    for way in ("eager", "graph"):
        one = runner()
        if way == "graph":
            one.capture(buckets_up_to(max(given.batches)), lambda *_: None)
        for batch in given.batches:
            launch_ms, collect_ms = measure(one, plans(batch, given.context))
            print(f"| {batch} | {way} | {launch_ms:.3f} | {collect_ms:.3f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
