"""`baton bench compare A=URL B=URL ...`: several servers, the same requests, round by round.

In each round every arm gets the same requests once, in an order that is drawn anew; different
rounds have different prompts. Figures are compared within a round, so that a machine that changes
from hour to hour changes all arms alike. The report shows how the arms were started.
"""

import random
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from baton.bench.client.probe import EXTENSIONS, pages_of
from baton.bench.client.target import Place, Target, place_of
from baton.bench.experiment import Experiment, Server
from baton.bench.figures.metrics import Distribution, Summary
from baton.bench.figures.paired import MIN_ROUNDS, paired
from baton.bench.parity import Facts, facts_of_flags, facts_said, parity, warnings
from baton.bench.plan.workload import range_of
from baton.bench.planning import arrivals_of, loop_of
from baton.bench.records import Outcome
from baton.bench.report.document import Compared, Report, Run
from baton.bench.settings import CompareSettings
from baton.protocol.errors import ConfigError

Arms = Mapping[str, Target]
LATENCIES = (
    ("ttft", "p50"), ("ttft", "p99"), ("tpot", "p50"), ("tpot", "p99"), ("itl", "p99"),
    ("gap_max", "p99"), ("e2e", "p50"), ("e2e", "p99"),
)  # fmt: skip
# More is better of these figures; the others are latencies.
UNITS = {"tokens/s": "tokens/s", "goodput": "requests/s", "answered": "share"}


def compare(settings: CompareSettings, words: Sequence[str]) -> int:
    """Return the exit code."""
    arms = arms_of(words, settings.target)
    flags = flags_of(settings.flags, list(arms))
    arrivals = arrivals_of(settings.arrival, settings.workload)
    experiment = Experiment(
        "compare",
        settings,
        [arrivals] * settings.rounds,
        concurrency=settings.arrival.concurrency,
    )
    with experiment:
        report = experiment.report
        report.title = report.title or " against ".join(arms)
        servers = connect(experiment, arms)
        report.notes += [f"{name}: {server.described}" for name, server in servers.items()]
        experiment.note_repeated_prompts()
        report.notes += same_servers(arms)
        said = {name: facts_said(pages_of(server.target)) for name, server in servers.items()}
        report.parity = parity(flags, said)
        report.notes += warnings(report.parity)
        dice = random.Random(settings.workload.seed)
        for number in range(1, settings.rounds + 1):
            for name in dice.sample(list(servers), len(servers)):
                if experiment.interrupted:
                    break
                label = f"{name}, round {number}"
                case = experiment.case(servers[name], number - 1, label, arrivals)
                case.arm, case.round = name, number
                experiment.put(case)
    contrast(report, list(arms), loop_of(settings.arrival))
    # Last: a run that is whole stays in the comparison of the rounds that are.
    return experiment.finish(len(arms) * settings.rounds)


def arms_of(words: Sequence[str], common: Target) -> dict[str, Target]:
    """Read `NAME=URL` or `NAME=URL#MODEL`; an arm without a model has that of `--model`."""
    arms: dict[str, Target] = {}
    for word in words:
        name, equals, rest = word.partition("=")
        url, _, model = rest.partition("#")
        if not (name and equals and url):
            raise ConfigError(f"arm {word!r}: write it as NAME=URL or NAME=URL#MODEL")
        if name in arms:
            raise ConfigError(f"the arm {name} is named twice")
        arms[name] = msgspec.structs.replace(common, url=url, model=model or common.model)
    if len(arms) < 2:
        raise ConfigError("a comparison needs two arms at least, each as NAME=URL")
    return arms


def flags_of(texts: Sequence[str], arms: Sequence[str]) -> dict[str, Facts]:
    """Return what every arm was started with, as far as `--flags` says."""
    flags: dict[str, Facts] = {arm: {} for arm in arms}
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
    """Return the content of the file of that name, or the text if there is none."""
    path = Path(text)
    try:
        return path.read_text() if len(text) < 4096 and path.is_file() else text
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--flags: cannot read {text}: {error}") from error


