"""Processes that stand still and go on, alone and together, as on a host that swaps or suspends."""

import os
import random
import signal
import time

import pytest

from baton.deploy.startup import HealthReply, ask_health
from tests.support.checkpoints import tiny_cluster
from tests.support.cluster import Cluster

CONFIG = tiny_cluster(
    cache={"num_blocks": 400}, engine={"max_num_batched_tokens": 64, "threads": 1}
)
# What is promised is 5 s. The rest is for machines that have other work.
BACK_S = 10.0


def pause(cluster: Cluster) -> None:
    for child in cluster.children.values():
        os.kill(child.pid, signal.SIGSTOP)


def resume(cluster: Cluster, rng: random.Random) -> None:
    children = list(cluster.children.values())
    rng.shuffle(children)
    for child in children:
        os.kill(child.pid, signal.SIGCONT)
        time.sleep(rng.choice((0.0, 0.1, 1.0)))


def move_slowly(cluster: Cluster, rng: random.Random, seconds: float) -> None:
    """Let each process run for moments only."""
    children = list(cluster.children.values())
    ends_s = time.monotonic() + seconds
    pause(cluster)
    while time.monotonic() < ends_s:
        child = rng.choice(children)
        os.kill(child.pid, signal.SIGCONT)
        time.sleep(rng.choice((0.005, 0.02, 0.05, 0.2)))
        os.kill(child.pid, signal.SIGSTOP)
        time.sleep(rng.choice((0.0, 0.05, 0.3, 1.0)))


def until_whole(cluster: Cluster) -> float:
    """Wait until every node is in service. Return the seconds that it took."""
    began_s = time.monotonic()
    num_nodes = cluster.config.prefill + cluster.config.decode
    while True:
        health = ask_health(f"http://127.0.0.1:{cluster.port}") or HealthReply()
        took_s = time.monotonic() - began_s
        if len(health.ready_ids) == num_nodes:
            return took_s
        assert took_s < BACK_S, cluster.lines[-20:]
        time.sleep(0.1)


@pytest.mark.release
@pytest.mark.timeout(600)
@pytest.mark.parametrize("over", ["ipc", "tcp"])
def test_every_node_is_back_within_seconds_after_the_host_stood_still(over, tmp_path):
    rng = random.Random(1)
    with Cluster(tmp_path, CONFIG, over=over) as cluster:
        for slow_s in (0.0, 20.0, 35.0):
            pause(cluster)
            time.sleep(25.0)
            move_slowly(cluster, rng, slow_s)
            resume(cluster, rng)
            until_whole(cluster)
            assert cluster.complete(model="tiny", prompt=[5, 6, 7], max_tokens=4)[
                "choices"
            ]
