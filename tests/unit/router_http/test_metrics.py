"""What the router counts, as Prometheus reads it."""

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from baton.protocol.errors import NodeError
from baton.protocol.ids import NodeId
from baton.protocol.messages import Load, Totals
from baton.router.core.health import Health, ServedModel
from baton.router.core.pair_health import PairTransfers
from baton.router.http.api import sse
from baton.router.http.api.sse import DeltaCounter
from baton.router.http.metrics import MAX_CODES, ROUTER_FAMILIES, HttpMetrics, StatsLine
from baton.router.outputs import CompletionOutput, RequestMetrics
from baton.runtime.metrics import NODE_FAMILIES, Histogram, LostNode, NodeHealth

MODEL = ServedModel("tiny", "/tiny", "m", "l", 256, 400, 16, dtype="bfloat16")
D0 = NodeHealth(
    NodeId("d0"),
    "decode",
    "ready",
    "ready",
    0,
    0,
    Load(2, 1, 3, 4, 2, 1),
    0.5,
    0.0,
    0,
    0,
    totals=Totals(
        prefix_queried_tokens=10, prefix_hit_tokens=4, preemptions=2, leases_expired=1
    ),
    dtype="bfloat16",
    features=("prefix_caching",),
)


def samples(page: bytes) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
    }


def value(metrics: HttpMetrics, health: Health, name: str, **labels: str) -> float:
    wanted = frozenset({"model_name": "tiny", **labels}.items())
    return samples(metrics.render(health, MODEL))[name, wanted]


def test_retries_resumes_and_transfers_are_counted_once():
    metrics = HttpMetrics("tiny")
    failure = NodeError("gone").to_failure()
    for _ in range(2):
        request = RequestMetrics()
        request.try_again(failure, is_resume=False)
        for _ in range(3):
            request.try_again(failure, is_resume=True)
        metrics.ended(request, "finished", 1)
    moved = PairTransfers(NodeId("p0"), NodeId("d0"), 7, 2, 4096, 0.5)
    health = Health("ready", (), 0, 0, transfers=(moved,))
    assert value(metrics, health, "baton_retries_total", reason="node_lost") == 2
    assert value(metrics, health, "baton_resumes_total", reason="node_lost") == 6
    for name, expected in (
        ("s", 7),
        ("_failures", 2),
        ("_bytes", 4096),
        ("_seconds", 0.5),
    ):
        of_pair = value(
            metrics, health, f"baton_transfer{name}_total", prefill="p0", decode="d0"
        )
        assert of_pair == expected


def test_counters_of_losses_and_refusals_exist_before_the_first_one():
    """The rate of a counter that begins at 1 is 0, so the first loss would not be seen."""
    metrics = HttpMetrics("tiny")
    health = Health("ready", (), 0, 0)
    assert value(metrics, health, "baton_resumes_total", reason="node_lost") == 0
    assert value(metrics, health, "baton_retries_total", reason="transfer_timeout") == 0
    assert (
        value(metrics, health, "baton_refusals_total", status="429", code="queue_full")
        == 0
    )


def test_the_gaps_between_the_deltas_of_a_choice_are_observed(monkeypatch):
    times = iter([1.0, 1.5, 3.0, 3.5])
    monkeypatch.setattr(sse, "monotonic", lambda: next(times))
    metrics = HttpMetrics("tiny")
    taken: list[CompletionOutput] = []
    counter = DeltaCounter(metrics, 1, 2, taken.append)
    for choice in (0, 1, 0, 0):
        counter.note(CompletionOutput(choice, "a", [5, 6]))
    assert [delta.index for delta in taken] == [2, 3, 2, 2]
    assert metrics.num_output_tokens == 8
    health = Health("ready", (), 0, 0)
    assert value(metrics, health, "baton_inter_token_latency_seconds_count") == 2
    assert value(metrics, health, "baton_inter_token_latency_seconds_sum") == 2.5


@given(st.lists(st.sampled_from([0.0, 1.0, 2.0, 2.5, 3.0, 7.0]), max_size=20))
def test_values_that_are_counted_together_are_counted_as_each_alone(values):
    alone = Histogram([1.0, 2.0, 3.0])
    together = Histogram([1.0, 2.0, 3.0])
    for number in values:
        alone.observe(number)
        together.new.append(number)
    assert together.buckets() == alone.buckets()
    assert together.total == alone.total


def test_an_idle_router_has_no_line_of_stats():
    metrics = HttpMetrics("tiny")
    line = StatsLine(metrics)
    idle = Health("ready", (), 0, 0)
    assert line.take(10.0, idle) is None
    metrics.ended(RequestMetrics(num_prompt_tokens=50), "finished", 1)
    found = line.take(10.0, idle)
    assert (found["ended"], found["prompt_tokens_per_s"]) == (1, 5.0)
    assert line.take(10.0, idle) is None
    assert line.take(10.0, Health("ready", (), 1, 0)) is not None


