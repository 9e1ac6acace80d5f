"""`baton bench selftest`: the client and its metrics against a server whose token times are known.

Plays good answers of every shape and every kind of failure, open loop, from real client processes
over real sockets, and holds each percentile to what the server wrote and each outcome to what was
scripted. Without a deviation the exit code is 0. Meant for a machine that has nothing else to do:
a client that the kernel keeps waiting is late, and this says so.
"""

import gc
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
from rich.console import Console
from rich.table import Table

from baton.bench.client.load import Load, run_load
from baton.bench.client.target import Api, Target
from baton.bench.json_file import json_file, save
from baton.bench.records import Outcome, Planned
from baton.bench.report.provenance import Provenance, collect, complete
from baton.bench.selftest.cases import (
    FIRST_NUMBER,
    TIMEOUT_S,
    Counting,
    Mix,
    make_cases,
    plan,
)
from baton.bench.selftest.scripted_server import HOST, MODEL, ScriptedServer, Stage
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

Say = Callable[[str], object]


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
        return all(one.is_exact for one in self.others) and all(one.ok for one in self.verdicts)


def selftest(settings: SelfTest, say: Say = lambda _: None) -> SelfTestReport:
    """Play all loads, one after the other; `say` hears what is going on."""
    verdicts = []
    with served() as (server, stage):
        for offset, (api, counting, processes, concurrency) in enumerate(LOADS):
            seed = settings.seed + 10 * offset
            mix = Mix(
                api, counting, settings.num_good, settings.rate, seed, concurrency=concurrency
            )
            name = f"{api}, tokens counted by {counting.replace('_', ' ')}, {processes} process"
            name += "es" if processes > 1 else ""
            name += f", at most {concurrency} at once" if concurrency else ""
            say(f"{name}: {mix.num_good} good answers and the faulty ones, {mix.rate:g} a second")
            verdicts.append(judge(play(server, stage, name, processes, mix), settings.tolerance_ms))
    say("a port without a server")
    return SelfTestReport(settings, verdicts, [ask_unreachable()])


@contextmanager
def served() -> Iterator[tuple[ScriptedServer, Stage]]:
    """Run a server; the collector has little to do meanwhile, which else would stall answers."""
    stage = Stage()
    gc.collect()
    gc.freeze()
    try:
        with ScriptedServer(stage.play) as server:
            yield server, stage
    finally:
        gc.unfreeze()


def play(server: ScriptedServer, stage: Stage, name: str, processes: int, mix: Mix) -> Played:
    """Run one load, and return everything that is known about it."""
    cases = make_cases(mix)
    stage.prepare({FIRST_NUMBER + index: [case.script] for index, case in enumerate(cases)})
    target = Target(
        server.url, MODEL, mix.api, timeout_s=mix.timeout_s, timeline=False,
        token_ids=mix.counting == "token_ids", continuous_usage=mix.counting == "running_usage",
    )  # fmt: skip
    requests = plan(cases, mix)
    load = Load(target, requests, concurrency=mix.concurrency, processes=processes)
    starts: list[float] = []
    result = run_load(load, on_start=starts.append)
    return Played(name, mix, cases, requests, stage.answers, result, *starts)


def ask_unreachable() -> Count:
    """Send requests to a port that was free a moment ago."""
    with socket.create_server((HOST, 0)) as listener:
        port = listener.getsockname()[1]
    target = Target(f"http://{HOST}:{port}", MODEL, timeout_s=TIMEOUT_S)
    requests = [
        Planned(index, 0.02 * index, 1, prompt_ids=(1, 2)) for index in range(NUM_UNREACHABLE)
    ]
    records = run_load(Load(target, requests)).records
    num_counted = sum(record.outcome is Outcome.UNREACHABLE for record in records)
    return Count("a port without a server", Outcome.UNREACHABLE, NUM_UNREACHABLE, num_counted)


def show(report: SelfTestReport, console: Console) -> None:
    """Print the whole report as tables."""
    for verdict in report.verdicts:
        console.print(f"\n{verdict.name}: {verdict.num_requests} requests", highlight=False)
        console.print(f"  {verdict.reads}", highlight=False)
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
    figures = [figure for verdict in report.verdicts for figure in verdict.figures]
    num_requests = sum(verdict.num_requests for verdict in report.verdicts)
    farthest = max((abs(figure.deviation) for figure in figures), default=0.0)
    console.print(
        f"{'ok' if report.ok else 'DEVIATES'}: {num_requests} requests, {len(figures)} "
        f"percentiles, the farthest {farthest:.3f} ms from the truth "
        f"(allowed {report.settings.tolerance_ms:g})"
    )


def _figures(verdict: Verdict) -> Table:
    table = Table("ms")
    for heading in ("written", "+-", "measured", "off by", ""):
        table.add_column(heading, justify="right")
    for one in verdict.figures:
        numbers = (f"{one.truth.middle:.3f}", f"{one.truth.width / 2:.3f}", f"{one.client:.3f}")
        is_ok = "ok" if one.is_close else "WRONG"
        table.add_row(f"{one.metric} p{one.percent}", *numbers, f"{one.deviation:+.3f}", is_ok)
    return table


def _counts(counts: list[Count]) -> Table:
    table = Table("answers", "to be counted as", "scripted", "counted", "")
    for one in counts:
        numbers = (str(one.num_scripted), str(one.num_counted))
        table.add_row(one.name, one.counted_as, *numbers, "ok" if one.is_exact else "WRONG")
    return table


def main(arguments: list[str]) -> int:
    """Return 0 without a deviation, else 1."""
    default = SelfTest()
    flags: dict[str, tuple[str, int | float, str]] = {
        "--requests": ("num_good", default.num_good, "good answers per load, of four loads"),
        "--rate": ("rate", default.rate, "requests per second"),
        "--tolerance-ms": ("tolerance_ms", default.tolerance_ms, "what a percentile may be off"),
        "--seed": ("seed", default.seed, "of arrivals and scripts"),
    }
    parser = FlagParser("baton bench selftest", description=DESCRIPTION)
    for flag, (name, value, text) in flags.items():
        help_text = f"{text} (%(default)s)"
        parser.add_argument(flag, dest=name, type=type(value), default=value, help=help_text)
    parser.add_argument("--json", default="", help="write the verdicts to this file")
    given = vars(parser.parse_args(arguments))
    out = json_file(given.pop("json"))
    settings = msgspec.convert(given, SelfTest)
    if settings.num_good < 1 or settings.rate <= 0 or settings.tolerance_ms < 0:
        raise ConfigError("selftest: --requests and --rate must be positive")
    before = collect(settings, ["baton", "bench", "selftest", *arguments])
    report = selftest(settings, lambda line: print(line, file=sys.stderr, flush=True))
    show(report, Console(width=100))
    if out:
        save(out, msgspec.structs.replace(report, provenance=complete(before)))
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
