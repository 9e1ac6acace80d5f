"""Turn the records of a load into a `Run` of a report: its figures and its problems.

The experiment calls it after every load. This file is pure.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from baton.bench.client.target import Target
from baton.bench.figures.metrics import Summary, counted, summarise
from baton.bench.figures.validity import Problem, check, invalid, warning
from baton.bench.plan.plan import Plan
from baton.bench.planning import bounds_of, window_of
from baton.bench.records import LoadResult, Outcome, Planned, Record
from baton.bench.report.document import Run
from baton.bench.settings import Settings
from baton.bench.verify import Mismatch, MismatchKind
from baton.protocol.errors import BatonError

MAX_OFF_RATE = 0.1
MAX_CACHED_SHARE = 0.1  # of prompt tokens; a chat template may be shared
CACHED = (
    "the server had prompts cached that share nothing with each other: it saw them before, so "
    "TTFT is too good; choose another --seed, or reset the cache"
)


@dataclass(slots=True)
class Case:
    """A load for a target, and how to judge it."""

    label: str
    target: Target
    plan: Plan
    settings: Settings
    concurrency: int  # of a closed loop; 0 for an open loop


def judge(case: Case, result: LoadResult, why_stopped: str) -> Run:
    """Return the figures of a load, and all problems with them.

    Raises `BatonError` for a load that was stopped before any request counts.
    """
    if why_stopped and not counted(result.records, None):
        raise BatonError(f"nothing was measured: {why_stopped}")
    problems = [invalid(why_stopped)] if why_stopped else []
    asked = case.settings.load
    window = window_of(asked.window)
    if window is not None and not counted(result.records, window):
        text = f"no request arrived in --window {asked.window}: the figures are of all requests"
        problems, window = [*problems, invalid(text)], None
    bounds = bounds_of(case.settings.bounds)
    is_closed = bool(case.concurrency)
    summary = summarise(result, window=window, bounds=bounds, closed_loop=is_closed)
    problems += _flaws(case, result, summary, bool(why_stopped))
    return Run(
        label=case.label,
        summary=summary,
        rate=case.plan.offered_rate,
        started_at=result.started_at,
        wall_s=result.wall_s,
        notes=list(case.plan.notes),
        problems=problems,
        clients=result.clients,
        records=result.records,
    )


def _flaws(case: Case, result: LoadResult, summary: Summary, is_stopped: bool) -> Iterator[Problem]:
    asked, planned = case.settings.load, case.plan.requests
    if is_stopped or (case.concurrency and asked.duration_s):
        # Unsent requests are intended, or have been reported already.
        ended = {record.index for record in result.records}
        planned = [one for one in planned if one.index in ended]
    yield from check(result, summary, planned)
    workload = case.settings.workload
    # No prompt of these begins like another one of the same load.
    is_new = workload.workload in ("tokens", "text", "chat") and not workload.shared_prefix
    if is_new and (summary.cached_share or 0.0) > MAX_CACHED_SHARE:
        yield warning(CACHED)
    num_asked = sum(not one.warm_up for one in case.plan.requests)
    if num_asked < case.concurrency:
        yield warning(f"{num_asked} requests cannot keep {case.concurrency} clients busy")
    # Drawn arrivals may be far from the rate that was asked for.
    plan = case.plan
    wanted, drawn = plan.offered_rate, plan.realised.rate if plan.realised else None
    if wanted and drawn is not None and abs(drawn / wanted - 1) > MAX_OFF_RATE:
        off = f"{abs(drawn / wanted - 1):.0%} {'above' if drawn > wanted else 'below'}"
        text = f"the arrivals were drawn at {drawn:.4g}/s, {off} the {wanted:g}/s asked for"
        yield warning(f"{text}: a longer load comes closer")


def sent_so_far(records: Sequence[Record], planned: Sequence[Planned]) -> str:
    """Return how far a stopped load got, without its warm-up."""
    sent = [one for one in records if not one.warm_up]
    num_planned = sum(not one.warm_up for one in planned)
    num_stopped = sum(one.outcome is Outcome.STOPPED for one in sent)
    rest = f"; not ended by then, and in no figure: {num_stopped}" if num_stopped else ""
    return f"{len(sent)} of {num_planned} requests had been sent{rest}"


def mark_mismatches(records: Sequence[Record], mismatches: Sequence[Mismatch]) -> list[Problem]:
    """Mark the answers whose output under load was different, and return the problems of the run.

    Different tokens may come from a server that is not batch-invariant, so they are a warning.
    """
    marks = {mismatch.index: str(mismatch) for mismatch in mismatches}
    for record in records:
        if record.index in marks and record.outcome is Outcome.ANSWERED:
            record.outcome, record.detail = Outcome.WRONG_TOKENS, marks[record.index][:200]
    num_compared, problems = sum(not record.warm_up for record in records), []
    for kind, count in Counter(mismatch.kind for mismatch in mismatches).items():
        first = next(mismatch for mismatch in mismatches if mismatch.kind is kind)
        told = f"{count} of {num_compared} outputs differ from those of the requests alone ({kind})"
        text = f"{told}; request {first.index}: {first}"
        problems.append(warning(text) if kind is MismatchKind.WRONG else invalid(text))
    return problems