def test_nodes_show_their_load_and_a_lost_one_stays_visible_as_zero():
    metrics = HttpMetrics("tiny", "1.2")
    waits = {"prefill": 0, "decode": 7}
    busy = {NodeId("d0"): 1.2}
    health = Health(
        "ready",
        (D0,),
        3,
        1,
        lost=(LostNode(NodeId("p0"), "prefill", 9.0),),
        num_waiting_for=waits,
        busy=busy,
    )
    d0 = {"node": "d0", "role": "decode"}
    p0 = {"node": "p0", "role": "prefill"}
    assert value(metrics, health, "baton_nodes", role="decode", state="ready") == 1
    assert value(metrics, health, "baton_router_waiting_requests", role="decode") == 7
    assert value(metrics, health, "baton_router_waiting_requests", role="prefill") == 0
    assert value(metrics, health, "baton_router_node_busy_ratio", **d0) == 1.2
    assert value(metrics, health, "baton_node_up", **d0) == 1
    assert value(metrics, health, "baton_node_up", **p0) == 0
    assert value(metrics, health, "baton_node_running_requests", **p0) == 0
    assert value(metrics, health, "baton_node_running_requests", **d0) == 2
    assert value(metrics, health, "baton_node_waiting_requests", **d0) == 1
    assert value(metrics, health, "baton_kv_cache_usage_perc", **d0) == 0.25
    assert value(metrics, health, "baton_node_quarantined_blocks", **d0) == 1
    assert value(metrics, health, "baton_prefix_cache_queries_total", **d0) == 10
    assert value(metrics, health, "baton_prefix_cache_hits_total", **d0) == 4
    assert value(metrics, health, "baton_num_preemptions_total", **d0) == 2
    assert value(metrics, health, "baton_node_leases_expired_total", **d0) == 1
    build = {
        "version": "1.2",
        "dtype": "bfloat16",
        "block_size": "16",
        "max_model_len": "256",
        "features": "prefix_caching",
    }
    assert value(metrics, health, "baton_build_info", **build) == 1
    assert (
        "baton_node_free_blocks",
        frozenset({"model_name": "tiny", **p0}.items()),
    ) not in (samples(metrics.render(health, MODEL)))


def test_a_request_is_seen_in_every_family_of_times_and_lengths():
    metrics = HttpMetrics("tiny")
    request = RequestMetrics(
        router_queue_s=0.25,
        queue_s=0.25,
        prefill_s=0.5,
        time_to_first_token_s=1.0,
        e2e_s=3.0,
        num_prompt_tokens=30,
        num_output_tokens=101,
        finish_reasons=["stop"],
    )
    metrics.ended(request, "finished", 1)
    health = Health("ready", (), 0, 0)
    sums = {
        "time_to_first_token_seconds": 1.0,
        "request_time_per_output_token_seconds": 0.02,
        "e2e_request_latency_seconds": 3.0,
        "request_queue_time_seconds": 0.5,
        "request_prefill_time_seconds": 0.5,
        "request_decode_time_seconds": 2.0,
        "request_inference_time_seconds": 2.5,
        "request_prompt_tokens": 30,
        "request_generation_tokens": 101,
    }
    for name, expected in sums.items():
        assert value(metrics, health, f"baton_{name}_sum") == expected
        assert value(metrics, health, f"baton_{name}_bucket", le="+Inf") == 1
    below = "baton_request_time_per_output_token_seconds_bucket"
    assert value(metrics, health, below, le="0.015") == 0
    assert value(metrics, health, below, le="0.02") == 1
    assert (
        value(metrics, health, "baton_request_success_total", finished_reason="stop")
        == 1
    )


def test_tokens_of_another_router_count_neither_as_ours_nor_in_our_pace():
    metrics = HttpMetrics("tiny")
    request = RequestMetrics(time_to_first_token_s=1.0, e2e_s=3.0, num_output_tokens=11)
    request.received(990)
    metrics.ended(request, "finished", 1)
    health = Health("ready", (), 0, 0)
    for name, expected in (
        ("time_per_output_token_seconds", 0.2),
        ("generation_tokens", 11),
    ):
        assert value(metrics, health, f"baton_request_{name}_sum") == expected
    assert request.num_output_tokens == 1001, "usage counts the whole answer"


def test_codes_that_others_invent_do_not_add_up():
    metrics = HttpMetrics("tiny")
    for number in range(2 * MAX_CODES):
        metrics.ended(RequestMetrics(), f"code-{number}", 1)
    health = Health("ready", (), 0, 0)
    shown = [
        key
        for key in samples(metrics.render(health))
        if key[0] == "baton_requests_total"
    ]
    assert len(shown) == MAX_CODES + 1
    others = {"path": "none", "outcome": "other"}
    assert value(metrics, health, "baton_requests_total", **others) == MAX_CODES


def test_the_page_has_the_families_of_the_tables_those_of_the_process_and_no_others():
    page = HttpMetrics("tiny").render(Health("ready", (D0,), 0, 0)).decode()
    found = [
        line.split()[2] for line in page.splitlines() if line.startswith("# TYPE ")
    ]
    ours = [name for name in found if not name.startswith("process_")]
    assert sorted(ours) == sorted(
        one.full_name for one in (*ROUTER_FAMILIES, *NODE_FAMILIES)
    )
    assert "process_cpu_seconds_total" in found
    assert "_created" not in page
