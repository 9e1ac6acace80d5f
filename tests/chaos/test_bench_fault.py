"""The harness sees what a fault does to a cluster under load, and that no output is harmed."""

import random
from pathlib import Path

import msgspec

from baton.bench.client.load import Load, Progress, run_load
from baton.bench.client.target import Target
from baton.bench.figures.faults import Injected, Judgement, impacts, parse_fault
from baton.bench.figures.metrics import Bounds
from baton.bench.injector import FaultInjector
from baton.bench.records import LoadResult, Outcome, Planned
from baton.bench.verify import compare_outputs, reference
from baton.protocol.config import (
    CacheConfig,
    ClusterConfig,
    EngineConfig,
    ModelConfig,
    RouterConfig,
)
from tests.support.checkpoints import model_folder
from tests.support.cluster import Cluster

SEED = 1
# A closed loop whose fault comes when so many were answered and the node has a stream in its first
# half: there is something to compare with and to interrupt, however fast this machine is.
NUM_CLIENTS, NUM_REQUESTS, NUM_BEFORE = 6, 24, 7
# A stream that goes on elsewhere begins with its whole prompt: long ones, so that this takes much
# longer than anything that other processes do to a step.
PROMPT_TOKENS, OUTPUT_TOKENS = 1500, 300
VICTIM = "decode-0"
JUDGEMENT = Judgement(closed_loop=True)


def settings() -> ClusterConfig:
    return ClusterConfig(
        decode=2,
        model=ModelConfig(path=str(model_folder("qwen3")), name="tiny"),
        cache=CacheConfig(num_blocks=1200, prefix=False),
        engine=EngineConfig(chunk_tokens=64),
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


def run_with(cluster: Cluster, fault: str) -> tuple[LoadResult, Injected]:
    """The load, with the fault in the midst of it. The nodes have served before."""
    target = target_of(cluster)
    run_load(Load(target, planned(SEED + 1, 4, 10), concurrency=2, closed=True))
    starts_s: list[float] = []
    with FaultInjector([parse_fault(fault)]) as injector:

        def strike(progress: Progress) -> None:
            if progress.ended >= NUM_BEFORE and starts_s and streams(cluster):
                injector.begin(starts_s.pop())

        load = Load(target, REQUESTS, concurrency=NUM_CLIENTS, closed=True)
        result = run_load(load, on_progress=strike, on_start=starts_s.append)
        (done,) = injector.finish()
    assert done.problem == ""
    return result, done


def streams(cluster: Cluster) -> bool:
    """Whether a sequence of the victim's last step has at least half of its tokens before it."""
    slices = cluster.steps(VICTIM)[-1].slices
    return any(0 < part.start - PROMPT_TOKENS < OUTPUT_TOKENS // 2 for part in slices)


def test_the_load_outlives_a_killed_decode_node_and_the_times_are_sane(tmp_path: Path) -> None:
    with Cluster(tmp_path, settings()) as cluster:
        fault = f"kill:{cluster.children[VICTIM].pid}@0"
        result, done = run_with(cluster, fault)
        in_flight = [
            record for record in result.records if record.sent_s <= done.at_s <= record.end_s
        ]
        # After the load, because it warms the prefix caches.
        alone = reference(target_of(cluster), [REQUESTS[record.index] for record in in_flight])
    assert all(record.outcome is Outcome.ANSWERED for record in result.records)
    # One may be between the end of a request and the next.
    assert NUM_CLIENTS - 1 <= len(in_flight) <= NUM_CLIENTS
    assert compare_outputs(alone, in_flight) == []

    assert done.gone_s is not None
    assert 0 < done.at_s <= done.gone_s
    (found,) = impacts(result.records, [done], Bounds(), JUDGEMENT)
    shown = msgspec.json.encode(found).decode()
    assert found.time_to_detect_s is not None, shown
    assert found.time_to_resume_s is not None, shown
    assert found.time_to_recover_s is not None, shown
    assert 0 <= found.time_to_detect_s < found.time_to_resume_s < 30, shown
    assert found.time_to_resume_s <= found.time_to_recover_s < 30, shown
    assert found.num_in_flight >= found.num_interrupted == found.num_resumed >= 1, shown
    assert found.num_failed == 0, shown
    assert found.goodput_before > 0, shown


def test_a_decode_node_that_was_stopped_goes_on_and_the_pause_is_seen(tmp_path: Path) -> None:
    with Cluster(tmp_path, settings()) as cluster:
        fault = f"stop:{cluster.children[VICTIM].pid}@0+1.5"
        result, done = run_with(cluster, fault)
        assert cluster.get("/health")[0] == 200
        assert all(child.poll() is None for child in cluster.children.values())
    assert all(record.outcome is Outcome.ANSWERED for record in result.records)
    assert done.resumed_s is not None
    assert done.resumed_s - done.at_s >= 1.5
    (found,) = impacts(result.records, [done], Bounds(), JUDGEMENT)
    shown = msgspec.json.encode(found).decode()
    assert found.time_to_detect_s is not None, shown
    assert found.time_to_resume_s is not None, shown
    assert 0 <= found.time_to_detect_s < 1.5 <= found.time_to_resume_s, shown
    assert found.longest_wait_s >= 1.4, shown
