"""The frame of every command that measures: it plans all loads, runs them, judges and reports.

A command makes an `Experiment`, which refuses, before the first load runs, any load that cannot be
planned. The command then enters it, runs its loads and ends with `finish`. Ctrl-C ends the load
that is running and leaves a report that is marked as interrupted; a second one ends the process at
once.
"""

import contextlib
import os
import threading
from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.status import Status
from rich.text import Text

from baton.bench.client.load import Load, Progress, run_load
from baton.bench.client.probe import Probed, accepted, probe
from baton.bench.client.request import settled
from baton.bench.figures.metrics import PRESETS, Bounds
from baton.bench.figures.validity import Case, invalid, judge, sent_so_far
from baton.bench.plan.plan import ArrivalProcess, Plan, plan_of, reseeded
from baton.bench.records import Outcome
from baton.bench.report.document import Report, Run
from baton.bench.report.page import begin, finish
from baton.bench.settings import (
    AUTO,
    ArrivalSettings,
    BoundSettings,
    Settings,
    Target,
    Workload,
)
from baton.protocol.errors import BatonError
from baton.runtime.clock import Clock, monotonic
from baton.runtime.process import Interrupts

LINE_EVERY_S = 5.0
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
        gives = {"token ids": self.target.token_ids, "usage": self.target.usage}
        found = ", ".join(name for name, given in gives.items() if given) or "nothing more"
        known = {"version": self.probed.version, "server": self.probed.server}
        names = [f"{what} {name}" for what, name in known.items() if name]
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
    ) -> None:
        self._command, self.settings = command, settings
        self._concurrency = arrival.concurrency if arrival else 0
        self._newest: tuple[Workload, ArrivalProcess | None, Plan] | None = None
        # The first load is planned last, because the newest plan is kept.
        for place in reversed(range(len(arrivals))):
            self._draft = self._plan(settings.workload, place, arrivals[place])
        self._api_key = settled(settings.target, self._draft.requests).api_key
        self.progress = LoadProgress()
        self._interrupts = Interrupts(on_second=self.progress.abandon)
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "Experiment":
        self.report = begin(self._command, self.settings)
        self.report.bounds = bounds_of(self.settings.bounds)
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
        target = settled(target, self._draft.requests)
        probed = probe(target, self._interrupts.fileno())
        target, workload = probed.fit(target), self.settings.workload
        if workload.vocabulary == AUTO and any(one.prompt_ids for one in self._draft.requests):
            low, high = accepted(target)
            workload = msgspec.structs.replace(workload, vocabulary=f"{low}-{high}")
        self.progress.say(f"{target.url} serves {target.model}")
        return Server(target, workload, probed)

    def connect_alone(self, what: str = "") -> Server:
        """Connect to the one server of the experiment, and name it in the report."""
        server = self.connect(self.settings.target)
        self.report.title = f"{server.target.model} at {server.target.url}{what}"
        self.report.notes.append(server.described)
        return server

    def _plan(self, workload: Workload, place: int, arrivals: ArrivalProcess | None) -> Plan:
        workload = reseeded(workload, place)
        if self._newest is None or self._newest[:2] != (workload, arrivals):
            self._newest = None  # drop it before the next one is made, because plans are large
            plan = plan_of(workload, self.settings.load, arrivals)
            self._newest = workload, arrivals, plan
        return self._newest[2]

    def run(
        self, server: Server, place: int, label: str, arrivals: ArrivalProcess | None
    ) -> Run | None:
        """Run and report load number `place`, which has prompts of its own.

        Return None if Ctrl-C came before any request had ended. Raises `ConfigError` for a load
        that cannot be planned.
        """
        plan = self._plan(server.workload, place, arrivals)
        bounds = self.report.bounds
        case = Case(label, plan, self.settings, bounds, self._concurrency)
        try:
            run = self.measure(case, server.target)
        except BatonError:
            if self.interrupted and self.report.runs:
                return None
            raise
        self.report.runs.append(run)
        return run

    def measure(self, case: Case, target: Target) -> Run:
        """Run a load and judge it."""
        load, planned, stop = self.settings.load, case.plan.requests, threading.Event()
        has_given_up = False

        def watch(progress: Progress) -> None:
            """Show the progress, and stop the load early after Ctrl-C or too many failures."""
            nonlocal has_given_up
            self.progress.show(progress)
            if not stop.is_set() and self.interrupted:
                self.progress.say(STOPPING)
                stop.set()
            elif not stop.is_set() and 0 < load.give_up_after <= progress.ended == progress.failed:
                has_given_up = True
                stop.set()

        self.progress.begin(case.label, len(planned), sum(one.warm_up for one in planned))
        result = run_load(
            Load(
                target=target,
                requests=planned,
                concurrency=case.concurrency,
                processes=load.processes,
                stop_after_s=load.duration_s or None if case.concurrency else None,
            ),
            on_progress=watch,
            stop=stop,
        )
        ended = [one for one in result.records if one.outcome is not Outcome.STOPPED]
        far = sent_so_far(result.records, planned)
        why_stopped = f"interrupted: {far}" if self.interrupted else ""
        if has_given_up and len(ended) < len(planned):
            first = next((one.detail for one in ended if one.detail), "")
            why = f"the first {load.give_up_after} requests all failed: {first}"
            why_stopped = f"stopped early: {why}; {far}"
        summary, problems = judge(case, result, why_stopped)
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

    def finish(self, num_wanted: int = 0) -> int:
        """Write and show the report; return the exit code.

        A report with fewer than `num_wanted` runs is incomplete after Ctrl-C, and marked so.
        """
        runs = self.report.runs
        if runs and len(runs) < num_wanted and not self.report.invalid:
            text = f"interrupted: {len(runs)} of {num_wanted} loads were run"
            runs[-1].problems.insert(0, invalid(text))
        return finish(self.report, self.settings.report.out, self._api_key)


