"""What real processes show of themselves and of their requests: metrics and logs."""

import re
import time
import urllib.request
from collections.abc import Iterator

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
        deadline_s = time.monotonic() + WAIT_S
        while (shown := values(cluster.get("/metrics")[1], node=f"{role}-0")) != own:
            assert time.monotonic() < deadline_s, (shown, own)  # beats come once a second
            time.sleep(0.05)


def values(page: str, **labels: str) -> dict[str, float]:
    """The samples of counters and infos with these labels."""
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if family.type == "counter" and labels.items() <= sample.labels.items()
    }
