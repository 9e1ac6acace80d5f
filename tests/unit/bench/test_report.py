"""A report comes back as it was, and its page and terminal text say what they must."""

import re
from html import unescape
from xml.etree import ElementTree

import msgspec
import pytest

import baton
from baton.bench.figures.metrics import DEFINITIONS, Ratio, summarise
from baton.bench.figures.search import Found, Probe
from baton.bench.figures.validity import invalid, warning
from baton.bench.records import Outcome, Record
from baton.bench.report.charts import charts
from baton.bench.report.document import Compared, Report, Run, read_json, write_json
from baton.bench.report.page import begin, finish, html, sections, shown
from baton.bench.report.provenance import collect
from baton.bench.settings import ReportSettings, RunSettings, Target
from baton.protocol.errors import ConfigError
from tests.support.bench_records import answered, failed, load, report_of, scene_run
from tests.support.sources import REPOSITORY

EVIL = (
    '</title><script>alert(1)</script> $x_1$ & "q" | `p`\n<img src=x onerror=alert(1)>'
)
KEY = "sk-proj-0123456789abcdef"


def compared() -> Report:
    found = report_of(
        [scene_run("old, round 1"), scene_run("new, round 1")], command="compare"
    )
    found.comparison = [
        Compared(
            "TTFT p50",
            "ms",
            "lower",
            {"old": 120.0, "new": 77.0},
            {"new": Ratio(0.64, 0.61, 0.68, 6)},
        ),
        Compared(
            "goodput",
            "requests/s",
            "higher",
            {"old": 5.0, "new": 4.0},
            {"new": Ratio(0.8, 0.75, 0.85, 5)},
        ),
    ]
    return found


def searched() -> Report:
    found = report_of([scene_run(f"{rate:g}/s", rate=rate) for rate in (2.0, 4.0)])
    probes = [Probe(2.0, 0.99, True, "up"), Probe(4.0, 0.5, True, "confirm")]
    found.search = Found(4.0, True, "found", 8.0, "4 requests/s hold, 8 do not", probes)
    found.target = 0.95
    return found


@pytest.mark.parametrize("written", [report_of([scene_run()]), compared(), searched()])
def test_a_report_comes_back_from_json_and_all_its_sections_are_on_the_page(
    written, tmp_path
):
    write_json(written, tmp_path / "report.json")
    found = read_json(tmp_path / "report.json")
    assert found == written
    page = unescape(html(found))
    for section in sections(found):
        cells = [cell for table in section.tables for row in table.rows for cell in row]
        captions = [table.caption for table in section.tables]
        for text in (section.title, *cells, *captions, *section.lines):
            assert text in page
    for text in (*DEFINITIONS, found.provenance.commit, found.title):
        assert text in page


@pytest.mark.parametrize("content", ['{"schema": "baton.bench/99"}', "not json", None])
def test_another_file_is_refused_in_one_line(content, tmp_path):
    path = tmp_path / "none.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=str(path)) as caught:
        read_json(path)
    assert "\n" not in caught.value.message


def test_an_invalid_run_cannot_be_overlooked_and_a_warning_is_no_banner():
    found = report_of([scene_run()])
    found.runs[0].problems = [warning("9 requests failed")]
    assert "<aside" not in html(found)
    assert "INVALID" not in html(found)
    found.runs[0].problems += [invalid("lag p99 35.1 ms is over 5.0 ms")]
    page = html(found)
    banner = page[page.index('<aside class="invalid"') : page.index("</aside>")]
    assert page.index("<aside") < page.index("<svg") < page.index("<table")
    assert "lag p99 35.1 ms is over 5.0 ms" in banner
    assert "9 requests failed" not in banner
    assert "<title>INVALID: " in page


@pytest.mark.parametrize("confirmed", [True, False])
def test_a_search_is_judged_by_its_confirmation_alone(confirmed):
    found = searched()
    found.runs[0].problems = [invalid("the client sent late")]
    found.search = msgspec.structs.replace(found.search, confirmed=confirmed)
    assert found.verdict == ("CONFIRMED" if confirmed else "NOT CONFIRMED")
    page = html(found)
    assert ('<aside class="invalid"' in page) != confirmed
    # The run's own place says all the same what was wrong with it.
    assert '<b class="flag">INVALID</b> the client sent late' in page


