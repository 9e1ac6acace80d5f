"""What a report holds, that it comes back as it was, and what its page says and must never say."""

import re
from collections.abc import Callable
from html import unescape
from pathlib import Path

import msgspec
import pytest

import baton
from baton.bench.figures.metrics import DEFINITIONS, Ratio
from baton.bench.figures.search import Found, Probe
from baton.bench.figures.validity import invalid, warning
from baton.bench.records import Outcome
from baton.bench.report.document import (
    Compared,
    Report,
    Table,
    read_json,
    withhold,
    write_json,
)
from baton.bench.report.page import begin, finish, html, write_again
from baton.bench.report.provenance import collect
from baton.bench.report.sections import sections, shown
from baton.bench.settings import ReportAgainSettings, ReportSettings, RunSettings
from baton.protocol.errors import ConfigError
from tests.support.bench_records import Scene, failed, report_of, scene_run

SHORT = Scene(duration_s=8.0, warm_up=2, failed_share=0.05)
EVIL = '</title><script>alert(1)</script> $x_1$ & "q" | `p`\n<img src=x onerror=alert(1)>'
KEY = "sk-proj-0123456789abcdef"
Make = Callable[[], Report]


def one_run() -> Report:
    return report_of([scene_run(SHORT, "poisson 6/s")])


def compared() -> Report:
    runs = []
    for round_number in (1, 2):
        for arm in ("old", "new"):
            run = scene_run(SHORT, f"{arm}, round {round_number}")
            run.arm, run.round = arm, round_number
            runs.append(run)
    found = report_of(runs, command="compare")
    found.comparison = [
        Compared("TTFT p50", "ms", "lower", {"old": 120.0, "new": 77.0},
                 {"new": Ratio(0.64, 0.61, 0.68, 6, (0.61, 0.68, 0.63, 0.64, 0.64, 0.65))}),
        Compared("TPOT p50", "ms", "lower", {"old": 13.0, "new": 13.1},
                 {"new": Ratio(1.01, 0.98, 1.02, 6)}),
        Compared("goodput", "requests/s", "higher", {"old": 5.0, "new": 4.0},
                 {"new": Ratio(0.8, 0.75, 0.85, 5)}),
    ]  # fmt: skip
    return found


def searched() -> Report:
    runs = [scene_run(msgspec.structs.replace(SHORT, rate=rate), f"{rate:g}/s")
            for rate in (2.0, 4.0)]  # fmt: skip
    found = report_of(runs, command="search")
    probes = [Probe(2.0, 0.99, True, "up"), Probe(4.0, 0.5, True, "confirm")]
    found.search = Found(4.0, True, "found", 8.0, "4 requests/s hold, 8 do not", probes)
    found.target = 0.95
    return found


def evil() -> Report:
    found = report_of([scene_run(SHORT, EVIL), scene_run(SHORT, "<b>two</b>")], title=EVIL)
    found.runs[0].records[4] = failed(4, 1.0, Outcome.SERVER_ERROR, EVIL)
    found.runs[0].notes, found.notes = [EVIL], [EVIL]
    found.runs[0].problems = [invalid(EVIL)]
    found.settings = {EVIL: EVIL}
    return found


def table_of(report: Report, title: str) -> Table:
    return next(
        table
        for section in sections(report)
        for table in section.tables
        if title in (section.title, table.title)
    )


