"""The frame of a report: begun before the first request, finished after the last one.

Every experiment begins one, puts its runs in, and ends with `finish`, which prints, writes the
files of `--out` and gives the exit code: 0 for figures that may be used, 1 for others.
"""

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from baton.bench.console import shown
from baton.bench.records import Outcome
from baton.bench.report.document import Report, Run, flat_settings, read_json, withhold
from baton.bench.report.provenance import collect, complete
from baton.bench.report.writing import REPORT, write_all
from baton.bench.settings import ReportAgainSettings, ReportSettings
from baton.protocol.errors import ConfigError

UNTOLD = (
    "the server did not say how much of the prompts it had cached: if it was asked the same "
    "before, by this --seed or from this file, it may have known them, and TTFT is too good"
)


@dataclass(slots=True)
class Publisher:
    """A report on its way. `secrets` are the very keys in use; they never leave this process."""

    report: Report
    out: Path | None
    secrets: tuple[str, ...]

    def finish(self) -> int:
        self.report.provenance = complete(self.report.provenance)
        self.report.notes += caches_untold(self.report.runs)
        _give(withhold(self.report, self.secrets), self.out, self.secrets)
        return 0 if is_usable(self.report) else 1


def caches_untold(runs: Sequence[Run]) -> list[str]:
    """What nobody can warn of: vLLM, for one, tells cached tokens only when started to do so."""
    silent = [
        run
        for run in runs
        if run.summary.cached_share is None and run.summary.outcomes.get(Outcome.ANSWERED)
    ]
    if not silent:
        return []
    arms = ", ".join(dict.fromkeys(run.arm for run in silent if run.arm))
    return [f"{arms}: {UNTOLD}" if arms else UNTOLD]


def _give(report: Report, out: Path | None, secrets: Sequence[str] = ()) -> None:
    """Prints it and writes its files; that one of the two fails keeps nobody from the other."""
    written: list[Path] = []
    try:
        # First: whoever reads the output may have left, as `head` does.
        written = write_all(report, out, secrets) if out is not None else []
    finally:
        print(shown(report, _width()), flush=True)
    for path in written:
        print(f"wrote {path}", file=sys.stderr)


def _width() -> int:
    """Of the terminal; 0 where there is none, so that what a program reads is never broken."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 0


def is_usable(report: Report) -> bool:
    """A search stands by what it confirmed; everything else by the runs, all of them."""
    if report.search is not None:
        return report.search.confirmed
    return bool(report.runs) and not report.invalid


def begin(
    command: str,
    settings: msgspec.Struct,
    report: ReportSettings,
    *,
    api_key: str = "",
) -> Publisher:
    """Looks at the machine as it is before the load; raises `ConfigError` for a bad `--out`."""
    secrets = (api_key,) if api_key else ()
    out = _folder(report.out)
    if out is not None and (out / REPORT).exists():
        raise ConfigError(f"--out {out} holds a report already: name another folder, or remove it")
    return Publisher(
        Report(
            command=command,
            title=report.label,
            provenance=collect(settings, _command_line(), secrets),
            settings=flat_settings(settings, secrets),
        ),
        out,
        secrets,
    )


def write_again(settings: ReportAgainSettings, files: list[str]) -> int:
    """`baton bench report`: shows a report that was written before, and makes its pages anew."""
    if len(files) != 1:
        raise ConfigError("name one file: baton bench report report.json --out FOLDER")
    out = _folder(settings.report.out)
    report = read_json(Path(files[0]))
    if out is not None and (out / REPORT).exists():
        # Its own pages may be made again, but no measurement is lost to another one.
        there = read_json(out / REPORT).provenance
        if there != report.provenance:
            raise ConfigError(f"--out {out} holds another report: name another folder")
    if settings.report.label:
        report.title = settings.report.label
    _give(report, out)
    return 0 if is_usable(report) else 1


def _command_line() -> Sequence[str]:
    return ["baton", *sys.argv[1:]]


def _folder(name: str) -> Path | None:
    """Made now, so that no load runs for a report that could not be written."""
    if not name:
        return None
    folder = Path(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise ConfigError(f"--out {name} is a file: name a folder") from None
    except OSError as error:
        raise ConfigError(f"--out {name}: {error.strerror}") from error
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"--out {name}: the folder cannot be written")
    return folder
