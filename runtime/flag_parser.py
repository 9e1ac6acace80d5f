"""An argument parser that raises a one-line `ConfigError`, with the nearest flag, for a mistake.

Every command of baton uses it. Each setting of a command's Structs becomes one flag with its help.
The parser knows no single flag, and prints and exits for `--help` only.
"""

import argparse
import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NoReturn

import msgspec

from baton.protocol.errors import ConfigError
from baton.runtime.fields import Field

# The placeholder in a flag's help for a value that is or may be a file or a folder.
PATHS = ("PATH", "FILE", "FOLDER", "MODEL")
_UNKNOWN = "unrecognized arguments: "


class Argument(msgspec.Struct, frozen=True):
    """A flag with all its names, or an operand, which has none, and its possible values."""

    names: tuple[str, ...]
    help: str
    words: tuple[str, ...] = ()
    is_path: bool = False
    takes_value: bool = True


class FlagParser(argparse.ArgumentParser):
    """A parser without abbreviated flags: a new flag would change what an abbreviation means.

    `words` holds, by an argument's `dest`, its only possible values if there are few.
    """

    def __init__(self, prog: str, *, instead: Mapping[str, str] = {}, **how: object) -> None:
        """`instead` says, for flags of other programs, what to use in their place."""
        how.setdefault("formatter_class", _HelpFormatter)
        super().__init__(prog, allow_abbrev=False, **how)  # type: ignore[arg-type]
        self.words: dict[str, tuple[str, ...]] = {}
        self._instead = instead

    def arguments(self) -> tuple[Argument, ...]:
        """Return what may be typed after the command, as `--help` lists it."""
        return tuple(
            Argument(
                tuple(action.option_strings),
                (action.help or "").replace("%%", "%"),
                self.words.get(action.dest, ()),
                is_path=action.metavar in PATHS,
                takes_value=action.nargs != 0,
            )
            for action in self._actions
        )

    def add_settings(
        self,
        fields: Iterable[Field],
        flags_of: Callable[[Field], Sequence[str]] = lambda field: (field.flag,),
        group_of: Callable[[Field], str] = lambda field: field.section,
    ) -> None:
        """Add a flag per setting, in groups with titles. A flag that is not given is None."""
        groups: dict[str, argparse._ArgumentGroup] = {}
        for field in fields:
            title = group_of(field)
            if title not in groups:
                groups[title] = self.add_argument_group(title)
            how: dict[str, object] = {"nargs": "?", "const": "true"} if field.is_bool else {}
            if field.is_repeated:
                how = {"action": "append"}
            words = ("true", "false") if field.is_bool else tuple(filter(None, field.choices))
            if words:
                self.words[field.name] = words
            groups[title].add_argument(
                *flags_of(field),
                dest=field.name,
                metavar=field.metavar,
                help=field.help,
                default=None,
                **how,  # type: ignore[arg-type]
            )

    def error(self, message: str) -> NoReturn:
        if not message.startswith(_UNKNOWN):
            raise ConfigError(f"{message}; see {self.prog} --help")
        unknown = message.removeprefix(_UNKNOWN)
        word = (unknown.split() or [unknown])[0].partition("=")[0]
        if not word.startswith("-"):
            raise ConfigError(f"{self.prog} does not take {word!r}; see {self.prog} --help")
        if advice := self._instead.get(word):
            raise ConfigError(f"{word} is not a flag of baton: {advice}")
        known = [flag for flag in self._option_string_actions if flag.startswith("--")]
        hint = did_you_mean(word, known) or f"; see {self.prog} --help"
        raise ConfigError(f"unknown flag {word}{hint}")


def did_you_mean(word: str, known: Iterable[str], prefix: str = "") -> str:
    """Return the end of a message about an unknown `word`; empty if no known name is similar."""
    # Compare without dashes and the names' common prefix: they make any two names look alike.
    bare = {name.lstrip("-").removeprefix(prefix): name for name in known}
    near = difflib.get_close_matches(word.lstrip("-").removeprefix(prefix), bare, n=1)
    return f"; did you mean {bare[near[0]]}?" if near else ""


def timeout_of(text: str) -> float:
    """Return the seconds that `--timeout` gives."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ConfigError(f"--timeout {text}: give a number of seconds above 0")
    return seconds


class _HelpFormatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32, width=100)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        """Return `--port, --router-port N`, with the value once and not after each name."""
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        value = self._format_args(action, self._get_default_metavar_for_optional(action))
        return f"{', '.join(action.option_strings)} {value}"
