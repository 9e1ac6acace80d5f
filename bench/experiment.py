"""The frame of every command that measures, and the commands `run`, `sweep` and `search`.

An `Experiment` plans all loads before the first one runs, then runs, judges and reports them. Each
load has prompts of its own, so none profits from what an earlier one left in a prefix cache. Ctrl-C
ends the load and leaves a report that is marked as interrupted; a second one ends the process.
"""

import os
import sys
import threading
from collections.abc import Callable, Sequence

import msgspec

from baton.bench.client.http import settled
from baton.bench.client.load import Load, Progress, run_load
from baton.bench.client.probe import Probed, accepted, probe
from baton.bench.figures.metrics import PRESETS, Bounds
from baton.bench.figures.search import Probe, RateSearch
from baton.bench.figures.validity import (
    MAX_WRONG_LENGTHS,
    Case,
    find_growth,
    invalid,
    judge,
    sent_so_far,
)
from baton.bench.plan.plan import (
    ArrivalProcess,
    Plan,
    arrivals_of,
    loop_of,
    plan_of,
    reseeded,
    shaped,
)
from baton.bench.records import Outcome, Planned
from baton.bench.report.document import Report, Run
from baton.bench.report.page import begin, finish
from baton.bench.settings import (
    AUTO,
    ArrivalSettings,
    BoundSettings,
    RunSettings,
    SearchSettings,
    Settings,
    SweepSettings,
    Target,
    Workload,
)
from baton.protocol.errors import BatonError, ConfigError
from baton.runtime.clock import monotonic
from baton.runtime.process import Interrupts

