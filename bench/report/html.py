"""A report as one HTML file that needs nothing else: style and drawings are inside, no script.

Called by `writing.py` and for reports that are rendered again. Everything that could have come
from a server, a file or a command line is escaped, and the page forbids itself to load anything.
"""

from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING

from baton.bench.report.document import Report, Table
from baton.bench.report.headlines import Headline, headlines, subject, usable
from baton.bench.report.sections import Section, background, results
from baton.bench.report.style import style_sheet
from baton.bench.report.wording import several, utc

if TYPE_CHECKING:
    from baton.bench.report.plots import Drawing

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
FLAGGED = ("INVALID", "NO")  # cells that must not be overlooked
DENSE = 9  # columns from which on a table is set smaller
NARROW = 18  # characters of a cell that still reads as a number


def html(report: Report, drawn: "Sequence[Drawing] | None" = None) -> str:
    """The page. `drawn`: the report's drawings, where the caller has made them already."""
    if drawn is None:
        # Only a page needs matplotlib: a run without files never loads it.
        from baton.bench.report.figures import drawings

        drawn = drawings(report)
    found = results(report)
    below = background(report)
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width,initial-scale=1">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            f"<title>{escape(_title(report))}</title>",
            f"<style>{style_sheet()}</style></head>",
            f'<body class="{"usable" if usable(report) else "unusable"}"><main>',
            *_head(report),
            *_navigation(drawn, [*found, *below]),
            *_drawings(drawn),
            *_results(found),
            *(_card(section) for section in below),
            "<footer>Made by baton bench. The raw records are in the JSON file beside this page."
            "</footer>",
            "</main></body></html>",
            "",
        ]
    )


def _title(report: Report) -> str:
    return f"INVALID: {report.title}" if report.invalid else report.title


def _head(report: Report) -> Iterator[str]:
    provenance = report.provenance
    yield "<header>"
    yield f'<p class="eyebrow">baton bench {escape(report.command)}</p>'
    yield f"<h1>{escape(report.title)}</h1>"
    facts = (
        utc(provenance.created_at),
        f"baton {provenance.revision}",
        provenance.machine.cpu_model,
    )
    yield f'<p class="muted">{escape(" · ".join([*facts, *provenance.machine.gpus]))}</p>'
    yield "</header>"
    if report.invalid:
        yield from _banner(report)
    shown = headlines(report)
    if shown:
        yield f'<p class="subject">{escape(subject(report))}</p>'
        yield '<div class="tiles">'
        yield from map(_tile, shown)
        yield "</div>"
    if report.notes:
        yield f'<div class="notes">{_lines(report.notes)}</div>'


def _banner(report: Report) -> Iterator[str]:
    yield '<aside class="invalid" role="alert"><strong>INVALID</strong>'
    num_runs = len({id(run) for run, _ in report.invalid})
    which = "" if len(report.runs) < 2 else f" of {num_runs} of {several(len(report.runs), 'run')}"
    yield f"The figures{which} are not the server's and must not be used."
    yield "<ul>"
    for run, reason in report.invalid:
        yield f"<li><b>{escape(run.label)}</b>: {escape(reason)}</li>"
    yield "</ul></aside>"


def _tile(headline: Headline) -> str:
    unit = f'<span class="unit">{escape(headline.unit)}</span>' if headline.unit else ""
    verdict = escape(headline.verdict)
    if headline.holds is not None:
        verdict = f"{'✓' if headline.holds else '✗'} {verdict}".strip()
        verdict = f'<b class="{"holds" if headline.holds else "missed"}">{verdict}</b>'
    between = "; " if headline.verdict and headline.note else " "
    note = f"{verdict}{between}{escape(headline.note)}".strip()
    return (
        f'<div class="tile"><p class="name">{escape(headline.name)}</p>'
        f'<p class="value">{escape(headline.value)}{unit}</p>'
        f'<p class="note">{note}</p></div>'
    )


