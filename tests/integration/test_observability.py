"""What real processes show of themselves and of their requests: metrics and logs."""

import json
import os
import re
import signal
import time
import urllib.request

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from baton.router.http.metrics import ROUTER_FAMILIES
from tests.support.cluster import Cluster
from tests.support.completions import ask
from tests.support.oracle import prompt
from tests.support.sources import REPOSITORY
from tests.support.waiting import until

GRAFANA = REPOSITORY / "deploy" / "grafana"
# Labels that it adds to what it scrapes, or its operator does.
OF_PROMETHEUS = {"job", "instance", "cluster", "namespace"}
BLOCK = 16
WAIT_S = 60.0
PROMPT = prompt(4 * BLOCK + 1, salt=70)
NUM_TOKENS = 8
BODY = {
    "prompt": PROMPT,
    "max_tokens": NUM_TOKENS,
    "temperature": 0,
    "ignore_eos": True,
}


def test_a_node_says_what_it_computes_with_and_which_setting_makes_its_pool_short(
    cluster,
):
    for role in ("prefill", "decode"):
        lines = [line for line in cluster.lines if f" {role}-0: " in line]
        (ready,) = [line for line in lines if f": ready role={role} " in line]
        fields = dict(re.findall(r" (\w+)=(\S+)", ready))
        assert int(fields.pop("threads")) >= 1
        assert fields.pop("compute")
        assert fields == {
            "role": role,
            "device": "cpu",
            "dtype": "float32",
            "kv_tokens": "8000",
            "blocks": "500",
            "max_model_len": "8192",
            "transports": fields["transports"],
            "batch_invariant": "True",
        }
        assert "shm" in fields["transports"].split(",")
        (short,) = [line for line in lines if "no sequence can be longer" in line]
        assert short.endswith(
            "holds 8000 tokens, so no sequence can be longer, although the model "
            "takes 8192: raise cache.num_blocks"
        )
    assert '"max_model_len":8000' in cluster.get("/v1/models")[1]


def test_nodes_serve_probes_and_the_counts_that_the_router_shows_of_them(cluster):
    lines = [
        re.search(r"(decode|prefill)-0: .*/metrics on (\S+)", line)
        for line in cluster.lines
    ]
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
    before = {role: counters(url, role) for role, url in urls.items()}
    for _ in range(2):
        cluster.complete(**BODY)

    def gained(role: str) -> dict[str, float]:
        """What a node counts since, once the router shows the same, by a heartbeat a second."""
        own = counters(urls[role], role)
        is_shown = values(page(cluster), node=f"{role}-0") == own
        return (
            {name: own[name] - before[role][name] for name in expected[role]}
            if is_shown
            else {}
        )

    for role, url in urls.items():
        for path in ("/live", "/ready"):
            with urllib.request.urlopen(url + path, timeout=30.0) as reply:
                assert reply.status == 200
        until(
            lambda role=role: gained(role) == expected[role],
            lambda role=role: gained(role),
        )


@pytest.mark.release
def test_a_response_says_how_many_tokens_were_guessed_right(cluster):
    """A greedy text that goes in circles is guessed, and the nodes' counts agree."""

    def counts() -> tuple[float, float]:
        shown = values(page(cluster), node="decode-0")
        draft, accepted = (
            shown[f"baton_spec_decode_num_{kind}_tokens_total"]
            for kind in ("draft", "accepted")
        )
        return draft, accepted

    before = counts()
    body = {**BODY, "prompt": prompt(30, salt=71), "max_tokens": 120}
    usage = cluster.complete(**body)["usage"]
    assert isinstance(usage, dict)
    details = usage["completion_tokens_details"]
    accepted = details["accepted_prediction_tokens"]
    drafts = accepted + details["rejected_prediction_tokens"]
    assert 0 < accepted < usage["completion_tokens"] == 120
    until(
        lambda: counts() == (before[0] + drafts, before[1] + accepted),
        lambda: (before, counts(), usage),
    )


