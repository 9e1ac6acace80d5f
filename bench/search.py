"""`baton bench search`: run load after load until the largest rate that holds is known.

`figures/search.py` decides what to try next and what is known in the end; this file runs the loads.
"""

import statistics
from collections.abc import Sequence

import msgspec

from baton.bench.experiment import Experiment
from baton.bench.figures.growth import find_growth
from baton.bench.figures.metrics import PRESETS
from baton.bench.figures.search import Found, Purpose, RateSearch
from baton.bench.figures.validity import MAX_WRONG_LENGTHS
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
            observe(rates, rate, run)
            experiment.progress.say(f"{label}: {outcome(run)}")
    report.search = with_offered(rates.result(), report.runs)
    return experiment.finish()


def with_offered(found: Found, runs: Sequence[Run]) -> Found:
    """Add what the confirming runs offered, since drawn arrivals never have quite the rate."""
    offered = [
        run.summary.offered_rate
        for run, probe in zip(runs, found.probes, strict=False)  # the last may have been cut short
        if probe.rate == found.rate and probe.purpose is Purpose.CONFIRM and probe.is_valid
        if run.summary.offered_rate is not None
    ]
    if not found.confirmed or not offered:
        return found
    median = statistics.median(offered)
    line = f"{found.line}; {median:.4g}/s were offered (median of the confirming runs)"
    return msgspec.structs.replace(found, offered_rate=median, line=line)


def observe(rates: RateSearch, rate: float, run: Run) -> None:
    broken = run.invalid and is_servers_fault(run)
    rates.observe(
        rate,
        run.summary.attainment or 0.0,
        broken or not run.invalid,
        saturated=bool(find_growth(run.records, None)),
        broken=broken,
        alone=run.summary.concurrency < ALONE,
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
