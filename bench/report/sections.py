"""A report in words and tables: one list of sections, which the page and the terminal both render.

`publish.py` renders the page and `console.py` the terminal's text, which leaves out what is marked
as a detail. Text is plain here: each renderer escapes it, since much of it came from a server.
"""

from collections import Counter
from collections.abc import Iterator, Mapping

import msgspec

from baton.bench.figures.metrics import Distribution, Summary
from baton.bench.figures.paired import MIN_ROUNDS
from baton.bench.figures.stages import STAGES, summarise_stages
from baton.bench.report.document import Compared, Report, Run, Table
from baton.bench.report.provenance import Provenance
from baton.bench.report.wording import NONE, number, quantity, several, share, utc

LATENCIES = ("ttft", "tpot", "itl", "gap_max", "e2e", "lag")
FURTHER = ("chunk_gap", "ntpot", "ttft_from_sent", "e2e_from_sent")
PERCENTILES = ("mean", "p50", "p90", "p95", "p99", "max")
MIN_FOR_P99 = 1000
MAX_REASONS = 12


class Section(msgspec.Struct, frozen=True):
    title: str
    lines: list[str]
    tables: list[Table]
    detail: bool = False  # the terminal leaves it out
    folded: bool = False  # the page shows it on demand


def sections(report: Report) -> list[Section]:
    """Return the results, then what they rest on; nothing that is empty."""
    several_runs = len(report.runs) > 1
    found = [
        *_search(report),
        _comparison(report),
        _parity(report),
        *_overview(report),
        *(_run(run, is_one_of_several=several_runs) for run in report.runs),
        *(
            Section(table.title, [], [msgspec.structs.replace(table, title="")])
            for table in report.tables
        ),
        Section("Notes", report.notes, []),
        Section("Settings", [], [pairs("", report.settings)], detail=True),
        Section("Provenance", [], [pairs("", _provenance(report.provenance))], detail=True),
        Section("Definitions", [], [pairs("", _definitions(report))], detail=True),
    ]
    filled = [
        msgspec.structs.replace(one, tables=[table for table in one.tables if table.rows])
        for one in found
    ]
    return [one for one in filled if one.lines or one.tables]


def pairs(title: str, rows: Mapping[str, str], caption: str = "", *, detail: bool = False) -> Table:
    """Return a table of names and values without those that are not known."""
    known = [[name, value] for name, value in rows.items() if value not in ("", NONE)]
    return Table(title, ["", ""], known, caption, detail)


def span(low: float, high: float, unit: str = "") -> str:
    """Return the ends of an interval."""
    if unit == "share":
        return f"{share(low).removesuffix(' %')} to {share(high)}"
    return f"{number(low)} to {number(high)} {unit}".strip()


def _search(report: Report) -> Iterator[Section]:
    if report.search is None:
        return
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
    yield Section("Search", [report.search.line], [table])


def _comparison(report: Report) -> Section:
    if not report.comparison:
        return Section("Comparison", [], [])
    first, *others = report.comparison[0].medians
    columns = ["figure", first, *others, *(f"{arm} / {first}" for arm in others), "better"]
    rows = [
        [row.name, *(quantity(value, row.unit) for value in row.medians.values()),
         *(_ratio(row, arm) for arm in others), row.better]
        for row in report.comparison
    ]  # fmt: skip
    caption = (
        "Medians of the rounds. A ratio is the median of the ratios within each round, which need "
        "not be the ratio of the two medians, with the ends of its 95 % interval, or of its range "
        f"in fewer than {MIN_ROUNDS} rounds. * no difference was shown: the interval includes 1, "
        "or there were too few rounds."
    )
    return Section("Comparison", [], [Table("", columns, rows, caption)])


def _ratio(row: Compared, arm: str) -> str:
    ratio = row.ratios[arm]
    ends = f"{ratio.median:.3f} ({span(ratio.low, ratio.high)})"
    return ends if ratio.is_conclusive else f"{ends} *"


def _parity(report: Report) -> Section:
    if not report.parity:
        return Section("", [], [])
    rows = [
        [setting.name, *setting.values.values(), "yes" if setting.same else "NO"]
        for setting in report.parity
    ]
    different = ", ".join(setting.name for setting in report.parity if not setting.same)
    lines = [f"The arms did not run alike: {different}."] if different else []
    columns = ["setting", *report.parity[0].values, "same"]
    return Section("Flag parity", lines, [Table("", columns, rows)])


def _overview(report: Report) -> Iterator[Section]:
    """Return a row per run, where there are several, and the problems that most of them have."""
    if len(report.runs) < 2:
        return
    columns = [
        "run", "offered/s", "answered/s", "tokens/s", "attainment", "goodput/s", "TTFT p50",
        "TTFT p99", "TPOT p50", "TPOT p99", "gap p99", "failed", "valid",
    ]  # fmt: skip
    rows = [_overview_row(run) for run in report.runs]
    table = Table("", columns, rows, "Latencies are in milliseconds.")
    # Invalid runs are no flaw of a search, which goes on until it knows what it can.
    form = "INVALID: {}: {}" if report.search is None else "{} was INVALID: {}"
    found = [(run, problem) for run in report.runs for problem in run.problems]
    lines = [form.format(run.label, one.text) for run, one in found if one.is_invalid]
    shared = Counter(problem.text for _, problem in found if not problem.is_invalid)
    for text, count in shared.items():
        if 2 * count >= len(report.runs):
            lines.append(f"WARNING: {count} of {len(report.runs)} runs: {text}")
    yield Section("Runs", lines, [table])


