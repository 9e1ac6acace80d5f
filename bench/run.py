"""`baton bench run` and `sweep`: one load after the other, each with prompts of its own.

No load profits from what an earlier one left in a prefix cache.
"""

import statistics
from collections.abc import Sequence

from baton.bench.experiment import Experiment
from baton.bench.figures.metrics import figures_of, unit_of
from baton.bench.plan.arrivals import ArrivalProcess
from baton.bench.planning import arrivals_of, loop_of, shaped
from baton.bench.report.document import Run, Table
from baton.bench.report.sections import quantity
from baton.bench.settings import RunSettings, SweepSettings
from baton.protocol.errors import ConfigError


def run(settings: RunSettings) -> int:
    """Return the exit code."""
    arrivals, num_runs = arrivals_of(settings.arrival, settings.workload), settings.runs
    loads = [arrivals] * num_runs
    experiment = Experiment("run", settings, loads, settings.arrival, settings.verify)
    label = loop_of(settings.arrival)
    labels = [label]
    if num_runs > 1:
        labels = [f"{label}, run {place + 1}" for place in range(num_runs)]
    _put_all(experiment, labels, loads)
    runs = experiment.report.runs
    if len(runs) > 1:
        for place, one in enumerate(runs, start=1):
            one.round = place
        experiment.report.tables.append(spread(runs))
    return experiment.finish(num_runs)


def sweep(settings: SweepSettings) -> int:
    """Return the exit code."""
    rates = rates_of(settings.rates)
    arrivals = [shaped(settings.shape, rate) for rate in rates]
    experiment = Experiment("sweep", settings, arrivals)
    _put_all(experiment, [f"{rate:g}/s" for rate in rates], arrivals, ", by rate")
    return experiment.finish(len(rates))


def _put_all(
    experiment: Experiment,
    labels: Sequence[str],
    arrivals: Sequence[ArrivalProcess | None],
    what: str = "",
) -> None:
    with experiment:
        server = experiment.connect_alone(what)
        if len(labels) > 1:
            experiment.note_repeated_prompts()
        for place, label in enumerate(labels):
            experiment.put(server, place, label, arrivals[place])
            if experiment.interrupted:
                break


def rates_of(text: str) -> list[float]:
    """Return the rates in ascending order, each once. Raises `ConfigError`."""
    try:
        rates = sorted({float(part) for part in text.split(",") if part.strip()})
    except ValueError:
        rates = []
    if not rates or not all(0 < rate < float("inf") for rate in rates):
        raise ConfigError(f"--rates {text!r}: write requests/s as 1,2,4,8")
    return rates


def spread(runs: list[Run]) -> Table:
    """Return the median of the runs' figures, and how far apart they lie."""
    figures, rows = [figures_of(run.summary) for run in runs], []
    for name in figures[0]:
        values = [one[name] for one in figures]
        if all(values):
            spread_of = (statistics.median(values), min(values), max(values))
            rows.append([name, *(quantity(value, unit_of(name)) for value in spread_of)])
    columns = ["figure", "median", "lowest", "highest"]
    return Table("Over the runs", columns, rows, f"{len(runs)} runs of the same load")