LINE_EVERY_S = 5.0
STOPPING = (
    "stopping: the report keeps the results so far; a second Ctrl-C ends at once, "
    "without a report"
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
        found = (
            ", ".join(name for name, given in gives.items() if given) or "nothing more"
        )
        name = f" ({self.probed.server})" if self.probed.server else ""
        return f"{self.target.url}{name}: {self.target.model}, giving {found}"


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
        self._command = command
        self.settings = settings
        self._concurrency = arrival.concurrency if arrival else 0
        self._newest: tuple[Workload, ArrivalProcess | None, Plan] | None = None
        # The first load is planned last, because the newest plan is kept.
        for place in reversed(range(len(arrivals))):
            self._draft = self._plan(settings.workload, place, arrivals[place])
        self._api_key = settled(settings.target, self._draft.requests).api_key
        self._interrupts = Interrupts(on_second=_abandon)

    def __enter__(self) -> "Experiment":
        self.report = begin(self._command, self.settings)
        self.report.bounds = bounds_of(self.settings.bounds)
        self._interrupts.__enter__()
        return self

    def __exit__(self, *_error: object) -> None:
        self._interrupts.__exit__(None, None, None)

    @property
    def interrupted(self) -> bool:
        return self._interrupts.requested

    def connect(self, target: Target) -> Server:
        """Find out which requests a server accepts. Raises `ConfigError` or `BatonError`."""
        target = settled(target, self._draft.requests)
        probed = probe(target, self._interrupts.fileno())
        target = probed.fit(target)
        workload = self.settings.workload
        if workload.vocabulary == AUTO and any(
            one.prompt_ids for one in self._draft.requests
        ):
            low, high = accepted(target)
            workload = msgspec.structs.replace(workload, vocabulary=f"{low}-{high}")
        say(f"{target.url} serves {target.model}")
        return Server(target, workload, probed)

    def connect_alone(self, what: str = "") -> Server:
        """Connect to the one server of the experiment, and name it in the report."""
        server = self.connect(self.settings.target)
        self.report.title = f"{server.target.model} at {server.target.url}{what}"
        self.report.notes.append(server.described)
        return server

    def _plan(
        self, workload: Workload, place: int, arrivals: ArrivalProcess | None
    ) -> Plan:
        workload = reseeded(workload, place)
        if self._newest is None or self._newest[:2] != (workload, arrivals):
            # Drop it before the next one is made, because plans are large.
            self._newest = None
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
        load = self.settings.load
        planned = case.plan.requests
        stop = threading.Event()
        has_given_up = False

        def watch(progress: Progress) -> None:
            """Show the progress, and stop the load early after Ctrl-C or too many failures."""
            nonlocal has_given_up
            show(progress)
            if not stop.is_set() and self.interrupted:
                say(STOPPING)
                stop.set()
            elif (
                not stop.is_set()
                and 0 < load.give_up_after <= progress.ended == progress.failed
            ):
                has_given_up = True
                stop.set()

        show = _shown_every(LINE_EVERY_S, case.label, planned)
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
    given = {
        name: limit
        for name in Bounds.__struct_fields__
        if (limit := getattr(settings, name))
    }
    bounds = msgspec.structs.replace(bounds, **given)
    return None if bounds == Bounds() else bounds


def run(settings: RunSettings) -> int:
    arrivals = arrivals_of(settings.arrival, settings.workload)
    num_runs = settings.runs
    loads = [arrivals] * num_runs
    experiment = Experiment("run", settings, loads, settings.arrival)
    places = (
        [f", run {place}" for place in range(1, num_runs + 1)] if num_runs > 1 else [""]
    )
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
            if (
                run.summary.outcomes.get(Outcome.WRONG_LENGTH, 0)
                == run.summary.num_requests
            ):
                raise BatonError(
                    f"no response has the requested length: {outcome(run)}"
                )
            if experiment.interrupted:
                break
            rates.observe(probe_of(rate, run))
            say(f"{label}: {outcome(run)}")
    report.search = rates.result()
    return experiment.finish()


def probe_of(rate: float, run: Run) -> Probe:
    summary = run.summary
    outcomes = run.summary.outcomes
    # A server that answers nothing fails, and one whose lengths are wrong if nothing else is. A
    # client without free sockets shows nothing about it.
    wrong_length = (
        outcomes.get(Outcome.WRONG_LENGTH, 0) > MAX_WRONG_LENGTHS * summary.num_requests
    )
    is_alone = wrong_length and sum(problem.is_invalid for problem in run.problems) == 1
    is_broken = run.invalid and not outcomes.get(Outcome.NO_SOCKET)
    is_broken = is_broken and (is_alone or not outcomes.get(Outcome.ANSWERED))
    return Probe(
        rate,
        summary.attainment or 0.0,
        is_broken or not run.invalid,
        is_saturated=bool(find_growth(run.records)),
        is_broken=is_broken,
        offered_rate=summary.offered_rate,
    )


def outcome(run: Run) -> str:
    why = next((one.text for one in run.problems if one.is_invalid), "")
    return (
        f"INVALID: {why}" if why else f"attainment {run.summary.attainment or 0.0:.1%}"
    )


def _shown_every(
    seconds: float, label: str, planned: Sequence[Planned]
) -> Callable[[Progress], None]:
    """Return a function that prints the progress of a load now and then, without its warm-up."""
    num_warm_up = sum(one.warm_up for one in planned)
    started_s = printed_s = monotonic()

    def show(progress: Progress) -> None:
        nonlocal printed_s
        now_s = monotonic()
        if now_s - printed_s < seconds:
            return
        printed_s = now_s
        elapsed_s = now_s - started_s
        ended = max(0, progress.ended - num_warm_up)  # warm-up ends first
        say(
            f"{label}: {ended}/{len(planned) - num_warm_up} ended, {progress.failed} failed, "
            f"{progress.sent - progress.ended} in flight, {progress.tokens / elapsed_s:.0f} "
            f"tokens/s, {elapsed_s:.0f} s"
        )

    return show


def say(line: str) -> None:
    print(
        "".join(c if c.isprintable() else " " for c in line),
        file=sys.stderr,
        flush=True,
    )


def _abandon() -> None:
    """Say that the process ends at once; safe within a signal handler."""
    os.write(2, b"\nbaton: ended at once; nothing was written\n")
