"""What every page of a report says in words and tables, before it is Markdown or HTML.

`tables.py` and `html.py` render the same sections, so the two cannot disagree. Text is plain and
unescaped: whoever renders it escapes it, since much of it came from a server.
"""

from collections.abc import Iterable, Mapping

import msgspec

from baton.bench.figures.metrics import Distribution, Summary
from baton.bench.figures.paired import MIN_ROUNDS
from baton.bench.figures.stages import STAGES, summarise_stages
from baton.bench.report.document import Report, Run, Table
from baton.bench.report.provenance import Load, Provenance
from baton.bench.report.wording import (
    NONE,
    gibibytes,
    number,
    quantity,
    several,
    share,
    span,
    utc,
)

LATENCIES = (
    "ttft", "tpot", "itl", "gap_max", "chunk_gap", "e2e", "ntpot", "ttft_from_sent",
    "e2e_from_sent", "lag",
)  # fmt: skip
PERCENTILES = ("mean", "p50", "p90", "p95", "p99", "max")


class Section(msgspec.Struct, frozen=True):
    """`key` is unique and fit for an address; `lines` come before the tables."""

    key: str
    title: str
    lines: list[str]
    tables: list[Table]


def results(report: Report) -> list[Section]:
    """What was found."""
    found = [
        _search(report),
        _comparison(report),
        _overview(report),
        *(_of_run(number_, run) for number_, run in enumerate(report.runs, 1)),
        *(Section(f"table-{number_}", table.title, _filled(table.caption),
                  [msgspec.structs.replace(table, title="", caption="")])
          for number_, table in enumerate(report.tables, 1)),
    ]  # fmt: skip
    return [section for section in found if section is not None]


def background(report: Report) -> list[Section]:
    """What it rests on: settings, provenance, definitions."""
    return [
        Section("settings", "Settings", [], _pairs(report.settings, "setting")),
        Section("provenance", "Provenance", [], _pairs(provenance(report.provenance), "what")),
        Section("definitions", "Definitions", [], _pairs(report.definitions, "word")),
    ]


def provenance(of: Provenance) -> dict[str, str]:
    machine = of.machine
    cpus = f"{machine.num_cpus} of {several(machine.num_cpus_total, 'CPU')}"
    told = {
        "made": utc(of.created_at),
        "command": " ".join(of.command_line),
        "baton": of.baton_version,
        "commit": of.commit or "not in a checkout",
        "local changes": "yes: the commit alone does not say what ran" if of.dirty else "no",
        "settings hash": of.config_hash,
        "machine": f"{machine.cpu_model}, {cpus}, {gibibytes(machine.memory_bytes)}",
        "GPUs": "; ".join(machine.gpus) or "none seen by the client",
        "system": machine.system,
        "load before": _load(of.load_before),
        "load after": _load(of.load_after),
        **{f"{name} version": version for name, version in of.versions.items()},
    }
    if of.gpus_after:
        told["GPUs after"] = "; ".join(of.gpus_after)
    return told


def _overview(report: Report) -> Section | None:
    """One row per run, where there are several."""
    if len(report.runs) < 2:
        return None
    columns = [
        "run", "offered/s", "answered/s", "tokens/s", "attainment", "goodput/s", "TTFT p50",
        "TTFT p99", "TPOT p50", "TPOT p99", "gap p99", "failed", "valid",
    ]  # fmt: skip
    rows = [[run.label, *_overview_row(run.summary), _validity(run)] for run in report.runs]
    return Section("runs", "Runs", [], [Table("", columns, rows, "latencies in ms")])


def _overview_row(summary: Summary) -> list[str]:
    p50s, p99s = ("p50", "p99"), ("p99",)
    return [
        number(summary.offered_rate),
        number(summary.answered_rate),
        number(summary.tokens_per_s),
        share(summary.attainment),
        number(summary.goodput),
        *_percentiles(summary.ttft, p50s),
        *_percentiles(summary.tpot, p50s),
        *_percentiles(summary.gap_max, p99s),
        f"{summary.num_requests - summary.outcomes.get('answered', 0):,}",
    ]


def _validity(run: Run) -> str:
    if run.invalid:
        return "INVALID"
    return "warnings" if run.problems else "yes"


