"""`baton bench selftest`: the client and its metrics against a server whose token times are known.

Plays good answers of every shape and every kind of failure, open loop, from real client processes
over real sockets, and holds each percentile to what the server wrote and each outcome to what was
scripted. Without a deviation the exit code is 0. Meant for a machine that has nothing else to do:
a client that the kernel keeps waiting is late, and this says so.
"""

import socket
import sys
from collections.abc import Callable

import msgspec
from rich.console import Console
from rich.table import Table

from baton.bench.client.load import Load, run_load
from baton.bench.client.target import Api, Target
from baton.bench.json_file import json_file, save
from baton.bench.records import Outcome, Planned
from baton.bench.report.provenance import Provenance, collect, complete
from baton.bench.selftest.cases import FIRST_NUMBER, TIMEOUT_S, Counting, Mix, make_cases, plan
from baton.bench.selftest.greedy import find_damage
from baton.bench.selftest.scripted_server import HOST, ScriptedServer
from baton.bench.selftest.scripts import MODEL
from baton.bench.selftest.verdict import Count, Played, Verdict, judge
from baton.protocol.errors import ConfigError
from baton.runtime.flag_parser import FlagParser

# (API, what tokens are counted by, client processes, requests at once)
LOADS: tuple[tuple[Api, Counting, int, int | None], ...] = (
    ("completions", "token_ids", 2, None),
    ("chat", "text", 1, None),
    ("completions", "running_usage", 1, None),
    ("chat", "running_usage", 2, 4),
)
NUM_UNREACHABLE = 3
MAX_LINES = 20
BUSY = (
    "Every answer was counted right. If few reads were late, that was the machine: try again when "
    "it has nothing else to do, or with real-time priority (chrt -f 10 baton bench selftest)."
)
DESCRIPTION = "Measure a scripted server whose token times are known, and compare."
HELP = {
    "requests": "good answers per load, of four loads (%(default)s)",
    "rate": "requests per second (%(default)s)",
    "tolerance": "what a percentile may be off the truth (%(default)s)",
    "seed": "of arrivals and scripts (%(default)s)",
}

Say = Callable[[str], None]


class SelfTest(msgspec.Struct, frozen=True):
    """What is played, and how exact it must be."""

    num_good: int = 300  # answers without a fault, per load
    rate: float = 25.0  # requests per second
    tolerance_ms: float = 1.0
    seed: int = 0


class SelfTestReport(msgspec.Struct, frozen=True):
    settings: SelfTest
    verdicts: list[Verdict]
    others: list[Count]  # of loads without figures
    provenance: Provenance | None = None  # of one from the command line

    @property
    def ok(self) -> bool:
        exact = all(count.is_exact for count in self.others)
        return exact and all(verdict.ok for verdict in self.verdicts)


def selftest(settings: SelfTest, say: Say | None = None) -> SelfTestReport:
    """Plays all loads, one after the other; `say` hears what is going on."""
    say = say or _say_nothing
    verdicts = []
    with ScriptedServer() as server:
        for offset, (api, counting, processes, concurrency) in enumerate(LOADS):
            mix = Mix(
                api, counting, settings.num_good, settings.rate, settings.seed + 10 * offset,
                concurrency=concurrency,
            )  # fmt: skip
            name = _name(mix, processes)
            say(f"{name}: {mix.num_good} good answers and the faulty ones, {mix.rate:g} a second")
            played = play(server, name, processes, mix)
            verdicts.append(judge(played, settings.tolerance_ms))
        say("damaged tokens, and a port that nobody listens on")
        others = [*find_damage(server, by_ids=True), *find_damage(server, by_ids=False)]
    return SelfTestReport(settings, verdicts, [*others, ask_nobody()])


def _name(mix: Mix, processes: int) -> str:
    name = f"{mix.api}, tokens counted by {mix.counting.replace('_', ' ')}, {processes} process"
    name += "es" if processes > 1 else ""
    return name if mix.concurrency is None else f"{name}, at most {mix.concurrency} at once"


def _say_nothing(line: str) -> None:
    pass


def play(server: ScriptedServer, name: str, processes: int, mix: Mix) -> Played:
    """One load, and everything that is known about it."""
    cases = make_cases(mix)
    server.play({FIRST_NUMBER + index: [case.script] for index, case in enumerate(cases)})
    target = Target(
        server.url, MODEL, mix.api, timeout_s=mix.timeout_s, timeline=False,
        token_ids=mix.counting == "token_ids",
        continuous_usage=mix.counting == "running_usage",
    )  # fmt: skip
    requests = plan(cases, mix)
    load = Load(target, requests, concurrency=mix.concurrency, processes=processes)
    starts: list[float] = []
    result = run_load(load, on_start=starts.append)
    return Played(name, mix, cases, requests, server.answers(), result, *starts)