@pytest.mark.parametrize("make", [one_run, compared, searched])
def test_a_report_comes_back_from_json_and_all_its_sections_are_on_the_page(
    make: Make, tmp_path: Path
) -> None:
    written = make()
    write_json(written, tmp_path / "report.json")
    found = read_json(tmp_path / "report.json")
    assert found == written
    assert withhold(found, "no-such-key") == written
    page = unescape(html(found))
    for section in sections(found):
        cells = [cell for table in section.tables for row in table.rows for cell in row]
        captions = [table.caption for table in section.tables]
        for text in (section.title, *cells, *captions, *section.lines):
            assert text in page
    for text in (*DEFINITIONS, found.provenance.commit, found.title):
        assert text in page


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"schema": "baton.bench/99"}', "Invalid enum value 'baton.bench/99'"),
        ("not json", "is not a report of this version of baton bench, or damaged"),
        ('{"schema": "baton.bench/1"}', "or damaged: Object missing required field"),
        (None, "none.json: No such file"),
    ],
)
def test_another_file_is_refused_in_one_line(
    content: str | None, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "none.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        read_json(path)
    assert said in caught.value.message
    assert "\n" not in caught.value.message


def test_an_invalid_run_cannot_be_overlooked_and_a_warning_is_no_banner() -> None:
    found = one_run()
    found.runs[0].problems = [warning("9 requests failed")]
    assert "<aside" not in html(found)
    assert "INVALID" not in html(found)
    reasons = ["lag p99 35.1 ms is over 5.0 ms", "a client process used 71 % of a core"]
    found.runs[0].problems += map(invalid, reasons)
    page = html(found)
    banner = page[page.index('<aside class="invalid"') : page.index("</aside>")]
    assert page.index("<aside") < page.index("<svg") < page.index("<table")
    assert all(reason in banner for reason in reasons)
    assert "9 requests failed" not in banner
    assert '<b class="muted">WARNING</b> 9 requests failed' in page
    assert "<title>INVALID: " in page


@pytest.mark.parametrize("confirmed", [True, False])
def test_a_search_stands_by_what_it_confirmed_whatever_was_invalid_on_the_way(
    confirmed: bool,
) -> None:
    found = searched()
    assert found.search is not None
    found.runs[0].problems = [invalid("the client sent late")]
    found.search = msgspec.structs.replace(found.search, confirmed=confirmed)
    assert found.verdict == ("CONFIRMED" if confirmed else "NOT CONFIRMED")
    page = html(found)
    assert ('<aside class="invalid"' in page) != confirmed
    # The run's own place says all the same what was wrong with it.
    assert '<b class="flag">INVALID</b> the client sent late' in page
    assert "--attainment 0.95" in page
    assert table_of(found, "Search").rows == [
        ["2", "up", "99 %", "yes", "no"],
        ["4", "confirm", "50 %", "yes", "no"],
    ]


@pytest.mark.parametrize("key", [KEY, "hunter2-hunter2", "xyq"])
def test_no_key_reaches_any_file_or_the_terminal(
    key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = one_run()
    found.provenance = msgspec.structs.replace(
        found.provenance, command_line=["--api-key", key, f"--api-key={key}", "--max-tokens", "9"]
    )
    found.runs[0].notes = [f"Authorization: Bearer {key}"]
    found.settings = {"target.api_key": key, "flags": f"--dtype half --api-key {key} --tp 2",
                      "body": f'{{"api_key": "{key}"}}', "max_tokens": "9"}  # fmt: skip
    if key != "xyq":  # too short to be found where nothing names it
        found.runs[0].records[3].detail = f"401: {key} is not known"
    finish(found, str(tmp_path), key)
    written = list(tmp_path.iterdir())
    assert {path.name for path in written} == {"report.json", "report.html"}
    assert not [path.name for path in written if key.encode() in path.read_bytes()]
    assert "(withheld)" in (tmp_path / "report.html").read_text()
    assert key not in capsys.readouterr().out
    kept = read_json(tmp_path / "report.json")
    assert kept.settings["max_tokens"] == "9"
    assert kept.settings["flags"] == "--dtype half --api-key (withheld) --tp 2"
    assert kept.provenance.command_line[-2:] == ["--max-tokens", "9"]


def test_a_measurement_is_not_overwritten_by_another(tmp_path: Path) -> None:
    first, second = (report_of([], title=title) for title in ("first", "second"))
    second.provenance = msgspec.structs.replace(second.provenance, created_at="later")
    write_json(first, tmp_path / "report.json")
    write_json(second, tmp_path / "second.json")
    with pytest.raises(ConfigError, match="holds a report already: name another folder"):
        begin("run", RunSettings(report=ReportSettings(out=str(tmp_path))))
    again = ReportAgainSettings(ReportSettings(out=str(tmp_path)))
    with pytest.raises(ConfigError, match="holds another report"):
        write_again(again, [str(tmp_path / "second.json")])
    assert write_again(again, [str(tmp_path / "report.json")]) == 1  # it has no run
    assert (tmp_path / "report.html").exists()
    with pytest.raises(ConfigError, match="it is a file: name a folder"):
        begin("run", RunSettings(report=ReportSettings(out=str(tmp_path / "report.json"))))


def test_the_terminal_says_why_figures_must_not_be_used_and_a_server_cannot_command_it() -> None:
    run = scene_run(SHORT, "poisson:6")
    run.problems = [invalid("it said \x1b]0;title\x07 and \x1b[2J"), warning("few samples")]
    run.notes = ["realised 6/s", "WARNING: the rate was off"]
    text = shown(report_of([run]))
    assert text.splitlines()[-6:] == [
        "INVALID: it said  ]0;title  and  [2J",
        "WARNING: few samples",
        "realised 6/s",
        "WARNING: the rate was off",
        "",
        "INVALID: these figures are not the server's and must not be used",
    ]
    assert "\x1b" not in text


def test_a_checkout_is_named_by_its_commit_and_else_by_the_version() -> None:
    provenance = collect(["baton", "bench", "run"])
    installed = msgspec.structs.replace(provenance, commit="", dirty=False)
    assert installed.revision == f"version {baton.__version__}"
    if not (Path(__file__).parents[3] / ".git").exists():
        pytest.skip("these sources are in no checkout")
    assert re.fullmatch(r"[0-9a-f]{40}", provenance.commit)
    assert provenance.revision.startswith(provenance.commit[:12])


def test_no_text_of_a_server_runs_in_the_page() -> None:
    page = html(evil())
    assert "<script" not in page
    assert "<img" not in page
