"""Records of loads that never ran: a small queueing model of a server, exactly repeatable.

One prefill at a time, decode steps that slow down with the sequences in them, stalls, failures,
and a fault if wanted. The shapes are those of real servers, so that reports can be looked at.
"""

import random
from collections.abc import Sequence

import msgspec

from baton.bench.client.target import Target
from baton.bench.figures.metrics import PRESETS, Bounds, summarise
from baton.bench.figures.validity import Problem, Severity
from baton.bench.judging import Case
from baton.bench.plan.plan import Plan
from baton.bench.plan.workload import Workload
from baton.bench.records import ClientProcess, LoadResult, Outcome, Planned, Record, Stage
from baton.bench.report.document import Report, Run
from baton.bench.report.provenance import Machine, Provenance
from baton.bench.settings import BoundSettings, LoadSettings, Settings
from tests.support.load_records import request

PROVENANCE = Provenance(
    created_at="2026-03-01T12:00:00+00:00",
    command_line=["baton", "bench", "run", "--arrivals", "poisson:6", "--preset", "chat"],
    baton_version="0.1.0",
    commit="0123456789abcdef0123456789abcdef01234567",
    dirty=False,
    config_hash="9f" * 32,
    machine=Machine("Example CPU at 3.0 GHz", 16, 16, 128 << 30, [], "Linux 6.1 x86_64"),
    versions={"python": "3.11.7", "aiohttp": "3.14.5"},
    load_before=(0.31, 0.42, 0.40),
    load_after=(1.12, 0.77, 0.52),
)


class Scene(msgspec.Struct, frozen=True):
    """What is offered, and the server that it meets."""

    rate: float = 6.0
    duration_s: float = 60.0
    seed: int = 1
    prefill_s: float = 0.07
    step_s: float = 0.012
    step_per_sequence_s: float = 0.0004
    output_tokens: int = 48
    stall_share: float = 0.01
    failed_share: float = 0.01
    lag_s: float = 0.0004
    fault_at_s: float | None = None
    fault_for_s: float = 4.0
    warm_up: int = 2
    stages: bool = True


def scene_result(scene: Scene) -> LoadResult:
    """A whole load."""
    source = random.Random(scene.seed)
    server = _Server(scene, source)
    records = [_warm_up(index, scene) for index in range(scene.warm_up)]
    at_s = 0.0
    while (at_s := at_s + source.expovariate(scene.rate)) < scene.duration_s:
        records.append(server.answer(len(records), at_s))
    wall_s = max(record.end_s for record in records)
    tokens = sum(record.num_tokens for record in records)
    client = ClientProcess(4711, 0.06 * wall_s, wall_s, len(records), tokens, 0.0013)
    return LoadResult(records, [client], wall_s, "2026-03-01T12:00:00+00:00")


def scene_run(scene: Scene, label: str, *, bounds: Bounds | None = PRESETS["chat"]) -> Run:
    """A run of a scene, as the experiments report it."""
    result = scene_result(scene)
    return Run(
        label=label,
        rate=scene.rate,
        summary=summarise(result, bounds=bounds),
        started_at=result.started_at,
        wall_s=result.wall_s,
        notes=[f"realised {len(result.records) / scene.duration_s:.2f} requests/s, CV 1.02"],
        clients=result.clients,
        records=result.records,
    )


def report_of(runs: Sequence[Run], *, command: str = "run", title: str = "A load") -> Report:
    """A report whose provenance and settings are always the same."""
    return Report(
        command=command,
        title=title,
        provenance=PROVENANCE,
        settings={"target.url": "http://127.0.0.1:8000", "arrival.arrivals": "poisson:6"},
        bounds=runs[0].summary.bounds if runs else None,
        runs=list(runs),
    )


def invalid(text: str) -> Problem:
    return Problem(Severity.INVALID, text)


def warning(text: str) -> Problem:
    return Problem(Severity.WARNING, text)


def answered(index: int, at_s: float, token_times_s: Sequence[float]) -> Record:
    """A request that was sent on time and got one token at each of these times after `at_s`."""
    record = request(at_s, token_times_s, index=index)
    record.first_byte_s, record.status = record.arrivals[0].at_s, 200
    record.prompt_tokens, record.cached_tokens = 512, 0
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
        plan = Plan([Planned(index, None, 2, (1,)) for index in range(plan)], ["a note"])
    settings = Settings(
        load=msgspec.convert(load, LoadSettings),
        workload=workload or Workload(),
        bounds=BoundSettings(preset="chat"),
    )
    return Case("a load", Target("http://a", "m"), plan, settings, concurrency)


