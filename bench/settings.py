"""What a user may ask of `baton bench`: one frozen Struct per command, made of groups of flags.

`cli.py` makes flags and their help of these annotations, the commands read the values, and reports
carry them without secrets. Groups that belong to a part of the bench are stated there: `Workload`,
`Target` and `SearchOptions`. A number of 0 and an empty text mean "not given" where the description
says so.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from baton.bench.client.target import Target
from baton.bench.figures.search import SearchOptions
from baton.bench.plan.workload import SECONDS, Workload

Preset = Literal["", "chat", "tight", "long-32k"]
MOST_REQUESTS = 2_000_000  # all are planned before the first is sent
MILLISECONDS = {"unit": "ms"}
REPEATED = {"repeated": True}
Shape = Annotated[
    str,
    Meta(description="distribution of the arrivals: poisson, constant, gamma,cv=N or trace"),
]
Verify = Annotated[
    bool,
    Meta(description="after the load, ask each prompt once more alone, and compare the outputs"),
]


class ArrivalSettings(msgspec.Struct, frozen=True):
    arrivals: Annotated[
        str,
        Meta(
            description="open loop: poisson:5, constant:5, gamma:5,cv=3 or ramp:1-10 requests/s; "
            "trace for the times as recorded (the default with --workload trace), trace:5 to "
            "stretch them to 5 requests/s"
        ),
    ] = ""
    concurrency: Annotated[
        int,
        Meta(
            ge=0,
            description="closed loop: number of clients, each of which waits for its answer before "
            "it sends again; 0 for an open loop",
        ),
    ] = 0


class LoadSettings(msgspec.Struct, frozen=True):
    requests: Annotated[
        int,
        Meta(
            ge=0,
            le=MOST_REQUESTS,
            description="number of requests; 0 for all of --duration-s",
        ),
    ] = 0
    duration_s: Annotated[
        float,
        Meta(
            ge=0,
            description="time in which requests arrive; 0 for all of --requests",
            extra=SECONDS,
        ),
    ] = 0.0
    warm_up: Annotated[
        int,
        Meta(
            ge=0,
            le=100_000,
            description="number of requests with other prompts that go first and are not counted",
        ),
    ] = 4
    window: Annotated[
        str, Meta(description="FROM-TO in seconds: count only the requests that arrive then")
    ] = ""
    max_concurrency: Annotated[
        int,
        Meta(
            ge=0,
            description="limit on the requests in flight of an open loop, where waiting for a "
            "place counts into TTFT; 0 sets none",
        ),
    ] = 0
    processes: Annotated[
        int, Meta(ge=1, le=256, description="number of client processes that share the load")
    ] = 1
    give_up_after: Annotated[
        int,
        Meta(ge=0, description="end the load if its first N requests all failed; 0 never does"),
    ] = 16


class BoundSettings(msgspec.Struct, frozen=True):
    preset: Annotated[
        Preset, Meta(description="bounds by name, of which the next flags replace single ones")
    ] = ""
    ttft_ms: Annotated[
        float, Meta(ge=0, description="bound on the first token; 0 sets none", extra=MILLISECONDS)
    ] = 0.0
    tpot_ms: Annotated[
        float,
        Meta(ge=0, description="bound on the mean time per later token", extra=MILLISECONDS),
    ] = 0.0
    gap_max_ms: Annotated[
        float,
        Meta(ge=0, description="bound on the largest gap between tokens", extra=MILLISECONDS),
    ] = 0.0
    e2e_ms: Annotated[
        float, Meta(ge=0, description="bound on the whole answer", extra=MILLISECONDS)
    ] = 0.0


class ReportSettings(msgspec.Struct, frozen=True):
    out: Annotated[
        str,
        Meta(description="new folder for report.json and report.html"),
    ] = ""
    label: Annotated[str, Meta(description="title of the report")] = ""


class RunSettings(msgspec.Struct, frozen=True):
    """Put one load on a server and measure it."""

    runs: Annotated[
        int, Meta(ge=1, description="number of times to run the load, each with its own prompts")
    ] = 1
    verify: Verify = False
    target: Target = Target()
    arrival: ArrivalSettings = ArrivalSettings()
    load: LoadSettings = LoadSettings()
    workload: Workload = Workload()
    bounds: BoundSettings = BoundSettings()
    report: ReportSettings = ReportSettings()


class SweepSettings(msgspec.Struct, frozen=True):
    """Measure one load after the other, at several rates."""

    rates: Annotated[
        str, Meta(description="rates to measure in requests/s, separated by commas: 1,2,4,8")
    ] = ""
    shape: Shape = "poisson"
    target: Target = Target()
    load: LoadSettings = LoadSettings()
    workload: Workload = Workload()
    bounds: BoundSettings = BoundSettings()
    report: ReportSettings = ReportSettings()


class SearchSettings(msgspec.Struct, frozen=True):
    """Find the largest rate at which enough requests meet the bounds."""

    shape: Shape = "poisson"
    search: SearchOptions = SearchOptions()
    target: Target = Target()
    load: LoadSettings = LoadSettings()
    workload: Workload = Workload()
    bounds: BoundSettings = BoundSettings()
    report: ReportSettings = ReportSettings()


class CompareSettings(msgspec.Struct, frozen=True):
    """Measure several servers in turn with the same requests, and their ratios."""

    rounds: Annotated[
        int, Meta(ge=1, description="number of rounds; each measures every arm once, in any order")
    ] = 6
    flags: Annotated[
        tuple[str, ...],
        Meta(
            description="NAME=FILE or NAME=TEXT: the flags that the server of this arm was started "
            "with; may be repeated",
            extra=REPEATED,
        ),
    ] = ()
    target: Target = Target()
    arrival: ArrivalSettings = ArrivalSettings()
    load: LoadSettings = LoadSettings()
    workload: Workload = Workload()
    bounds: BoundSettings = BoundSettings()
    report: ReportSettings = ReportSettings()


class FaultSettings(msgspec.Struct, frozen=True):
    """Kill, stop or restart a process under load, and measure what its clients see."""

    fault: Annotated[
        tuple[str, ...],
        Meta(
            description="kill:PID@10, stop:PID@10+2 or restart:PID@10=COMMAND, in seconds from the "
            "start of the load; may be repeated",
            extra=REPEATED,
        ),
    ] = ()
    bin_s: Annotated[
        float,
        Meta(gt=0, description="width of the bins in which recovery is looked for", extra=SECONDS),
    ] = 1.0
    verify: Verify = False
    target: Target = Target()
    arrival: ArrivalSettings = ArrivalSettings()
    load: LoadSettings = LoadSettings()
    workload: Workload = Workload()
    bounds: BoundSettings = BoundSettings()
    report: ReportSettings = ReportSettings()


class ReportAgainSettings(msgspec.Struct, frozen=True):
    """Write the pages of a report.json again."""

    report: ReportSettings = ReportSettings()


Settings = RunSettings | SweepSettings | SearchSettings | CompareSettings | FaultSettings
