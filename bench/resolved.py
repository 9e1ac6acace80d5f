"""What settings come to: the plan's workload and arrivals, bounds and window.

Between `settings.py`, which is what people write, and the files that do the work. Every function
raises `ConfigError` for what cannot work, in one line that names the flag.
"""

import msgspec

from baton.bench.figures.metrics import PRESETS, Bounds, Window
from baton.bench.figures.search import SearchOptions as SearchLimits
from baton.bench.plan.arrivals import ArrivalProcess, at_rate, parse_arrivals
from baton.bench.plan.plan import Plan, make_plan
from baton.bench.settings import (
    ArrivalSettings,
    BoundSettings,
    LoadSettings,
    SearchOptions,
    WorkloadSettings,
)
from baton.protocol.errors import ConfigError


def arrivals_of(settings: ArrivalSettings, workload: WorkloadSettings) -> ArrivalProcess | None:
    """None for a closed loop."""
    if settings.arrivals and settings.concurrency:
        raise ConfigError("--arrivals is an open loop and --concurrency a closed one: choose one")
    if settings.arrivals:
        return parse_arrivals(settings.arrivals)
    if settings.concurrency:
        return None
    if workload.workload == "trace":
        return parse_arrivals("trace")
    raise ConfigError(
        "say how requests arrive: --arrivals poisson:5 (open loop) or --concurrency 8 (closed loop)"
    )


def shaped(shape: str, rate: float) -> ArrivalProcess:
    """Arrivals of `--shape` at a rate."""
    name, comma, rest = shape.partition(",")
    try:
        process = parse_arrivals(f"{name}:1{comma}{rest}")
    except ConfigError as error:
        raise ConfigError(
            f"--shape {shape!r}: write poisson, constant, gamma,cv=N or trace ({error.message})"
        ) from error
    return at_rate(process, rate)


def plan_of(
    workload: WorkloadSettings, load: LoadSettings, arrivals: ArrivalProcess | None
) -> Plan:
    """The requests of one load."""
    # What the duration of a closed loop ends is the sending: its requests have no times.
    duration_s = None if arrivals is None else load.duration_s or None
    plan = make_plan(
        workload,
        arrivals,
        count=load.requests or None,
        duration_s=duration_s,
        warm_up=load.warm_up,
    )
    window, at = window_of(load.window), arrival_times(plan)
    if window is not None and at and not any(window.start_s <= at_s < window.end_s for at_s in at):
        raise ConfigError(
            f"no request arrives in --window {load.window}: the first one does after {at[0]:.6g} s "
            f"and the last one after {at[-1]:.6g} s"
        )
    return plan


def arrival_times(plan: Plan) -> list[float]:
    """Without the warm-up; none if some requests arrive only when others were answered."""
    at = [one.at_s for one in plan.requests if not one.warm_up]
    known = [at_s for at_s in at if at_s is not None]
    return known if len(known) == len(at) else []


def bounds_of(settings: BoundSettings) -> Bounds | None:
    """The preset's bounds, single ones replaced; None if nothing bounds."""
    bounds = PRESETS[settings.preset] if settings.preset else Bounds()
    given = {name: limit for name in Bounds.__struct_fields__ if (limit := getattr(settings, name))}
    bounds = msgspec.structs.replace(bounds, **given)
    return None if bounds == Bounds() else bounds


def needed_bounds(settings: BoundSettings, why: str) -> Bounds:
    bounds = bounds_of(settings)
    if bounds is None:
        raise ConfigError(f"{why}: give it --preset {'|'.join(PRESETS)} or bounds like --ttft-ms")
    return bounds


def window_of(text: str) -> Window | None:
    if not text:
        return None
    start, _, end = text.partition("-")
    try:
        window = Window(float(start), float(end))
    except ValueError:
        raise ConfigError(f"--window {text!r}: write it as FROM-TO in seconds") from None
    if not 0 <= window.start_s < window.end_s:
        raise ConfigError(f"--window {text!r} ends before it begins")
    return window


def rates_of(text: str) -> list[float]:
    """Ascending, each once."""
    try:
        rates = sorted({float(part) for part in text.split(",") if part.strip()})
    except ValueError:
        rates = []
    if not rates or not all(0 < rate < float("inf") for rate in rates):
        raise ConfigError(f"--rates {text!r}: write requests/s as 1,2,4,8")
    return rates


def search_limits(options: SearchOptions) -> SearchLimits:
    return SearchLimits(
        attainment=options.attainment,
        start_rate=options.start_rate,
        min_rate=options.min_rate,
        max_rate=options.max_rate or None,
        tolerance=options.tolerance,
        confirmations=options.confirmations,
        max_probes=options.max_probes,
    )
