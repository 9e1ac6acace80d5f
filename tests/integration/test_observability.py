"""What real processes show of themselves and of their requests: metrics and logs."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from baton.protocol.config import (
    CacheConfig,
    ClusterConfig,
    EngineConfig,
    ModelConfig,
    NodeConfig,
    RouterConfig,
)
from tests.support.checkpoints import model_folder
from tests.support.cluster import Cluster
from tests.support.oracle import prompt

BLOCK = 16
WAIT_S = 60.0
PROMPT, NUM_TOKENS = prompt(4 * BLOCK + 1), 8
BODY = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    config = ClusterConfig(
        model=ModelConfig(path=str(model_folder("llama")), name="tiny"),
        cache=CacheConfig(num_blocks=700),
        engine=EngineConfig(chunk_tokens=64),
        router=RouterConfig(local_prefill="never"),
        node=NodeConfig(http="127.0.0.1:0"),
    )
    with Cluster(tmp_path_factory.mktemp("cluster"), config) as cluster:
        for _ in range(2):  # the second finds the first one's blocks in the prefix caches
            cluster.complete(**BODY)
        yield cluster


def test_nodes_serve_probes_and_the_counts_that_the_router_shows_of_them(cluster: Cluster) -> None:
    lines = [re.search(r"(decode|prefill)-0: .*/metrics on (\S+)", line) for line in cluster.lines]
    urls = {found[1]: found[2] for found in lines if found}
    assert set(urls) == {"prefill", "decode"}
    expected = {
        "prefill": {
            "baton_node_prompt_tokens_total": len(PROMPT) + 1,
            "baton_prefix_cache_queries_total": 2 * len(PROMPT),
            "baton_prefix_cache_hits_total": 4 * BLOCK,
            "baton_node_kv_reads_total": 0,
        },
        "decode": {
            "baton_node_generation_tokens_total": 2 * (NUM_TOKENS - 1),
            "baton_prefix_cache_hits_total": 4 * BLOCK,
            "baton_node_kv_read_failures_total": 0,
        },
    }
    for role, url in urls.items():
        for path in ("/live", "/ready"):
            with urllib.request.urlopen(url + path, timeout=30.0) as reply:
                assert reply.status == 200
        with urllib.request.urlopen(f"{url}/metrics", timeout=30.0) as reply:
            own = values(reply.read().decode(), node=f"{role}-0")
        assert expected[role].items() <= own.items()
        node = f"{role}-0"  # whose beats come once a second
        wait_until(lambda own=own, node=node: values(page(cluster), node=node) == own)


def test_a_lost_node_stays_visible_as_0_and_one_that_leaves_as_planned_does_not(
    cluster: Cluster,
) -> None:
    up = {"node": "decode-1", "role": "decode"}
    for signal_number, text in (
        (signal.SIGTERM, "node left as planned"),
        (signal.SIGKILL, "out of service"),
    ):
        cluster.start_node("decode", 1)
        wait_until(lambda: values(page(cluster), "gauge", **up).get("baton_node_up") == 1)
        wait_until(
            lambda: '"decode-1","role":"decode","state":"ready"' in cluster.get("/health")[1]
        )
        os.kill(cluster.children["decode-1"].pid, signal_number)
        assert cluster.children["decode-1"].wait(time.monotonic() + WAIT_S)
        wait_until(lambda text=text: any(text in line for line in told_of("decode-1", cluster)))
        shown = values(page(cluster), "gauge", **up)
        assert shown.get("baton_node_up") == (0 if signal_number == signal.SIGKILL else None)
    lines = told_of("decode-1", cluster)
    assert [line for line in lines if "out of service" in line] == lines[-1:]


def test_with_log_json_serve_prints_nothing_else(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "baton", "serve", "--port", "0", "--log-json"]
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env, cwd=tmp_path, text=True
    ) as process:
        lines = []
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(json.loads(line))
            if lines[-1]["process"] == "serve" and lines[-1]["message"] == "ready":
                process.send_signal(signal.SIGINT)
    processes = {line["process"] for line in lines}
    assert processes == {"serve", "router", "prefill-0", "decode-0"}
    assert process.returncode == 0, lines


def wait_until(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def page(cluster: Cluster) -> str:
    return cluster.get("/metrics")[1]


def told_of(node: str, cluster: Cluster) -> list[str]:
    """What the router's log says of a node that has left."""
    words = ("left as planned", "out of service")
    lines = [line for line in cluster.lines if f"node={node}" in line and "router:" in line]
    return [line for line in lines if any(word in line for word in words)]


def values(page: str, kind: str = "counter", **labels: str) -> dict[str, float]:
    """The samples of families of a kind with these labels."""
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if family.type == kind and labels.items() <= sample.labels.items()
    }