def _search(report: Report) -> Section | None:
    if report.search is None:
        return None
    search = report.search
    rows = [
        [
            number(probe.rate),
            str(probe.purpose),
            share(probe.attainment) if probe.is_valid else NONE,
            "server's fault" if probe.is_broken else "yes" if probe.is_valid else "INVALID",
            "yes" if probe.is_saturated else "no",
        ]
        for probe in search.probes
    ]
    columns = ["rate/s", "why", "attainment", "valid", "saturated"]
    return Section("search", "Search", [search.line], [Table("", columns, rows)])


def _comparison(report: Report) -> Section | None:
    if not report.comparison and not report.parity:
        return None
    lines, tables = [], []
    if report.comparison:
        arms = list(report.comparison[0].medians)
        columns = ["figure", *arms, *(f"{arm} / {arms[0]}" for arm in arms[1:]), "better"]
        rows = []
        for row in report.comparison:
            ratios = [
                f"{ratio.median:.3f} ({span(ratio.low, ratio.high)})"
                + ("" if ratio.is_conclusive else " *")
                for ratio in row.ratios.values()
            ]
            medians = [quantity(row.medians.get(arm), row.unit) for arm in arms]
            rows.append([row.name, *medians, *ratios, row.better])
        caption = (
            "medians of the rounds; ratios are medians of the rounds' ratios with the ends of "
            f"their 95 % interval, or of their range in fewer than {MIN_ROUNDS} rounds. * no "
            "difference shown: the interval includes 1, or there were too few rounds"
        )
        tables.append(Table("", columns, rows, caption))
    if report.parity:
        arms = list(report.parity[0].values)
        rows = [
            [parity.name, *(parity.values.get(arm, NONE) for arm in arms),
             "yes" if parity.same else "NO"]
            for parity in report.parity
        ]  # fmt: skip
        different = [parity.name for parity in report.parity if not parity.same]
        if different:
            lines.append(f"The arms did not run alike: {', '.join(different)}.")
        tables.append(Table("Flag parity", ["setting", *arms, "same"], rows))
    return Section("comparison", "Comparison", lines, tables)


def _of_run(place: int, run: Run) -> Section:
    summary = run.summary
    lines = [f"{problem.severity.upper()}: {problem.text}" for problem in run.problems]
    latencies = Table("Latency, ms", ["figure", "samples", *PERCENTILES], _latencies(summary))
    tables = [latencies, Table("Totals", ["figure", ""], _totals(run))]
    outcomes = [[name.replace("_", " "), f"{count:,}", share(count / summary.num_requests)]
                for name, count in summary.outcomes.items()]  # fmt: skip
    tables.append(Table("What became of the requests", ["outcome", "requests", "share"], outcomes))
    if reasons := _reasons(run):
        tables.append(Table("What the failures said", ["requests", "outcome", "detail"], reasons))
    tables.append(_clients(run))
    tables += _pairs(run.settings, "setting", "Settings of this run")
    tables += _impacts(run)
    tables += _stages(run)
    return Section(f"run-{place}", run.label, lines + run.notes, tables)


def _latencies(summary: Summary) -> list[list[str]]:
    rows = []
    for name in LATENCIES:
        found: Distribution | None = getattr(summary, name)
        if found is not None:
            rows.append([name, f"{found.count:,}", *_percentiles(found, PERCENTILES)])
    return rows


def _percentiles(found: Distribution | None, names: Iterable[str]) -> list[str]:
    return [NONE if found is None else number(getattr(found, name)) for name in names]


