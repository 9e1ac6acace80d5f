"""`baton bench fault`: one load, and faults of given processes at given moments of it.

`injector.py` carries the faults out and `faults.py` says what they did; this runs the load between
the two. Failed requests are the point here, so only a client that was at fault makes it invalid,
or a fault that was not carried out.
"""

from collections.abc import Sequence

from baton.bench import resolved
from baton.bench.experiments import Bench, Case, asked, loop_of, shares_prompts
from baton.bench.figures.faults import DEFINITIONS, FaultSpec, Judgement, impacts, parse_fault
from baton.bench.figures.metrics import Bounds
from baton.bench.figures.validity import Problem, Severity
from baton.bench.injector import FaultInjector
from baton.bench.plan.plan import Plan
from baton.bench.report.publish import begin
from baton.bench.settings import FaultSettings
from baton.protocol.errors import ConfigError


def fault(settings: FaultSettings) -> int:
    """The exit code."""
    specs = faults_of(settings)
    arrivals = resolved.arrivals_of(settings.arrival, settings.workload)
    bounds = resolved.bounds_of(settings.bounds)
    wanted = asked(settings.target, settings.workload, settings.load, arrivals)
    refuse_late(specs, wanted.plan)
    publisher = begin("fault", settings, settings.report, api_key=wanted.target.api_key)
    report = publisher.report
    report.bounds = bounds
    report.definitions |= DEFINITIONS
    with Bench() as bench, FaultInjector(specs) as injector:
        server = bench.connect(wanted)
        report.title = report.title or f"{server.target.model} at {server.target.url}, with faults"
        report.notes.append(server.described)
        plan = server.plan(wanted, settings.load, arrivals)
        case = Case(
            label=loop_of(settings.arrival),
            target=server.target,
            plan=plan,
            concurrency=settings.arrival.concurrency,
            load=settings.load,
            bounds=bounds,
            verify=settings.check.verify,
            may_be_cached=shares_prompts(settings.workload),
            rate=plan.offered_rate,
        )
        run = bench.measure(case, on_start=injector.begin)
        if not bench.interrupted:
            run.faults = injector.finish()
            missed = [Problem(Severity.INVALID, text) for text in injector.left_out()]
            run.problems[:0] = missed
            judgement = Judgement(settings.fault.bin_s, closed_loop=bool(case.concurrency))
            run.impacts = impacts(run.records, run.faults, bounds or Bounds(), judgement)
        report.runs.append(run)
    if bounds is None:
        report.notes.append("without bounds every answered request counts as good")
    return publisher.finish()


def faults_of(settings: FaultSettings) -> list[FaultSpec]:
    if not settings.fault.fault:
        raise ConfigError("name a fault: --fault kill:PID@10, stop:PID@10+2 or restart:PID@10=...")
    return [parse_fault(text) for text in settings.fault.fault]


def refuse_late(specs: Sequence[FaultSpec], plan: Plan) -> None:
    """Raises `ConfigError` for a fault after the end of a schedule that is known."""
    if not resolved.arrival_times(plan) or plan.duration_s is None:
        return
    for spec in specs:
        if spec.at_s > plan.duration_s:
            raise ConfigError(
                f"fault {spec}: the schedule ends after {plan.duration_s:.6g} s; give it a longer "
                "--duration-s, or more --requests"
            )
