"""Records of loads that never ran: from a few numbers, or of an imagined server."""

from collections.abc import Sequence

import msgspec
from hypothesis import strategies as st

from baton.bench.figures.metrics import PRESETS, Bounds, summarise
from baton.bench.figures.validity import Case, judge
from baton.bench.plan.plan import Plan
from baton.bench.records import (
    Arrival,
    ClientProcess,
    LoadResult,
    Outcome,
    Planned,
    Record,
)
from baton.bench.report.document import Report, Run
from baton.bench.report.provenance import Machine, Provenance
from baton.bench.settings import LoadSettings, Settings, Workload

PROVENANCE = Provenance(
    created_at="2026-03-01T12:00:00+00:00",
    command_line=[
        "baton",
        "bench",
        "run",
        "--arrivals",
        "poisson:6",
        "--preset",
        "chat",
    ],
    baton_version="0.1.0",
    commit="0123456789abcdef0123456789abcdef01234567",
    dirty=False,
    machine=Machine(
        "Example CPU at 3.0 GHz", 16, 16, 128 << 30, [], "Linux 6.1 x86_64"
    ),
    versions={"python": "3.11.7", "aiohttp": "3.14.5"},
    load_before=(0.31, 0.42, 0.40),
    load_after=(1.12, 0.77, 0.52),
)


def scene_run(
    label: str = "a run", *, rate: float = 6.0, bounds: Bounds | None = PRESETS["chat"]
) -> Run:
    """Return a run with two warm-up requests, 40 answered ones and a refused one."""
    warm_up = [answered(index, index - 2.0, [1.5]) for index in range(2)]
    for record in warm_up:
        record.warm_up = True
    records = [
        answered(
            2 + n, n / rate, [0.1 + 0.001 * n + 0.012 * place for place in range(8)]
        )
        for n in range(40)
    ]
    refused = failed(42, 40 / rate, Outcome.REFUSED, "503: no room, try again in 1 s")
    client = ClientProcess(4711, 0.5, 10.0, 43, 320)
    result = load([*warm_up, *records, refused], client)
    return Run(
        label=label,
        rate=rate,
        summary=summarise(result, bounds=bounds),
        started_at=result.started_at,
        wall_s=result.wall_s,
        notes=["a note"],
        clients=result.clients,
        records=result.records,
    )


def report_of(
    runs: Sequence[Run], *, command: str = "run", title: str = "A load"
) -> Report:
    """A report whose provenance and settings are always the same."""
    return Report(
        command=command,
        title=title,
        provenance=PROVENANCE,
        settings={
            "target.url": "http://127.0.0.1:8000",
            "arrival.arrivals": "poisson:6",
        },
        bounds=runs[0].summary.bounds if runs else None,
        runs=list(runs),
    )


def answered(index: int, at_s: float, token_times_s: Sequence[float]) -> Record:
    """A request that was sent on time and got one token at each of these times after `at_s`."""
    record = request(at_s, token_times_s, index=index)
    record.first_byte_s = record.arrivals[0].at_s
    record.status = 200
    record.prompt_tokens = 512
    record.cached_tokens = 0
    record.output_tokens = len(record.arrivals)
    return record


def failed(index: int, at_s: float, outcome: Outcome, detail: str = "") -> Record:
    """A request that got no token."""
    record = request(at_s, (), index=index, tail_s=0.02, outcome=outcome)
    record.detail = detail
    record.status = 503 if outcome is Outcome.REFUSED else None
    return record


def case_of(
    plan: Plan | int,
    concurrency: int = 1,
    workload: Workload | None = None,
    **load: object,
) -> Case:
    """A case of a plan, or of a closed loop of one client with so many requests."""
    if isinstance(plan, int):
        plan = Plan(
            [Planned(index, None, 2, (1,)) for index in range(plan)], ["a note"]
        )
    settings = Settings(
        load=msgspec.convert(load, LoadSettings), workload=workload or Workload()
    )
    return Case("a load", plan, settings, PRESETS["chat"], concurrency)


def run_of(case: Case, result: LoadResult, why_stopped: str = "") -> Run:
    """The judged run of a load that never ran."""
    summary, problems = judge(case, result, why_stopped)
    notes = list(case.plan.notes)
    return Run(
        label=case.label,
        summary=summary,
        rate=case.plan.offered_rate,
        notes=notes,
        problems=problems,
        records=result.records,
    )


def ended(*outcomes: Outcome) -> LoadResult:
    """A load of one request per second, whose requests ended in this way."""
    return load(
        [
            answered(index, float(index), [0.1, 0.11])
            if outcome is Outcome.ANSWERED
            else failed(index, float(index), outcome, "the server's words")
            for index, outcome in enumerate(outcomes)
        ]
    )


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
        Planned(
            record.index,
            record.intended_s,
            record.forced_tokens,
            warm_up=record.warm_up,
        )
        for record in records
    ]


@st.composite
def loads(draw: st.DrawFn) -> list[Record]:
    """Any requests in any order: answered and failed ones, late ones, chunks of several tokens."""
    found = []
    for index in range(draw(st.integers(1, 8))):
        gaps = draw(
            st.lists(st.tuples(st.integers(1, 400), st.integers(1, 4)), max_size=4)
        )
        counted = sorted(set(Outcome) - {Outcome.STOPPED})
        outcome = draw(st.sampled_from(counted)) if gaps else Outcome.TRUNCATED
        now_s = 0.0
        chunks = []
        for gap_ms, count in gaps:
            now_s += gap_ms / 1e3
            chunks.append((now_s, count))
        at_s = draw(st.integers(0, 5_000)) / 1e3
        found.append(request(at_s, chunks, index=index, tail_s=0.001, outcome=outcome))
    return draw(st.permutations(found))
