"""`baton bench fault`: one load, and the fault of a given process at a given moment of it.

Failed requests are expected, so a run is invalid only if the client was at fault, or if the fault
was not carried out.
"""

from baton.bench.experiment import Experiment
from baton.bench.figures.faults import (
    DEFINITIONS,
    FORMS,
    FaultSpec,
    Judgement,
    impact_of,
    parse_fault,
)
from baton.bench.figures.metrics import Bounds
from baton.bench.figures.validity import invalid
from baton.bench.injector import FaultInjector
from baton.bench.plan.plan import Plan
from baton.bench.planning import arrivals_of, loop_of
from baton.bench.settings import FaultSettings
from baton.protocol.errors import ConfigError

TOO_LATE = "the load ended before it; let it go on for longer"


def fault(settings: FaultSettings) -> int:
    """Return the exit code."""
    if not settings.fault:
        raise ConfigError(f"name a fault with --fault {FORMS}")
    spec = parse_fault(settings.fault)
    arrivals = arrivals_of(settings.arrival, settings.workload)
    experiment = Experiment("fault", settings, [arrivals], settings.arrival, settings.verify)
    refuse_late(spec, experiment.draft)
    with experiment, FaultInjector(spec) as injector:
        report = experiment.report
        report.definitions |= DEFINITIONS
        server = experiment.connect_alone(", with a fault")
        run = experiment.put(server, 0, loop_of(settings.arrival), arrivals, injector.begin)
        if run is not None and not experiment.interrupted:
            if (done := injector.finish()) is None:
                run.problems.insert(0, invalid(f"fault {spec} was not carried out: {TOO_LATE}"))
            else:
                judgement = Judgement(closed_loop=arrivals is None)
                bounds = report.bounds or Bounds()
                run.faults = [done]
                run.impacts = [impact_of(run.records, done, bounds, judgement)]
    if report.bounds is None:
        report.notes.append("without bounds every answered request counts as good")
    return experiment.finish()


def refuse_late(spec: FaultSpec, plan: Plan) -> None:
    """Raise `ConfigError` for a fault after the end of a schedule that is known."""
    if plan.times and plan.duration_s is not None and spec.at_s > plan.duration_s:
        raise ConfigError(
            f"fault {spec}: the schedule ends after {plan.duration_s:.6g} s; give it a longer "
            "--duration-s, or more --requests"
        )
