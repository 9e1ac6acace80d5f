"""The figures of a load: every figure of a report, and the definition that is printed with it.

A failed request has no latency that counts, but it stays in every denominator. The intended arrival
of a request decides its order, and not its end. Nothing here may mend, drop or reorder records.
"""

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate

import msgspec
import numpy as np
import numpy.typing as npt

from baton.bench.records import LoadResult, Outcome, Record
from baton.protocol.errors import BatonError

Floats = npt.NDArray[np.float64]

# With fewer rounds, even the range of all of them covers the median in fewer than 95 of 100 cases.
MIN_ROUNDS = 6
NUM_BATCHES = 20
# Two-sided 95 % of Student's t with NUM_BATCHES - 1 degrees of freedom.
_T_OF_19 = 2.093

# The figures of a request that a summary has distributions of.
PER_REQUEST = ("ttft", "ttft_from_sent", "tpot", "gap_max", "e2e", "ntpot")

# The figures by which runs are compared: these, and rates and shares, of which more is better.
HEADLINES = (
    ("ttft", "p50"),
    ("ttft", "p99"),
    ("tpot", "p50"),
    ("tpot", "p99"),
    ("itl", "p99"),
    ("gap_max", "p99"),
    ("e2e", "p50"),
    ("e2e", "p99"),
)
RATES = {"tokens/s": "tokens/s", "goodput": "requests/s", "answered": "share"}

DEFINITIONS: Mapping[str, str] = {
    "intended": "when the schedule wanted the request to arrive; in a closed loop, when it is sent",
    "lag": "sent - intended, of all requests; the delay of the client itself",
    "ttft": "first byte that carries a token, at the client - intended",
    "ttft_from_sent": "the same from the moment of sending",
    "e2e": "last byte of the answer - intended",
    "chunk_gap": "time between two arrivals of tokens of one request, as they came",
    "itl": "the gap before a chunk of k tokens counts as k gaps of a k-th of it",
    "gap_max": "the largest chunk_gap of one request",
    "tpot": "(last token - first token) / (n - k0), where k0 of the n tokens came with the first; "
    "n - 1 where tokens come one by one. A request whose tokens all came at once has none",
    "ntpot": "e2e / n",
    "attainment": "share of ALL arrivals that were answered within all bounds; a failure misses "
    "them, and a tpot or gap_max that does not exist meets them",
    "goodput": "requests per second that were answered within all bounds",
    "window": "from the first intended arrival to the last end, in an open loop at least to where "
    "the next arrival would be, a mean gap after the last. Warm-up never counts, nor does what was "
    "under way when a load was stopped",
    "offered_rate": "(arrivals - 1) / (last - first arrival)",
    "answered_rate": "answered requests / window; arrivals at one moment have neither this rate "
    "nor the others of requests",
    "tokens_per_s": "output tokens that arrived within the window / window",
    "concurrency": "mean number of requests between sending and end, within the window",
    "cached_share": "prompt tokens that the server says it had cached / prompt tokens",
    "percentile": "nearest rank: the smallest sample that p % of the samples do not exceed; no "
    "interpolation. Latencies are of answered requests, in milliseconds",
    "interval": "95 %, by batch means: 20 batches in the order of arrival; of a share the wider of "
    "that and Wilson's",
}


class Bounds(msgspec.Struct, frozen=True, omit_defaults=True):
    """Limits that a good request must not exceed. None means no limit."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    gap_max_ms: float | None = None
    e2e_ms: float | None = None

    def __str__(self) -> str:
        words = ((name.removesuffix("_ms"), limit) for name, limit in _limits(self))
        return (
            ", ".join(f"{name} <= {limit:g} ms" for name, limit in words) or "answered"
        )


# For a model of about 8B parameters on one large GPU.
PRESETS: Mapping[str, Bounds] = {
    "chat": Bounds(ttft_ms=300, tpot_ms=25, gap_max_ms=250),
    "tight": Bounds(ttft_ms=150, tpot_ms=10, gap_max_ms=100),
    "long-32k": Bounds(ttft_ms=2000, tpot_ms=30, gap_max_ms=500),
}


class Window(msgspec.Struct, frozen=True):
    """From `start_s` up to, but without, `end_s`."""

    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


class Distribution(msgspec.Struct, frozen=True):
    """The distribution of a non-empty sample, in milliseconds."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float
    min: float


