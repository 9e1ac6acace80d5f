"""The harness sees what a fault does to a cluster under load, and that no output is harmed."""

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import msgspec

from baton.bench.client.load import Load, Progress, run_load
from baton.bench.client.target import Target
from baton.bench.figures import faults
from baton.bench.figures.faults import Impact, Injected, Judgement, parse_fault
from baton.bench.figures.metrics import Bounds
from baton.bench.injector import FaultInjector
from baton.bench.records import LoadResult, Outcome, Planned, Record
from baton.bench.verify import compare_outputs, reference
from baton.protocol.config import (
    CacheConfig,
    ClusterConfig,
    ModelConfig,
    RouterConfig,
)
from baton.runtime.clock import monotonic
from tests.support.checkpoints import model_folder
from tests.support.cluster import Cluster

SEED = 1
# The fault comes when so many requests were answered and the node has a stream in its first half:
# there is something to compare with and to interrupt, however fast this machine is.
NUM_CLIENTS, NUM_REQUESTS, NUM_BEFORE = 6, 40, 3
PROMPT_TOKENS, OUTPUT_TOKENS = 100, 300
VICTIM = "decode-0"
LOOK_EVERY_S, WAIT_S = 0.02, 30.0
# Fine bins, so that the requests after the fault fill some of them on a fast machine, too.
JUDGEMENT = Judgement(closed_loop=True, bin_s=0.1)


def settings() -> ClusterConfig:
    """Return a cluster whose streams have no other decode node to go on at."""
    return ClusterConfig(
        model=ModelConfig(path=str(model_folder("qwen3")), name="tiny"),
        cache=CacheConfig(num_blocks=300, prefix=False),
        router=RouterConfig(local_prefill="never"),
    )


def planned(seed: int, count: int, output_tokens: int) -> list[Planned]:
    dice = random.Random(seed)
    return [
        Planned(
            index=index,
            at_s=None,
            output_tokens=output_tokens,
            prompt_ids=tuple(dice.randrange(10, 250) for _ in range(PROMPT_TOKENS)),
        )
        for index in range(count)
    ]


REQUESTS = planned(SEED, NUM_REQUESTS, OUTPUT_TOKENS)


def target_of(cluster: Cluster) -> Target:
    return Target(cluster.url(""), "tiny", token_ids=True)


def run_with(
    cluster: Cluster,
    fault: Callable[[float], str],
    then: Callable[[float, float], None] = lambda *_: None,
) -> tuple[LoadResult, Injected]:
    """Run the load with a fault in the midst of it. The nodes have served before.

    `fault` gets the seconds that the node is to be away for: longer than the load has run, so
    longer than any wait before the fault, on a busy machine too. `then` gets these too, and the
    start of the load.
    """
    target = target_of(cluster)
    run_load(Load(target, planned(SEED + 1, 4, 10), concurrency=2))
    starts_s: list[float] = []
    progress: list[Progress] = []
    injectors: list[FaultInjector] = []
    load_is_over = threading.Event()
    with ExitStack() as stack:

        def strike() -> None:
            while not (progress and progress[-1].ended >= NUM_BEFORE and streams(cluster)):
                if load_is_over.wait(LOOK_EVERY_S):
                    return
            (start_s,) = starts_s
            away_s = monotonic() - start_s + 1.0
            injectors.append(stack.enter_context(FaultInjector(parse_fault(fault(away_s)))))
            injectors[0].begin(start_s)
            then(away_s, start_s)

        load = Load(target, REQUESTS, concurrency=NUM_CLIENTS)
        with ThreadPoolExecutor(1) as pool:
            struck = pool.submit(strike)
            try:
                result = run_load(load, on_progress=progress.append, on_start=starts_s.append)
            finally:
                load_is_over.set()
            struck.result()
        done = injectors[0].finish()
        assert done is not None
        assert done.problem == ""
        # After the load, because it warms the prefix caches.
        alone = reference(target, [REQUESTS[record.index] for record in in_flight(result, done)])
    assert all(record.outcome is Outcome.ANSWERED for record in result.records)
    assert compare_outputs(alone, in_flight(result, done)) == []
    return result, done


def in_flight(result: LoadResult, done: Injected) -> list[Record]:
    return [record for record in result.records if record.sent_s <= done.at_s <= record.end_s]


def streams(cluster: Cluster) -> bool:
    """Return whether a sequence of the victim's last step has most of its tokens before it."""
    slices = cluster.steps(VICTIM)[-1].slices
    return any(0 < part.start - PROMPT_TOKENS < OUTPUT_TOKENS // 2 for part in slices)


def impact_of(result: LoadResult, done: Injected) -> Impact:
    """Return the only impact, which interrupted at least one stream and ended none."""
    found = faults.impact_of(result.records, done, Bounds(), JUDGEMENT)
    shown = msgspec.json.encode(found).decode()
    assert found.num_in_flight >= found.num_interrupted == found.num_resumed >= 1, shown
    assert found.num_failed == 0, shown
    assert found.goodput_before > 0, shown
    return found


def test_the_load_outlives_a_killed_decode_node_and_the_times_are_sane(tmp_path: Path) -> None:
    restarted_s: list[float] = []
    with Cluster(tmp_path, settings()) as cluster:
        victim = cluster.children[VICTIM]

        def restart(away_s: float, start_s: float) -> None:
            assert victim.wait(monotonic() + WAIT_S)
            time.sleep(away_s)
            restarted_s.append(monotonic() - start_s)
            cluster.start_node("decode", 0)

        result, done = run_with(cluster, lambda _: f"kill:{victim.pid}@0", restart)
    assert done.gone_s is not None
    assert 0 < done.at_s <= done.gone_s <= restarted_s[0]
    found = impact_of(result, done)
    assert found.time_to_detect_s is not None
    assert found.time_to_resume_s is not None
    assert found.time_to_recover_s is not None
    away = restarted_s[0] - done.at_s
    assert 0 <= found.time_to_detect_s < away < found.time_to_resume_s <= found.time_to_recover_s


def test_a_decode_node_that_was_stopped_goes_on_and_the_pause_is_seen(tmp_path: Path) -> None:
    with Cluster(tmp_path, settings()) as cluster:
        pid = cluster.children[VICTIM].pid
        result, done = run_with(cluster, lambda seconds: f"stop:{pid}@0+{seconds}")
        assert cluster.get("/health")[0] == 200
        assert all(child.poll() is None for child in cluster.children.values())
    assert done.resumed_s is not None
    away_s = done.resumed_s - done.at_s
    assert away_s >= done.spec.after_s
    found = impact_of(result, done)
    assert found.time_to_detect_s is not None
    assert found.time_to_resume_s is not None
    assert 0 <= found.time_to_detect_s < away_s <= found.time_to_resume_s
