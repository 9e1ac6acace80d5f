"""Writes a report in every format: JSON, CSV, Markdown, one HTML page, a PNG per drawing.

The experiments call `write_all` for `--out`, and again for `baton bench report`. It is the one way
to the disk, and secrets are withheld here whatever the caller did before. Never reads anything.
"""

from collections.abc import Sequence
from pathlib import Path

from baton.bench.report.document import Report, withhold, write_json
from baton.bench.report.headlines import usable
from baton.bench.report.html import html
from baton.bench.report.tables import markdown, write_csv
from baton.protocol.errors import ConfigError

REPORT = "report.json"


def write_all(report: Report, folder: Path, secrets: Sequence[str] = ()) -> list[Path]:
    """Writes report.json, .csv, .md, .html and PNGs into `folder`; returns what was written.

    `secrets` are the very keys in use: they are cut out wherever they occur. Raises `ConfigError`
    if the folder cannot be written.
    """
    # Only files need matplotlib: a run without them never loads it.
    from baton.bench.report.figures import drawings
    from baton.bench.report.plots import png

    report = withhold(report, secrets)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # The records first: whatever goes wrong with a page, the measurement is kept.
        write_json(report, folder / REPORT)
        drawn = drawings(report)
        write_csv(report, folder / "report.csv")
        (folder / "report.md").write_text(markdown(report), encoding="utf-8")
        (folder / "report.html").write_text(html(report, drawn), encoding="utf-8")
        for drawing in drawn:
            png(drawing, folder / f"{drawing.name}.png", usable=usable(report))
    except OSError as error:
        raise ConfigError(f"cannot write the report to {folder}: {error.strerror}") from error
    names = (REPORT, "report.csv", "report.md", "report.html")
    return [folder / name for name in (*names, *(f"{drawing.name}.png" for drawing in drawn))]
