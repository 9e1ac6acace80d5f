"""Goodput against offered load: `python -m tools.overload --out FOLDER`, about ten minutes.

It starts `baton serve`, finds with `baton bench search` the rate that the server sustains, and
offers multiples of it with `baton bench sweep`. A table shows the share of the best goodput that is
left at each rate, and how long refusals took. Only developers run it.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from baton.bench.figures.paired import nearest_rank
from baton.bench.figures.search import SearchOptions
from baton.bench.loads import search, sweep
from baton.bench.records import Outcome, Record
from baton.bench.report.document import Run, read_json
from baton.bench.settings import (
    BoundSettings,
    LoadSettings,
    ReportSettings,
    SearchSettings,
    Settings,
    SweepSettings,
    Target,
    Workload,
)
from baton.deploy.demo_model import CHECKPOINT
from baton.protocol.errors import BatonError, ConfigError
from tools.json_file import json_file, save
from tools.peers.servers import ServerCommand, free_ports, running
from tools.settings_line import settings_from

SCHEMA = "baton.tools.overload/1"
START_TIMEOUT_S = 180.0
AT_ONCE, IN_VAIN = 429, 503  # refused on arrival, or after a wait in the line


class OverloadSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    out: Annotated[str, Meta(description="new folder for the reports and the server's log")] = ""
    json: Annotated[str, Meta(description="file to write the table to")] = ""
    model: Annotated[str, Meta(description="folder of the model")] = str(CHECKPOINT)
    vocabulary: Annotated[str, Meta(description="token ids of the prompts, LOW-HIGH")] = "auto"
    factors: Annotated[
        tuple[float, ...], Meta(min_length=1, description="multiples of the sustained rate")
    ] = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0)
    rate: Annotated[
        float, Meta(ge=0, description="sustained rate in requests/s; 0: search for it")
    ] = 0.0
    search_s: Annotated[float, Meta(gt=0, description="seconds of each load of the search")] = 20.0
    duration_s: Annotated[float, Meta(gt=0, description="seconds of each load")] = 45.0
    prompt: Annotated[str, Meta(description="lengths of prompts in tokens")] = "uniform:128-384"
    output: Annotated[str, Meta(description="lengths of outputs in tokens")] = "uniform:64-192"
    ttft_ms: Annotated[float, Meta(gt=0, description="bound on the first token in ms")] = 3000.0
    tpot_ms: Annotated[float, Meta(gt=0, description="bound on each later token in ms")] = 60.0
    blocks: Annotated[int, Meta(ge=1, description="KV blocks of each node")] = 300


class Times(msgspec.Struct, frozen=True):
    """The times of one kind of answer, from the request's last byte, in milliseconds."""

    num: int
    p50_ms: float
    p99_ms: float
    max_ms: float

    @classmethod
    def of(cls, records: Sequence[Record]) -> "Times":
        ms = sorted(1e3 * (record.end_s - record.sent_s) for record in records)
        ranks = [nearest_rank(ms, percent) if ms else 0.0 for percent in (50, 99, 100)]
        return cls(len(ms), *ranks)


class LoadRow(msgspec.Struct, frozen=True):
    """One offered load. The share is that of the best goodput of all loads."""

    factor: float
    offered_rate: float
    goodput: float
    share_of_best: float
    num_requests: int
    at_once: Times
    in_vain: Times
    num_without_retry_after: int
    num_failed: int  # neither answered nor refused


class OverloadReport(msgspec.Struct, frozen=True):
    schema: str
    settings: OverloadSettings
    sustained_rate: float
    rows: list[LoadRow]


