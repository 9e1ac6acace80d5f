"""The command line of `baton bench`: flags and help come from the Structs of `settings.py`.

Called by `baton.command_line`. Each command's code is imported when it is chosen. A mistake of the
user is a `ConfigError` in one line; the exit code is 0 for valid figures, 1 for figures that must
not be used, and 2 for misuse.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from baton.bench.settings import (
    CompareSettings,
    FaultSettings,
    ReportAgainSettings,
    RunSettings,
    SearchSettings,
    SweepSettings,
)
from baton.protocol.errors import ConfigError
from baton.runtime.fields import Field, fields_of
from baton.runtime.flag_parser import FlagParser, did_you_mean

S = TypeVar("S", bound=msgspec.Struct)

# What a command takes besides its flags: (name in the help, how many, help).
Words = tuple[str, str, str]

DESCRIPTIONS = {
    "run": "Put one load on a server and measure it.",
    "sweep": "Measure one load after the other, at several rates.",
    "search": "Find the largest rate at which enough requests meet the bounds.",
    "compare": "Measure several servers in turn with the same requests, and their ratios.",
    "fault": "Kill, stop or restart a process under load; how long until it is noticed and over.",
    "selftest": "Measure a scripted server whose times are known, and compare.",
    "report": "Write the pages of a report.json again.",
}
EXAMPLES = {
    "run": "baton bench run --arrivals poisson:5 --requests 1000 --preset chat --out report",
    "sweep": "baton bench sweep --rates 1,2,4,8 --duration-s 60 --preset chat --out report",
    "search": "baton bench search --preset chat --attainment 0.9 --duration-s 60 --out report",
    "compare": "baton bench compare split=http://a:8000 whole=http://b:8000#name --concurrency 8",
    "fault": "baton bench fault --fault kill:4711@10 --arrivals poisson:5 --duration-s 30",
    "selftest": "baton bench selftest",
    "report": "baton bench report report/report.json --out again",
}
# Settings that are no flags of a command: each arm names its own server.
NO_FLAGS = {"compare": ("target.url",)}
# Settings that only the probe decides about.
PROBED = ("target.usage", "target.continuous_usage")
ARMS: Words = ("NAME=URL", "*", "an arm: its name, its server, and its model as URL#MODEL")
FILE: Words = ("FILE", "*", "the report.json")


def main(words: Sequence[str]) -> int:
    """Run `baton bench words...`; the exit code of the process."""
    name, rest = (words[0], list(words[1:])) if words else ("", [])
    if name in ("", "-h", "--help", "help"):
        print(overview())
        return 0 if name else 2
    if name not in _COMMANDS:
        near = did_you_mean(name, _COMMANDS) or f": {', '.join(_COMMANDS)}"
        raise ConfigError(f"unknown command bench {name}{near}")
    return _COMMANDS[name](rest)


def overview() -> str:
    lines = [f"  {name:<10}{text}" for name, text in DESCRIPTIONS.items()]
    return "\n".join(
        [
            "usage: baton bench COMMAND [flags]",
            "",
            "Measure the latency of any OpenAI-compatible server.",
            "",
            *lines,
            "",
            "`baton bench COMMAND --help` lists its flags. The definitions are in docs/bench.md",
            "and in every report.",
        ]
    )


def parse(
    name: str, settings: type[S], arguments: Sequence[str], words: Words | None = None
) -> tuple[S, list[str]]:
    """The settings that `arguments` ask for, and the words that are no flags."""
    parsed = vars(parser(name, settings, words).parse_intermixed_args(arguments))
    tree: dict[str, dict[str, object]] = {}
    for field in flags_of(name, settings):
        given = parsed[field.name]
        if given is not None:
            tree.setdefault(field.section, {})[field.key] = _value(field, given)
    return msgspec.convert(tree, settings), parsed.get("words") or []


def parser(
    name: str, settings: type[msgspec.Struct], words: Words | None = None
) -> argparse.ArgumentParser:
    """The parser of `baton bench name`, with a flag per setting; flags carry no section."""
    built = FlagParser(
        prog=f"baton bench {name}",
        usage=" ".join(["baton bench", name, *([f"{words[0]} ..."] if words else []), "[flags]"]),
        description=DESCRIPTIONS[name],
        epilog=f"example: {EXAMPLES[name]}",
        formatter_class=_HelpFormatter,
    )
    if words:
        built.add_argument("words", metavar=words[0], nargs=words[1], help=words[2])
    groups: dict[str, argparse._ArgumentGroup] = {}
    for field in flags_of(name, settings):
        if field.section not in groups:
            groups[field.section] = built.add_argument_group(field.section)
        if field.is_list:
            how: dict[str, object] = {"action": "append", "metavar": "TEXT"}
        elif field.is_bool:
            how = {"nargs": "?", "const": "true", "metavar": field.metavar}
        else:
            how = {"metavar": field.metavar}
        groups[field.section].add_argument(
            _flag(field),
            dest=field.name,
            help=field.help.replace(" (default: empty)", "").replace(" (default: none)", ""),
            default=None,
            **how,  # type: ignore[arg-type]
        )
    return built


def flags_of(name: str, settings: type[msgspec.Struct]) -> list[Field]:
    """The settings that `baton bench name` takes as flags."""
    left_out = (*PROBED, *NO_FLAGS.get(name, ()))
    return [field for field in fields_of(settings) if field.name not in left_out]


def _flag(field: Field) -> str:
    return "--" + field.key.replace("_", "-")


def _value(field: Field, given: str | list[str]) -> object:
    if isinstance(given, list):
        return tuple(given)
    try:
        value = field.from_text(given)
    except ConfigError as error:
        said = error.message.replace(f"setting {field.name} cannot be", f"{_flag(field)} cannot be")
        raise ConfigError(said) from error
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{_flag(field)} cannot be {given!r}: expected a finite number")
    return value


class _HelpFormatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=100)


def _run(rest: list[str]) -> int:
    from baton.bench.one_load import run

    return run(parse("run", RunSettings, rest)[0])


def _sweep(rest: list[str]) -> int:
    from baton.bench.sweep import sweep

    return sweep(parse("sweep", SweepSettings, rest)[0])


def _search(rest: list[str]) -> int:
    from baton.bench.searching import search

    return search(parse("search", SearchSettings, rest)[0])


def _compare(rest: list[str]) -> int:
    from baton.bench.compare import compare

    return compare(*parse("compare", CompareSettings, rest, ARMS))


def _fault(rest: list[str]) -> int:
    from baton.bench.fault_run import fault

    return fault(parse("fault", FaultSettings, rest)[0])


def _selftest(rest: list[str]) -> int:
    from baton.bench.selftest.run import main as selftest

    return selftest(rest)


def _report(rest: list[str]) -> int:
    from baton.bench.report.publish import write_again

    return write_again(*parse("report", ReportAgainSettings, rest, FILE))


_COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "run": _run,
    "sweep": _sweep,
    "search": _search,
    "compare": _compare,
    "fault": _fault,
    "selftest": _selftest,
    "report": _report,
}