class Interval(msgspec.Struct, frozen=True):
    """An estimate and the ends of its 95 % interval."""

    estimate: float
    low: float
    high: float


class Ratio(msgspec.Struct, frozen=True):
    """A over B. With fewer than `MIN_ROUNDS` rounds the ends are the range of `each`."""

    median: float
    low: float
    high: float
    rounds: int
    each: tuple[float, ...] = ()  # in the order of the rounds

    @property
    def is_conclusive(self) -> bool:
        """Return whether A and B differ, in enough rounds to say so."""
        return self.rounds >= MIN_ROUNDS and not self.low <= 1.0 <= self.high


class Timing(msgspec.Struct, frozen=True):
    """The figures of one request, in milliseconds. None where there is nothing to measure."""

    lag_ms: float
    e2e_ms: float
    num_tokens: int
    ttft_ms: float | None = None
    ttft_from_sent_ms: float | None = None
    tpot_ms: float | None = None
    gap_max_ms: float | None = None
    ntpot_ms: float | None = None


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """A load in figures. Rates are per second, shares between 0 and 1, latencies distributions."""

    num_requests: int  # arrivals that count; the denominator of every share
    outcomes: dict[str, int]
    window: Window
    offered_rate: float | None
    answered_rate: float | None  # None if nothing is offered per second, as goodput
    tokens_per_s: float
    num_tokens: int  # output, of answered requests
    # Of answered requests; None if the server did not say.
    num_prompt_tokens: int | None
    tokens_per_chunk: float | None
    ttft: Distribution | None
    ttft_from_sent: Distribution | None
    itl: Distribution | None
    chunk_gap: Distribution | None
    tpot: Distribution | None
    gap_max: Distribution | None
    e2e: Distribution | None
    ntpot: Distribution | None
    lag: Distribution
    bounds: Bounds | None
    attainment: float | None  # None without bounds, as the next two
    attainment_interval: Interval | None
    goodput: float | None
    cached_share: float | None
    concurrency: float


def chunk_gaps(record: Record) -> tuple[Floats, Floats]:
    """Return the seconds before each later arrival of tokens, and how many tokens it brought."""
    stamps = np.array([arrival.at_s for arrival in record.arrivals], np.float64)
    tokens = np.array([arrival.num_tokens for arrival in record.arrivals], np.float64)
    return np.diff(stamps), tokens[1:]


def measure(record: Record) -> Timing:
    """Measure one request, failed or not; its outcome says whether the figures count."""
    lag_ms = 1e3 * (record.sent_s - record.intended_s)
    e2e_ms = 1e3 * (record.end_s - record.intended_s)
    whole = Timing(lag_ms, e2e_ms, record.num_tokens)
    if not whole.num_tokens:
        return whole
    gaps, tokens = chunk_gaps(record)
    first_s = record.arrivals[0].at_s
    return msgspec.structs.replace(
        whole,
        ttft_ms=1e3 * (first_s - record.intended_s),
        ttft_from_sent_ms=1e3 * (first_s - record.sent_s),
        tpot_ms=1e3 * float(gaps.sum()) / float(tokens.sum()) if len(gaps) else None,
        gap_max_ms=1e3 * float(gaps.max()) if len(gaps) else None,
        ntpot_ms=e2e_ms / whole.num_tokens,
    )


def meets(record: Record, bounds: Bounds) -> bool:
    """Return whether a request was answered within all bounds; the limit itself is within."""
    if record.outcome is not Outcome.ANSWERED:
        return False
    timing = measure(record)
    if bounds.ttft_ms is not None and timing.ttft_ms is None:
        return False
    # A figure that does not exist meets its bound.
    return all(
        (getattr(timing, name) or 0.0) <= limit for name, limit in _limits(bounds)
    )


def counted(records: Sequence[Record]) -> list[Record]:
    """Return the requests that a summary is about, in the order of their intended arrivals."""
    chosen = [
        one for one in records if not one.warm_up and one.outcome is not Outcome.STOPPED
    ]
    return sorted(chosen, key=lambda record: (record.intended_s, record.index))


