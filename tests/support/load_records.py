"""Records and loads from a few numbers, for the tests of what is computed from them."""

from collections.abc import Sequence

from hypothesis import strategies as st

from baton.bench.records import Arrival, ClientProcess, LoadResult, Outcome, Planned, Record


def request(
    at_s: float = 0.0,
    after_s: Sequence[float | tuple[float, int]] = (0.1, 0.2, 0.3),
    *,
    index: int = 0,
    lag_s: float = 0.0,
    tail_s: float = 0.0,
    outcome: Outcome = Outcome.ANSWERED,
) -> Record:
    """Tokens this long after `at_s`, one each or as many as a pair says; `tail_s` to the end."""
    pairs = [one if isinstance(one, tuple) else (one, 1) for one in after_s]
    arrivals = [Arrival(at_s + late_s, count) for late_s, count in pairs]
    last_s = arrivals[-1].at_s if arrivals else at_s + lag_s
    return Record(
        index=index,
        intended_s=at_s,
        sent_s=at_s + lag_s,
        end_s=last_s + tail_s,
        outcome=outcome,
        arrivals=arrivals,
        forced_tokens=sum(count for _, count in pairs),
    )


def load(records: Sequence[Record], *clients: ClientProcess) -> LoadResult:
    wall_s = max((record.end_s for record in records), default=0.0)
    return LoadResult(list(records), list(clients), wall_s, "2026-03-01T12:00:00+00:00")


def steady(
    count: int, *, every_s: float = 0.1, ttft_s: float = 0.1, num_tokens: int = 10
) -> list[Record]:
    """Requests that come at a constant rate and are all answered alike, a token each 10 ms."""
    stamps = [ttft_s + 0.01 * place for place in range(num_tokens)]
    return [request(every_s * index, stamps, index=index) for index in range(count)]


def plan_of(records: Sequence[Record]) -> list[Planned]:
    """The plan that these records carried out."""
    return [
        Planned(record.index, record.intended_s, record.forced_tokens, warm_up=record.warm_up)
        for record in records
    ]


@st.composite
def loads(draw: st.DrawFn) -> list[Record]:
    """Any requests in any order: answered and failed ones, late ones, chunks of several tokens."""
    found = []
    for index in range(draw(st.integers(1, 8))):
        gaps = draw(st.lists(st.tuples(st.integers(1, 400), st.integers(1, 4)), max_size=4))
        counted = sorted(set(Outcome) - {Outcome.STOPPED})
        outcome = draw(st.sampled_from(counted)) if gaps else Outcome.TRUNCATED
        now_s, chunks = 0.0, []
        for gap_ms, count in gaps:
            now_s += gap_ms / 1e3
            chunks.append((now_s, count))
        at_s = draw(st.integers(0, 5_000)) / 1e3
        found.append(request(at_s, chunks, index=index, tail_s=0.001, outcome=outcome))
    return draw(st.permutations(found))
