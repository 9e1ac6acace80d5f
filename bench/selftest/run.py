"""`baton bench selftest`: the client and its metrics against a server whose token times are known.

It plays good answers and every kind of failure, from real client processes over real sockets, and
holds each percentile to the server's writes and each outcome to the script. Run it on an idle
machine: a client that must wait for it is late.
"""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.table import Table

from baton.bench.client.load import Load, run_load
from baton.bench.client.target import Target
from baton.bench.selftest.cases import FIRST_NUMBER, Mix, make_cases, plan
from baton.bench.selftest.scripted_server import MODEL, ScriptedServer, Stage
from baton.bench.selftest.verdict import Played, Verdict, judge
from baton.bench.settings import SelfTestSettings

MAX_LINES = 20
BUSY = (
    "Every answer was counted right, so the machine may have been busy: try again when it is idle, "
    "or with real-time priority (chrt -f 10 baton bench selftest)."
)


def selftest(settings: SelfTestSettings) -> int:
    """Play all loads, one after the other; return 0 without a deviation, else 1."""
    verdicts = []
    for mix in mixes(settings):
        name = "completions, tokens counted by their ids" if mix.counts_ids else ""
        name = name or "chat, tokens counted by chunks of text"
        print(f"{name}: {mix.num_good} good answers and the faulty ones", file=sys.stderr)
        verdicts.append(judge(play(name, mix), settings.tolerance_ms))
    show(verdicts, Console(width=100, highlight=False))
    return 0 if all(verdict.ok for verdict in verdicts) else 1


def mixes(settings: SelfTestSettings) -> tuple[Mix, ...]:
    """Return the loads: each way of counting tokens, and both APIs."""
    asked = (settings.requests, settings.rate)
    return (
        Mix(True, *asked, settings.seed, processes=2),
        Mix(False, *asked, settings.seed + 10),
    )


def play(name: str, mix: Mix) -> Played:
    """Run one load, and return its cases, answers and records."""
    cases = make_cases(mix)
    stage = Stage({FIRST_NUMBER + index: case.script for index, case in enumerate(cases)})
    requests, starts = plan(cases, mix), list[float]()
    with frozen(), ScriptedServer(stage.play) as server:
        target = Target(
            server.url, MODEL, "completions" if mix.counts_ids else "chat",
            timeout_s=mix.timeout_s, timeline=False, token_ids=mix.counts_ids,
        )  # fmt: skip
        load = Load(target, requests, processes=mix.processes)
        result = run_load(load, on_start=starts.append)
    return Played(name, mix, cases, requests, stage.answers, result, *starts)


@contextmanager
def frozen() -> Iterator[None]:
    """Freeze the heap, because a long garbage collection would stall scripted answers."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def show(verdicts: list[Verdict], console: Console) -> None:
    for verdict in verdicts:
        console.print(f"\n{verdict.name}: {verdict.num_requests} requests")
        table = Table("ms", "written", "measured", "off by", "")
        for one in verdict.figures:
            off_ms = one.measured - one.written
            is_ok = "ok" if abs(off_ms) <= verdict.tolerance_ms else "WRONG"
            numbers = (f"{one.written:.3f}", f"{one.measured:.3f}", f"{off_ms:+.3f}")
            table.add_row(one.name, *numbers, is_ok)
        console.print(table)
        lines = [*verdict.doubts, *verdict.wrong]
        for line in lines[:MAX_LINES]:
            console.print(f"  {line}", style="red", markup=False)
        if len(lines) > MAX_LINES:
            console.print(f"  and {len(lines) - MAX_LINES} more")
        if not verdict.wrong and not verdict.ok:
            console.print(f"  {BUSY}")
    num_requests = sum(verdict.num_requests for verdict in verdicts)
    farthest = max(verdict.farthest_ms for verdict in verdicts)
    console.print(
        f"{'ok' if all(one.ok for one in verdicts) else 'DEVIATES'}: {num_requests} requests, "
        f"{sum(len(one.wrong) for one in verdicts)} counted wrong; the farthest percentile is "
        f"{farthest:.3f} ms off the truth (allowed {verdicts[0].tolerance_ms:g})",
        soft_wrap=True,
    )