def ask_nobody() -> Count:
    """Requests to a port that was free a moment ago."""
    with socket.create_server((HOST, 0)) as listener:
        port = listener.getsockname()[1]
    target = Target(f"http://{HOST}:{port}", MODEL, timeout_s=TIMEOUT_S, timeline=False)
    requests = [
        Planned(index, 0.02 * index, 1, prompt_ids=(1, 2)) for index in range(NUM_UNREACHABLE)
    ]
    records = run_load(Load(target=target, requests=requests, processes=1)).records
    num_counted = sum(record.outcome is Outcome.UNREACHABLE for record in records)
    return Count("nobody listens", Outcome.UNREACHABLE, NUM_UNREACHABLE, num_counted)


def show(report: SelfTestReport, console: Console) -> None:
    """The whole report as tables."""
    for verdict in report.verdicts:
        for line in _heading(verdict):
            console.print(line, markup=False, highlight=False)
        console.print(_figures(verdict))
        console.print(_counts(verdict.counts))
        lines = [*verdict.doubts, *verdict.wrong]
        for line in lines[:MAX_LINES]:
            console.print(f"  {line}", style="red", markup=False)
        if len(lines) > MAX_LINES:
            console.print(f"  and {len(lines) - MAX_LINES} more")
        if verdict.is_exact and not verdict.is_close:
            console.print(f"  {BUSY}")
    console.print(_counts(report.others))
    num_figures = sum(len(verdict.figures) for verdict in report.verdicts)
    num_requests = sum(verdict.num_requests for verdict in report.verdicts)
    farthest = max(
        (abs(figure.deviation) for verdict in report.verdicts for figure in verdict.figures),
        default=0.0,
    )
    console.print(
        f"{'ok' if report.ok else 'DEVIATES'}: {num_requests} requests, {num_figures} percentiles, "
        f"the farthest {farthest:.3f} ms from the truth (allowed {report.settings.tolerance_ms:g})"
    )


def _heading(verdict: Verdict) -> list[str]:
    reads = verdict.reads
    lines = [
        "",
        f"{verdict.name}: {verdict.num_requests} requests",
        f"  lag p99 {verdict.lag_p99_ms:.2f} ms; {reads.count} reads p50 {reads.p50_ms:.3f}, "
        f"p99 {reads.p99_ms:.3f}, max {reads.max_ms:.3f} ms after their writes",
    ]
    if reads.num_late or reads.num_merged:
        lines.append(
            f"  {reads.num_late} reads were late, and in {reads.num_merged} answers several writes "
            "were read at once"
        )
    return lines


def _figures(verdict: Verdict) -> Table:
    table = Table()
    for heading in ("ms", "written", "+-", "measured", "off by", ""):
        table.add_column(heading, justify="left" if heading == "ms" else "right")
    for figure in verdict.figures:
        table.add_row(
            f"{figure.metric} p{figure.percent}",
            f"{figure.truth.middle:.3f}",
            f"{figure.truth.width / 2:.3f}",
            f"{figure.client:.3f}",
            f"{figure.deviation:+.3f}",
            "ok" if figure.is_close else "WRONG",
        )
    return table


def _counts(counts: list[Count]) -> Table:
    table = Table("answers", "to be counted as", "scripted", "counted", "")
    for count in counts:
        table.add_row(
            count.name,
            count.counted_as,
            str(count.num_scripted),
            str(count.num_counted),
            "ok" if count.is_exact else "WRONG",
        )
    return table


def main(arguments: list[str]) -> int:
    """0 without a deviation, else 1."""
    default = SelfTest()
    parser = FlagParser("baton bench selftest", description=DESCRIPTION)
    parser.add_argument("--requests", type=int, default=default.num_good, help=HELP["requests"])
    parser.add_argument("--rate", type=float, default=default.rate, help=HELP["rate"])
    parser.add_argument(
        "--tolerance-ms", type=float, default=default.tolerance_ms, help=HELP["tolerance"]
    )
    parser.add_argument("--seed", type=int, default=default.seed, help=HELP["seed"])
    parser.add_argument("--json", default="", help="write the verdicts here")
    parsed = parser.parse_args(arguments)
    if parsed.requests < 1 or parsed.rate <= 0 or parsed.tolerance_ms < 0:
        raise ConfigError("selftest: --requests and --rate must be positive")
    out = json_file(parsed.json)
    settings = SelfTest(parsed.requests, parsed.rate, parsed.tolerance_ms, parsed.seed)
    before = collect(settings, ["baton", "bench", "selftest", *arguments])
    report = selftest(settings, lambda line: print(line, file=sys.stderr, flush=True))
    show(report, Console(width=100))
    if out:
        save(out, msgspec.structs.replace(report, provenance=complete(before)))
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