def loaded(records: Sequence[Record]) -> LoadResult:
    return LoadResult(list(records), [], float(len(records)), "2026-03-01T12:00:00+00:00")


def ended(*outcomes: Outcome) -> LoadResult:
    """A load of one request per second, whose requests ended in this way."""
    return loaded(
        [
            answered(index, float(index), [0.1, 0.11])
            if outcome is Outcome.ANSWERED
            else failed(index, float(index), outcome, "the server's words")
            for index, outcome in enumerate(outcomes)
        ]
    )


def _warm_up(index: int, scene: Scene) -> Record:
    record = answered(index, index - scene.warm_up * 1.0, [1.5, 1.52])
    record.warm_up = True
    return record


class _Server:
    def __init__(self, scene: Scene, source: random.Random) -> None:
        self._scene, self._source = scene, source
        self._prefill_free_s = 0.0
        self._ends_s: list[float] = []

    def answer(self, index: int, at_s: float) -> Record:
        scene, source = self._scene, self._source
        sent_s = at_s + scene.lag_s * source.uniform(0.2, 1.8)
        if source.random() < scene.failed_share:
            return failed(index, at_s, Outcome.REFUSED, "503: no room, try again in 1 s")
        if (start_s := max(sent_s, self._prefill_free_s)) > 8.0 + sent_s:
            return failed(index, at_s, Outcome.REFUSED, "503: the queue is full")
        start_s = self._after_fault(start_s)
        prefill_s = scene.prefill_s * source.lognormvariate(0.0, 0.35)
        self._prefill_free_s = start_s + prefill_s
        transfer_s = 0.002 * source.uniform(0.8, 2.0)
        first_s = self._prefill_free_s + transfer_s
        self._ends_s = [end_s for end_s in self._ends_s if end_s > first_s]
        times = self._token_times(first_s, len(self._ends_s))
        self._ends_s.append(times[-1])
        record = answered(index, at_s, [time_s - at_s for time_s in times])
        record.sent_s = sent_s
        record.cached_tokens = source.choice([0, 0, 128, 256])
        if scene.stages:
            record.stages = _stages(at_s, sent_s, start_s, (prefill_s, transfer_s), times)
        return self._cut(record)

    def _token_times(self, first_s: float, num_running: int) -> list[float]:
        scene, source = self._scene, self._source
        step_s = scene.step_s + scene.step_per_sequence_s * num_running
        stalled_at = source.randrange(1, scene.output_tokens)
        stalls = source.random() < scene.stall_share
        times = [first_s]
        for position in range(1, scene.output_tokens):
            gap_s = step_s * source.lognormvariate(0.0, 0.12)
            gap_s += source.uniform(0.1, 0.4) if stalls and position == stalled_at else 0.0
            times.append(self._after_fault(times[-1] + gap_s))
        return times

    def _after_fault(self, at_s: float) -> float:
        """Nothing happens while the server is gone."""
        fault_s = self._scene.fault_at_s
        if fault_s is None or not fault_s <= at_s < fault_s + self._scene.fault_for_s:
            return at_s
        return fault_s + self._scene.fault_for_s + 0.1 * self._source.random()

    def _cut(self, record: Record) -> Record:
        """End half of the streams that a fault meets."""
        fault_s = self._scene.fault_at_s
        if fault_s is None or not record.intended_s < fault_s < record.end_s:
            return record
        if self._source.random() < 0.5:
            return record
        record.arrivals = [arrival for arrival in record.arrivals if arrival.at_s < fault_s]
        record.outcome, record.detail = Outcome.TRUNCATED, "the connection was reset"
        record.end_s, record.stages, record.output_tokens = fault_s + 0.01, [], None
        return record


def _stages(
    at_s: float, sent_s: float, start_s: float, prompt_s: tuple[float, float], times: list[float]
) -> list[Stage]:
    """Parts that sum to the time from `at_s` to the last token."""
    prefill_s, transfer_s = prompt_s
    return [
        Stage("client_lag", sent_s - at_s),
        Stage("queue", start_s - sent_s),
        Stage("prefill", prefill_s),
        Stage("exposed_transfer", transfer_s),
        Stage("decoding", times[-1] - times[0]),
    ]