def _totals(run: Run) -> list[list[str]]:
    summary = run.summary
    interval = summary.attainment_interval
    attained = share(summary.attainment)
    if interval is not None:
        attained += f" (95 % interval {span(interval.low, interval.high, 'share')})"
    rows = {
        "bounds": str(summary.bounds) if summary.bounds else "none given",
        "attainment": attained,
        "goodput": quantity(summary.goodput, "requests/s"),
        "offered": quantity(summary.offered_rate, "requests/s"),
        "answered": quantity(summary.answered_rate, "requests/s"),
        "output": quantity(summary.tokens_per_s, "tokens/s"),
        "requests": f"{summary.num_requests:,}",
        "output tokens": f"{summary.num_tokens:,}",
        "prompt tokens": NONE if summary.num_prompt_tokens is None
        else f"{summary.num_prompt_tokens:,}",
        "cached share of the prompts": share(summary.cached_share),
        "tokens per chunk": number(summary.tokens_per_chunk),
        "stutter-free": share(summary.stutter_free),
        "concurrency": number(summary.concurrency),
        "window": f"{span(summary.window.start_s, summary.window.end_s, 's')}",
        "unfinished at its end": f"{summary.num_unfinished:,}",
        "started": utc(run.started_at) or NONE,
    }  # fmt: skip
    return [[name, value] for name, value in rows.items() if value != NONE]


def _reasons(run: Run) -> list[list[str]]:
    """The failures' own words, most frequent first; at most a dozen."""
    counts: dict[tuple[str, str], int] = {}
    for record in run.counted:
        if record.outcome != "answered":
            key = (str(record.outcome).replace("_", " "), record.detail)
            counts[key] = counts.get(key, 0) + 1
    most = sorted(counts.items(), key=lambda item: -item[1])
    return [[f"{count:,}", outcome, detail] for (outcome, detail), count in most[:12]]


def _stages(run: Run) -> list[Table]:
    """Where the time went, and how well the parts add up to the whole."""
    found = summarise_stages(run.counted)
    if found is None:
        return []
    rows = [
        [stage.name, *_percentiles(stage.time, ("mean", "p50", "p90", "p99")),
         share(stage.share), STAGES.get(stage.name, "")]
        for stage in found.stages
    ]  # fmt: skip
    columns = ["stage", "mean", "p50", "p90", "p99", "share", "what it is"]
    added_up = (
        f"add up to e2e within {number(max(0.001, found.max_error_ms))} ms"
        if found.adds_up
        else f"DO NOT ADD UP to e2e within 1 ms for {several(found.num_beyond, 'request')}"
    )
    caption = f"{several(found.num_joined, 'request')} with a timeline; their stages {added_up}"
    if found.num_without:
        caption += f"; {found.num_without:,} answered without one"
    return [Table("Stages, ms", columns, rows, caption)]


def _impacts(run: Run) -> list[Table]:
    tables = []
    for impact in run.impacts:
        rows = {
            "at": quantity(impact.at_s, "s"),
            "time to detect": quantity(impact.time_to_detect_s, "s"),
            "time to resume": quantity(impact.time_to_resume_s, "s"),
            "time to recover": quantity(impact.time_to_recover_s, "s"),
            "longest wait": quantity(impact.longest_wait_s, "s"),
            "attainment before": share(impact.attainment_before),
            "goodput before": quantity(impact.goodput_before, "requests/s"),
            "goodput dip": quantity(impact.goodput_dip, "requests"),
            "in flight at the fault": f"{impact.num_in_flight:,}",
            "of these interrupted": f"{impact.num_interrupted:,}",
            "of these answered all the same": f"{impact.num_resumed:,}",
            "failed from the fault on": f"{impact.num_failed:,}",
        }
        pairs = [[name, value] for name, value in rows.items()]
        caption = "; ".join(impact.notes)
        tables.append(
            Table(f"Fault {impact.fault.partition('=')[0]}", ["figure", ""], pairs, caption)
        )
    return tables


def _clients(run: Run) -> Table:
    rows = [
        [
            str(number_),
            share(client.cpu_s / client.wall_s if client.wall_s > 0 else None),
            f"{client.num_requests:,}",
            f"{client.num_tokens:,}",
            quantity(1e3 * client.max_loop_lag_s, "ms"),
        ]
        for number_, client in enumerate(run.clients, 1)
    ]
    columns = ["process", "CPU of a core", "requests", "tokens", "loop lag"]
    return Table("The client itself", columns, rows)


def _pairs(pairs: Mapping[str, str], what: str, title: str = "") -> list[Table]:
    if not pairs:
        return []
    return [Table(title, [what, ""], [[name, value] for name, value in pairs.items()])]


def _load(load: Load | None) -> str:
    return ", ".join(f"{value:.2f}" for value in load) if load else "unknown"


def _filled(line: str) -> list[str]:
    return [line] if line else []