def _navigation(drawn: "Sequence[Drawing]", sections: Sequence[Section]) -> Iterator[str]:
    yield '<nav aria-label="Contents">'
    if drawn:
        yield '<a href="#drawings">Drawings</a>'
    runs = [section for section in sections if section.key.startswith("run-")]
    for section in sections:
        if section in runs[1:]:
            continue
        title = section.title
        if section in runs:
            title = "Each run" if len(runs) > 1 else "Tables"
        yield f'<a href="#{escape(section.key)}">{escape(title)}</a>'
    yield "</nav>"


def _drawings(drawn: "Sequence[Drawing]") -> Iterator[str]:
    if not drawn:
        return
    from baton.bench.report.plots import svg

    yield '<div class="drawings" id="drawings">'
    for drawing in drawn:
        wide = " wide" if drawing.wide else ""
        yield f'<figure class="card{wide}" id="drawing-{escape(drawing.name)}">'
        yield f"<h3>{escape(drawing.title)}</h3>"
        yield f'<p class="caption">{escape(drawing.caption)}</p>'
        yield svg(drawing.figure, name=drawing.name, title=drawing.title)
        yield "</figure>"
    yield "</div>"


def _results(sections: Sequence[Section]) -> Iterator[str]:
    """Runs fold where there are several; anything else is open."""
    runs = [section for section in sections if section.key.startswith("run-")]
    for section in sections:
        if section in runs and len(runs) > 1:
            if section is runs[0]:
                yield "<h2>Each run</h2>"
            yield f'<details class="card" id="{escape(section.key)}">'
            yield f"<summary>{escape(section.title)}</summary>"
            yield f"{_inside(section)}</details>"
        else:
            yield _card(section)


def _card(section: Section) -> str:
    return (
        f'<h2 id="{escape(section.key)}">{escape(section.title)}</h2>'
        f'<div class="card">{_inside(section)}</div>'
    )


def _inside(section: Section) -> str:
    lines = _lines(section.lines) if section.lines else ""
    blocks = []
    for is_small, tables in groupby(section.tables, _is_small):
        inner = "".join(map(_table, tables))
        blocks.append(f'<div class="columns">{inner}</div>' if is_small else inner)
    return f'<div class="inside">{lines}{"".join(blocks)}</div>'


def _is_small(table: Table) -> bool:
    """Whether two such tables fit beside each other."""
    return bool(table.title) and len(table.columns) <= 5 and table.columns[-1] != "what it is"


def _lines(lines: Sequence[str]) -> str:
    items = []
    for line in lines:
        kind, colon, rest = line.partition(": ")
        if colon and kind in ("INVALID", "WARNING"):
            flag = "flag" if kind == "INVALID" else "muted"
            items.append(f'<li><b class="{flag}">{kind}</b> {escape(rest)}</li>')
        else:
            items.append(f"<li>{escape(line)}</li>")
    return f'<ul class="lines">{"".join(items)}</ul>'


def _table(table: Table) -> str:
    """A second column without a name makes pairs; short cells are numbers, set to the right."""
    pairs = len(table.columns) == 2 and not table.columns[1]
    short = all(len(cell) <= NARROW for row in table.rows for cell in row[1:])
    kind = "pairs" if pairs else "numbers" if short else "words"
    title = f"<h3>{escape(table.title)}</h3>" if table.title else ""
    caption = f'<p class="caption">{escape(table.caption)}</p>' if table.caption else ""
    head = ""
    if not pairs:
        cells = "".join(f'<th scope="col">{escape(name)}</th>' for name in table.columns)
        head = f"<thead><tr>{cells}</tr></thead>"
    rows = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in table.rows)
    if len(table.columns) > DENSE:
        kind += " dense"
    return (
        f'<div class="block">{title}<div class="scroll"><table class="{kind}">{head}'
        f"<tbody>{rows}</tbody></table></div>{caption}</div>"
    )


def _cell(text: str) -> str:
    flag = ' class="flag"' if text in FLAGGED else ""
    return f"<td{flag}>{escape(text)}</td>"