def test_a_lost_node_stays_visible_as_0_and_one_that_leaves_as_planned_does_not(
    cluster,
):
    up = {"node": "decode-1", "role": "decode"}
    for signal_number, text in (
        (signal.SIGTERM, "has left: it was told to end"),
        (signal.SIGKILL, "is lost: "),
    ):
        cluster.start_node("decode", 1)
        until(lambda: values(page(cluster), "gauge", **up).get("baton_node_up") == 1)
        until(
            lambda: (
                '"decode-1","role":"decode","state":"ready"'
                in cluster.get("/health")[1]
            )
        )
        os.kill(cluster.children["decode-1"].pid, signal_number)
        assert cluster.children["decode-1"].wait(time.monotonic() + WAIT_S)
        until(
            lambda text=text: any(text in line for line in told_of("decode-1", cluster))
        )
        shown = values(page(cluster), "gauge", **up)
        assert shown.get("baton_node_up") == (
            0 if signal_number == signal.SIGKILL else None
        )
    del cluster.children["decode-1"]
    lines = told_of("decode-1", cluster)
    assert [line for line in lines if "is lost: " in line] == lines[-1:]


def test_a_request_is_one_trace_whose_stages_add_up_to_its_latency(cluster, collector):
    """The page has the same stages, and the client's trace goes on."""
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    parent = "00f067aa0ba902b7"
    # So many tokens that a prefill node without a core for a while tells its stages before the end.
    body = {**BODY, "prompt": prompt(70, salt=71), "max_tokens": 100}
    with ask(cluster.url(""), body, traceparent=f"00-{trace}-{parent}-01") as reply:
        name = reply.headers["X-Request-Id"]
    with urllib.request.urlopen(cluster.url("/status.json"), timeout=10) as reply:
        requests = json.loads(reply.read())["requests"]
    (shown,) = [one for one in requests if one["request_id"] == name]
    stages = shown["stages"]
    assert sum(stage["duration_s"] for stage in stages) == pytest.approx(
        shown["e2e_s"], abs=1e-3
    )
    computed = [stage["stage"] for stage in stages if stage["node"]]
    assert computed[0] in ("queue", "prefill")
    assert {"prefill", "first_step", "decode"} <= set(computed)
    # The root ends last, perhaps in a message of its own.
    until(
        lambda: any(span.parent_span_id.hex() == parent for span in collector.of(trace))
    )
    spans = {span.name: span for span in collector.of(trace)}
    (root,) = [span for span in spans.values() if span.parent_span_id.hex() == parent]
    assert root.name == "POST /v1/completions"
    whole = spans["llm_request"]
    assert [name for name in spans if spans[name].parent_span_id == whole.span_id] == [
        stage["stage"] for stage in stages
    ]
    in_spans_ns = sum(
        span.end_time_unix_nano - span.start_time_unix_nano
        for span in spans.values()
        if span.parent_span_id == whole.span_id
    )
    assert in_spans_ns / 1e9 == pytest.approx(shown["e2e_s"], abs=1e-3)


def test_every_query_of_the_board_and_of_the_alerts_finds_what_it_names(cluster):
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(page(cluster)):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    for family in ROUTER_FAMILIES:  # some have no sample until something goes wrong
        found.setdefault(family.full_name, {*family.labels, "model_name"})
    board = json.loads((GRAFANA / "board.json").read_text())
    (group,) = yaml.safe_load((GRAFANA / "alerts.yaml").read_text())["groups"]
    queries = [
        target["expr"] for panel in board["panels"] for target in panel["targets"]
    ]
    queries += [
        one["query"] for one in board["templating"]["list"] if one["type"] == "query"
    ]
    for query in [*queries, *(rule["expr"] for rule in group["rules"])]:
        metrics = re.findall(r"\b(?:baton|process)_\w+", query)
        assert set(metrics) <= found.keys(), query
        labels = re.findall(r'(\w+)\s*(?:=~|!~|!=|=)\s*"', query)
        for grouping in re.findall(r"\bby\s*\(([^)]*)\)", query):
            labels += re.findall(r"\w+", grouping)
        known = set[str]().union(*(found[metric] for metric in metrics))
        assert metrics
        assert set(labels) <= known | OF_PROMETHEUS, query
    for rule in group["rules"]:
        assert set(rule["annotations"]) == {"summary", "action"}


def page(cluster: Cluster) -> str:
    return cluster.get("/metrics")[1]


def counters(url: str, role: str) -> dict[str, float]:
    """What a node counts of itself."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30.0) as reply:
        return values(reply.read().decode(), node=f"{role}-0")


def told_of(node: str, cluster: Cluster) -> list[str]:
    """What the router's log says of a node that has left."""
    words = ("left as planned", "out of service")
    lines = [
        line for line in cluster.lines if f"node={node}" in line and "router:" in line
    ]
    return [line for line in lines if any(word in line for word in words)]


def values(page: str, kind: str = "counter", **labels: str) -> dict[str, float]:
    """The samples of families of a kind with these labels."""
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if family.type == kind and labels.items() <= sample.labels.items()
    }
