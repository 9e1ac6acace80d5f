"""From the records of a load to a `Run` of a report: its figures, and whether they may be used.

The experiment asks after every load. Pure: everything that a judgement needs is in the `Case` and
the records.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from baton.bench.client.target import Target
from baton.bench.client.turns import NOT_SENT, units_of
from baton.bench.figures.metrics import Summary, counted, summarise
from baton.bench.figures.validity import Problem, Severity, check
from baton.bench.plan.plan import Plan
from baton.bench.plan.prompts import shared_share
from baton.bench.planning import bounds_of, may_be_cached, window_of
from baton.bench.records import LoadResult, Outcome, Planned, Record
from baton.bench.report.document import Run
from baton.bench.settings import Settings
from baton.bench.verify import Mismatch, MismatchKind
from baton.protocol.errors import BatonError

ALL_FAILED = "all_failed"
MAX_OFF_RATE = 0.1
# Share of prompt tokens, beyond what the prompts share among themselves. A chat template may be
# shared.
MAX_CACHED_SHARE = 0.1
CACHED = (
    "the server had more of these prompts cached than they share among themselves: it saw them "
    "before, so TTFT is too good; choose another --seed, or reset the cache"
)


@dataclass(slots=True)
class Case:
    """A load that is to be put on a target, and how it is judged."""

    label: str
    target: Target
    plan: Plan
    settings: Settings
    concurrency: int  # of a closed loop; 0 for an open loop
    arm: str = ""
    round: int = 0


def judge(case: Case, result: LoadResult, why_stopped: str) -> Run:
    """Return the figures of a load, and all that is wrong with them.

    A load of which nothing was answered is an invalid run, not an error. Raises `BatonError` for a
    load that was stopped before anything counts.
    """
    if why_stopped and not counted(result.records, None):
        raise BatonError(f"nothing was measured: {why_stopped}")
    problems = [_invalid(why_stopped)] if why_stopped else []
    asked = case.settings.load
    window, is_closed = window_of(asked.window), bool(case.concurrency)
    if window is not None and not counted(result.records, window):
        text = f"no request arrived in --window {asked.window}: the figures are of all requests"
        problems, window = [*problems, _invalid(text)], None
    bounds = bounds_of(case.settings.bounds)
    summary = summarise(result, window=window, bounds=bounds, closed_loop=is_closed)
    planned = case.plan.requests
    if why_stopped or (is_closed and asked.duration_s):
        # That others were not sent is said already, or meant.
        ended = {record.index for record in result.records}
        planned = [one for one in planned if one.index in ended]
    limit = None if is_closed else asked.max_concurrency or None
    try:
        problems += check(result, summary, planned, max_concurrency=limit)
    except BatonError as error:
        if error.code != ALL_FAILED:
            raise
        problems.append(_invalid(error.message))
    if not may_be_cached(case.settings.workload):
        problems += _known_prompts(case.plan, counted(result.records, window), summary)
    problems += _idle_clients(case)
    return Run(
        label=case.label,
        summary=summary,
        arm=case.arm,
        round=case.round,
        rate=case.plan.offered_rate,
        started_at=result.started_at,
        wall_s=result.wall_s,
        notes=list(case.plan.notes),
        problems=problems + _off_rate(case.plan),
        clients=result.clients,
        records=result.records,
    )


def _idle_clients(case: Case) -> list[Problem]:
    num_units = len(units_of([one for one in case.plan.requests if not one.warm_up]))
    if num_units >= case.concurrency:
        return []
    return [_warning(f"{num_units} requests cannot keep {case.concurrency} clients busy")]


def _known_prompts(plan: Plan, records: Sequence[Record], summary: Summary) -> list[Problem]:
    """Warn of a cache that knew more of the counted prompts than they and earlier ones share."""
    unexpected = (summary.cached_share or 0.0) - MAX_CACHED_SHARE
    if unexpected <= 0:
        return []
    indices = {record.index for record in records}
    before = [one.prompt_ids for one in plan.requests if one.index < min(indices)]
    asked = [one.prompt_ids for one in plan.requests if one.index in indices]
    return [_warning(CACHED)] if shared_share(asked, before) < unexpected else []


def _off_rate(plan: Plan) -> list[Problem]:
    """Drawn arrivals come at another rate than was asked for, the more so the fewer they are."""
    asked, planned = plan.offered_rate, plan.planned_rate
    if not asked or planned is None or abs(planned / asked - 1) <= MAX_OFF_RATE:
        return []
    where = "above" if planned > asked else "below"
    text = f"the arrivals were drawn at {planned:.4g}/s, {abs(planned / asked - 1):.0%} {where} "
    return [_warning(f"{text}the {asked:g}/s asked for: a longer load comes closer")]


def sent_so_far(records: Sequence[Record], planned: Sequence[Planned]) -> str:
    """Say how far a load came that was stopped, without its warm-up."""
    sent = [one for one in records if not (one.warm_up or one.detail.startswith(NOT_SENT))]
    num_planned = sum(not one.warm_up for one in planned)
    num_stopped = sum(one.outcome is Outcome.STOPPED for one in sent)
    rest = f"; not ended by then, and in no figure: {num_stopped}" if num_stopped else ""
    return f"{len(sent)} of {num_planned} requests had been sent{rest}"


def mark_mismatches(records: Sequence[Record], mismatches: Sequence[Mismatch]) -> list[Problem]:
    """Mark the answers whose output was another under load, and return what that says of a run.

    Tokens that were lost, doubled or out of order are faults of any server. Other tokens may come
    from one that is not batch-invariant, so they are a warning, and count as failed requests.
    """
    marks = {mismatch.index: str(mismatch) for mismatch in mismatches}
    for record in records:
        if record.index in marks and record.outcome is Outcome.ANSWERED:
            record.outcome, record.detail = Outcome.WRONG_TOKENS, marks[record.index][:200]
    num_compared = sum(not record.warm_up for record in records)
    problems = []
    for kind, count in Counter(mismatch.kind for mismatch in mismatches).items():
        first = next(mismatch for mismatch in mismatches if mismatch.kind is kind)
        text = (
            f"{count} of {num_compared} outputs differ from those of the requests alone ({kind}); "
            f"request {first.index}: {first}"
        )
        problems.append(_warning(text) if kind is MismatchKind.WRONG else _invalid(text))
    return problems


def _invalid(text: str) -> Problem:
    return Problem(Severity.INVALID, text)


def _warning(text: str) -> Problem:
    return Problem(Severity.WARNING, text)