def distribution(samples_ms: Sequence[float] | Floats) -> Distribution | None:
    """Describe a sample; None if it is empty."""
    if not len(samples_ms):
        return None
    ordered = np.sort(np.asarray(samples_ms, np.float64))
    p50, p90, p95, p99 = (
        nearest_rank(ordered, percent) for percent in (50, 90, 95, 99)
    )
    smallest = float(ordered[0])
    largest = float(ordered[-1])
    return Distribution(
        len(ordered), float(ordered.mean()), p50, p90, p95, p99, largest, smallest
    )


def summarise(
    result: LoadResult,
    *,
    bounds: Bounds | None = None,
    closed_loop: bool = False,
) -> Summary:
    """Return all figures of a load. Raises `BatonError` if no request arrived."""
    records = counted(result.records)
    if not records:
        raise BatonError("no request arrived, so there is nothing to measure")
    good = [record for record in records if record.outcome is Outcome.ANSWERED]
    answered = [measure(record) for record in good]
    latencies = {
        name: distribution(
            [ms for one in answered if (ms := getattr(one, f"{name}_ms")) is not None]
        )
        for name in PER_REQUEST
    }
    lag = distribution(
        [1e3 * (record.sent_s - record.intended_s) for record in records]
    )
    assert lag is not None, "there is at least one request"
    arrived, span = _spans(records, closed_loop)
    offered_rate = _per_s(len(records), arrived) or None
    came = [(one.at_s, one.num_tokens) for record in records for one in record.arrivals]
    met = [meets(record, bounds) for record in records] if bounds is not None else []
    ends = Counter(record.outcome for record in records)
    chunk_ms, itl_ms, num_chunks = gaps_ms(good)
    num_tokens = sum(timing.num_tokens for timing in answered)
    prompts = [
        record.prompt_tokens for record in good if record.prompt_tokens is not None
    ]
    caches = [
        (record.cached_tokens, record.prompt_tokens)
        for record in good
        if record.cached_tokens is not None and record.prompt_tokens
    ]
    return Summary(
        num_requests=len(records),
        outcomes={outcome.value: ends[outcome] for outcome in Outcome if ends[outcome]},
        window=span,
        offered_rate=offered_rate,
        answered_rate=_per_s(len(answered), span) if offered_rate else None,
        tokens_per_s=_per_s(
            sum(span.start_s <= at_s <= span.end_s and num for at_s, num in came), span
        ),
        num_tokens=num_tokens,
        num_prompt_tokens=sum(prompts) if prompts else None,
        tokens_per_chunk=num_tokens / num_chunks if num_chunks else None,
        itl=distribution(itl_ms),
        chunk_gap=distribution(chunk_ms),
        lag=lag,
        bounds=bounds,
        attainment=sum(met) / len(met) if met else None,
        attainment_interval=share_interval(met) if met else None,
        goodput=_per_s(sum(met), span) if met and offered_rate else None,
        cached_share=sum(had for had, _ in caches) / sum(of for _, of in caches)
        if caches
        else None,
        concurrency=_concurrency(records, span),
        **latencies,
    )


def figures_of(summary: Summary) -> dict[str, float]:
    """Return the figures by which loads are compared; 0 if a load has no such figure."""
    found: dict[str, float | None] = {"tokens/s": summary.tokens_per_s}
    for field, percentile in HEADLINES:
        one: Distribution | None = getattr(summary, field)
        shown = field if field == "gap_max" else field.upper()
        found[f"{shown} {percentile}"] = (
            None if one is None else getattr(one, percentile)
        )
    found["goodput"] = summary.goodput
    # Latencies are of these requests, so an arm must not look better by answering fewer.
    found["answered"] = summary.outcomes.get(Outcome.ANSWERED, 0) / summary.num_requests
    return {name: value or 0.0 for name, value in found.items()}


def unit_of(figure: str) -> str:
    return RATES.get(figure, "ms")


def _limits(bounds: Bounds) -> list[tuple[str, float]]:
    named = [(name, getattr(bounds, name)) for name in Bounds.__struct_fields__]
    return [(name, limit) for name, limit in named if limit is not None]


def gaps_ms(answered: Sequence[Record]) -> tuple[Floats, Floats, int]:
    """Return all gaps between chunks, the same per token, and the number of chunks."""
    chunks = [np.zeros(0)]
    per_token = [np.zeros(0)]
    num_chunks = 0
    for record in answered:
        gaps, tokens = chunk_gaps(record)
        chunks.append(1e3 * gaps)
        per_token.append(np.repeat(1e3 * gaps / tokens, tokens.astype(np.int64)))
        num_chunks += len(gaps) + (record.num_tokens > 0)
    return np.concatenate(chunks), np.concatenate(per_token), num_chunks


