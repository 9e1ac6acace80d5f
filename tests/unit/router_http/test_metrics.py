"""What the router counts of losses."""

from baton.protocol.ids import NodeId
from baton.router.health import Health
from baton.router.http.metrics import HttpMetrics
from baton.router.outputs import RequestMetrics


def value(metrics: HttpMetrics, health: Health, name: str) -> float:
    lines = metrics.render(health).decode().splitlines()
    return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name} "))


def test_retries_resumes_and_failed_transfers_are_counted_once() -> None:
    metrics = HttpMetrics()
    for _ in range(2):
        metrics.ended(RequestMetrics(num_retries=1, num_resumes=3), "finished", 1)
    health = Health("ready", (), 0, 0)
    assert value(metrics, health, "baton_retries_total") == 2
    assert value(metrics, health, "baton_resumes_total") == 6
    name = 'baton_transfer_failures_total{decode="d0",prefill="p0"}'
    for count in (2, 2, 5):
        failures = ((NodeId("p0"), NodeId("d0"), count),)
        health = Health("ready", (), 0, 0, transfer_failures=failures)
        assert value(metrics, health, name) == count
