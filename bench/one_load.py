"""`baton bench run`: one load, or the same several times with prompts of its own each time."""

import statistics

from baton.bench import resolved
from baton.bench.console import LATENCIES
from baton.bench.experiments import Bench, Case, loop_of, shares_prompts
from baton.bench.figures.metrics import Distribution
from baton.bench.report.document import Run, Table
from baton.bench.report.publish import begin
from baton.bench.report.wording import number
from baton.bench.settings import RunSettings
from baton.bench.sweep import add_run, asked_all, mark_unfinished, repeated_prompts, reseeded


def run(settings: RunSettings) -> int:
    """The exit code."""
    arrivals = resolved.arrivals_of(settings.arrival, settings.workload)
    bounds = resolved.bounds_of(settings.bounds)
    loads = [arrivals] * settings.again.runs
    wanted = asked_all(settings.target, settings.workload, settings.load, loads)
    publisher = begin("run", settings, settings.report, api_key=wanted.target.api_key)
    report, num_runs = publisher.report, settings.again.runs
    report.bounds = bounds
    with Bench() as bench:
        server = bench.connect(wanted)
        report.title = report.title or f"{server.target.model} at {server.target.url}"
        report.notes.append(server.described)
        label = settings.report.label or loop_of(settings.arrival)
        for place in range(num_runs):
            plan = server.plan(wanted, settings.load, arrivals)
            if place:
                workload = reseeded(server.workload, place)
                plan = resolved.plan_of(workload, settings.load, arrivals)
            case = Case(
                label=label if num_runs == 1 else f"{label}, run {place + 1}",
                target=server.target,
                plan=plan,
                concurrency=settings.arrival.concurrency,
                load=settings.load,
                bounds=bounds,
                verify=settings.check.verify,
                may_be_cached=shares_prompts(settings.workload),
                round=place + 1 if num_runs > 1 else 0,
                rate=plan.offered_rate,
            )
            add_run(bench, report, case)
            if bench.interrupted:
                break
    mark_unfinished(report, num_runs)
    if len(report.runs) > 1:
        report.notes += repeated_prompts(settings.workload)
        report.tables.append(spread(report.runs))
    return publisher.finish()


def spread(runs: list[Run]) -> Table:
    """The median of the runs' figures, and how far apart they lie."""
    rows = [_row("tokens/s", [run.summary.tokens_per_s for run in runs])]
    for name in LATENCIES:
        for percentile in ("p50", "p99"):
            found: list[Distribution | None] = [getattr(run.summary, name) for run in runs]
            values = [getattr(one, percentile) for one in found if one is not None]
            if len(values) == len(runs):
                rows.append(_row(f"{name} {percentile}, ms", values))
    columns = ["figure", "median", "lowest", "highest"]
    return Table("Over the runs", columns, rows, f"{len(runs)} runs of the same load")


def _row(name: str, values: list[float]) -> list[str]:
    return [name, *(number(one) for one in (statistics.median(values), min(values), max(values)))]
