"""The frame of every command that measures: it plans all loads, runs them, judges and reports.

A command makes an `Experiment`, which refuses, before the first load runs, any load that cannot be
planned. The command then enters it, runs its loads and ends with `finish`. Ctrl-C ends the load
that is running and leaves a report that is marked as interrupted; a second one ends the process at
once.
"""

import contextlib
import threading
from collections.abc import Callable, Sequence

import msgspec

from baton.bench.client.load import Load, Progress, run_load
from baton.bench.client.probe import Probed, accepted, probe
from baton.bench.client.target import Target, settled
from baton.bench.figures.validity import Problem, invalid
from baton.bench.judging import Case, judge, mark_mismatches, sent_so_far
from baton.bench.plan.arrivals import ArrivalProcess
from baton.bench.plan.plan import Plan
from baton.bench.plan.workload import AUTO, Workload
from baton.bench.planning import bounds_of, plan_of, reseeded
from baton.bench.records import LoadResult, Outcome
from baton.bench.report.document import Report, Run
from baton.bench.report.publish import begin, finish
from baton.bench.settings import ArrivalSettings, Settings
from baton.bench.terminal import LoadProgress
from baton.bench.verify import check_greedy, compare_outputs, reference
from baton.protocol.errors import BatonError
from baton.runtime.process import Interrupts

OnStart = Callable[[float], None]
STOPPING = (
    "stopping: the report keeps the results so far; a second Ctrl-C ends at once, without a report"
)


class Server(msgspec.Struct, frozen=True):
    """A server, and the requests that it accepts."""

    target: Target
    workload: Workload  # with the vocabulary settled
    probed: Probed

    @property
    def described(self) -> str:
        """Return one line that describes the server and the extensions in use."""
        gives = {
            "token ids": self.target.token_ids,
            "a timeline": self.target.timeline,
            "usage": self.target.usage,
        }
        found = ", ".join(name for name, given in gives.items() if given) or "nothing more"
        told = {"version": self.probed.version, "server": self.probed.server}
        names = [f"{what} {name}" for what, name in told.items() if name]
        return f"{', '.join([f'{self.target.url}: {self.target.model}', *names])}, giving {found}"


