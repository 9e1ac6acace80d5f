"""`baton bench compare A=URL B=URL ...`: several servers, the same requests, round by round.

In each round every arm gets the same plan once, in an order that is drawn anew; the plans of
different rounds have different prompts. Figures are compared within a round, so that a machine that
changes from hour to hour hits all arms. How the arms were started, by their flags and by their own
words, is part of the report.
"""

import random
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from baton.bench import resolved
from baton.bench.client.probe import EXTENSIONS
from baton.bench.client.target import Place, Target, place_of, settled
from baton.bench.experiments import Asked, Bench, Case, Connected, loop_of, shares_prompts
from baton.bench.figures.metrics import Distribution, Summary
from baton.bench.figures.paired import MIN_ROUNDS, paired
from baton.bench.parity import Facts, facts_of_flags, parity, warnings
from baton.bench.plan.workload import range_of
from baton.bench.records import Outcome
from baton.bench.report.document import Compared, Report, Run
from baton.bench.report.publish import begin
from baton.bench.said import facts_said
from baton.bench.settings import CompareSettings, WorkloadSettings
from baton.bench.sweep import add_run, asked_all, mark_unfinished, repeated_prompts, reseeded
from baton.protocol.errors import ConfigError

Figure = Callable[[Summary], float | None]


class Arm(msgspec.Struct, frozen=True):
    name: str
    url: str
    model: str = ""


def compare(settings: CompareSettings, words: list[str]) -> int:
    """The exit code."""
    arms = arms_of(words, settings.target.model)
    flags = flags_of(settings.compare.flags, arms)
    arrivals = resolved.arrivals_of(settings.arrival, settings.workload)
    bounds = resolved.bounds_of(settings.bounds)
    rounds = [arrivals] * settings.compare.rounds
    wanted = {
        arm.name: asked_all(_target(settings.target, arm), settings.workload, settings.load, rounds)
        for arm in arms
    }
    api_key = settled(settings.target, ()).api_key
    publisher = begin("compare", settings, settings.report, api_key=api_key)
    report = publisher.report
    report.bounds = bounds
    report.title = report.title or " against ".join(arm.name for arm in arms)
    with Bench() as bench:
        servers = connect(bench, wanted)
        report.notes += [f"{name}: {server.described}" for name, server in servers.items()]
        report.notes += [*repeated_prompts(settings.workload), *same_servers(arms)]
        said = {name: facts_said(server.target) for name, server in servers.items()}
        report.parity = parity(flags, said)
        report.notes += warnings(report.parity)
        workload = narrowest(servers)
        dice = random.Random(settings.workload.seed)
        for number in range(settings.compare.rounds):
            plan = resolved.plan_of(reseeded(workload, number), settings.load, arrivals)
            for name in dice.sample(list(servers), len(servers)):
                if bench.interrupted:
                    break
                case = Case(
                    label=f"{name}, round {number + 1}",
                    target=servers[name].target,
                    plan=plan,
                    concurrency=settings.arrival.concurrency,
                    load=settings.load,
                    bounds=bounds,
                    may_be_cached=shares_prompts(settings.workload),
                    arm=name,
                    round=number + 1,
                    rate=plan.offered_rate,
                )
                add_run(bench, report, case)
    finish(report, [arm.name for arm in arms], loop_of(settings.arrival))
    # Last: a run that is whole stays in the comparison of the rounds that are.
    mark_unfinished(report, len(arms) * settings.compare.rounds)
    return publisher.finish()


def arms_of(words: list[str], model: str) -> list[Arm]:
    """`NAME=URL` or `NAME=URL#MODEL`; without a model that of `--model`."""
    arms: list[Arm] = []
    for word in words:
        name, equals, rest = word.partition("=")
        url, _, own = rest.partition("#")
        if not (name and equals and url):
            raise ConfigError(f"arm {word!r}: write it as NAME=URL or NAME=URL#MODEL")
        if name in {arm.name for arm in arms}:
            raise ConfigError(f"the arm {name} is named twice")
        arms.append(Arm(name, url, own or model))
    if len(arms) < 2:
        raise ConfigError("a comparison needs two arms at least, each as NAME=URL")
    return arms


def flags_of(texts: tuple[str, ...], arms: list[Arm]) -> dict[str, Facts]:
    """What every arm was started with, as far as `--flags` says."""
    flags: dict[str, Facts] = {arm.name: {} for arm in arms}
    for given in texts:
        name, equals, text = given.partition("=")
        if not equals or name not in flags:
            known = ", ".join(flags)
            raise ConfigError(
                f"--flags {given!r}: write NAME=FILE or NAME=TEXT, NAME one of {known}"
            )
        if not (facts := facts_of_flags(_content(text))):
            raise ConfigError(f"--flags {given!r}: there is no such file, or no setting in it")
        flags[name] |= facts
    return flags


def _content(text: str) -> str:
    """The file of that name, if there is one."""
    path = Path(text)
    try:
        return path.read_text() if len(text) < 4096 and path.is_file() else text
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--flags: cannot read {text}: {error}") from error


def _target(settings: Target, arm: Arm) -> Target:
    return msgspec.structs.replace(settings, url=arm.url, model=arm.model)


