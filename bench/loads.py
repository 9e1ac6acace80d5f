"""The commands that measure one server: `baton bench run`, `sweep`, `search` and `fault`.

Each load of a command has prompts of its own, so no load profits from what an earlier one left in a
prefix cache. `figures/search.py` decides what a search tries next, `figures/faults.py` what a fault
did. Each command returns the exit code of the process.
"""

from collections.abc import Sequence

from baton.bench.experiment import Experiment
from baton.bench.figures import faults
from baton.bench.figures.faults import FORMS, FaultSpec, Judgement, parse_fault
from baton.bench.figures.metrics import PRESETS, Bounds
from baton.bench.figures.search import Probe, RateSearch
from baton.bench.figures.validity import MAX_WRONG_LENGTHS, find_growth, invalid
from baton.bench.injector import FaultInjector
from baton.bench.plan.arrivals import ArrivalProcess
from baton.bench.plan.plan import Plan
from baton.bench.planning import arrivals_of, bounds_of, loop_of, shaped
from baton.bench.records import Outcome
from baton.bench.report.document import Run
from baton.bench.settings import FaultSettings, RunSettings, SearchSettings, SweepSettings
from baton.protocol.errors import BatonError, ConfigError

# Below this mean number of requests in flight, most requests run alone.
ALONE = 0.2
TOO_LATE = "the load ended before the fault; make the load longer"


def run(settings: RunSettings) -> int:
    arrivals, num_runs = arrivals_of(settings.arrival, settings.workload), settings.runs
    loads = [arrivals] * num_runs
    experiment = Experiment("run", settings, loads, settings.arrival, settings.verify)
    places = [f", run {place}" for place in range(1, num_runs + 1)] if num_runs > 1 else [""]
    _put_all(experiment, [loop_of(settings.arrival) + place for place in places], loads)
    return experiment.finish(num_runs)


def sweep(settings: SweepSettings) -> int:
    rates = sorted(set(settings.rates))
    if not rates:
        raise ConfigError("say which rates in requests/s: --rates 1,2,4,8")
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
        for place, label in enumerate(labels):
            experiment.put(server, place, label, arrivals[place])
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
                run = experiment.put(server, len(report.runs), label, arrivals)
            except ConfigError as error:
                if not report.runs:
                    raise
                report.notes.append(f"the search ended at {rate:g}/s: {error.message}")
                break
            if run is None:
                break
            if run.summary.outcomes.get(Outcome.WRONG_LENGTH, 0) == run.summary.num_requests:
                raise BatonError(f"no answer has the length asked for: {outcome(run)}")
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
        is_alone=summary.concurrency < ALONE,
        offered_rate=summary.offered_rate,
    )


def is_servers_fault(run: Run) -> bool:
    """Return whether an invalid run shows that the server cannot sustain the rate.

    It does if every request failed, or if wrong lengths of answers are the only problem. A client
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


def fault(settings: FaultSettings) -> int:
    if not settings.fault:
        raise ConfigError(f"name a fault with --fault {FORMS}")
    spec = parse_fault(settings.fault)
    arrivals = arrivals_of(settings.arrival, settings.workload)
    experiment = Experiment("fault", settings, [arrivals], settings.arrival, settings.verify)
    refuse_late(spec, experiment.draft)
    with experiment, FaultInjector(spec) as injector:
        report = experiment.report
        report.definitions |= faults.DEFINITIONS
        server = experiment.connect_alone(", with a fault")
        run = experiment.put(server, 0, loop_of(settings.arrival), arrivals, injector.begin)
        if run is not None and not experiment.interrupted:
            if (done := injector.finish()) is None:
                run.problems.insert(0, invalid(f"fault {spec} was not carried out: {TOO_LATE}"))
            else:
                judgement = Judgement(closed_loop=arrivals is None)
                bounds = report.bounds or Bounds()
                run.faults = [done]
                run.impacts = [faults.impact_of(run.records, done, bounds, judgement)]
    if report.bounds is None:
        report.notes.append("without bounds every answered request counts as good")
    return experiment.finish()


def refuse_late(spec: FaultSpec, plan: Plan) -> None:
    """Raise `ConfigError` for a fault after the end of a schedule that is known."""
    if plan.times and plan.duration_s is not None and spec.at_s > plan.duration_s:
        raise ConfigError(
            f"fault {spec}: the schedule ends after {plan.duration_s:.6g} s; give it a longer "
            "--duration-s, or more --requests"
        )