class Experiment:
    """A context in which loads run one after the other, with a `report` from the start.

    `arrivals` are those of every load, None in a closed loop; a search does not know all of its
    loads and names the first. Raises `ConfigError` for all mistakes that show without a server.
    """

    report: Report

    def __init__(
        self,
        command: str,
        settings: Settings,
        arrivals: Sequence[ArrivalProcess | None],
        arrival: ArrivalSettings | None = None,
        verify: bool = False,
    ) -> None:
        self._command, self.settings = command, settings
        self._concurrency, self._verify = arrival.concurrency if arrival else 0, verify
        self._newest: tuple[Workload, ArrivalProcess | None, Plan] | None = None
        # The first load is planned last, because the newest plan is kept.
        for place in reversed(range(len(arrivals))):
            self.draft = self._plan(settings.workload, place, arrivals[place])
        api_key = settled(settings.target, self.draft.requests).api_key
        self._secrets = [api_key] if api_key else []
        self.progress = LoadProgress()
        self._interrupts = Interrupts(on_second=self.progress.abandon)
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "Experiment":
        settings = self.settings
        self.report = begin(self._command, settings, self._secrets)
        self.report.bounds = bounds_of(settings.bounds)
        self._stack.enter_context(self._interrupts)
        self._stack.enter_context(self.progress)
        return self

    def __exit__(self, *_error: object) -> None:
        self._stack.close()

    @property
    def interrupted(self) -> bool:
        return self._interrupts.requested

    def connect(self, target: Target) -> Server:
        """Find out which requests a server accepts. Raises `ConfigError` or `BatonError`."""
        target = settled(target, self.draft.requests)
        probed = probe(target, self._interrupts.fileno())
        target, workload = probed.fit(target), self.settings.workload
        if workload.vocabulary == AUTO and any(one.prompt_ids for one in self.draft.requests):
            low, high = accepted(target)
            workload = msgspec.structs.replace(workload, vocabulary=f"{low}-{high}")
        self.progress.say(f"{target.url} serves {target.model}")
        return Server(target, workload, probed)

    def connect_alone(self, what: str = "") -> Server:
        """Connect to the one server of the experiment, and name it in the report."""
        server = self.connect(self.settings.target)
        name = f"{server.target.model} at {server.target.url}{what}"
        self.report.title = name
        self.report.notes.append(server.described)
        return server

    def _plan(self, workload: Workload, place: int, arrivals: ArrivalProcess | None) -> Plan:
        workload = reseeded(workload, place)
        if self._newest is None or self._newest[:2] != (workload, arrivals):
            self._newest = None  # drop it before the next one is made, because plans are large
            plan = plan_of(workload, self.settings.load, arrivals)
            self._newest = workload, arrivals, plan
        return self._newest[2]

    def put(
        self,
        server: Server,
        place: int,
        label: str,
        arrivals: ArrivalProcess | None,
        on_start: OnStart = lambda _: None,
    ) -> Run | None:
        """Run and report load number `place`, which has prompts of its own.

        Return None if Ctrl-C came before any request had ended. `on_start` gets the start of the
        schedule on the monotonic clock. Raises `ConfigError` for a load that cannot be planned.
        """
        plan = self._plan(server.workload, place, arrivals)
        try:
            run = self.measure(
                Case(label, server.target, plan, self.settings, self._concurrency), on_start
            )
        except BatonError:
            if self.interrupted and self.report.runs:
                return None
            raise
        self.report.runs.append(run)
        return run

    def measure(self, case: Case, on_start: OnStart) -> Run:
        """Run a load and judge it. Raises `ConfigError` for outputs that cannot be verified."""
        if self._verify:
            check_greedy(case.target)
        watch, load = _Watch(self, case), self.settings.load
        result = run_load(
            Load(
                target=case.target,
                requests=case.plan.requests,
                concurrency=case.concurrency,
                processes=load.processes,
                stop_after_s=load.duration_s or None if case.concurrency else None,
                keep_text=self._verify,
            ),
            on_progress=watch,
            on_start=on_start,
            stop=watch.stop,
        )
        why_stopped = watch.why_stopped(result)
        is_verified = self._verify and not why_stopped
        found, notes = self._verified(case, result) if is_verified else ([], [])
        run = judge(case, result, why_stopped)
        run.notes += notes
        run.problems = sorted(found + run.problems, key=lambda problem: not problem.is_invalid)
        return run

    def _verified(self, case: Case, result: LoadResult) -> tuple[list[Problem], list[str]]:
        """Ask each prompt alone, and mark the records whose output under load was different."""
        self.progress.say("asking each prompt alone, to compare the outputs")
        stop = threading.Event()

        def watch(_: Progress) -> None:
            if self.interrupted:
                stop.set()

        try:
            references = reference(case.target, case.plan.requests, stop, watch)
        except BatonError as error:  # the measurement is kept, but not as verified
            return [invalid(f"not verified: {error.message}")], []
        known = [record for record in result.records if record.index in references]
        mismatches = compare_outputs(references, known)
        found = mark_mismatches(known, mismatches)
        what = "token by token" if case.target.token_ids else "letter by letter"
        count = sum(not record.warm_up for record in known)
        note = f"{count} outputs were compared with those of the requests alone, {what}"
        if stop.is_set():
            text = f"interrupted: only {len(references)} of the requests were asked alone"
            found.append(invalid(text))
        return found, [note if mismatches else f"{note}: all equal"]

    def finish(self, num_wanted: int = 0) -> int:
        """Write and show the report; return the exit code.

        A report with fewer than `num_wanted` runs is incomplete after Ctrl-C, and marked so.
        """
        runs = self.report.runs
        if runs and len(runs) < num_wanted and not self.report.invalid:
            text = f"interrupted: {len(runs)} of {num_wanted} loads were run"
            runs[-1].problems.insert(0, invalid(text))
        return finish(self.report, self.settings.report.out, self._secrets)


class _Watch:
    """Watches one load: it shows the progress, and may stop the load early."""

    def __init__(self, experiment: Experiment, case: Case) -> None:
        self.stop = threading.Event()
        self._experiment = experiment
        self._give_up_after = experiment.settings.load.give_up_after
        self._planned = case.plan.requests
        self._gave_up = False
        num_warm_up = sum(one.warm_up for one in self._planned)
        experiment.progress.begin(case.label, len(self._planned), num_warm_up)

    def __call__(self, progress: Progress) -> None:
        self._experiment.progress.show(progress)
        if self.stop.is_set():
            return
        if self._experiment.interrupted:
            self._experiment.progress.say(STOPPING)
            self.stop.set()
        elif 0 < self._give_up_after <= progress.ended == progress.failed:
            self._gave_up = True
            self.stop.set()

    def why_stopped(self, result: LoadResult) -> str:
        """Return nothing if the load ran to its end."""
        ended = [one for one in result.records if one.outcome is not Outcome.STOPPED]
        far = sent_so_far(result.records, self._planned)
        if self._gave_up and len(ended) < len(self._planned):
            first = next((one.detail for one in ended if one.detail), "")
            why = f"the first {self._give_up_after} requests all failed: {first}"
            return f"stopped early: {why}; {far}"
        return f"interrupted: {far}" if self._experiment.interrupted else ""
