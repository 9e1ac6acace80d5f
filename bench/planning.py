"""Make plans from settings: bounds, arrivals, the window, and the requests of every load.

This file is pure, except for the traces and files that a plan reads. Every function raises a
`ConfigError` of one line, which names the flag, for settings that cannot work.
"""

import msgspec
import numpy as np

from baton.bench.figures.metrics import PRESETS, Bounds, Window
from baton.bench.plan.arrivals import ArrivalProcess, parse_arrivals
from baton.bench.plan.plan import Plan, make_plan
from baton.bench.plan.workload import Workload
from baton.bench.settings import ArrivalSettings, BoundSettings, LoadSettings
from baton.protocol.errors import ConfigError


def bounds_of(settings: BoundSettings) -> Bounds | None:
    """Return the preset's bounds with single ones replaced; None if nothing bounds."""
    bounds = PRESETS[settings.preset] if settings.preset else Bounds()
    given = {name: limit for name in Bounds.__struct_fields__ if (limit := getattr(settings, name))}
    bounds = msgspec.structs.replace(bounds, **given)
    return None if bounds == Bounds() else bounds


def arrivals_of(settings: ArrivalSettings, workload: Workload) -> ArrivalProcess | None:
    """Return the arrivals of an open loop, or None for a closed loop."""
    if settings.arrivals and settings.concurrency:
        raise ConfigError("--arrivals is an open loop and --concurrency a closed one: choose one")
    if settings.concurrency:
        return None
    text = settings.arrivals or ("trace" if workload.workload == "trace" else "")
    if not text:
        raise ConfigError(
            "say how requests arrive: --arrivals poisson:5 (open loop) or --concurrency 8 (closed "
            "loop)"
        )
    return parse_arrivals(text)


def loop_of(settings: ArrivalSettings) -> str:
    """Name the way in which requests arrive."""
    closed = f"concurrency {settings.concurrency}" if settings.concurrency else ""
    return closed or settings.arrivals or "trace"


def shaped(shape: str, rate: float) -> ArrivalProcess:
    """Return arrivals of `--shape` at a rate."""
    name, comma, rest = shape.partition(",")
    try:
        return parse_arrivals(f"{name}:{rate}{comma}{rest}")
    except ConfigError as error:
        raise ConfigError(
            f"--shape {shape!r}: write poisson, constant, gamma,cv=N or trace ({error.message})"
        ) from error


def plan_of(workload: Workload, load: LoadSettings, arrivals: ArrivalProcess | None) -> Plan:
    """Return the requests of one load."""
    window = window_of(load.window)
    # The duration of a closed loop ends the sending: its requests have no times.
    duration_s = None if arrivals is None else load.duration_s or None
    count = load.requests or None
    plan = make_plan(workload, arrivals, count=count, duration_s=duration_s, warm_up=load.warm_up)
    at = plan.times
    if window is not None and at and not any(window.start_s <= at_s < window.end_s for at_s in at):
        raise ConfigError(
            f"no request arrives in --window {load.window}: the first one does after {at[0]:.6g} s "
            f"and the last one after {at[-1]:.6g} s"
        )
    return plan


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


def reseeded(workload: Workload, place: int) -> Workload:
    """Return the workload of load number `place`: 0 has the seed as given, others a mix of both."""
    if place == 0:
        return workload
    mixed = np.random.SeedSequence([workload.seed, place]).generate_state(1)
    return msgspec.structs.replace(workload, seed=int(mixed[0]))
