"""Prometheus metrics of one process, in a registry that its main creates and passes on.

Every name starts with `baton_` and ends in its unit. There is no global registry, so a test or a
second router in one process counts for itself.
"""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

PREFIX = "baton_"
# Seconds, from an inter-token gap to a long prompt in a queue.
LATENCY_BUCKETS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip


class Metrics:
    """Creates metrics and renders them."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

    def counter(self, name: str, description: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(_checked(name), description, labels, registry=self.registry)

    def gauge(self, name: str, description: str, labels: Sequence[str] = ()) -> Gauge:
        return Gauge(_checked(name), description, labels, registry=self.registry)

    def histogram(
        self,
        name: str,
        description: str,
        labels: Sequence[str] = (),
        buckets: Sequence[float] = LATENCY_BUCKETS_S,
    ) -> Histogram:
        return Histogram(
            _checked(name), description, labels, registry=self.registry, buckets=buckets
        )

    def render(self) -> bytes:
        """The text that a Prometheus server scrapes, of type `content_type`."""
        return generate_latest(self.registry)


def _checked(name: str) -> str:
    if not name.startswith(PREFIX):
        raise ValueError(f"metric {name!r} must start with {PREFIX!r}")
    return name