def connect(experiment: Experiment, arms: Arms) -> dict[str, Server]:
    """Return the servers of all arms, which are asked alike and so counted alike.

    Each is asked only for what every one of them gives, with token ids that all of them take.
    """
    servers = {name: experiment.connect(target) for name, target in arms.items()}
    given = {
        field: all(getattr(server.probed, field) for server in servers.values())
        for field in ("usage", *EXTENSIONS)
    }
    workloads = [server.workload for server in servers.values()]
    narrowest = min(workloads, key=lambda workload: range_of(workload.vocabulary)[1])
    return {
        name: msgspec.structs.replace(
            server,
            target=msgspec.structs.replace(server.probed, **given).fit(server.target),
            workload=narrowest,
        )
        for name, server in servers.items()
    }


def figures_of(summary: Summary) -> dict[str, float]:
    """Return what arms are compared by; 0 where a load has no such figure."""
    found: dict[str, float | None] = {"tokens/s": summary.tokens_per_s}
    for field, percentile in LATENCIES:
        one: Distribution | None = getattr(summary, field)
        shown = field if field == "gap_max" else field.upper()
        found[f"{shown} {percentile}"] = None if one is None else getattr(one, percentile)
    found["goodput"] = summary.goodput
    # Latencies are of these requests, so an arm must not look better by answering fewer.
    found["answered"] = summary.outcomes.get(Outcome.ANSWERED, 0) / summary.num_requests
    return {name: value or 0.0 for name, value in found.items()}


def contrast(report: Report, arms: Sequence[str], loop: str) -> None:
    """Report the paired ratios of the rounds in which every arm has a valid run."""
    rounds = whole_rounds(report.runs, arms)
    report.notes.append(
        f"{loop}; {len(rounds)} rounds, every arm once in each, in an order drawn from the seed"
    )
    left_out = len({run.round for run in report.runs}) - len(rounds)
    if left_out:
        report.notes.append(f"{left_out} rounds are not compared: an arm has no valid run in them")
    figures = [{arm: figures_of(one[arm].summary) for arm in arms} for one in rounds]
    for name in figures[0][arms[0]] if figures else ():
        values = {arm: [one[arm][name] for one in figures] for arm in arms}
        if all(min(found) > 0 for found in values.values()):
            report.comparison.append(
                Compared(
                    name=name,
                    unit=UNITS.get(name, "ms"),
                    better="higher" if name in UNITS else "lower",
                    medians={arm: statistics.median(found) for arm, found in values.items()},
                    ratios={arm: paired(values[arm], values[arms[0]]) for arm in arms[1:]},
                )
            )
        elif any(any(found) for found in values.values()):
            # A figure that no arm ever has was not asked for, and is not missed.
            lacking = {arm: found.count(0.0) for arm, found in values.items()}
            shown = ", ".join(f"{arm} in {count}" for arm, count in lacking.items() if count)
            report.notes.append(
                f"WARNING: {name} is not compared: rounds without it, or with 0: {shown}"
            )
    if report.comparison and len(rounds) < MIN_ROUNDS:
        report.notes.append(f"fewer than {MIN_ROUNDS} rounds cannot show a difference")
    elif report.comparison:
        report.notes.append(
            f"each of the {len(report.comparison) * (len(arms) - 1)} intervals (sign test) misses "
            "by chance in up to 5 of 100 comparisons: a difference in one figure alone may be none"
        )


def same_servers(arms: Arms) -> list[str]:
    """Arms of one server ask it the same twice, and a prefix cache answers the second."""
    names: dict[Place, list[str]] = {}
    for name, target in arms.items():
        names.setdefault(place_of(target.url), []).append(name)
    return [
        f"WARNING: {' and '.join(found)} are one server: it is asked the same by each of them, and "
        "a prefix cache may know it the second time"
        for found in names.values()
        if len(found) > 1
    ]


def whole_rounds(runs: Sequence[Run], arms: Sequence[str]) -> list[dict[str, Run]]:
    """Return the valid runs by arm, of each round that has one of every arm."""
    rounds: dict[int, dict[str, Run]] = {}
    for run in runs:
        if not run.invalid:
            rounds.setdefault(run.round, {})[run.arm] = run
    return [found for found in rounds.values() if len(found) == len(arms)]
