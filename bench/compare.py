"""`baton bench compare A=URL B=URL ...`: several servers, the same requests, round by round.

In each round every arm gets the same requests once, in an order that is drawn anew; different
rounds have different prompts. Figures are compared within a round, so that a machine that changes
from hour to hour changes all arms alike.
"""

import os
import random
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from baton.bench.experiment import Experiment, Server
from baton.bench.figures.metrics import figures_of, paired, unit_of
from baton.bench.plan.plan import arrivals_of
from baton.bench.report.document import Compared, Report, Run
from baton.bench.settings import CompareSettings, Target, range_of
from baton.protocol.errors import ConfigError

Arms = Mapping[str, Target]


def compare(settings: CompareSettings, operands: Sequence[str]) -> int:
    """Return the exit code."""
    arms = arms_of(operands, settings.target)
    flags = flags_of(settings.flags, list(arms))
    arrivals = arrivals_of(settings.arrival, settings.workload)
    loads = [arrivals] * settings.rounds
    with Experiment("compare", settings, loads, settings.arrival) as experiment:
        report = experiment.report
        report.title = " against ".join(arms)
        servers = connect(experiment, arms)
        report.notes += [
            f"{name}: {server.described}" for name, server in servers.items()
        ]
        report.notes += flags
        rng = random.Random(settings.workload.seed)
        for number in range(1, settings.rounds + 1):
            for name in rng.sample(list(servers), len(servers)):
                if experiment.interrupted:
                    break
                label = f"{name}, round {number}"
                run = experiment.run(servers[name], number - 1, label, arrivals)
                if run is not None:
                    run.arm = name
                    run.round = number
    contrast(report, list(arms))
    # This comes last, so that complete rounds are still compared.
    return experiment.finish(len(arms) * settings.rounds)


def arms_of(operands: Sequence[str], common: Target) -> dict[str, Target]:
    """Read `NAME=URL` or `NAME=URL#MODEL`; an arm without a model has that of `--model`."""
    arms: dict[str, Target] = {}
    for word in operands:
        name, equals, rest = word.partition("=")
        url, _, model = rest.partition("#")
        if not (name and equals and url):
            raise ConfigError(f"arm {word!r}: write it as NAME=URL or NAME=URL#MODEL")
        if name in arms:
            raise ConfigError(f"the arm {name} is named twice")
        arms[name] = msgspec.structs.replace(
            common, url=url, model=model or common.model
        )
    if len(arms) < 2:
        raise ConfigError("a comparison needs two arms at least, each as NAME=URL")
    return arms


def flags_of(texts: Sequence[str], arms: Sequence[str]) -> list[str]:
    """Return a note for each of `--flags`: how the server of an arm was started."""
    notes = []
    for given in texts:
        name, equals, text = given.partition("=")
        if not equals or name not in arms:
            known = ", ".join(arms)
            raise ConfigError(
                f"--flags {given!r}: write NAME=FILE or NAME=TEXT, NAME one of {known}"
            )
        if os.path.isfile(text):
            try:
                text = Path(text).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"--flags: cannot read {text}: {error}") from error
        elif not re.search("--|[=:]", text):
            raise ConfigError(f"--flags {given!r}: it is neither a file nor a flag")
        notes.append(f"{name} was started with: {' '.join(text.split())}")
    return notes


def connect(experiment: Experiment, arms: Arms) -> dict[str, Server]:
    """Return the servers, with only the extensions that all of them have."""
    servers = {name: experiment.connect(target) for name, target in arms.items()}
    given = frozenset.intersection(
        *(server.probed.gives for server in servers.values())
    )
    workloads = [server.workload for server in servers.values()]
    narrowest = min(workloads, key=lambda workload: range_of(workload.vocabulary)[1])
    return {
        name: Server(
            msgspec.structs.replace(server.probed, gives=given).fit(server.target),
            narrowest,
            server.probed,
        )
        for name, server in servers.items()
    }


def contrast(report: Report, arms: Sequence[str]) -> None:
    """Report the paired ratios of the rounds in which every arm has a valid run."""
    rounds = whole_rounds(report.runs, arms)
    left_out = len({run.round for run in report.runs}) - len(rounds)
    if left_out:
        report.notes.append(
            f"{left_out} rounds are not compared: an arm has no valid run in them"
        )
    figures = [{arm: figures_of(one[arm].summary) for arm in arms} for one in rounds]
    for name in figures[0][arms[0]] if figures else ():
        values = {arm: [one[arm][name] for one in figures] for arm in arms}
        if all(min(found) > 0 for found in values.values()):
            report.comparison.append(
                Compared(
                    name=name,
                    unit=unit_of(name),
                    better="lower" if unit_of(name) == "ms" else "higher",
                    medians={
                        arm: statistics.median(found) for arm, found in values.items()
                    },
                    ratios={
                        arm: paired(values[arm], values[arms[0]]) for arm in arms[1:]
                    },
                )
            )
        elif any(any(found) for found in values.values()):
            # A figure that no arm ever has was not requested, so it is not missing.
            lacking = {arm: found.count(0.0) for arm, found in values.items()}
            shown = ", ".join(
                f"{arm} in {count}" for arm, count in lacking.items() if count
            )
            report.notes.append(
                f"WARNING: {name} is not compared: rounds without it, or with 0: {shown}"
            )


def whole_rounds(runs: Sequence[Run], arms: Sequence[str]) -> list[dict[str, Run]]:
    """Return the valid runs by arm, of each round that has one of every arm."""
    rounds: dict[int, dict[str, Run]] = {}
    for run in runs:
        if not run.invalid:
            rounds.setdefault(run.round, {})[run.arm] = run
    return [found for found in rounds.values() if len(found) == len(arms)]