def bounds_of(settings: BoundSettings) -> Bounds | None:
    """Return the preset's bounds with single ones replaced; None if nothing bounds."""
    bounds = PRESETS[settings.preset] if settings.preset else Bounds()
    given = {name: limit for name in Bounds.__struct_fields__ if (limit := getattr(settings, name))}
    bounds = msgspec.structs.replace(bounds, **given)
    return None if bounds == Bounds() else bounds


class LoadProgress:
    """The progress of a load on stderr: a live line on a terminal, else a line now and then."""

    def __init__(self, console: Console | None = None, clock: Clock = monotonic) -> None:
        self._console = console or Console(stderr=True, highlight=False)
        self._clock = clock
        self._status: Status | None = None
        self._label, self._total, self._num_warm_up = "", 0, 0
        self._started_s = self._printed_s = clock()

    def __enter__(self) -> "LoadProgress":
        if self._console.is_terminal:
            self._status = self._console.status("")
            self._status.start()
        return self

    def __exit__(self, *_error: object) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None

    def abandon(self) -> None:
        """Say that the process ends at once; safe within a signal handler."""
        # The interrupted code may hold rich's locks; the live line hid the cursor.
        cursor = b"\x1b[?25h\n" if self._status is not None else b""
        os.write(2, cursor + b"baton: ended at once; nothing was written\n")

    def begin(self, label: str, total: int, num_warm_up: int = 0) -> None:
        """Start the load `label` of `total` requests, `num_warm_up` of which only warm up."""
        self._label, self._total, self._num_warm_up = label, total - num_warm_up, num_warm_up
        self._started_s = self._printed_s = self._clock()
        if self._status is not None:
            self._status.update(Text(label))

    def show(self, progress: Progress) -> None:
        now_s = self._clock()
        if self._status is not None:
            self._status.update(Text(self._line(progress, now_s)))
        elif now_s - self._printed_s >= LINE_EVERY_S:
            self._printed_s = now_s
            self.say(self._line(progress, now_s))

    def say(self, line: str) -> None:
        """Print a line that stays."""
        self._console.print(Text(line), soft_wrap=True)

    def _line(self, progress: Progress, now_s: float) -> str:
        elapsed_s = max(now_s - self._started_s, 1e-9)
        # Warm-up goes first, so it ends first.
        ended = max(0, progress.ended - self._num_warm_up)
        failed = f"  {progress.failed} failed" if progress.failed else ""
        # Tokens are counted as requests end.
        rate = f"  {progress.tokens / elapsed_s:.0f} tokens/s" if progress.tokens else ""
        so_far = f"{self._label}: {ended}/{self._total} ended{failed}"
        return f"{so_far}  {progress.sent - progress.ended} in flight{rate}  {elapsed_s:.0f} s"
