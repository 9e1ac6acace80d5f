"""The command line of a tool whose settings are one Struct: a flag for each of its fields.

`overload` and `soak` read their arguments with it.
"""

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from baton.runtime.fields import FlagParser, fields_of, with_values

S = TypeVar("S", bound=msgspec.Struct)


def settings_from(kind: type[S], tool: str, summary: str, arguments: Sequence[str]) -> S:
    """Return the parsed arguments; `--help` prints and exits. Raises `ConfigError`."""
    parser = FlagParser(f"python -m tools.{tool}", description=summary)
    fields = fields_of(kind)
    parser.add_settings(fields, group_of=lambda _: "settings")
    given = vars(parser.parse_args(arguments))
    return with_values(
        kind(),
        {field.name: field.from_text(given[field.name], field.flag)
         for field in fields if given[field.name] is not None},
    )  # fmt: skip
