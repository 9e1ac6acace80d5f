"""`baton bench run`: one load, or the same several times with prompts of its own each time."""

import statistics

from baton.bench.experiment import Experiment
from baton.bench.figures.metrics import Distribution
from baton.bench.planning import arrivals_of, loop_of
from baton.bench.report.document import Run, Table
from baton.bench.report.sections import LATENCIES
from baton.bench.report.wording import number
from baton.bench.settings import RunSettings


def run(settings: RunSettings) -> int:
    """Return the exit code."""
    arrivals, num_runs = arrivals_of(settings.arrival, settings.workload), settings.runs
    experiment = Experiment(
        "run",
        settings,
        [arrivals] * num_runs,
        concurrency=settings.arrival.concurrency,
        verify=settings.verify,
    )
    label = settings.report.label or loop_of(settings.arrival)
    with experiment:
        server = experiment.connect_alone()
        for place in range(num_runs):
            shown = label if num_runs == 1 else f"{label}, run {place + 1}"
            case = experiment.case(server, place, shown, arrivals)
            case.round = place + 1 if num_runs > 1 else 0
            experiment.put(case)
            if experiment.interrupted:
                break
    if len(experiment.report.runs) > 1:
        experiment.note_repeated_prompts()
        experiment.report.tables.append(spread(experiment.report.runs))
    return experiment.finish(num_runs)


def spread(runs: list[Run]) -> Table:
    """Return the median of the runs' figures, and how far apart they lie."""
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
