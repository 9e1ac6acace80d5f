"""How a report begins before the first request, and ends after the last one.

Every experiment begins one, puts its runs in, and ends with `finish`. A report reaches the disk and
the terminal only here, so secrets are withheld here. The page is one file: style and charts are
inside, and it forbids itself to load anything.
"""

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from baton.bench.console import shown
from baton.bench.records import Outcome
from baton.bench.report.charts import charts
from baton.bench.report.document import (
    Report,
    Run,
    flat_settings,
    read_json,
    withhold,
    write_json,
)
from baton.bench.report.provenance import collect, complete
from baton.bench.report.sections import sections
from baton.bench.report.wording import utc
from baton.bench.settings import ReportAgainSettings, ReportSettings
from baton.protocol.errors import ConfigError

REPORT, PAGE = "report.json", "report.html"
UNTOLD = (
    "the server does not say how much of the prompts it had cached: TTFT is too good if it was "
    "asked them before, by this --seed or from this file"
)


@dataclass(slots=True)
class Publisher:
    """A report on its way. `secrets` are the very keys in use; they never leave this process."""

    report: Report
    out: Path | None
    secrets: tuple[str, ...]

    def finish(self) -> int:
        """Show and write the report; return 0 if its figures may be used, else 1."""
        self.report.provenance = complete(self.report.provenance)
        self.report.notes += _untold_caches(self.report.runs)
        return _give(self.report, self.out, self.secrets)


def begin(
    command: str, settings: msgspec.Struct, report: ReportSettings, *, api_key: str = ""
) -> Publisher:
    """Look at the machine as it is before the load; raise `ConfigError` for a bad `--out`."""
    secrets = (api_key,) if api_key else ()
    out = _folder(report.out)
    if out is not None and (out / REPORT).exists():
        raise ConfigError(f"--out {out} holds a report already: name another folder, or remove it")
    begun = Report(
        command=command,
        title=report.label,
        provenance=collect(settings, ["baton", *sys.argv[1:]], secrets),
        settings=flat_settings(settings, secrets),
    )
    return Publisher(begun, out, secrets)


def write_again(settings: ReportAgainSettings, files: list[str]) -> int:
    """`baton bench report`: show a report that was written before, and make its page anew."""
    if len(files) != 1:
        raise ConfigError("name one file: baton bench report report.json --out FOLDER")
    out = _folder(settings.report.out)
    report = read_json(Path(files[0]))
    # Its own page may be made again, but no measurement is lost to another one.
    there = out is not None and (out / REPORT).exists() and read_json(out / REPORT)
    if there and there.provenance != report.provenance:
        raise ConfigError(f"--out {out} holds another report: name another folder")
    report.title = settings.report.label or report.title
    return _give(report, out)


def is_usable(report: Report) -> bool:
    return report.verdict in ("VALID", "CONFIRMED")


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


def _give(report: Report, out: Path | None, secrets: Sequence[str] = ()) -> int:
    """Print the report and write its files, each even if the other fails; return the exit code."""
    report = withhold(report, secrets)
    written: list[Path] = []
    try:
        # First: the reader of the output may have left, as `head` does.
        written = _write(report, out) if out is not None else []
    finally:
        # Without a terminal no line is broken, since a program may read it.
        is_terminal = sys.stdout.isatty()
        width = shutil.get_terminal_size().columns if is_terminal else 0
        print(shown(report, width, styled=is_terminal), flush=True)
    for path in written:
        print(f"wrote {path}", file=sys.stderr)
    return 0 if is_usable(report) else 1


def _write(report: Report, folder: Path) -> list[Path]:
    """Write the JSON and the page; return what was written."""
    try:
        # The records first: if the page fails, the measurement is kept.
        write_json(report, folder / REPORT)
        (folder / PAGE).write_text(html(report), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write the report to {folder}: {error.strerror}") from error
    return [folder / REPORT, folder / PAGE]


def _untold_caches(runs: Sequence[Run]) -> list[str]:
    """Name the servers that did not say what they had cached; vLLM does only when asked to."""
    answered = [run for run in runs if run.summary.outcomes.get(Outcome.ANSWERED)]
    silent = dict.fromkeys(run.arm for run in answered if run.summary.cached_share is None)
    arms = ", ".join(filter(None, silent))
    return [f"{arms}: {UNTOLD}" if arms else UNTOLD] if silent else []


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
