"""`baton bench fault`: one load, and faults of given processes at given moments of it.

Failed requests are expected, so a run is invalid only if the client was at fault, or if a fault was
not carried out.
"""

from collections.abc import Sequence

from baton.bench.experiment import Experiment
from baton.bench.figures.faults import (
    DEFINITIONS,
    FORMS,
    FaultSpec,
    Judgement,
    impacts,
    parse_fault,
)
from baton.bench.figures.metrics import Bounds
from baton.bench.figures.validity import invalid
from baton.bench.injector import FaultInjector
from baton.bench.plan.plan import Plan
from baton.bench.planning import arrivals_of, loop_of
from baton.bench.settings import FaultSettings
from baton.protocol.errors import ConfigError


def fault(settings: FaultSettings) -> int:
    """Return the exit code."""
    if not settings.fault:
        raise ConfigError(f"name a fault with --fault {FORMS}")
    specs = [parse_fault(text) for text in settings.fault]
    arrivals = arrivals_of(settings.arrival, settings.workload)
    experiment = Experiment("fault", settings, [arrivals], settings.arrival, settings.verify)
    refuse_late(specs, experiment.draft)
    with experiment, FaultInjector(specs) as injector:
        report = experiment.report
        report.definitions |= DEFINITIONS
        server = experiment.connect_alone(", with faults")
        run = experiment.put(server, 0, loop_of(settings.arrival), arrivals, injector.begin)
        if run is not None and not experiment.interrupted:
            run.faults = injector.finish()
            missed = [invalid(text) for text in injector.left_out()]
            run.problems[:0] = missed
            judgement = Judgement(settings.bin_s, closed_loop=arrivals is None)
            run.impacts = impacts(run.records, run.faults, report.bounds or Bounds(), judgement)
    if report.bounds is None:
        report.notes.append("without bounds every answered request counts as good")
    return experiment.finish()


def refuse_late(specs: Sequence[FaultSpec], plan: Plan) -> None:
    """Raise `ConfigError` for a fault after the end of a schedule that is known."""
    if not plan.times or plan.duration_s is None:
        return
    for spec in specs:
        if spec.at_s > plan.duration_s:
            raise ConfigError(
                f"fault {spec}: the schedule ends after {plan.duration_s:.6g} s; give it a longer "
                "--duration-s, or more --requests"
            )
