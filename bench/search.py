"""`baton bench search`: run load after load until the largest rate that holds is known.

`figures/search.py` decides what to try next and what is known in the end; this file runs the loads.
"""

from baton.bench.experiment import Experiment
from baton.bench.figures.metrics import PRESETS
from baton.bench.figures.search import Probe, RateSearch
from baton.bench.figures.validity import MAX_WRONG_LENGTHS, find_growth
from baton.bench.planning import bounds_of, shaped
from baton.bench.records import Outcome
from baton.bench.report.document import Run
from baton.bench.settings import SearchSettings
from baton.protocol.errors import BatonError, ConfigError

# Mean requests in flight below which a request meets no other most of the time.
ALONE = 0.2


def search(settings: SearchSettings) -> int:
    """Return the exit code: 0 if a rate was confirmed."""
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
        experiment.note_repeated_prompts()
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
    """Return whether an invalid run shows that the server does not hold the rate.

    It does if every request failed, or if answers of a wrong length are all that is wrong. A client
    without a socket left says nothing about the server.
    """
    outcomes = run.summary.outcomes
    if outcomes.get(Outcome.NO_SOCKET):
        return False
    num_invalid = sum(problem.is_invalid for problem in run.problems)
    most_wrong = MAX_WRONG_LENGTHS * sum(outcomes.values())
    wrong_length = outcomes.get(Outcome.WRONG_LENGTH, 0) > most_wrong
    return not outcomes.get(Outcome.ANSWERED) or (wrong_length and num_invalid == 1)


def outcome(run: Run) -> str:
    if run.invalid:
        return f"INVALID: {next(one.text for one in run.problems if one.is_invalid)}"
    return f"attainment {run.summary.attainment or 0.0:.1%}"
