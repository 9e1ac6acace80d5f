"""The commands that measure one server: `baton bench run`, `sweep` and `search`.

Each load of a command has prompts of its own, so no load profits from what an earlier one left in a
prefix cache. Each command returns the exit code of the process.
"""

from collections.abc import Sequence

from baton.bench.experiment import Experiment, bounds_of
from baton.bench.figures.metrics import PRESETS
from baton.bench.figures.search import Probe, RateSearch
from baton.bench.figures.validity import MAX_WRONG_LENGTHS, find_growth
from baton.bench.plan.plan import ArrivalProcess, arrivals_of, loop_of, shaped
from baton.bench.records import Outcome
from baton.bench.report.document import Run
from baton.bench.settings import RunSettings, SearchSettings, SweepSettings
from baton.protocol.errors import BatonError, ConfigError


def run(settings: RunSettings) -> int:
    arrivals, num_runs = arrivals_of(settings.arrival, settings.workload), settings.runs
    loads = [arrivals] * num_runs
    experiment = Experiment("run", settings, loads, settings.arrival)
    places = [f", run {place}" for place in range(1, num_runs + 1)] if num_runs > 1 else [""]
    _run_all(experiment, [loop_of(settings.arrival) + place for place in places], loads)
    return experiment.finish(num_runs)


def sweep(settings: SweepSettings) -> int:
    rates = sorted(set(settings.rates))
    if not rates:
        raise ConfigError("say which rates in requests/s: --rates 1,2,4,8")
    arrivals = [shaped(settings.shape, rate) for rate in rates]
    experiment = Experiment("sweep", settings, arrivals)
    _run_all(experiment, [f"{rate:g}/s" for rate in rates], arrivals, ", by rate")
    return experiment.finish(len(rates))


def _run_all(
    experiment: Experiment,
    labels: Sequence[str],
    arrivals: Sequence[ArrivalProcess | None],
    what: str = "",
) -> None:
    with experiment:
        server = experiment.connect_alone(what)
        for place, label in enumerate(labels):
            experiment.run(server, place, label, arrivals[place])
            if experiment.interrupted:
                break


def search(settings: SearchSettings) -> int:
    if bounds_of(settings.bounds) is None:
        presets = "|".join(PRESETS)
        raise ConfigError(
            f"a search needs bounds: give it --preset {presets} or flags like --ttft-ms"
        )
    rates = RateSearch(settings.search)
    first = rates.next_rate()
    assert first is not None, "a search begins with a rate"
    with Experiment("search", settings, [shaped(settings.shape, first)]) as experiment:
        report = experiment.report
        report.target = settings.search.attainment
        server = experiment.connect_alone(": largest rate")
        while (rate := rates.next_rate()) is not None:
            label = f"{rate:g}/s, {rates.purpose}"
            try:
                arrivals = shaped(settings.shape, rate)
                run = experiment.run(server, len(report.runs), label, arrivals)
            except ConfigError as error:
                if not report.runs:
                    raise
                report.notes.append(f"the search ended at {rate:g}/s: {error.message}")
                break
            if run is None:
                break
            if run.summary.outcomes.get(Outcome.WRONG_LENGTH, 0) == run.summary.num_requests:
                raise BatonError(f"no response has the requested length: {outcome(run)}")
            if experiment.interrupted:
                break
            rates.observe(probe_of(rate, run))
            experiment.progress.say(f"{label}: {outcome(run)}")
    report.search = rates.result()
    return experiment.finish()


def probe_of(rate: float, run: Run) -> Probe:
    is_broken, summary = run.invalid and is_servers_fault(run), run.summary
    return Probe(
        rate,
        summary.attainment or 0.0,
        is_broken or not run.invalid,
        is_saturated=bool(find_growth(run.records, None)),
        is_broken=is_broken,
        offered_rate=summary.offered_rate,
    )


def is_servers_fault(run: Run) -> bool:
    """Return whether an invalid run shows that the server cannot sustain the rate.

    It does if every request failed, or if wrong lengths of responses are the only problem. A client
    without free sockets shows nothing about the server.
    """
    outcomes = run.summary.outcomes
    if outcomes.get(Outcome.NO_SOCKET):
        return False
    num_invalid = sum(problem.is_invalid for problem in run.problems)
    most_wrong = MAX_WRONG_LENGTHS * sum(outcomes.values())
    wrong_length = outcomes.get(Outcome.WRONG_LENGTH, 0) > most_wrong
    return not outcomes.get(Outcome.ANSWERED) or (wrong_length and num_invalid == 1)


def outcome(run: Run) -> str:
    why = next((one.text for one in run.problems if one.is_invalid), "")
    return f"INVALID: {why}" if why else f"attainment {run.summary.attainment or 0.0:.1%}"
