"""What a report says in words and tables, before it is HTML, Markdown or a terminal's text.

`pages.py` and `console.py` render the same sections, so they cannot disagree. Text is plain here:
each renderer escapes it, since much of it came from a server.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from baton.bench.figures.metrics import Distribution, Summary
from baton.bench.figures.paired import MIN_ROUNDS
from baton.bench.figures.stages import STAGES, summarise_stages
from baton.bench.report.document import Report, Run, Table
from baton.bench.report.provenance import Provenance
from baton.bench.report.wording import NONE, number, quantity, several, share, span, utc

LATENCIES = (
    "ttft", "tpot", "itl", "gap_max", "chunk_gap", "e2e", "ntpot", "ttft_from_sent",
    "e2e_from_sent", "lag",
)  # fmt: skip
PERCENTILES = ("mean", "p50", "p90", "p95", "p99", "max")
MAX_REASONS = 12


class Section(msgspec.Struct, frozen=True):
    """`key` is unique and fit for an address; `lines` come before the tables."""

    key: str
    title: str
    lines: list[str]
    tables: list[Table]

    @property
    def is_run(self) -> bool:
        return self.key.startswith("run-")


def results(report: Report) -> list[Section]:
    """Return what was found."""
    return [
        *_search(report),
        *_comparison(report),
        *_overview(report),
        *(_run(f"run-{place}", run) for place, run in enumerate(report.runs, 1)),
        *(
            Section(f"table-{place}", table.title, [], [msgspec.structs.replace(table, title="")])
            for place, table in enumerate(report.tables, 1)
        ),
    ]


def background(report: Report) -> list[Section]:
    """Return what the results rest on."""
    return [
        Section("settings", "Settings", [], _pairs("", report.settings)),
        Section("provenance", "Provenance", [], _pairs("", _provenance(report.provenance))),
        Section("definitions", "Definitions", [], _pairs("", report.definitions)),
    ]


def latencies(
    summary: Summary, names: Sequence[str] = LATENCIES, percentiles: Sequence[str] = PERCENTILES
) -> Table:
    rows = []
    for name in names:
        found: Distribution | None = getattr(summary, name)
        if found is not None:
            rows.append([name, f"{found.count:,}", *_percentiles(found, *percentiles)])
    return Table("Latency, ms", ["figure", "samples", *percentiles], rows)


def totals(run: Run) -> Table:
    """Return the figures of a whole run, without those that nothing is known of."""
    summary = run.summary
    attained = share(summary.attainment)
    if (interval := summary.attainment_interval) is not None:
        attained += f" (95 % interval {span(interval.low, interval.high, 'share')})"
    prompt_tokens = summary.num_prompt_tokens
    rows = {
        "bounds": str(summary.bounds) if summary.bounds else "none given",
        "attainment": attained,
        "goodput": quantity(summary.goodput, "requests/s"),
        "offered rate": quantity(summary.offered_rate, "requests/s"),
        "answered rate": quantity(summary.answered_rate, "requests/s"),
        "output": quantity(summary.tokens_per_s, "tokens/s"),
        "requests": f"{summary.num_requests:,}",
        **{
            name.replace("_", " "): f"{count:,} ({share(count / summary.num_requests)})"
            for name, count in summary.outcomes.items()
        },
        "unfinished at the end of the window": f"{summary.num_unfinished:,}",
        "output tokens": f"{summary.num_tokens:,}",
        "prompt tokens": NONE if prompt_tokens is None else f"{prompt_tokens:,}",
        "cached share of the prompts": share(summary.cached_share),
        "tokens per chunk": number(summary.tokens_per_chunk),
        "stutter-free": share(summary.stutter_free),
        "requests in flight, mean": number(summary.concurrency),
        "window": span(summary.window.start_s, summary.window.end_s, "s"),
        "duration": quantity(run.wall_s or None, "s"),
        "started": utc(run.started_at) or NONE,
    }
    return _pairs("Totals", {name: value for name, value in rows.items() if value != NONE})[0]


def faults(run: Run) -> list[Table]:
    """Return what each fault of a run did to its requests."""
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
        spec, _, _ = impact.fault.partition("=")
        tables += _pairs(f"Fault {spec}", rows, "; ".join(impact.notes))
    return tables


def _run(key: str, run: Run) -> Section:
    lines = [f"{problem.severity.upper()}: {problem.text}" for problem in run.problems]
    clients = [
        [
            str(place),
            share(client.cpu_s / client.wall_s if client.wall_s > 0 else None),
            f"{client.num_requests:,}",
            f"{client.num_tokens:,}",
            quantity(1e3 * client.max_loop_lag_s, "ms"),
        ]
        for place, client in enumerate(run.clients, 1)
    ]
    columns = ["process", "CPU of a core", "requests", "tokens", "largest loop lag"]
    tables = [
        latencies(run.summary),
        totals(run),
        *_reasons(run),
        Table("The client itself", columns, clients),
        *_pairs("Settings of this run", run.settings),
        *faults(run),
        *_stages(run),
    ]
    return Section(key, run.label, lines + run.notes, tables)


def _reasons(run: Run) -> list[Table]:
    """Return the failures' own words, the most frequent first."""
    counts = Counter(
        (str(record.outcome).replace("_", " "), record.detail)
        for record in run.counted
        if record.outcome != "answered"
    )
    rows = [[f"{count:,}", *reason] for reason, count in counts.most_common(MAX_REASONS)]
    columns = ["requests", "outcome", "detail"]
    return [Table("What the failures said", columns, rows)] if rows else []


