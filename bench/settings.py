"""The settings of `baton bench`: one frozen Struct per command, made of groups of flags.

`cli.py` makes flags and their help of these annotations. A number of 0 and an empty text mean "not
given" where the description says so.
"""

from typing import Annotated, Literal

import msgspec

from baton.bench.client.target import Target
from baton.bench.figures.search import SearchOptions
from baton.bench.plan.workload import Workload
from baton.protocol.config import about

Preset = Literal["", "chat", "tight", "long-32k"]
MOST_REQUESTS = 2_000_000  # all are planned before the first is sent
Shape = Annotated[
    str, about("distribution of the arrivals: poisson, constant, gamma,cv=N or trace")
]
Verify = Annotated[bool, about("send each prompt alone after the load, and compare the outputs")]


class ArrivalSettings(msgspec.Struct, frozen=True):
    arrivals: Annotated[
        str,
        about(
            "open loop: poisson:5, constant:5 or gamma:5,cv=3 requests/s; trace for the times as "
            "recorded (the default with --workload trace), trace:5 to stretch them to 5 requests/s"
        ),
    ] = ""
    concurrency: Annotated[
        int,
        about(
            "closed loop: number of clients that each wait for their answer; 0 means an open loop",
            ge=0,
        ),
    ] = 0


class LoadSettings(msgspec.Struct, frozen=True):
    requests: Annotated[
        int, about("number of requests; 0 means no limit", ge=0, le=MOST_REQUESTS)
    ] = 0
    duration_s: Annotated[
        float, about("time in which requests arrive; 0 means no end", "s", ge=0)
    ] = 0.0
    warm_up: Annotated[
        int,
        about(
            "number of requests with other prompts that are sent first and do not count",
            ge=0,
            le=100_000,
        ),
    ] = 4
    window: Annotated[
        str, about("FROM-TO in seconds: count only requests that arrive in this time")
    ] = ""
    processes: Annotated[
        int, about("number of client processes that share the load", ge=1, le=256)
    ] = 1
    give_up_after: Annotated[
        int, about("end the load if its first N requests all failed; 0 never ends it", ge=0)
    ] = 16


class BoundSettings(msgspec.Struct, frozen=True):
    preset: Annotated[
        Preset, about("named set of bounds; the next flags replace single bounds")
    ] = ""
    ttft_ms: Annotated[
        float, about("bound on the time to the first token; 0 sets none", "ms", ge=0)
    ] = 0.0
    tpot_ms: Annotated[float, about("bound on the mean time per later token", "ms", ge=0)] = 0.0
    gap_max_ms: Annotated[float, about("bound on the largest gap between tokens", "ms", ge=0)] = 0.0
    e2e_ms: Annotated[float, about("bound on the whole answer", "ms", ge=0)] = 0.0


class ReportSettings(msgspec.Struct, frozen=True):
    out: Annotated[str, about("new folder for report.json and report.html", kind="path")] = ""


class Settings(msgspec.Struct, frozen=True):
    """The flags of every command that puts a load on a server."""

    target: Target = Target()
    load: LoadSettings = LoadSettings()
    workload: Workload = Workload()
    bounds: BoundSettings = BoundSettings()
    report: ReportSettings = ReportSettings()


class RunSettings(Settings, frozen=True):
    """Put one load on a server and measure it."""

    runs: Annotated[int, about("number of runs of the load, each with its own prompts", ge=1)] = 1
    verify: Verify = False
    arrival: ArrivalSettings = ArrivalSettings()


class SweepSettings(Settings, frozen=True):
    """Measure one load after the other, at several rates."""

    rates: Annotated[
        tuple[float, ...], about("rates in requests/s, separated by commas: 1,2,4,8")
    ] = ()
    shape: Shape = "poisson"


class SearchSettings(Settings, frozen=True):
    """Find the largest rate at which enough requests meet the bounds."""

    shape: Shape = "poisson"
    search: SearchOptions = SearchOptions()


class CompareSettings(Settings, frozen=True):
    """Measure several servers in turn with the same requests, and their ratios."""

    rounds: Annotated[
        int, about("number of rounds, each of which measures every arm once", ge=1)
    ] = 6
    flags: Annotated[
        tuple[str, ...],
        about(
            "NAME=FILE or NAME=TEXT: the flags that the server of this arm was started with; may "
            "be repeated",
            kind="repeated",
        ),
    ] = ()
    arrival: ArrivalSettings = ArrivalSettings()


class FaultSettings(Settings, frozen=True):
    """Kill or stop a process under load, and measure what its clients see."""

    fault: Annotated[
        str,
        about(
            "kill:PID@10, or stop:PID@10+2 for 2 s: a process of this host, and the moment of the "
            "fault in seconds from the start of the load"
        ),
    ] = ""
    verify: Verify = False
    arrival: ArrivalSettings = ArrivalSettings()


class SelfTestSettings(msgspec.Struct, frozen=True):
    """Measure a scripted server whose token times are known, and compare."""

    requests: Annotated[int, about("number of good answers in each of the two loads", ge=1)] = 300
    rate: Annotated[float, about("requests per second", gt=0)] = 25.0
    tolerance_ms: Annotated[float, about("largest error of a percentile", "ms", ge=0)] = 1.0
    seed: Annotated[int, about("seed of arrivals and scripts", ge=0)] = 0


class ReportAgainSettings(msgspec.Struct, frozen=True):
    """Write the pages of a report.json again."""

    report: ReportSettings = ReportSettings()
