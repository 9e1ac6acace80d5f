"""The numbers behind the drawings: reports in, arrays out.

`drawings.py` draws them. Pure, and without matplotlib. Figures of requests come from `metrics.py`
alone; what the records cannot show is empty here, and not drawn.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from baton.bench.figures.metrics import Bounds, Summary, chunk_gaps, measure, meets
from baton.bench.figures.paired import Floats
from baton.bench.records import Outcome, Record
from baton.bench.report.document import Report, Run

MAX_CURVES = 8
MAX_BINS = 240  # of a timeline
# Which part of the requests sorted by e2e, and its name.
PARTS = (
    (0.0, 1.0, "all"),
    (0.0, 0.5, "faster half"),
    (0.5, 0.9, "next 40 %"),
    (0.9, 0.99, "next 9 %"),
    (0.99, 1.0, "slowest 1 %"),
)


@dataclass(frozen=True, slots=True)
class Group:
    """Runs that are shown as one: the rounds of an arm, or a single run."""

    label: str
    runs: list[Run]
    is_step: bool = False  # one step of a quantity, such as the rate

    @property
    def answered(self) -> list[Record]:
        records = (record for run in self.runs for record in run.counted)
        return [record for record in records if record.outcome is Outcome.ANSWERED]

    def times_ms(self, name: str) -> list[float]:
        """Return the figure `name` of the answered requests that have it."""
        times = [getattr(measure(record), f"{name}_ms") for record in self.answered]
        return [time_ms for time_ms in times if time_ms is not None]


class Sweep:
    """The runs of one server at several rates; a NaN where no run at a rate has a value."""

    def __init__(self, report: Report) -> None:
        rates: dict[float, list[Run]] = {}
        for run in report.runs:
            rates.setdefault(run.rate or run.summary.offered_rate or 0.0, []).append(run)
        self.rates = sorted(rates)
        self._runs = [rates[rate] for rate in self.rates]
        self.valid = np.array([not any(run.invalid for run in runs) for runs in self._runs], bool)
        self.offered = self._medians(lambda summary: summary.offered_rate)
        self.attainment = self._medians(lambda summary: summary.attainment)
        self.goodput = self._medians(lambda summary: summary.goodput)
        self.tokens_per_s = self._medians(lambda summary: summary.tokens_per_s)
        self.one_user = self._medians(_tokens_of_one)

    def _medians(self, value: Callable[[Summary], float | None]) -> Floats:
        known = [
            [found for run in runs if (found := value(run.summary)) is not None]
            for runs in self._runs
        ]
        return np.array([median(values) if values else math.nan for values in known])


def _tokens_of_one(summary: Summary) -> float | None:
    return 1e3 / summary.tpot.p50 if summary.tpot and summary.tpot.p50 else None


@dataclass(frozen=True, slots=True)
class Timeline:
    """A run in bins of whole seconds; a request counts where it arrived."""

    edges_s: Floats
    in_flight: Floats  # mean over each bin
    tokens_per_s: Floats
    arrivals_per_s: Mapping[str, Floats]  # by what became of them

    @property
    def bin_s(self) -> float:
        return float(self.edges_s[1] - self.edges_s[0])


def groups(report: Report) -> list[Group]:
    """Return at most `MAX_CURVES`, evenly chosen; rounds of one arm at one rate are one group."""
    repeated = any(run.round for run in report.runs)
    found: dict[object, list[Run]] = {}
    for place, run in enumerate(report.runs):
        found.setdefault((run.arm, run.rate) if repeated else place, []).append(run)
    arms, rates = {run.arm for run in report.runs}, {run.rate for run in report.runs}
    by_arm = repeated and len(found) == len(arms)
    steps = len(arms) == 1 and len(rates) > 1 and None not in rates
    every = sorted(found.values(), key=lambda runs: (runs[0].rate or 0.0) if steps else 0.0)
    count = min(len(every), MAX_CURVES)
    made = []
    for place in range(count):
        runs = every[round(place * (len(every) - 1) / max(1, count - 1))]
        label = (runs[0].arm if by_arm else "") or runs[0].label
        invalid = "INVALID " if any(run.invalid for run in runs) else ""
        made.append(Group(invalid + label, runs, steps))
    return made


def gaps_ms(found: Sequence[Group]) -> Floats:
    """Return all gaps between tokens, as `itl` counts them."""
    gaps = [chunk_gaps(record) for group in found for record in group.answered]
    each = [np.repeat(1e3 * gap_s / tokens, tokens.astype(np.int64)) for gap_s, tokens in gaps]
    return np.concatenate([np.zeros(0), *each])


def stage_rows(found: Sequence[Group]) -> list[tuple[str, Mapping[str, float]]]:
    """Return mean times in ms, of one group by how long its requests took, of several for each."""
    rows = [(group.label, [one for one in group.answered if one.stages]) for group in found]
    if len(rows) == 1:
        slower = sorted(rows[0][1], key=lambda record: record.end_s - record.intended_s)
        count = len(slower)
        rows = [
            (label, slower[math.floor(low * count) : math.ceil(high * count)])
            for low, high, label in PARTS
        ]
    return [(label, _mean_stages(records)) for label, records in rows if records]


def _mean_stages(records: list[Record]) -> dict[str, float]:
    means: dict[str, float] = {}
    for stage in (stage for record in records for stage in record.stages):
        means[stage.name] = means.get(stage.name, 0.0) + 1e3 * stage.duration_s / len(records)
    return means


def timeline(run: Run, bounds: Bounds | None) -> Timeline:
    """Return the bins of a run that measured at least one request; longer ones of a long run."""
    records = run.measured
    start_s = math.floor(records[0].intended_s)
    took_s = max(record.end_s for record in records) - start_s
    bin_s = max(1, math.ceil(took_s / MAX_BINS))
    edges_s = start_s + bin_s * np.arange(max(1, math.ceil(took_s / bin_s)) + 1, dtype=np.float64)
    in_flight = np.zeros(len(edges_s) - 1)
    for record in records:
        inside_s = np.clip(edges_s, record.sent_s, max(record.sent_s, record.end_s))
        in_flight += np.diff(inside_s) / bin_s
    carried = [one for record in records for one in record.arrivals]
    counts = [one.num_tokens for one in carried]
    tokens, _ = np.histogram([one.at_s for one in carried], edges_s, weights=counts)
    good = "met all bounds" if bounds else "answered"
    kinds: dict[str, list[float]] = {good: [], "answered, missed a bound": [], "failed": []}
    for record in records:
        met = bounds is None or meets(record, bounds)
        kind = good if met else "answered, missed a bound"
        kinds[kind if record.outcome is Outcome.ANSWERED else "failed"].append(record.intended_s)
    arrivals = {kind: np.histogram(at_s, edges_s)[0] / bin_s for kind, at_s in kinds.items()}
    return Timeline(edges_s, in_flight, tokens / bin_s, arrivals)