def connect(bench: Bench, wanted: Mapping[str, Asked]) -> dict[str, Connected]:
    """All arms, asked for what every one of them gives: for the same, and so counted alike."""
    servers = {name: bench.connect(one) for name, one in wanted.items()}
    given = {
        field: all(getattr(server.probed, field) for server in servers.values())
        for field in ("usage", *EXTENSIONS)
    }
    return {
        name: msgspec.structs.replace(
            server,
            target=msgspec.structs.replace(server.probed, **given).fit(wanted[name].target),
        )
        for name, server in servers.items()
    }


def narrowest(servers: Mapping[str, Connected]) -> WorkloadSettings:
    """The workload whose token ids every arm takes."""
    workloads = [server.workload for server in servers.values()]
    return min(workloads, key=lambda workload: range_of(workload.vocabulary)[1])


def _percentile(field: str, percentile: str) -> Figure:
    def figure(summary: Summary) -> float | None:
        found: Distribution | None = getattr(summary, field)
        value: float | None = getattr(found, percentile) if found is not None else None
        return value

    return figure


def _answered(summary: Summary) -> float | None:
    """Latencies are of these, so one arm's must not be better by answering fewer."""
    return summary.outcomes.get(Outcome.ANSWERED, 0) / summary.num_requests


# What is compared: name, unit, the better direction, and where it stands in a summary.
FIGURES: tuple[tuple[str, str, str, Figure], ...] = (
    ("tokens/s", "tokens/s", "higher", lambda summary: summary.tokens_per_s),
    ("TTFT p50", "ms", "lower", _percentile("ttft", "p50")),
    ("TTFT p99", "ms", "lower", _percentile("ttft", "p99")),
    ("TPOT p50", "ms", "lower", _percentile("tpot", "p50")),
    ("TPOT p99", "ms", "lower", _percentile("tpot", "p99")),
    ("ITL p99", "ms", "lower", _percentile("itl", "p99")),
    ("gap_max p99", "ms", "lower", _percentile("gap_max", "p99")),
    ("E2E p50", "ms", "lower", _percentile("e2e", "p50")),
    ("E2E p99", "ms", "lower", _percentile("e2e", "p99")),
    ("goodput", "requests/s", "higher", lambda summary: summary.goodput),
    ("answered", "share", "higher", _answered),
)


def finish(report: Report, arms: list[str], loop: str) -> None:
    """The paired ratios of the rounds in which every arm has a valid run."""
    rounds = whole_rounds(report.runs, arms)
    report.notes.append(
        f"{loop}; {len(rounds)} rounds, every arm once in each, in an order drawn from the seed"
    )
    left_out = len({run.round for run in report.runs}) - len(rounds)
    if left_out:
        report.notes.append(f"{left_out} rounds are not compared: an arm has no valid run in them")
    for name, unit, better, figure in FIGURES:
        values = {arm: [figure(one[arm].summary) for one in rounds.values()] for arm in arms}
        plain = {
            arm: [value for value in found if value is not None and value > 0]
            for arm, found in values.items()
        }
        if not rounds or any(len(found) != len(rounds) for found in plain.values()):
            report.notes += _left_out(name, values)
            continue
        report.comparison.append(
            Compared(
                name=name,
                unit=unit,
                better="higher" if better == "higher" else "lower",
                medians={arm: statistics.median(found) for arm, found in plain.items()},
                ratios={arm: paired(plain[arm], plain[arms[0]]) for arm in arms[1:]},
            )
        )
    report.notes += _how_sure(len(rounds), len(report.comparison) * (len(arms) - 1))


def _how_sure(num_rounds: int, num_intervals: int) -> list[str]:
    if not num_intervals:
        return []
    if num_rounds < MIN_ROUNDS:
        return [f"fewer than {MIN_ROUNDS} rounds cannot show a difference"]
    return [
        f"each of the {num_intervals} intervals (sign test) misses by chance in up to 5 of 100 "
        "comparisons: a difference in one figure alone may be none"
    ]


def _left_out(name: str, values: Mapping[str, list[float | None]]) -> list[str]:
    """That a figure is missing in a round of some arm must not look as if nobody had asked."""
    lacking = {
        arm: sum(not value for value in found) for arm, found in values.items() if any(found)
    }
    if not lacking:
        return []
    lacking |= {arm: len(found) for arm, found in values.items() if not any(found)}
    shown = ", ".join(f"{arm} in {count}" for arm, count in lacking.items() if count)
    return [f"WARNING: {name} is not compared: rounds without it, or with 0: {shown}"]


def same_servers(arms: list[Arm]) -> list[str]:
    """Arms of one server ask it the same twice, and a prefix cache answers the second."""
    names: dict[Place, list[str]] = {}
    for arm in arms:
        names.setdefault(place_of(arm.url), []).append(arm.name)
    return [
        f"WARNING: {' and '.join(found)} are one server: it is asked the same by each of them, and "
        "a prefix cache may know it the second time"
        for found in names.values()
        if len(found) > 1
    ]


def whole_rounds(runs: list[Run], arms: list[str]) -> dict[int, dict[str, Run]]:
    """The valid runs by round and arm, of rounds that have them all."""
    rounds: dict[int, dict[str, Run]] = {}
    for run in runs:
        if not run.invalid:
            rounds.setdefault(run.round, {})[run.arm] = run
    return {number: found for number, found in rounds.items() if len(found) == len(arms)}
