"""The templates of what `baton render` writes for platforms other than Kubernetes."""

import shlex
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined


def literal(text: str) -> str:
    """Return text in which systemd replaces nothing."""
    return text.replace("%", "%%")


_environment = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
    autoescape=False,
)
_environment.filters["shell"] = shlex.quote
_environment.filters["literal"] = literal


def filled_in(template: str, **values: object) -> str:
    """Return the text of a template of this folder, which must find each value that it names."""
    return _environment.get_template(f"{template}.j2").render(values)
