"""`baton bench search`: runs load after load until `search.py` knows the largest rate that holds.

What is tried next and what is known in the end is decided there; this runs the loads and reports.
"""

import statistics
from collections.abc import Sequence

import msgspec

from baton.bench import resolved
from baton.bench.experiments import Bench, asked
from baton.bench.figures.search import Found, Purpose, RateSearch
from baton.bench.figures.validity import MAX_WRONG_LENGTHS, find_growth
from baton.bench.records import Outcome
from baton.bench.report.document import Run
from baton.bench.report.publish import begin
from baton.bench.settings import SearchSettings
from baton.bench.sweep import add_run, at_rate, repeated_prompts
from baton.protocol.errors import BatonError, ConfigError

# Mean requests in flight below which a request meets no other most of the time.
ALONE = 0.2


def search(settings: SearchSettings) -> int:
    """The exit code: 0 if a rate was confirmed."""
    bounds = resolved.needed_bounds(settings.bounds, "a search needs bounds")
    rates = RateSearch(resolved.search_limits(settings.search))
    first = rates.next_rate()
    assert first is not None
    arrivals = resolved.shaped(settings.shape.shape, first)
    wanted = asked(settings.target, settings.workload, settings.load, arrivals)
    publisher = begin("search", settings, settings.report, api_key=wanted.target.api_key)
    report = publisher.report
    report.bounds, report.target = bounds, settings.search.attainment
    with Bench() as bench:
        server = bench.connect(wanted)
        report.title = report.title or f"{server.target.model} at {server.target.url}: largest rate"
        report.notes += [server.described, *repeated_prompts(settings.workload)]
        while (rate := rates.next_rate()) is not None:
            purpose = rates.purpose
            try:
                case = at_rate(settings, server, bounds, rate, len(report.runs))
            except ConfigError as error:
                if not report.runs:
                    raise
                report.notes.append(f"the search ended at {rate:g}/s: {error.message}")
                break
            case.label = f"{rate:g}/s, {purpose}"
            if (run := add_run(bench, report, case)) is None:
                break
            if run.summary.outcomes.get(Outcome.WRONG_LENGTH, 0) == run.summary.num_requests:
                raise BatonError(f"no answer has the length asked for: {outcome(run)}")
            if bench.interrupted:
                break
            observe(rates, rate, run)
            bench.progress.say(f"{case.label}: {outcome(run)}")
    report.search = with_offered(rates.result(), report.runs)
    return publisher.finish()


def with_offered(found: Found, runs: Sequence[Run]) -> Found:
    """With what the runs that confirmed the rate offered: drawn arrivals never quite have it."""
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
    attainment = run.summary.attainment or 0.0
    saturated = find_growth(run.records, None) is not None
    broken = run.invalid and is_servers_fault(run)
    alone = run.summary.concurrency < ALONE
    valid = broken or not run.invalid
    rates.observe(rate, attainment, valid, saturated=saturated, broken=broken, alone=alone)


def is_servers_fault(run: Run) -> bool:
    """Whether an invalid run says something of the server at this rate, not of the client.

    So it is if every request failed, or if answers of a wrong length are all that is wrong: the
    server does not hold the rate then. A client without a socket left says nothing.
    """
    outcomes = run.summary.outcomes
    if outcomes.get(Outcome.NO_SOCKET):
        return False
    num_invalid = sum(problem.is_invalid for problem in run.problems)
    wrong_length = outcomes.get(Outcome.WRONG_LENGTH, 0) > MAX_WRONG_LENGTHS * sum(
        outcomes.values()
    )
    return not outcomes.get(Outcome.ANSWERED) or (wrong_length and num_invalid == 1)


def outcome(run: Run) -> str:
    if run.invalid:
        return f"INVALID: {next(one.text for one in run.problems if one.is_invalid)}"
    return f"attainment {run.summary.attainment or 0.0:.1%}"
