"""An argument parser whose mistakes are a `ConfigError` in one line, with the nearest known flag.

Used by every command line of baton: `settings.py`, `bench/cli.py`, the self-test's. It knows
nothing about any flag, and never prints or exits but for `--help`.
"""

import argparse
import difflib
from collections.abc import Iterable
from typing import NoReturn

from baton.protocol.errors import ConfigError

_UNKNOWN = "unrecognized arguments: "


class FlagParser(argparse.ArgumentParser):
    """Flags are never abbreviated: what a short form means would change with a new flag."""

    def __init__(self, prog: str, **how: object) -> None:
        super().__init__(prog, allow_abbrev=False, **how)  # type: ignore[arg-type]

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
