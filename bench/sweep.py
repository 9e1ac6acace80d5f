"""`baton bench sweep`: one load after the other at several rates, from the lowest up.

Every run draws prompts of its own, so that no run profits from what an earlier one left in a prefix
cache. The report then shows attainment, goodput and latencies against the rate.
"""

from collections.abc import Sequence

import msgspec
import numpy as np

from baton.bench import resolved
from baton.bench.client.target import Target
from baton.bench.experiments import Asked, Bench, Case, Connected, asked, shares_prompts
from baton.bench.figures.metrics import Bounds
from baton.bench.figures.validity import Problem, Severity
from baton.bench.plan.arrivals import ArrivalProcess
from baton.bench.report.document import Report, Run
from baton.bench.report.publish import begin
from baton.bench.settings import (
    LoadSettings,
    SearchSettings,
    SweepSettings,
    WorkloadSettings,
)
from baton.protocol.errors import BatonError

MAX_OFF_RATE = 0.1
SAME_PROMPTS = "a file has the same prompts in every run: a prefix cache may know them"


def sweep(settings: SweepSettings) -> int:
    """The exit code."""
    rates = resolved.rates_of(settings.sweep.rates)
    bounds = resolved.bounds_of(settings.bounds)
    arrivals = [resolved.shaped(settings.shape.shape, rate) for rate in rates]
    wanted = asked_all(settings.target, settings.workload, settings.load, arrivals)
    publisher = begin("sweep", settings, settings.report, api_key=wanted.target.api_key)
    report = publisher.report
    report.bounds = bounds
    with Bench() as bench:
        server = bench.connect(wanted)
        report.title = report.title or f"{server.target.model} at {server.target.url}, by rate"
        report.notes += [server.described, *repeated_prompts(settings.workload)]
        for place, rate in enumerate(rates):
            add_run(bench, report, at_rate(settings, server, bounds, rate, place))
            if bench.interrupted:
                break
    mark_unfinished(report, len(rates))
    return publisher.finish()


def asked_all(
    target: Target,
    workload: WorkloadSettings,
    load: LoadSettings,
    arrivals: Sequence[ArrivalProcess | None],
) -> Asked:
    """The first of several loads. Refuses any of them now: later that would cost the others."""
    for place, process in enumerate(arrivals[1:], 1):
        asked(target, reseeded(workload, place), load, process)
    return asked(target, workload, load, arrivals[0])


def add_run(bench: Bench, report: Report, case: Case) -> Run | None:
    """None if Ctrl-C came before anything had ended: then the report has the runs before it."""
    try:
        run = bench.measure(case)
    except BatonError:
        if bench.interrupted and report.runs:
            return None
        raise
    run.problems += off_rate(case)
    report.runs.append(run)
    return run


def off_rate(case: Case) -> list[Problem]:
    """Drawn arrivals come at another rate than was asked for, the more so the fewer they are."""
    planned = case.plan.planned_rate
    if not case.rate or planned is None or abs(planned / case.rate - 1) <= MAX_OFF_RATE:
        return []
    off = abs(planned / case.rate - 1)
    where = "above" if planned > case.rate else "below"
    text = f"the arrivals were drawn at {planned:.4g}/s, {off:.0%} {where} the {case.rate:g}/s "
    return [Problem(Severity.WARNING, f"{text}asked for: a longer load comes closer")]


def mark_unfinished(report: Report, num_wanted: int) -> None:
    """Ctrl-C between two loads spoils none of them, but what they were for is not whole."""
    if report.runs and len(report.runs) < num_wanted and not report.invalid:
        text = f"interrupted: {len(report.runs)} of {num_wanted} loads were run"
        report.runs[-1].problems.insert(0, Problem(Severity.INVALID, text))


def at_rate(
    settings: SweepSettings | SearchSettings,
    server: Connected,
    bounds: Bounds | None,
    rate: float,
    place: int,
) -> Case:
    """The run number `place` of an experiment, with prompts of its own."""
    arrivals = resolved.shaped(settings.shape.shape, rate)
    return Case(
        label=f"{rate:g}/s",
        target=server.target,
        plan=resolved.plan_of(reseeded(server.workload, place), settings.load, arrivals),
        concurrency=0,
        load=settings.load,
        bounds=bounds,
        may_be_cached=shares_prompts(settings.workload),
        rate=rate,
    )


def reseeded(workload: WorkloadSettings, place: int) -> WorkloadSettings:
    """The load number `place` of an experiment: number 0 has the seed as given.

    The others have one that is mixed of both, so that no neighbour of the seed asks the same.
    """
    if place == 0:
        return workload
    mixed = np.random.SeedSequence([workload.seed, place]).generate_state(1)
    return msgspec.structs.replace(workload, seed=int(mixed[0]))


def repeated_prompts(workload: WorkloadSettings) -> list[str]:
    return [SAME_PROMPTS] if workload.workload == "file" else []
