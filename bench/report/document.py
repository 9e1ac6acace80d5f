"""The result of a benchmark as one versioned document: raw records, summaries, provenance.

A `Report` holds everything that the page shows. Field names are promised: a new field gets a
default, and any other change of meaning needs a new schema. Call `withhold` before writing a report
or showing it: a report never contains the bench's API key.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from baton.bench.figures.metrics import DEFINITIONS, Bounds, Ratio, Summary, counted
from baton.bench.figures.search import Found
from baton.bench.figures.validity import Problem, is_valid
from baton.bench.records import ClientProcess, Record
from baton.bench.report.provenance import Provenance
from baton.protocol.errors import ConfigError

WITHHELD = "(withheld)"
SHORTEST_KEY = 8  # a shorter API key would match inside other words


class Run(msgspec.Struct, kw_only=True):
    """One load against one server. Warm-up requests are among the records and in no figure."""

    label: str
    summary: Summary
    arm: str = ""  # of a comparison, as the round
    round: int = 0
    rate: float | None = None  # the rate that was asked for; None in a closed loop
    started_at: str = ""
    wall_s: float = 0.0
    notes: list[str] = []  # scale factors, realised rate
    problems: list[Problem] = []
    clients: list[ClientProcess] = []
    records: list[Record] = []

    @property
    def counted(self) -> list[Record]:
        """Return the records that the summary is about."""
        return counted(self.records)

    @property
    def invalid(self) -> bool:
        return not is_valid(self.problems)


class Compared(msgspec.Struct):
    """One figure of all arms; `ratios` are the other arms over the first, paired by round."""

    name: str
    unit: str
    better: Literal["lower", "higher"]
    medians: dict[str, float]  # by arm, in the order of the command line
    ratios: dict[str, Ratio]  # by arm, without the first


class Table(msgspec.Struct):
    """Rows of text, as the page and the terminal show them; pairs have columns without names."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    caption: str = ""


class Report(msgspec.Struct, kw_only=True):
    """Everything about one `baton bench` command. `settings` are flat, for reading."""

    schema: Literal["baton.bench/1"] = "baton.bench/1"
    command: str  # "run", "sweep", ...
    title: str
    provenance: Provenance
    definitions: dict[str, str] = msgspec.field(
        default_factory=lambda: dict(DEFINITIONS)
    )
    settings: dict[str, str] = {}
    bounds: Bounds | None = None
    target: float | None = None  # the attainment that a search asked for
    runs: list[Run] = []
    search: Found | None = None
    comparison: list[Compared] = []
    notes: list[str] = []

    @property
    def invalid(self) -> list[tuple[Run, str]]:
        """Return every reason for which figures must not be used, with the run that gave it.

        A confirmed search has none, because an invalid run on the way to it does not matter.
        """
        if self.search is not None and self.search.confirmed:
            return []
        found = [(run, problem) for run in self.runs for problem in run.problems]
        return [(run, problem.text) for run, problem in found if problem.is_invalid]

    @property
    def verdict(self) -> str:
        """Return whether the figures may be used; a search is judged by its confirmation."""
        if self.search is not None:
            return "CONFIRMED" if self.search.confirmed else "NOT CONFIRMED"
        if not self.runs or not self.invalid:
            return "VALID" if self.runs else "no run"
        return "INVALID: these figures are not the server's and must not be used"


def write_json(report: Report, path: Path) -> None:
    """Write every bit of every number, so that `read_json` gives back an equal report."""
    path.write_bytes(msgspec.json.encode(report) + b"\n")


def read_json(path: Path) -> Report:
    """Raise `ConfigError` for a file that is not a report of this schema."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Report)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        text = f"{path} is not a report of this version of baton bench, or damaged: {error}"
        raise ConfigError(text) from error


def flat_settings(settings: object) -> dict[str, str]:
    """Return a Struct or plain data as `section.name` -> text, in order."""

    def flatten(name: str, value: object) -> Iterator[tuple[str, str]]:
        if isinstance(value, dict) and value:
            for key, inner in value.items():
                yield from flatten(f"{name}.{key}".lstrip("."), inner)
        else:
            yield (
                name,
                value
                if isinstance(value, str)
                else msgspec.json.encode(value).decode(),
            )

    return dict(flatten("", msgspec.to_builtins(settings)))


def withhold(report: Report, api_key: str) -> Report:
    """Return the report without `api_key`, which a server may have repeated in a message."""
    if len(api_key) < SHORTEST_KEY:
        return report
    written = msgspec.json.encode(api_key)[1:-1]
    return msgspec.json.decode(
        msgspec.json.encode(report).replace(written, WITHHELD.encode()), type=Report
    )
