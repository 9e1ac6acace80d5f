"""`baton bench compare A=URL B=URL ...`: several servers, the same requests, round by round.

In each round every arm gets the same requests once, in an order that is drawn anew; different
rounds have different prompts. Figures are compared within a round, so that a machine that changes
from hour to hour changes all arms alike. `--flags` show whether the servers were started alike:
settings are compared by the names and values with which they were written.
"""

import random
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from baton.bench.experiment import Experiment, Server
from baton.bench.figures.metrics import figures_of, unit_of
from baton.bench.figures.paired import paired
from baton.bench.plan.plan import arrivals_of
from baton.bench.report.document import UNKNOWN, Compared, Parity, Report, Run
from baton.bench.settings import CompareSettings, Target, range_of
from baton.protocol.errors import ConfigError

ON = "true"  # the value of a flag that has none
# The settings on which a comparison depends, and words by which their names are recognised.
DECISIVE: Mapping[str, str] = {
    "dtype": "dtype",
    "quantization": "quantiz",
    "block size": "(?:block|page)[-_]size",
    "threads": "threads",
    "CUDA graphs": "cuda[-_]?graph|eager",
}
_SETTING = re.compile(
    rf"""([\w.-]*(?:{"|".join(DECISIVE.values())})[\w-]*)["']?"""
    r"""(?:(?:[ \t]*[=:][ \t]*|[ \t]+)"""
    r"""(?:"([^"]*)"|'([^']*)'|([^\s"',;{}\[\]\\-][^\s"',;{}\[\]]*)))?""",
    re.IGNORECASE,
)

Arms = Mapping[str, Target]
Facts = dict[str, str]


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
        report.notes += [f"{name}: {server.described}" for name, server in servers.items()]
        report.parity = parity(flags)
        report.notes += warnings(report.parity, list(arms))
        rng = random.Random(settings.workload.seed)
        for number in range(1, settings.rounds + 1):
            for name in rng.sample(list(servers), len(servers)):
                if experiment.interrupted:
                    break
                label = f"{name}, round {number}"
                run = experiment.run(servers[name], number - 1, label, arrivals)
                if run is not None:
                    run.arm, run.round = name, number
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
        arms[name] = msgspec.structs.replace(common, url=url, model=model or common.model)
    if len(arms) < 2:
        raise ConfigError("a comparison needs two arms at least, each as NAME=URL")
    return arms


def flags_of(texts: Sequence[str], arms: Sequence[str]) -> dict[str, Facts]:
    """Return the flags with which every arm was started, according to `--flags`."""
    flags: dict[str, Facts] = {arm: {} for arm in arms}
    for given in texts:
        name, equals, text = given.partition("=")
        if not equals or name not in flags:
            known = ", ".join(flags)
            raise ConfigError(
                f"--flags {given!r}: write NAME=FILE or NAME=TEXT, NAME one of {known}"
            )
        try:
            # A text too long for the name of a file is the flags themselves.
            is_file = len(text) < 4096 and Path(text).is_file()
            text = Path(text).read_text() if is_file else text
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--flags: cannot read {text}: {error}") from error
        if not is_file and not re.search("--|[=:]", text):
            raise ConfigError(f"--flags {given!r}: it is neither a file nor a flag")
        flags[name] |= facts_of(text)
    return flags


def connect(experiment: Experiment, arms: Arms) -> dict[str, Server]:
    """Return the servers, with only the extensions that all of them have."""
    servers = {name: experiment.connect(target) for name, target in arms.items()}
    given = frozenset.intersection(*(server.probed.gives for server in servers.values()))
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
        report.notes.append(f"{left_out} rounds are not compared: an arm has no valid run in them")
    figures = [{arm: figures_of(one[arm].summary) for arm in arms} for one in rounds]
    for name in figures[0][arms[0]] if figures else ():
        values = {arm: [one[arm][name] for one in figures] for arm in arms}
        if all(min(found) > 0 for found in values.values()):
            report.comparison.append(
                Compared(
                    name=name,
                    unit=unit_of(name),
                    better="lower" if unit_of(name) == "ms" else "higher",
                    medians={arm: statistics.median(found) for arm, found in values.items()},
                    ratios={arm: paired(values[arm], values[arms[0]]) for arm in arms[1:]},
                )
            )
        elif any(any(found) for found in values.values()):
            # A figure that no arm ever has was not requested, so it is not missing.
            lacking = {arm: found.count(0.0) for arm, found in values.items()}
            shown = ", ".join(f"{arm} in {count}" for arm, count in lacking.items() if count)
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


def facts_of(text: str) -> Facts:
    """Return the decisive settings in a text of any form; the last of a name counts."""
    return {
        name.lstrip("-").lower().replace("_", "-").rpartition(".")[2]: "".join(values) or ON
        for name, *values in _SETTING.findall(text)
    }


def parity(flags: Mapping[str, Facts]) -> list[Parity]:
    """Return a row per setting with each arm's value."""
    names = dict.fromkeys(name for facts in flags.values() for name in facts)
    return [
        Parity(name, {arm: facts.get(name, UNKNOWN) for arm, facts in flags.items()})
        for name in names
    ]


def warnings(rows: Sequence[Parity], arms: Sequence[str]) -> list[str]:
    """Return a line for each setting that differs, and one for all unknown settings."""
    lines = []
    for row in rows:
        if row.same == "NO":
            shown = ", ".join(f"{arm}: {value}" for arm, value in row.values.items())
            lines.append(f"WARNING: the arms differ in {row.name} ({shown})")
    silent = []
    for subject, words in DECISIVE.items():
        own = [row for row in rows if re.search(words, row.name)]
        lacking = [arm for arm in arms if all(row.values[arm] == UNKNOWN for row in own)]
        silent += [f"{subject} ({', '.join(lacking)})"] if lacking else []
    if silent:
        lines.append(f"--flags do not show {', '.join(silent)}")
    return lines
