"""The command line of `baton bench`, whose flags and help come from the Structs of `settings.py`.

A command's code is imported when it is chosen, so that help appears
at once. A mistake of the user is a `ConfigError` of one line. The exit code is 0 for valid figures,
1 for figures that must not be used, and 2 for misuse.
"""

import importlib
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from baton.bench.settings import (
    CompareSettings,
    RunSettings,
    SearchSettings,
    SweepSettings,
)
from baton.protocol.errors import ConfigError
from baton.runtime.fields import Field, FlagParser, did_you_mean, fields_of, with_values

S = TypeVar("S", bound=msgspec.Struct)


class Command(msgspec.Struct, frozen=True):
    """The docstring of `settings` describes the command."""

    settings: type[msgspec.Struct]
    # MODULE:FUNCTION, called with the settings, and with the operands if it takes any.
    start: str
    example: str
    operands: str = ""  # their placeholder in the help
    operands_help: str = ""
    no_flags: tuple[str, ...] = ()


COMMANDS = {
    "run": Command(
        RunSettings,
        "experiment:run",
        "baton bench run --arrivals poisson:5 --requests 1000 --preset chat --out report",
    ),
    "sweep": Command(
        SweepSettings,
        "experiment:sweep",
        "baton bench sweep --rates 1,2,4,8 --duration-s 60 --preset chat --out report",
    ),
    "search": Command(
        SearchSettings,
        "experiment:search",
        "baton bench search --preset chat --attainment 0.9 --duration-s 60 --out report",
    ),
    "compare": Command(
        CompareSettings,
        "compare:compare",
        "baton bench compare split=http://a:8000 whole=http://b:8000#name --concurrency 8",
        "NAME=URL",
        "an arm: its name and the address of its server; NAME=URL#MODEL also names the model",
        no_flags=("target.url",),
    ),
}
ABOUT = "Measure the latency of any OpenAI-compatible server."
FURTHER = """`baton bench COMMAND --help` lists its flags. The definitions are in docs/bench.md
and in every report."""
GROUPS = {
    "target": "server",
    "arrival": "arrivals",
    "load": "arrivals",
    "workload": "requests",
}


def main(arguments: Sequence[str]) -> int:
    """Run `baton bench ARGUMENTS`; return the exit code of the process."""
    name, rest = (arguments[0], list(arguments[1:])) if arguments else ("", [])
    if name in ("", "-h", "--help", "help"):
        lines = [
            f"  {key:<10}{command.settings.__doc__}"
            for key, command in COMMANDS.items()
        ]
        print(
            "\n".join(
                [
                    "usage: baton bench COMMAND [flags]",
                    "",
                    ABOUT,
                    "",
                    *lines,
                    "",
                    FURTHER,
                ]
            )
        )
        return 0 if name else 2
    if name not in COMMANDS:
        near = did_you_mean(name, COMMANDS) or f": {', '.join(COMMANDS)}"
        raise ConfigError(f"unknown command bench {name}{near}")
    command = COMMANDS[name]
    settings, others = parse(command.settings, rest)
    module, _, function = command.start.partition(":")
    start: Callable[..., int] = getattr(
        importlib.import_module(f"baton.bench.{module}"), function
    )
    return start(settings, others) if command.operands else start(settings)


def parse(settings: type[S], arguments: Sequence[str]) -> tuple[S, list[str]]:
    """Return the settings that `arguments` ask for, and the operands."""
    built = parser(settings)
    given = built.parse_intermixed_args(arguments)
    values = built.values_in(given, flags_of(settings))
    return with_values(settings(), values), vars(given).get("operands") or []


def parser(settings: type[msgspec.Struct]) -> FlagParser:
    """Return the parser of the command with these settings, with a flag for each of them."""
    name, command = _command_of(settings)
    operands = f" {command.operands} ..." if command.operands else ""
    built = FlagParser(
        prog=f"baton bench {name}",
        usage=f"baton bench {name}{operands} [flags]",
        description=settings.__doc__,
        epilog=f"example: {command.example}",
    )
    if command.operands:
        built.add_argument(
            "operands", metavar=command.operands, nargs="*", help=command.operands_help
        )
    built.add_settings(
        flags_of(settings),
        group_of=lambda field: GROUPS.get(field.section, field.section) or name,
    )
    return built


def flags_of(settings: type[msgspec.Struct]) -> list[Field]:
    """Return the settings that have a flag; the bench itself finds out the others."""
    hidden = _command_of(settings)[1].no_flags
    fields = fields_of(settings)
    return [
        field for field in fields if field.meta.description and field.name not in hidden
    ]


def _command_of(settings: type[msgspec.Struct]) -> tuple[str, Command]:
    return next(item for item in COMMANDS.items() if item[1].settings is settings)
