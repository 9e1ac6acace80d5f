"""What a user may ask of `baton bench`: one frozen Struct per group of flags, one per command.

`cli.py` makes the flags and their help of these annotations, the experiments read them, and reports
carry them without secrets; `resolved.py` turns them into what the other files of this folder take.
A number of 0 and a text of "" mean "not given" wherever that is said.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from baton.bench.client.target import Target
from baton.bench.plan.workload import SECONDS, Workload

Preset = Literal["", "chat", "tight", "long-32k"]
MOST_REQUESTS = 2_000_000  # all are planned before the first is sent
MILLISECONDS = {"unit": "ms"}
WorkloadSettings = Workload


class LoadSettings(msgspec.Struct, frozen=True):
    requests: Annotated[
        int, Meta(ge=0, le=MOST_REQUESTS, description="how many; 0 leaves it to --duration-s")
    ] = 0
    duration_s: Annotated[
        float, Meta(ge=0, description="of arrivals; 0 leaves it to --requests", extra=SECONDS)
    ] = 0.0
    warm_up: Annotated[
        int,
        Meta(ge=0, le=100_000, description="requests before, with other prompts; not counted"),
    ] = 4
    window: Annotated[
        str, Meta(description="FROM-TO in seconds: counts only requests that arrive then")
    ] = ""
    max_concurrency: Annotated[
        int, Meta(ge=0, description="of an open loop; waiting counts into TTFT; 0 is no limit")
    ] = 0
    processes: Annotated[int, Meta(ge=1, le=256, description="client processes")] = 1
    give_up_after: Annotated[
        int, Meta(ge=0, description="stop when the first N all failed; 0 goes on")
    ] = 16


class ArrivalSettings(msgspec.Struct, frozen=True):
    arrivals: Annotated[
        str,
        Meta(
            description="open loop: poisson:5, constant:5, gamma:5,cv=3 or ramp:1-10 requests/s; "
            "trace as recorded (so by default with --workload trace), trace:5 stretched to 5/s"
        ),
    ] = ""
    concurrency: Annotated[
        int, Meta(ge=0, description="closed loop: so many clients, each asking when answered")
    ] = 0


class ShapeSettings(msgspec.Struct, frozen=True):
    shape: Annotated[
        str, Meta(description="of arrivals: poisson, constant, gamma,cv=N or trace")
    ] = "poisson"


class BoundSettings(msgspec.Struct, frozen=True):
    preset: Annotated[
        Preset, Meta(description="bounds by name; the flags below override single ones")
    ] = ""
    ttft_ms: Annotated[float, Meta(ge=0, description="bound; 0 has none", extra=MILLISECONDS)] = 0.0
    tpot_ms: Annotated[float, Meta(ge=0, description="bound; 0 has none", extra=MILLISECONDS)] = 0.0
    gap_max_ms: Annotated[
        float, Meta(ge=0, description="bound; 0 has none", extra=MILLISECONDS)
    ] = 0.0
    e2e_ms: Annotated[float, Meta(ge=0, description="bound; 0 has none", extra=MILLISECONDS)] = 0.0


class ReportSettings(msgspec.Struct, frozen=True):
    out: Annotated[
        str, Meta(description="folder for report.json, .csv, .md, .html and PNGs; a new one")
    ] = ""
    label: Annotated[str, Meta(description="the run's name in the report")] = ""


class CheckSettings(msgspec.Struct, frozen=True):
    verify: Annotated[
        bool, Meta(description="then ask each prompt alone, and compare the outputs")
    ] = False


class RepeatSettings(msgspec.Struct, frozen=True):
    runs: Annotated[
        int, Meta(ge=1, description="the same load so many times, each with its own prompts")
    ] = 1


class SweepOptions(msgspec.Struct, frozen=True):
    rates: Annotated[str, Meta(description="requests/s, as 1,2,4,8")] = ""


class SearchOptions(msgspec.Struct, frozen=True):
    attainment: Annotated[
        float, Meta(gt=0, le=1, description="share of arrivals that must meet all bounds")
    ] = 0.9
    start_rate: Annotated[float, Meta(gt=0, description="first rate tried, requests/s")] = 1.0
    min_rate: Annotated[float, Meta(gt=0, description="never below this, requests/s")] = 0.01
    max_rate: Annotated[
        float, Meta(ge=0, description="never beyond this, requests/s; 0 has no limit")
    ] = 0.0
    tolerance: Annotated[
        float, Meta(gt=0, lt=1, description="relative width at which bisecting ends")
    ] = 0.05
    confirmations: Annotated[int, Meta(ge=1, description="runs that must confirm the rate")] = 3
    max_probes: Annotated[int, Meta(ge=1, description="runs in all")] = 40


class CompareOptions(msgspec.Struct, frozen=True):
    rounds: Annotated[int, Meta(ge=1, description="each arm once per round, in random order")] = 6
    flags: Annotated[
        tuple[str, ...],
        Meta(description="NAME=FILE or NAME=TEXT: an arm's start flags; may be repeated"),
    ] = ()


class FaultOptions(msgspec.Struct, frozen=True):
    fault: Annotated[
        tuple[str, ...],
        Meta(
            description="kill:PID@10, stop:PID@10+2 or restart:PID@10=COMMAND, seconds from "
            "the start; may be repeated"
        ),
    ] = ()
    bin_s: Annotated[float, Meta(gt=0, description="width of a goodput bin", extra=SECONDS)] = 1.0


class RunSettings(msgspec.Struct, frozen=True):
    """One load, or the same several times."""

    again: RepeatSettings = RepeatSettings()
    target: Target = Target()
    workload: WorkloadSettings = WorkloadSettings()
    arrival: ArrivalSettings = ArrivalSettings()
    load: LoadSettings = LoadSettings()
    bounds: BoundSettings = BoundSettings()
    check: CheckSettings = CheckSettings()
    report: ReportSettings = ReportSettings()


class SweepSettings(msgspec.Struct, frozen=True):
    """Loads at several rates."""

    sweep: SweepOptions = SweepOptions()
    shape: ShapeSettings = ShapeSettings()
    target: Target = Target()
    workload: WorkloadSettings = WorkloadSettings()
    load: LoadSettings = LoadSettings()
    bounds: BoundSettings = BoundSettings()
    report: ReportSettings = ReportSettings()


class SearchSettings(msgspec.Struct, frozen=True):
    """The largest rate that attains the bounds."""

    search: SearchOptions = SearchOptions()
    shape: ShapeSettings = ShapeSettings()
    target: Target = Target()
    workload: WorkloadSettings = WorkloadSettings()
    load: LoadSettings = LoadSettings()
    bounds: BoundSettings = BoundSettings()
    report: ReportSettings = ReportSettings()


class CompareSettings(msgspec.Struct, frozen=True):
    """Several servers, the same requests."""

    compare: CompareOptions = CompareOptions()
    target: Target = Target()
    workload: WorkloadSettings = WorkloadSettings()
    arrival: ArrivalSettings = ArrivalSettings()
    load: LoadSettings = LoadSettings()
    bounds: BoundSettings = BoundSettings()
    report: ReportSettings = ReportSettings()


class FaultSettings(msgspec.Struct, frozen=True):
    """One load with faults."""

    fault: FaultOptions = FaultOptions()
    target: Target = Target()
    workload: WorkloadSettings = WorkloadSettings()
    arrival: ArrivalSettings = ArrivalSettings()
    load: LoadSettings = LoadSettings()
    bounds: BoundSettings = BoundSettings()
    check: CheckSettings = CheckSettings()
    report: ReportSettings = ReportSettings()


class ReportAgainSettings(msgspec.Struct, frozen=True):
    """Pages of a report that was written before."""

    report: ReportSettings = ReportSettings()


Settings = RunSettings | SweepSettings | SearchSettings | CompareSettings | FaultSettings