def measure(settings: OverloadSettings, folder: Path) -> OverloadReport:
    """Start a server and load it. Raises `BatonError` if there are no figures."""
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    argv = (
        sys.executable, "-m", "baton", "serve", "--model", settings.model, "--port", str(port),
        "--set", f"cache.num_blocks={settings.blocks}",
        # A request that has waited for longer than its bound is of no use to its client.
        "--set", f"router.max_queued_s={settings.ttft_ms / 1e3 * 0.75:g}",
    )  # fmt: skip
    server = ServerCommand("serve", argv, ready_url=f"{url}/health")
    with running([server], folder / "server", START_TIMEOUT_S):
        rate = settings.rate or sustained(settings, url, folder / "search")
        rates = {factor: round(factor * rate, 3) for factor in settings.factors}
        common = msgspec.structs.asdict(loads(settings, url, settings.duration_s, folder / "sweep"))
        sweep(SweepSettings(**common, rates=tuple(rates.values())))
    runs = {run.rate: run for run in read_json(folder / "sweep" / "report.json").runs}
    found = [(factor, runs[rates[factor]]) for factor in sorted(rates) if rates[factor] in runs]
    best = max((run.summary.goodput or 0.0 for _, run in found), default=0.0)
    return OverloadReport(
        SCHEMA, settings, rate, [row_of(factor, run, best) for factor, run in found]
    )


def sustained(settings: OverloadSettings, url: str, folder: Path) -> float:
    """Return the largest rate at which nine of ten requests meet the bounds."""
    options = SearchOptions(start_rate=2.0, tolerance=0.15, confirmations=1, max_probes=12)
    common = msgspec.structs.asdict(loads(settings, url, settings.search_s, folder))
    search(SearchSettings(**common, search=options))
    found = read_json(folder / "report.json").search
    if found is None or not found.rate:
        raise BatonError("no rate was found that the server sustains: name one with --rate")
    return found.rate


def loads(settings: OverloadSettings, url: str, duration_s: float, folder: Path) -> Settings:
    return Settings(
        target=Target(url=url),
        load=LoadSettings(duration_s=duration_s, give_up_after=0),
        workload=Workload(
            prompt=settings.prompt, output=settings.output, vocabulary=settings.vocabulary
        ),
        bounds=BoundSettings(ttft_ms=settings.ttft_ms, tpot_ms=settings.tpot_ms),
        report=ReportSettings(out=str(folder)),
    )


def row_of(factor: float, run: Run, best: float) -> LoadRow:
    refused = [record for record in run.counted if record.outcome is Outcome.REFUSED]
    goodput, outcomes = run.summary.goodput or 0.0, run.summary.outcomes
    num_answered = outcomes.get(Outcome.ANSWERED, 0)
    return LoadRow(
        factor,
        run.summary.offered_rate or 0.0,
        goodput,
        goodput / best if best else 0.0,
        run.summary.num_requests,
        Times.of([record for record in refused if record.status == AT_ONCE]),
        Times.of([record for record in refused if record.status == IN_VAIN]),
        sum(record.retry_after_s is None for record in refused),
        run.summary.num_requests - num_answered - len(refused),
    )


def table(report: OverloadReport) -> str:
    """Return the report as Markdown."""
    lines = [
        f"sustained: {report.sustained_rate:g} requests/s",
        "",
        "| load | offered/s | goodput/s | of the best | requests "
        "| refused at once: p50, p99, max ms | refused after waiting: p50, p99, max ms "
        "| without Retry-After | failed |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in report.rows:
        lines.append(
            f"| {row.factor:g} times | {row.offered_rate:.2f} | {row.goodput:.2f} "
            f"| {row.share_of_best:.2f} | {row.num_requests} | {_shown(row.at_once)} "
            f"| {_shown(row.in_vain)} | {row.num_without_retry_after} | {row.num_failed} |"
        )
    return "\n".join(lines)


def _shown(times: Times) -> str:
    if not times.num:
        return "0"
    return f"{times.num}: {times.p50_ms:.1f}, {times.p99_ms:.1f}, {times.max_ms:.1f}"


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        given = sys.argv[1:] if arguments is None else arguments
        settings = settings_from(
            OverloadSettings, "overload", "Overload a server of this host.", given
        )
        if not settings.out:
            raise ConfigError("--out names the folder for the reports; it is missing")
        file, folder = json_file(settings.json), Path(settings.out)
        folder.mkdir(parents=True)
        report = measure(settings, folder.resolve())
        print(table(report))
        if file is not None:
            save(file, report)
    except (BatonError, OSError) as error:
        print(f"baton: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