def _per_s(count: float, span: Window) -> float:
    return count / span.duration_s if span.duration_s > 0 else 0.0


def _spans(records: Sequence[Record], closed_loop: bool) -> tuple[Window, Window]:
    """Return the spans over which arrivals and answers are counted.

    The span of arrivals reaches to where the next arrival would be. The span of answers reaches to
    the last end, and in an open loop at least as far as that of arrivals: otherwise more would be
    answered per second than was offered.
    """
    first_s = records[0].intended_s
    last_s = records[-1].intended_s
    next_s = last_s + (last_s - first_s) / max(1, len(records) - 1)
    end_s = max(record.end_s for record in records)
    return Window(first_s, next_s), Window(
        first_s, end_s if closed_loop else max(end_s, next_s)
    )


def _concurrency(records: Sequence[Record], span: Window) -> float:
    within = (
        min(one.end_s, span.end_s) - max(one.sent_s, span.start_s) for one in records
    )
    # Sorted, so that the sum does not depend on the order of the records.
    return _per_s(sum(sorted(max(0.0, seconds) for seconds in within)), span)


def nearest_rank(ordered: Sequence[float] | Floats, percent: float) -> float:
    """Return the smallest of the `ordered` samples that at least `percent` % do not exceed."""
    assert len(ordered) > 0
    assert 0 < percent <= 100
    # Without the margin 99.9 * 1000 / 100, which is a little more than 999, would round up.
    rank = math.ceil(percent * len(ordered) / 100 - 1e-9)
    return float(ordered[max(1, rank) - 1])


def paired(a: Sequence[float], b: Sequence[float]) -> Ratio:
    """Compare A with B, round i of which ran side by side. All figures are positive.

    The interval is that of the sign test: it lies between two of the ratios, and covers at least
    95 % however they are distributed, if rounds do not depend on each other.
    """
    if len(a) != len(b) or not a:
        raise ValueError(
            f"{len(a)} rounds of one and {len(b)} of the other cannot be paired"
        )
    each = tuple(one / other for one, other in zip(a, b, strict=True))
    ratios = sorted(each)
    cut = _outside(len(each))
    return Ratio(
        statistics.median(each), ratios[cut], ratios[-1 - cut], len(each), each
    )


def _outside(num_rounds: int) -> int:
    """Return how many ratios lie below the 95 % interval of their median; as many lie above.

    More than n - k ratios lie on one side of the true median with the probability that fewer than k
    of n coins show heads, which may be 1 in 40 per side.
    """
    chances = accumulate(
        math.comb(num_rounds, heads) for heads in range(num_rounds + 1)
    )
    rare = [count for count in chances if 40 * count <= 1 << num_rounds]
    return max(0, len(rare) - 1)


def batch_means(samples: Sequence[float]) -> Interval | None:
    """Estimate the mean of a sequence whose neighbours depend on each other, in order of arrival.

    The means of long batches hardly depend on each other. Return None if batches would be shorter
    than two samples.
    """
    if len(samples) < 2 * NUM_BATCHES:
        return None
    values = np.asarray(samples, np.float64)
    means = np.array([batch.mean() for batch in np.array_split(values, NUM_BATCHES)])
    half = _T_OF_19 * float(means.std(ddof=1)) / math.sqrt(NUM_BATCHES)
    middle = float(values.mean())
    return Interval(middle, middle - half, middle + half)


def share_interval(met: Sequence[bool]) -> Interval:
    """Estimate a share of a sequence that is not empty: the wider of Wilson's and batch means.

    Wilson's interval is wide for few samples; that of batch means is wide for dependent samples.
    """
    size = len(met)
    share = sum(met) / len(met)
    z2 = 1.96**2
    middle = (share + z2 / (2 * size)) / (1 + z2 / size)
    half = math.sqrt(z2 * (share * (1 - share) / size + z2 / (4 * size**2))) / (
        1 + z2 / size
    )
    low = middle - half
    high = middle + half
    if (batches := batch_means(met)) is not None:
        low = min(low, batches.low)
        high = max(high, batches.high)
    return Interval(share, min(share, max(0.0, low)), max(share, min(1.0, high)))
