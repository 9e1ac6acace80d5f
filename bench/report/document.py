"""What a benchmark has to say, as one versioned document: raw records, summaries, provenance.

The experiments fill a `Report`; `tables.py`, `html.py` and `plots.py` show it; `read_json` brings
an old one back. The document holds everything that the pages show, so each page can be made again
from the JSON alone. Field names are promised: a new field gets a default, any other change of
meaning a new schema. A report never holds a secret: `withhold` before writing.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from baton.bench.figures.faults import Impact, Injected
from baton.bench.figures.metrics import DEFINITIONS, Bounds, Summary, counted
from baton.bench.figures.paired import Ratio
from baton.bench.figures.search import Found
from baton.bench.figures.validity import Problem, is_valid
from baton.bench.records import ClientProcess, Record
from baton.bench.report.provenance import Provenance
from baton.bench.report.redaction import clean, clean_text, cut
from baton.protocol.errors import ConfigError

SCHEMA = "baton.bench/1"

Settings = dict[str, str]


class Run(msgspec.Struct, kw_only=True):
    """One load against one server.

    Runs of one `arm` belong together: a sweep has one run per rate, a comparison one per arm and
    round. Warm-up requests are among the records and in none of the figures.
    """

    label: str
    summary: Summary
    arm: str = ""
    round: int = 0
    rate: float | None = None  # that was asked for; None in a closed loop
    started_at: str = ""
    wall_s: float = 0.0
    settings: Settings = msgspec.field(default_factory=dict)  # where they differ from the report's
    notes: list[str] = msgspec.field(default_factory=list)  # scale factors, clamps, realised rate
    problems: list[Problem] = msgspec.field(default_factory=list)
    clients: list[ClientProcess] = msgspec.field(default_factory=list)
    records: list[Record] = msgspec.field(default_factory=list)
    faults: list[Injected] = msgspec.field(default_factory=list)
    impacts: list[Impact] = msgspec.field(default_factory=list)

    @property
    def measured(self) -> list[Record]:
        """The records that can count, by intended time: no warm-up, nothing that was stopped."""
        return counted(self.records, None)

    @property
    def counted(self) -> list[Record]:
        """Of the measured records those that the summary is about."""
        if len(self.measured) == self.summary.num_requests:
            return self.measured  # also one that ended as it arrived, where the window ends
        return counted(self.records, self.summary.window)

    @property
    def invalid(self) -> bool:
        return not is_valid(self.problems)


class Compared(msgspec.Struct):
    """One figure of all arms; `ratios` are each other arm over the first, paired by round."""

    name: str
    unit: str
    better: Literal["lower", "higher"]
    medians: dict[str, float]  # by arm, in the order of the command line
    ratios: dict[str, Ratio]  # by arm, without the first


class Parity(msgspec.Struct):
    """A setting that both arms should share, and what each was seen to have."""

    name: str
    values: dict[str, str]  # by arm

    @property
    def same(self) -> bool:
        return len(set(self.values.values())) <= 1


class Table(msgspec.Struct):
    """Rows of an experiment that has no section of its own: transfer, selftest, verification."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    caption: str = ""


class Report(msgspec.Struct, kw_only=True):
    """Everything about one `baton bench` command. `settings` are flat, for reading.

    Whoever adds impacts of faults adds the definitions of `faults.py` too.
    """

    schema: str = SCHEMA
    command: str  # "run", "sweep", ...
    title: str
    provenance: Provenance
    definitions: dict[str, str] = msgspec.field(default_factory=lambda: dict(DEFINITIONS))
    settings: Settings = msgspec.field(default_factory=dict)
    bounds: Bounds | None = None
    target: float = 0.9  # attainment that counts as good enough
    runs: list[Run] = msgspec.field(default_factory=list)
    search: Found | None = None
    comparison: list[Compared] = msgspec.field(default_factory=list)
    parity: list[Parity] = msgspec.field(default_factory=list)
    tables: list[Table] = msgspec.field(default_factory=list)
    notes: list[str] = msgspec.field(default_factory=list)

    @property
    def invalid(self) -> list[tuple[Run, str]]:
        """Every reason for which figures must not be used, with the run that gave it.

        None of a confirmed search: it goes on until other runs hold, and those it stands on.
        """
        if self.search is not None and self.search.confirmed:
            return []
        return [
            (run, problem.text)
            for run in self.runs
            for problem in run.problems
            if problem.is_invalid
        ]


class _Head(msgspec.Struct):
    schema: str = ""


def write_json(report: Report, path: Path) -> None:
    """Numbers keep every bit: `read_json` gives back an equal report."""
    path.write_bytes(msgspec.json.encode(report) + b"\n")


def read_json(path: Path) -> Report:
    """Raises `ConfigError` for a file that is no report of this schema."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    try:
        schema = msgspec.json.decode(content, type=_Head).schema
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is no report of baton bench: {error}") from error
    if schema != SCHEMA:
        named = f"has schema {schema!r}" if schema else "has no schema"
        raise ConfigError(f"{path} {named}; this baton reads {SCHEMA!r}")
    try:
        return msgspec.json.decode(content, type=Report)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is a damaged report: {error}") from error


def flat_settings(settings: object, secrets: Sequence[str] = ()) -> Settings:
    """A Struct or plain data as `section.name` -> text, in order, secrets withheld."""
    flat: Settings = {}
    _flatten("", clean(msgspec.to_builtins(settings), secrets), flat)
    return flat


def _flatten(name: str, value: object, flat: Settings) -> None:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            _flatten(f"{name}.{key}" if name else str(key), inner, flat)
    elif isinstance(value, str):
        flat[name] = value
    else:
        flat[name] = msgspec.json.encode(value).decode()


def withhold(report: Report, secrets: Sequence[str] = ()) -> Report:
    """A report without `secrets` and without anything that looks like one.

    Also a server's own words are cleaned: some answer a wrong key by repeating it.
    """
    records = [run.records for run in report.runs]
    bare = [msgspec.structs.replace(run, records=[]) for run in report.runs]
    plain = msgspec.to_builtins(msgspec.structs.replace(report, runs=bare))
    cleaned = msgspec.convert(clean(plain, secrets), Report)
    for run, kept in zip(cleaned.runs, records, strict=True):
        run.records = [_withhold_record(record, secrets) for record in kept]
    return cleaned


def _withhold_record(record: Record, secrets: Sequence[str]) -> Record:
    return msgspec.structs.replace(
        record,
        detail=clean_text(record.detail, secrets),
        # What a model wrote is data: it may well write of passwords.
        text=None if record.text is None else cut(record.text, secrets),
    )
