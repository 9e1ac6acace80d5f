"""One load from its plan to a judged run, and the frame in which every experiment runs them.

The commands use `Bench` to find out about servers and to run loads, one after the other. Ctrl-C
ends the load that is running and leaves a report that is marked as interrupted.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import TracebackType

import msgspec

from baton.bench import resolved
from baton.bench.client.load import Load, Progress, run_load
from baton.bench.client.probe import Probed, probe
from baton.bench.client.target import Target, settled
from baton.bench.client.turns import NOT_SENT, units_of
from baton.bench.client.vocabulary import accepted
from baton.bench.figures.metrics import Bounds, Window, counted, summarise
from baton.bench.figures.validity import Problem, Severity, check
from baton.bench.plan.arrivals import ArrivalProcess
from baton.bench.plan.plan import Plan
from baton.bench.plan.prompts import shared_share
from baton.bench.plan.workload import AUTO
from baton.bench.progress import LoadProgress
from baton.bench.records import LoadResult, Outcome, Planned, Record
from baton.bench.report.document import Run
from baton.bench.settings import (
    ArrivalSettings,
    LoadSettings,
    WorkloadSettings,
)
from baton.bench.verify import Mismatch, MismatchKind, check_greedy, compare_outputs, reference
from baton.protocol.errors import BatonError
from baton.runtime.interrupts import Interrupts

OnStart = Callable[[float], None]
ALL_FAILED = "all_failed"
WATCH_EVERY_S = 0.1
# Of prompt tokens, beyond what the prompts share among themselves; a chat template may be shared.
MAX_CACHED_SHARE = 0.1
STOPPING = "stopping: the report keeps what there is; Ctrl-C again ends at once, without one"
CACHED = (
    "the server had more of these prompts cached than they share among themselves: it saw them "
    "before, so TTFT is too good; choose another --seed, or reset the cache"
)


@dataclass(slots=True, kw_only=True)
class Case:
    """A load that is to be put on a target, and how it is judged."""

    label: str
    target: Target
    plan: Plan
    concurrency: int  # closed loop; 0: open loop
    load: LoadSettings
    bounds: Bounds | None = None
    verify: bool = False
    may_be_cached: bool = False  # nobody can say how much of the prompts a cache should know
    arm: str = ""
    round: int = 0
    rate: float | None = None

    @property
    def window(self) -> Window | None:
        return resolved.window_of(self.load.window)

    @property
    def max_concurrency(self) -> int | None:
        """Of an open loop."""
        return None if self.concurrency else self.load.max_concurrency or None


class Asked(msgspec.Struct, frozen=True):
    """What the settings ask for, checked; the plan is a draft until the server was asked."""

    target: Target
    workload: WorkloadSettings
    plan: Plan


class Connected(msgspec.Struct, frozen=True):
    """A server as it can be asked."""

    target: Target
    workload: WorkloadSettings  # with the vocabulary settled
    probed: Probed

    @property
    def described(self) -> str:
        """One line on what it is, and what is made use of."""
        return _described(self.probed, self.target)

    def plan(self, draft: Asked, load: LoadSettings, arrivals: ArrivalProcess | None) -> Plan:
        """What is to be sent; the draft, if nothing had to be changed for this server."""
        if self.workload == draft.workload:
            return draft.plan
        return resolved.plan_of(self.workload, load, arrivals)


def asked(
    target: Target,
    workload: WorkloadSettings,
    load: LoadSettings,
    arrivals: ArrivalProcess | None,
) -> Asked:
    """Raises `ConfigError` for whatever can be seen without a server."""
    resolved.window_of(load.window)
    plan = resolved.plan_of(workload, load, arrivals)
    return Asked(settled(target, plan.requests), workload, plan)


class Bench:
    """A context in which loads run one after the other; shows progress and takes Ctrl-C."""

    def __init__(self) -> None:
        self.progress = LoadProgress()
        self._interrupts = Interrupts(self.progress.abandon)

    def __enter__(self) -> "Bench":
        self._interrupts.__enter__()
        self.progress.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.progress.__exit__(kind, error, trace)
        self._interrupts.__exit__(kind, error, trace)

    @property
    def interrupted(self) -> bool:
        return self._interrupts.requested

    def connect(self, asked: Asked) -> Connected:
        """Finds out what the server can be asked; raises `ConfigError` or `BatonError`."""
        probed = probe(asked.target, self._interrupts.fileno())
        target, workload = probed.fit(asked.target), asked.workload
        if workload.vocabulary == AUTO and any(one.prompt_ids for one in asked.plan.requests):
            low, high = accepted(target)
            workload = msgspec.structs.replace(workload, vocabulary=f"{low}-{high}")
        self.progress.say(f"{target.url} serves {target.model}")
        return Connected(target, workload, probed)

    def measure(self, case: Case, on_start: OnStart | None = None) -> Run:
        """Runs one load. A load of which nothing was answered is an invalid run, not an error.

        `on_start` is told when the schedule starts, on the monotonic clock. Raises `ConfigError`
        for outputs that are to be verified and cannot be.
        """
        if case.verify:
            check_greedy(case.target)
        watch = _Watch(self, case)
        result = run_load(
            Load(
                target=case.target,
                requests=case.plan.requests,
                concurrency=case.concurrency or case.max_concurrency,
                closed=bool(case.concurrency),
                processes=case.load.processes,
                stop_after_s=case.load.duration_s or None if case.concurrency else None,
                keep_text=case.verify,
            ),
            on_progress=watch,
            on_start=on_start,
            stop=watch.stop,
        )
        why_stopped = watch.why_stopped(result)
        found: list[Problem] = []
        notes: list[str] = []
        if case.verify and not why_stopped:
            found, notes = self._verify(case, result)
        run = judge(case, result, why_stopped)
        run.notes += notes
        run.problems = sorted(found + run.problems, key=lambda problem: not problem.is_invalid)
        return run

    def _verify(self, case: Case, result: LoadResult) -> tuple[list[Problem], list[str]]:
        """Asks each prompt alone, and marks the records whose output was another under load."""
        self.progress.say("asking each prompt alone, to compare the outputs")
        with self._stopped_by_interrupt() as stop:
            try:
                references = reference(case.target, case.plan.requests, stop)
            except BatonError as error:  # what was measured is kept, but not as verified
                return [Problem(Severity.INVALID, f"not verified: {error.message}")], []
        known = [record for record in result.records if record.index in references]
        mismatches = compare_outputs(references, known)
        marks = {mismatch.index: str(mismatch) for mismatch in mismatches}
        for record in known:
            if record.index in marks and record.outcome is Outcome.ANSWERED:
                record.outcome, record.detail = Outcome.WRONG_TOKENS, marks[record.index][:200]
        what = "token by token" if case.target.token_ids else "letter by letter"
        count = sum(not record.warm_up for record in known)
        note = f"{count} outputs were compared with those of the requests alone, {what}"
        if not mismatches:
            note += ": all equal"
        found = verification(count, mismatches)
        if stop.is_set():
            text = f"interrupted: only {len(references)} of the requests were asked alone"
            found.append(Problem(Severity.INVALID, text))
        return found, [note]

    @contextmanager
    def _stopped_by_interrupt(self) -> Iterator[threading.Event]:
        """An event that Ctrl-C sets while nobody polls."""
        stop, over = threading.Event(), threading.Event()

        def watch() -> None:
            while not over.is_set():
                if self._interrupts.wait(WATCH_EVERY_S):
                    stop.set()
                    return

        watcher = threading.Thread(target=watch, name="interrupts", daemon=True)
        watcher.start()
        try:
            yield stop
        finally:
            over.set()
            watcher.join()


class _Watch:
    """Sees the progress of a load, and stops it early for a reason."""

    def __init__(self, bench: Bench, case: Case) -> None:
        self.stop = threading.Event()
        self._bench = bench
        self._give_up_after = case.load.give_up_after
        self._planned = case.plan.requests
        self._gave_up = False
        num_warm_up = sum(one.warm_up for one in self._planned)
        bench.progress.begin(case.label, len(self._planned), num_warm_up)

    def __call__(self, progress: Progress) -> None:
        self._bench.progress.show(progress)
        enough = 0 < self._give_up_after <= progress.ended
        if self._bench.interrupted:
            if not self.stop.is_set():
                self._bench.progress.say(STOPPING)
            self.stop.set()
        elif enough and progress.ended == progress.failed and not self.stop.is_set():
            self._gave_up = True
            self.stop.set()

    def why_stopped(self, result: LoadResult) -> str:
        """Empty if it ran to its end."""
        ended = [one for one in result.records if one.outcome is not Outcome.STOPPED]
        far = sent_so_far(result.records, self._planned)
        if self._gave_up and len(ended) < len(self._planned):
            first = next((one.detail for one in ended if one.detail), "")
            why = f"the first {self._give_up_after} requests all failed: {first}"
            return f"stopped early: {why}; {far}"
        return f"interrupted: {far}" if self._bench.interrupted else ""


def sent_so_far(records: Sequence[Record], planned: Sequence[Planned]) -> str:
    """How far a load came that was stopped, without its warm-up."""
    sent = [one for one in records if not (one.warm_up or one.detail.startswith(NOT_SENT))]
    num_planned = sum(not one.warm_up for one in planned)
    num_stopped = sum(one.outcome is Outcome.STOPPED for one in sent)
    rest = f"; not ended by then, and in no figure: {num_stopped}" if num_stopped else ""
    return f"{len(sent)} of {num_planned} requests had been sent{rest}"


def verification(num_compared: int, mismatches: list[Mismatch]) -> list[Problem]:
    """What a comparison with the single-request outputs says about a run.

    Tokens that got lost, doubled or out of order are faults of any server. Other tokens may come
    from one that is not batch-invariant, so they are said, and count as failed requests.
    """
    counts = Counter(mismatch.kind for mismatch in mismatches)
    problems = []
    for kind, count in counts.items():
        first = next(mismatch for mismatch in mismatches if mismatch.kind is kind)
        text = (
            f"{count} of {num_compared} outputs differ from those of the requests alone ({kind}); "
            f"request {first.index}: {first}"
        )
        is_wrong = kind is MismatchKind.WRONG
        problems.append(Problem(Severity.WARNING if is_wrong else Severity.INVALID, text))
    return problems


def judge(case: Case, result: LoadResult, why_stopped: str) -> Run:
    """The figures of a load, and whether they may be used."""
    if why_stopped and not counted(result.records, None):
        raise BatonError(f"nothing was measured: {why_stopped}")
    problems = [Problem(Severity.INVALID, why_stopped)] if why_stopped else []
    if not counted(result.records, case.window) and case.window is not None:
        text = f"no request arrived in --window {case.load.window}: the figures are of all requests"
        problems.append(Problem(Severity.INVALID, text))
        case = replace(case, load=msgspec.structs.replace(case.load, window=""))
    is_closed = bool(case.concurrency)
    summary = summarise(result, window=case.window, bounds=case.bounds, closed_loop=is_closed)
    planned = case.plan.requests
    if why_stopped or (case.concurrency and case.load.duration_s):
        # That others were not sent is said already, or meant.
        ended = {record.index for record in result.records}
        planned = [one for one in planned if one.index in ended]
    try:
        problems += check(result, summary, planned, max_concurrency=case.max_concurrency)
    except BatonError as error:
        if error.code != ALL_FAILED:
            raise
        problems.append(Problem(Severity.INVALID, error.message))
    num_units = len(units_of([one for one in case.plan.requests if not one.warm_up]))
    if num_units < case.concurrency:
        text = f"{num_units} requests cannot keep {case.concurrency} clients busy"
        problems.append(Problem(Severity.WARNING, text))
    if not case.may_be_cached and (summary.cached_share or 0.0) > MAX_CACHED_SHARE:
        shared = _expected_share(case, result)
        if (summary.cached_share or 0.0) > MAX_CACHED_SHARE + shared:
            problems.append(Problem(Severity.WARNING, CACHED))
    return Run(
        label=case.label,
        summary=summary,
        arm=case.arm,
        round=case.round,
        rate=case.rate,
        started_at=result.started_at,
        wall_s=result.wall_s,
        notes=list(case.plan.notes),
        problems=problems,
        clients=result.clients,
        records=result.records,
    )


def _expected_share(case: Case, result: LoadResult) -> float:
    """What a cache should know of the prompts that count, from them and those sent before them."""
    indices = {record.index for record in counted(result.records, case.window)}
    before = [one.prompt_ids for one in case.plan.requests if one.index < min(indices)]
    asked = [one.prompt_ids for one in case.plan.requests if one.index in indices]
    return shared_share(asked, before)


def shares_prompts(workload: WorkloadSettings) -> bool:
    """Whether the server may have cached more than the plan's token ids can tell."""
    match workload.workload:
        case "conversation" | "file":
            return True
        case "text" | "chat":
            return workload.shared_prefix > 0
        case _:
            return False


def loop_of(settings: ArrivalSettings) -> str:
    """How requests arrive, as a label."""
    if settings.concurrency:
        return f"concurrency {settings.concurrency}"
    return settings.arrivals or "trace"


def _described(probed: Probed, target: Target) -> str:
    gives = {
        "token ids": target.token_ids,
        "a timeline": target.timeline,
        "usage": target.usage,
        "running usage": target.continuous_usage,
    }
    found = ", ".join(name for name, given in gives.items() if given) or "nothing more"
    server = " ".join(part for part in (probed.server, probed.version) if part)
    return f"{target.url}: {server or 'a server'} with {target.model}, giving {found}"
