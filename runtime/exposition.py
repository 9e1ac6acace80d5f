"""Metrics for Prometheus: the definition of a family, cheap counters, and the page to scrape.

The router and the nodes describe their families in tables of `Family`, from which docs/metrics.md
is generated. Counts are plain numbers without locks, because tokens are counted one by one on the
thread that owns them; they become samples only when the page is asked for.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, TypeVar

import msgspec
from prometheus_client import ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

CONTENT_TYPE = CONTENT_TYPE_LATEST

Labels = tuple[str, ...]


class Family(msgspec.Struct, frozen=True):
    """One family of metrics. The samples of a counter have the ending `_total` besides `name`."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    meaning: str
    labels: Labels = ()
    vllm: str = ""  # the family of vLLM with the same meaning

    @property
    def full_name(self) -> str:
        """Return the name that the page and the documentation show."""
        return f"{self.name}_total" if self.kind == "counter" else self.name


class Histogram:
    """The counts of observations up to each of `bounds`."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        """Return the cumulative counts with their bounds, as Prometheus writes them."""
        found, so_far = [], 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            so_far += count
            found.append((bound, float(so_far)))
        return found


Values = Sequence[tuple[Labels, float | Histogram]]
AnyLabels = TypeVar("AnyLabels", bound=Labels)


class Page(Collector):
    """The families of one process with their values, and the system's figures of the process.

    Every family gets the labels of `constant` as well.
    """

    def __init__(self, constant: Mapping[str, str]) -> None:
        self._names, self._texts = tuple(constant), tuple(constant.values())
        self._families: list[tuple[Family, Values]] = []

    def add(
        self, family: Family, values: Mapping[AnyLabels, float] | Mapping[AnyLabels, Histogram]
    ) -> None:
        """Add the values of a family by its labels."""
        self._families.append((family, list(values.items())))

    def collect(self) -> Iterator[Metric]:
        for family, values in self._families:
            yield self._metric(family, values)
        yield from _process_metrics()

    def text(self) -> bytes:
        return generate_latest(self)

    def _metric(self, family: Family, values: Values) -> Metric:
        names = (*self._names, *family.labels)
        metric: Metric = _KINDS[family.kind](family.name, family.meaning, labels=names)
        for labels, value in values:
            texts = (*self._texts, *labels)
            if isinstance(value, Histogram):
                assert isinstance(metric, HistogramMetricFamily)
                metric.add_metric(texts, value.buckets(), value.total)
            else:
                assert isinstance(metric, CounterMetricFamily | GaugeMetricFamily)
                metric.add_metric(texts, value)
        return metric


_KINDS = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}


def _process_metrics() -> Iterable[Metric]:
    return ProcessCollector(registry=None).collect()