@pytest.mark.parametrize("key", [KEY, "xyq"])
def test_no_key_reaches_any_file_or_the_terminal(key, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["bench", "--api-key", key, f"--api-key={key}"])
    found = begin("run", RunSettings(Target(api_key=key)))
    found.runs = [scene_run()]
    if key == KEY:  # the other is too short to be found in a text
        found.runs[0].records[-1].detail = f"401: {key} is not known"
    finish(found, str(tmp_path), key)
    written = list(tmp_path.iterdir())
    assert {path.name for path in written} == {"report.json", "report.html"}
    assert not [path.name for path in written if key.encode() in path.read_bytes()]
    assert key not in capsys.readouterr().out
    kept = read_json(tmp_path / "report.json")
    assert kept.provenance.command_line[1:] == ["--api-key", "(withheld)", "(withheld)"]


def test_a_measurement_is_not_overwritten_by_another(tmp_path):
    write_json(report_of([]), tmp_path / "report.json")
    with pytest.raises(
        ConfigError, match="holds a report already: name another folder"
    ):
        begin("run", RunSettings(report=ReportSettings(out=str(tmp_path))))
    with pytest.raises(ConfigError, match="it is a file: name a folder"):
        begin(
            "run", RunSettings(report=ReportSettings(out=str(tmp_path / "report.json")))
        )


def test_the_terminal_ends_with_the_verdict_and_a_server_cannot_command_it():
    run = scene_run()
    run.problems = [
        invalid("it said \x1b]0;title\x07 and \x1b[2J"),
        warning("few samples"),
    ]
    text = shown(report_of([run]))
    assert (
        "INVALID: it said  ]0;title  and  [2J\nWARNING: few samples\na note\n" in text
    )
    assert text.endswith(
        "INVALID: these figures are not the server's and must not be used"
    )
    assert "\x1b" not in text


def test_a_checkout_is_named_by_its_commit_and_else_by_the_version():
    provenance = collect(["baton", "bench", "run"])
    installed = msgspec.structs.replace(provenance, commit="", dirty=False)
    assert installed.revision == f"version {baton.__version__}"
    if not (REPOSITORY / ".git").exists():
        pytest.skip("these sources are in no checkout")
    assert re.fullmatch(r"[0-9a-f]{40}", provenance.commit)


def test_no_text_of_a_server_runs_in_the_page():
    found = report_of([scene_run(EVIL), scene_run("<b>two</b>")], title=EVIL)
    found.runs[0].records[4] = failed(4, 1.0, Outcome.SERVER_ERROR, EVIL)
    found.runs[0].notes = [EVIL]
    found.notes = [EVIL]
    found.settings = {EVIL: EVIL}
    page = html(found)
    assert "<script" not in page
    assert "<img" not in page


def run_of(records: list[Record]) -> Run:
    return Run(label="run", summary=summarise(load(records)), records=records)


def test_a_distribution_rises_to_one_over_answered_measured_requests():
    records = [
        answered(index, float(index), [0.001 * (index + 1)]) for index in range(4)
    ]
    warm_up = answered(4, -1.0, [9.0])
    warm_up.warm_up = True
    run = run_of([warm_up, *records, failed(5, 0.0, Outcome.REFUSED)])
    curve = charts(report_of([run]))[0].curves[0]
    assert curve.x.tolist() == pytest.approx([1.0, 1.0, 2.0, 3.0, 4.0])
    assert curve.y.tolist() == [0.0, 0.25, 0.5, 0.75, 1.0]


def test_a_report_has_the_charts_that_its_records_allow():
    bare = run_of([failed(0, 0.0, Outcome.REFUSED), answered(1, 0.1, [0.1])])
    distributions = [
        "Time to first token",
        "Time per output token",
        "Gaps between tokens",
    ]
    rates = ["Attainment against rate", "Goodput against rate"]
    for report, expected in (
        (report_of([scene_run()]), distributions),
        (searched(), [*rates, *distributions]),
        (report_of([bare]), distributions[:1]),
        (report_of([]), []),
    ):
        assert [one.title for one in charts(report)] == expected
        for one in charts(report):
            ElementTree.fromstring(one.svg())
