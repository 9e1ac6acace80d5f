"""Measure the CPU time of adding, planning and cancelling while many requests wait, and print it.

It calls the router's queue and the schedulers of both kinds of node; there are no sockets and no
processes. All blocks of a pool are taken, so a plan finds no room for any waiting request.
"""

import argparse
import gc
import sys
import time
from collections.abc import Callable, Sequence

from baton.decode_node.scheduler import DecodeScheduler
from baton.engine.block_pool import BlockPool
from baton.engine.scheduler import NodeLimits
from baton.prefill_node.scheduler import PrefillScheduler
from baton.protocol.config import RouterConfig
from baton.protocol.ids import Key, RequestId
from baton.protocol.messages import Decode, Prefill
from baton.protocol.sampling import Sampling
from baton.router.queue import Admission
from baton.router.request import Place

PROMPT_TOKENS = 512
BLOCK_SIZE, NUM_BLOCKS = 16, 1024
LIMITS = NodeLimits(chunk_tokens=512, max_num_seqs=64, max_model_len=8192)
SAMPLING = Sampling(seed=0, max_tokens=64)
ORIGIN = 0

Operation = Callable[[Key], object]


def queue_of_router() -> list[tuple[str, Operation]]:
    """Return the operations of a router on a request that waits for nodes, in order."""
    queue = Admission(RouterConfig(max_queued=1 << 20))

    def add(key: Key) -> None:
        queue.check_room(PROMPT_TOKENS, could_place=False)
        queue.wait(0.0, Place(key, PROMPT_TOKENS, 1, True, PROMPT_TOKENS))

    return [("add", add), ("plan", lambda _: queue.head(0)), ("cancel", queue.leave)]


def node(scheduler: PrefillScheduler | DecodeScheduler) -> list[tuple[str, Operation]]:
    """Return the operations of a node on a request that waits for blocks, in order."""
    scheduler.pool.allocate(NUM_BLOCKS)
    tokens = list(range(PROMPT_TOKENS))

    def add(key: Key) -> None:
        if isinstance(scheduler, PrefillScheduler):
            scheduler.add(0.0, ORIGIN, Prefill(key, tokens, PROMPT_TOKENS, SAMPLING))
        else:
            scheduler.add(0.0, ORIGIN, Decode(key, tokens, PROMPT_TOKENS, SAMPLING))

    def cancel(key: Key) -> None:
        scheduler.cancel(ORIGIN, (key,))

    return [("add", add), ("plan", lambda _: scheduler.plan(0.0)), ("cancel", cancel)]


def pool() -> BlockPool:
    return BlockPool(NUM_BLOCKS, BLOCK_SIZE)


PLACES: dict[str, Callable[[], list[tuple[str, Operation]]]] = {
    "router": queue_of_router,
    "prefill": lambda: node(PrefillScheduler(pool(), LIMITS)),
    "decode": lambda: node(DecodeScheduler(pool(), LIMITS)),
}


def times_us(operations: list[tuple[str, Operation]], num_waiting: int, num_timed: int) -> str:
    """Return the mean microseconds of each operation while `num_waiting` requests wait."""
    for number in range(num_waiting):
        operations[0][1](Key(RequestId(f"waits-{number}")))
    gc.freeze()  # as a router does
    keys = [Key(RequestId(f"timed-{number}")) for number in range(num_timed)]
    spent_s = dict.fromkeys((name for name, _ in operations), 0.0)
    for key in keys:
        for name, operation in operations:
            before_s = time.thread_time()
            operation(key)
            spent_s[name] += time.thread_time() - before_s
    return ", ".join(f"{name} {1e6 * spent / num_timed:.1f}" for name, spent in spent_s.items())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.queue_cost", description=__doc__)
    parser.add_argument(
        "--waiting", type=int, nargs="+", default=[10, 1000], help="numbers of requests that wait"
    )
    parser.add_argument("--timed", type=int, default=2000, help="requests that are timed")
    given = parser.parse_args(arguments)
    for name, make in PLACES.items():
        for num_waiting in given.waiting:
            print(f"{name}, {num_waiting} waiting: {times_us(make(), num_waiting, given.timed)} us")
    return 0


if __name__ == "__main__":
    sys.exit(main())
