"""An argument parser whose mistakes are a `ConfigError` in one line, with the nearest known flag.

Used by every command line of baton, which gives it the settings of its Structs: one flag for each,
with its help. It knows nothing about any single flag, and prints and exits for `--help` only.
"""

import argparse
import difflib
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

from baton.protocol.errors import ConfigError
from baton.runtime.fields import Field

_UNKNOWN = "unrecognized arguments: "


class FlagParser(argparse.ArgumentParser):
    """Flags are never abbreviated: what a short form means would change with a new flag."""

    def __init__(self, prog: str, **how: object) -> None:
        how.setdefault("formatter_class", _HelpFormatter)
        super().__init__(prog, allow_abbrev=False, **how)  # type: ignore[arg-type]

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
            raise ConfigError(f"{self.prog} takes no word like {word!r}; see {self.prog} --help")
        known = [flag for flag in self._option_string_actions if flag.startswith("--")]
        hint = did_you_mean(word, known) or f"; see {self.prog} --help"
        raise ConfigError(f"unknown flag {word}{hint}")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown `word`; empty if nothing is near."""
    # Without their dashes, which make any two flags look alike.
    bare = {name.lstrip("-"): name for name in known}
    near = difflib.get_close_matches(word.lstrip("-"), bare, n=1)
    return f"; did you mean {bare[near[0]]}?" if near else ""


class _HelpFormatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32, width=100)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        """`--port, --router-port N`: the value once, not after each name."""
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        value = self._format_args(action, self._get_default_metavar_for_optional(action))
        return f"{', '.join(action.option_strings)} {value}"