def _overview_row(run: Run) -> list[str]:
    summary = run.summary
    return [
        run.label,
        *map(number, (summary.offered_rate, summary.answered_rate, summary.tokens_per_s)),
        share(summary.attainment),
        number(summary.goodput),
        *_percentiles(summary.ttft, "p50", "p99"),
        *_percentiles(summary.tpot, "p50", "p99"),
        *_percentiles(summary.gap_max, "p99"),
        f"{summary.num_requests - summary.outcomes.get('answered', 0):,}",
        "INVALID" if run.invalid else "warnings" if run.problems else "yes",
    ]


def _run(run: Run, *, is_one_of_several: bool) -> Section:
    problems = [f"{problem.severity.upper()}: {problem.text}" for problem in run.problems]
    tables = [
        _latencies("Latency, ms", run.summary, LATENCIES),
        _totals(run),
        *_faults(run),
        *_stages(run),
        _reasons(run),
        _latencies("Further latencies, ms", run.summary, FURTHER, detail=True),
        _clients(run),
    ]
    hidden = is_one_of_several
    return Section(run.label, problems + run.notes, tables, detail=hidden, folded=hidden)


def _latencies(
    title: str, summary: Summary, names: tuple[str, ...], *, detail: bool = False
) -> Table:
    rows: list[list[str]] = []
    for name in names:
        found: Distribution | None = getattr(summary, name)
        if found is not None:
            rows.append([name, f"{found.count:,}", *_percentiles(found, *PERCENTILES)])
    caption = ""
    if summary.ttft is not None and summary.ttft.count < MIN_FOR_P99 and not detail:
        caption = f"A p99 rests on few samples in fewer than {MIN_FOR_P99:,} requests."
    return Table(title, ["figure", "samples", *PERCENTILES], rows, caption, detail)


def _totals(run: Run) -> Table:
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
        "started": utc(run.started_at),
    }
    return pairs("Totals", rows)


def _faults(run: Run) -> Iterator[Table]:
    """Return what each fault of a run did to its requests."""
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
        known = [[name, value] for name, value in rows.items()]  # a time that never came says much
        yield Table(f"Fault {spec}", ["", ""], known, "; ".join(impact.notes))


def _stages(run: Run) -> Iterator[Table]:
    """Return where the time went, and how well the parts add up to the whole."""
    found = summarise_stages(run.counted)
    if found is None:
        return
    rows = [
        [stage.name, *_percentiles(stage.time, "mean", "p50", "p90", "p99"), share(stage.share)]
        for stage in found.stages
    ]
    added_up = (
        f"add up to e2e within {number(max(0.001, found.max_error_ms))} ms"
        if found.adds_up
        else f"DO NOT ADD UP to e2e within 1 ms for {several(found.num_beyond, 'request')}"
    )
    caption = f"{several(found.num_joined, 'request')} with a timeline; their stages {added_up}"
    if found.num_without:
        caption += f"; {found.num_without:,} answered without one"
    yield Table("Stages, ms", ["stage", "mean", "p50", "p90", "p99", "share"], rows, caption)


def _reasons(run: Run) -> Table:
    """Return the failures' own words, the most frequent first."""
    counts = Counter(
        (str(record.outcome).replace("_", " "), record.detail)
        for record in run.counted
        if record.outcome != "answered"
    )
    rows = [[f"{count:,}", *reason] for reason, count in counts.most_common(MAX_REASONS)]
    return Table("What the failures said", ["requests", "outcome", "detail"], rows, detail=True)


def _clients(run: Run) -> Table:
    rows = [
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
    return Table("The client itself", columns, rows, detail=True)


def _definitions(report: Report) -> dict[str, str]:
    has_stages = any(record.stages for run in report.runs for record in run.records)
    return report.definitions | ({f"stage {name}": text for name, text in STAGES.items()}
                                 if has_stages else {})  # fmt: skip


def _provenance(of: Provenance) -> dict[str, str]:
    machine = of.machine
    cpus = f"{machine.num_cpus} of {several(machine.num_cpus_total, 'CPU')}"
    memory = f"{machine.memory_bytes / 2**30:.0f} GiB" if machine.memory_bytes else "unknown memory"
    before, after = (
        ", ".join(f"{value:.2f}" for value in load or ()) or "unknown"
        for load in (of.load_before, of.load_after)
    )
    return {
        "made": utc(of.created_at),
        "command": " ".join(of.command_line),
        "baton": of.baton_version,
        "commit": of.commit or "not in a checkout",
        "local changes": "yes: the commit alone does not say what ran" if of.dirty else "no",
        "settings hash": of.config_hash,
        "machine": f"{machine.cpu_model}, {cpus}, {memory}",
        "GPUs": "; ".join(machine.gpus) or "none seen by the client",
        "system": machine.system,
        "load before": before,
        "load after": after,
        **{f"{name} version": version for name, version in of.versions.items()},
        "GPUs after": "; ".join(of.gpus_after),
    }


def _percentiles(found: Distribution | None, *names: str) -> list[str]:
    return [NONE if found is None else number(getattr(found, name)) for name in names]