def _stages(run: Run) -> list[Table]:
    """Return where the time went, and how well the parts add up to the whole."""
    found = summarise_stages(run.counted)
    if found is None:
        return []
    rows = [
        [stage.name, *_percentiles(stage.time, "mean", "p50", "p90", "p99"), share(stage.share),
         STAGES.get(stage.name, "")]
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


def _overview(report: Report) -> list[Section]:
    """Return a row per run, where there are several."""
    if len(report.runs) < 2:
        return []
    columns = [
        "run", "offered/s", "answered/s", "tokens/s", "attainment", "goodput/s", "TTFT p50",
        "TTFT p99", "TPOT p50", "TPOT p99", "gap p99", "failed", "valid",
    ]  # fmt: skip
    rows = []
    for run in report.runs:
        summary = run.summary
        rows.append([
            run.label,
            number(summary.offered_rate),
            number(summary.answered_rate),
            number(summary.tokens_per_s),
            share(summary.attainment),
            number(summary.goodput),
            *_percentiles(summary.ttft, "p50", "p99"),
            *_percentiles(summary.tpot, "p50", "p99"),
            *_percentiles(summary.gap_max, "p99"),
            f"{summary.num_requests - summary.outcomes.get('answered', 0):,}",
            "INVALID" if run.invalid else "warnings" if run.problems else "yes",
        ])  # fmt: skip
    return [
        Section("runs", "Runs", [], [Table("", columns, rows, "Latencies are in milliseconds.")])
    ]


def _search(report: Report) -> list[Section]:
    if report.search is None:
        return []
    rows = [
        [
            number(probe.rate),
            str(probe.purpose),
            share(probe.attainment) if probe.is_valid else NONE,
            "server's fault" if probe.is_broken else "yes" if probe.is_valid else "INVALID",
            "yes" if probe.is_saturated else "no",
        ]
        for probe in report.search.probes
    ]
    table = Table("", ["rate/s", "purpose", "attainment", "valid", "saturated"], rows)
    return [Section("search", "Search", [report.search.line], [table])]


def _comparison(report: Report) -> list[Section]:
    lines, tables = [], []
    if report.comparison:
        first, *others = report.comparison[0].medians
        columns = ["figure", first, *others, *(f"{arm} / {first}" for arm in others), "better"]
        rows = []
        for row in report.comparison:
            medians = [quantity(row.medians.get(arm), row.unit) for arm in (first, *others)]
            ratios = [
                f"{ratio.median:.3f} ({span(ratio.low, ratio.high)})"
                + ("" if ratio.is_conclusive else " *")
                for ratio in row.ratios.values()
            ]
            rows.append([row.name, *medians, *ratios, row.better])
        caption = (
            "Medians of the rounds. A ratio is the median of the rounds' ratios, with the ends of "
            f"its 95 % interval, or of its range in fewer than {MIN_ROUNDS} rounds. * no "
            "difference was shown: the interval includes 1, or there were too few rounds."
        )
        tables.append(Table("", columns, rows, caption))
    if report.parity:
        columns = ["setting", *report.parity[0].values, "same"]
        rows = [
            [setting.name, *setting.values.values(), "yes" if setting.same else "NO"]
            for setting in report.parity
        ]
        different = [setting.name for setting in report.parity if not setting.same]
        if different:
            lines.append(f"The arms did not run alike: {', '.join(different)}.")
        tables.append(Table("Flag parity", columns, rows))
    return [Section("comparison", "Comparison", lines, tables)] if tables else []


def _provenance(of: Provenance) -> dict[str, str]:
    machine = of.machine
    cpus = f"{machine.num_cpus} of {several(machine.num_cpus_total, 'CPU')}"
    memory = f"{machine.memory_bytes / 2**30:.0f} GiB" if machine.memory_bytes else "unknown memory"
    loads = [
        ", ".join(f"{value:.2f}" for value in load or ()) or "unknown"
        for load in (of.load_before, of.load_after)
    ]
    told = {
        "made": utc(of.created_at),
        "command": " ".join(of.command_line),
        "baton": of.baton_version,
        "commit": of.commit or "not in a checkout",
        "local changes": "yes: the commit alone does not say what ran" if of.dirty else "no",
        "settings hash": of.config_hash,
        "machine": f"{machine.cpu_model}, {cpus}, {memory}",
        "GPUs": "; ".join(machine.gpus) or "none seen by the client",
        "system": machine.system,
        "load before": loads[0],
        "load after": loads[1],
        **{f"{name} version": version for name, version in of.versions.items()},
        "GPUs after": "; ".join(of.gpus_after),
    }
    return {name: value for name, value in told.items() if value}


def _pairs(title: str, pairs: Mapping[str, str], caption: str = "") -> list[Table]:
    if not pairs:
        return []
    return [Table(title, ["", ""], [[name, value] for name, value in pairs.items()], caption)]


def _percentiles(found: Distribution | None, *names: str) -> list[str]:
    return [NONE if found is None else number(getattr(found, name)) for name in names]
