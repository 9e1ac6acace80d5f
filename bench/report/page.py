"""Begin a report before the first request; write and show it after the last one.

A report reaches the disk and the terminal only here, so API keys are withheld here. The page is one
file: style and charts are inside, and it forbids itself to load anything.
"""

import os
import sys
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from baton.bench.report.charts import charts
from baton.bench.report.document import (
    WITHHELD,
    Report,
    flat_settings,
    read_json,
    withhold,
    write_json,
)
from baton.bench.report.provenance import collect, complete
from baton.bench.report.sections import sections, shown, utc
from baton.bench.settings import ReportAgainSettings, Settings
from baton.protocol.errors import ConfigError

REPORT, PAGE = "report.json", "report.html"


def begin(command: str, settings: Settings) -> Report:
    """Record the machine's state before the load. Raises `ConfigError` for a bad `--out`."""
    out = _folder(settings.report.out)
    if out is not None and (out / REPORT).exists():
        raise ConfigError(f"--out {out} holds a report already: name another folder, or remove it")
    flat = flat_settings(settings)
    words = ["baton", *sys.argv[1:]]
    if key := settings.target.api_key:
        flat["target.api_key"] = WITHHELD
        words = [WITHHELD if word in (key, f"--api-key={key}") else word for word in words]
    return Report(command=command, title="", provenance=collect(words), settings=flat)


def finish(report: Report, folder: str, api_key: str = "") -> int:
    """Show and write the report, without `api_key`; return 0 if its figures may be used, else 1."""
    report.provenance = complete(report.provenance)
    return _give(report, Path(folder) if folder else None, api_key)


def write_again(settings: ReportAgainSettings, files: list[str]) -> int:
    """`baton bench report`: show a report that was written before, and make its page anew."""
    if len(files) != 1:
        raise ConfigError("name one file: baton bench report report.json --out FOLDER")
    out = _folder(settings.report.out)
    report = read_json(Path(files[0]))
    # A report's own page may be replaced, but never another report.
    there = out is not None and (out / REPORT).exists() and read_json(out / REPORT)
    if there and there.provenance != report.provenance:
        raise ConfigError(f"--out {out} holds another report: name another folder")
    return _give(report, out)


def html(report: Report) -> str:
    """Return the page. Text that came from a server is escaped, so that no browser runs it."""
    pages = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True,
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    origin = report.provenance
    facts = [f"baton {origin.revision}", origin.machine.cpu_model, *origin.machine.gpus]
    return pages.get_template("report.html.j2").render(
        report=report,
        facts=[utc(origin.created_at), *facts],
        charts=charts(report),
        sections=sections(report),
    )


def _give(report: Report, out: Path | None, api_key: str = "") -> int:
    """Print the report and write its files, each even if the other fails; return the exit code."""
    report = withhold(report, api_key)
    written: list[Path] = []
    try:
        # This comes first, because the reader of the output may be gone, as with `head`.
        written = _write(report, out) if out is not None else []
    finally:
        print(shown(report), flush=True)
    for path in written:
        print(f"wrote {path}", file=sys.stderr)
    return 0 if report.verdict in ("VALID", "CONFIRMED") else 1


def _write(report: Report, folder: Path) -> list[Path]:
    """Write the JSON and the page; return what was written."""
    try:
        # The records come first: if the page fails, the measurement is kept.
        write_json(report, folder / REPORT)
        (folder / PAGE).write_text(html(report), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write the report to {folder}: {error.strerror}") from error
    return [folder / REPORT, folder / PAGE]


def _folder(name: str) -> Path | None:
    """Make the folder now, so that no load runs for a report that could not be written."""
    if not name:
        return None
    folder = Path(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = "it is a file: name a folder" if folder.is_file() else error.strerror
        raise ConfigError(f"--out {name}: {why}") from error
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"--out {name}: the folder cannot be written")
    return folder
