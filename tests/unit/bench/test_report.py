"""What a report holds, that it comes back as it was, and what its pages say and must never say."""

import csv
import io
import re
import subprocess
import sys
from collections.abc import Callable
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from baton.bench.figures.faults import FaultSpec, Injected, impacts
from baton.bench.figures.metrics import DEFINITIONS, PRESETS, summarise
from baton.bench.figures.paired import Ratio
from baton.bench.figures.search import Ending, Found, Probe, Purpose
from baton.bench.records import LoadResult, Outcome
from baton.bench.report.document import (
    SCHEMA,
    Compared,
    Parity,
    Report,
    Run,
    Table,
    flat_settings,
    read_json,
    withhold,
    write_json,
)
from baton.bench.report.headlines import headlines, usable
from baton.bench.report.pages import COLUMNS, NO_DRAWINGS, csv_text, html, markdown
from baton.bench.report.publish import Publisher, begin, write_again
from baton.bench.report.wording import duration, number, share
from baton.bench.settings import ReportAgainSettings, ReportSettings, RunSettings
from baton.protocol.errors import ConfigError
from tests.support.bench_records import (
    Scene,
    answered,
    failed,
    invalid,
    report_of,
    scene_run,
    warning,
)
from tests.support.sources import imports, sources

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
    better = Ratio(0.64, 0.61, 0.68, 6)
    found.comparison = [
        Compared("TTFT p50", "ms", "lower", {"old": 120.0, "new": 77.0}, {"new": better}),
        Compared("TPOT p50", "ms", "lower", {"old": 13.0, "new": 13.1},
                 {"new": Ratio(1.01, 0.98, 1.02, 6)}),
        Compared("goodput", "requests/s", "higher", {"old": 5.0, "new": 4.0},
                 {"new": Ratio(0.8, 0.75, 0.85, 6)}),
    ]  # fmt: skip
    found.parity = [Parity("block_size", {"old": "16", "new": "32"})]
    return found


def faulty() -> Report:
    run = scene_run(Scene(duration_s=30.0, fault_at_s=12.0, fault_for_s=3.0), "a kill")
    fault = Injected(FaultSpec("restart", 4711, 12.0, 0.5, ("serve", "--api-key", KEY)), 12.001)
    run.faults = [fault]
    run.impacts = impacts(run.records, [fault], PRESETS["chat"])
    return report_of([run], command="fault")


def searched() -> Report:
    runs = [scene_run(msgspec.structs.replace(SHORT, rate=rate), f"{rate:g}/s")
            for rate in (2.0, 4.0)]  # fmt: skip
    found = report_of(runs, command="search")
    probes = [Probe(2.0, 0.99, True, Purpose.UP), Probe(4.0, 0.5, True, Purpose.CONFIRM)]
    found.search = Found(4.0, True, Ending.FOUND, 8.0, "4 requests/s hold, 8 do not", probes)
    return found


def evil() -> Report:
    found = report_of([scene_run(SHORT, EVIL), scene_run(SHORT, "<b>two</b>")], title=EVIL)
    found.runs[0].records[4] = failed(4, 1.0, Outcome.SERVER_ERROR, EVIL)
    found.runs[0].notes, found.notes = [EVIL], [EVIL]
    found.runs[0].problems = [invalid(EVIL)]
    found.settings = {EVIL: EVIL}
    found.tables = [Table(EVIL, [EVIL, EVIL], [[EVIL, EVIL]], EVIL)]
    return found


@pytest.mark.parametrize("make", [one_run, compared, faulty, searched])
def test_a_report_comes_back_from_json_and_its_pages_rest_on_definitions_and_provenance(
    make: Make, tmp_path: Path
) -> None:
    written = make()
    write_json(written, tmp_path / "report.json")
    assert (tmp_path / "report.json").read_text().startswith(f'{{"schema":"{SCHEMA}"')
    found = read_json(tmp_path / "report.json")
    assert found == written
    assert make is faulty or withhold(found, ["no-such-key"]) == written
    for page in (unescape(html(found, ())), markdown(found).replace("\\", "")):
        for text in [*DEFINITIONS, *DEFINITIONS.values(), found.provenance.commit,
                     found.provenance.config_hash, found.title]:  # fmt: skip
            assert text in page


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"schema": "baton.bench/99"}', "has schema 'baton.bench/99'; this baton reads"),
        ('{"rows": []}', "has no schema; this baton reads 'baton.bench/1'"),
        ("not json", "is not a report of baton bench"),
        ('{"schema": "baton.bench/1"}', "is a damaged report: Object missing required field"),
        ("[1, 2]", "is not a report of baton bench"),
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


def test_the_csv_has_a_row_per_request_with_warm_up_marked_and_no_formula() -> None:
    found = one_run()
    found.runs[0].records[3] = failed(3, 1.0, Outcome.SERVER_ERROR, '=HYPERLINK("http://evil")')
    text = csv_text(found)
    assert "'=HYPERLINK" in text
    assert not re.search(r'(^|,)"?=', text, re.MULTILINE)
    rows = list(csv.DictReader(io.StringIO(text)))
    assert len(rows) == len(found.runs[0].records)
    assert set(COLUMNS) < set(rows[0])
    assert sum(int(row["warm_up"]) for row in rows) == SHORT.warm_up
    assert sum(int(row["counted"]) for row in rows) == found.runs[0].summary.num_requests
    whole = next(row for row in rows if row["outcome"] == "answered" and row["counted"] == "1")
    stages = ("client_lag_ms", "queue_ms", "prefill_ms", "exposed_transfer_ms", "decoding_ms")
    parts = sum(float(whole[name]) for name in stages)
    assert parts == pytest.approx(float(whole["e2e_ms"]), abs=0.01)


def test_an_invalid_run_cannot_be_overlooked_and_a_warning_is_no_banner() -> None:
    found = one_run()
    found.runs[0].problems = [warning("9 requests failed")]
    assert "<aside" not in html(found, ())
    assert "INVALID" not in html(found, ()) + markdown(found)
    reasons = ["lag p99 35.1 ms is over 5.0 ms", "a client process used 71 % of a core"]
    found.runs[0].problems += map(invalid, reasons)
    page, text = html(found, ()), markdown(found)
    banner = page[page.index('<aside class="invalid"') : page.index("</aside>")]
    assert page.index("<aside") < page.index('class="tiles"')
    assert all(reason in banner for reason in reasons)
    assert "9 requests failed" not in banner
    assert "9 requests failed" in page
    assert "<title>INVALID: " in page
    assert '<body class="unusable">' in page
    assert text.index("**INVALID.**") < text.index("Attainment")


def test_headlines_say_what_they_are_held_against() -> None:
    attainment = headlines(one_run())[0]
    assert attainment.name == "Attainment"
    assert "target 90 %" in attainment.note
    names = [one.name for one in headlines(faulty())]
    assert names[:3] == ["Time to detect", "Time to recover", "Goodput dip"]
    found = compared()
    ttft, tpot, goodput = headlines(found)
    assert (ttft.value, ttft.holds, ttft.verdict) == ("0.64", True, "better")
    assert "95 % interval" in ttft.note
    assert (tpot.holds, tpot.verdict) == (None, "no difference shown")
    assert (goodput.holds, goodput.verdict) == (False, "worse")
    few = msgspec.structs.replace(found.comparison[0].ratios["new"], rounds=5)
    found.comparison[0].ratios["new"] = few
    assert headlines(found)[0].note.startswith("range 0.")


def test_one_invalid_rate_does_not_spoil_the_headlines_of_a_sweep() -> None:
    found = searched()
    found.search, found.command = None, "sweep"
    found.runs[1].problems = [invalid("the client was late")]
    assert usable(found)
    assert "4/s" not in str(headlines(found))
    found.runs[0].problems = [invalid("the client was late")]
    assert not usable(found)


@pytest.mark.parametrize("confirmed", [True, False])
def test_a_search_stands_by_what_it_confirmed_whatever_was_invalid_on_the_way(
    confirmed: bool,
) -> None:
    found = searched()
    assert found.search is not None
    found.runs[0].problems = [invalid("the client sent late")]
    found.search = msgspec.structs.replace(found.search, confirmed=confirmed)
    rate = headlines(found)[0]
    expected = "confirmed" if confirmed else "not confirmed"
    assert (rate.value, rate.verdict, rate.holds) == ("4.00", expected, confirmed)
    page, text = html(found, ()), markdown(found)
    assert ('<aside class="invalid"' in page) != confirmed
    assert ("> **INVALID" in text) != confirmed
    # What was wrong with the run is in its own place all the same.
    assert '<b class="flag">INVALID</b> the client sent late' in page
    found.search = msgspec.structs.replace(found.search, rate=None, line="even 1/s is too much")
    assert "even 1/s is too much" in html(found, ())


def test_tables_of_the_experiment_and_flags_that_differ_are_on_every_page() -> None:
    found = compared()
    found.tables = [Table("shm", ["block", "GiB/s"], [["64 KiB", "9.13"]], "against memcpy")]
    page, text = html(found, ()), markdown(found)
    for said in ("9.13", "against memcpy", "The arms did not run alike: block"):
        assert said in page
        assert said in text
    assert '<td class="flag">NO</td>' in page


class Elements(HTMLParser):
    """The elements of a page and the addresses that they name."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.handlers: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "xlink:href", "data", "action"):
                self.addresses.append(value or "")
            if name.startswith("on"):
                self.handlers.append(name)


@pytest.mark.parametrize("make", [faulty, evil])
def test_a_page_is_one_file_that_loads_and_runs_nothing(make: Make, tmp_path: Path) -> None:
    Publisher(make(), tmp_path, ()).finish()
    page = (tmp_path / "report.html").read_text()
    elements = Elements(page)
    assert "svg" in elements.names
    assert "default-src 'none'" in page
    assert "prefers-color-scheme: dark" in page
    assert not {"script", "link", "iframe", "img", "object", "image"} & set(elements.names)
    assert not elements.handlers
    assert all(address.startswith("#") for address in elements.addresses)
    assert {address[1:] for address in elements.addresses} <= set(elements.ids)
    assert len(elements.ids) == len(set(elements.ids))
    text = (tmp_path / "report.md").read_text()
    assert not re.search(r"(?<!\\)<(script|img|b)", text)
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert rows
    assert all(line.endswith(" |") for line in rows)


def test_no_key_reaches_any_file_or_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = faulty()
    run = found.runs[0]
    run.records[3].detail = f"401: Incorrect API key provided: {KEY}"
    run.notes = [f"Authorization: Bearer {KEY}"]
    run.settings = flat_settings({"target": {"api_key": KEY, "url": f"http://me:{KEY}@host/v1"}})
    found.settings = {"api_key": KEY}
    found.tables = [Table("curl", ["word"], [["-H"], [f"Authorization: Bearer {KEY}"]])]
    Publisher(found, tmp_path, ()).finish()  # even if the caller does not say which key it is
    written = list(tmp_path.iterdir())
    assert {path.suffix for path in written} == {".json", ".csv", ".md", ".html", ".png"}
    assert not [path.name for path in written if KEY.encode() in path.read_bytes()]
    assert "(withheld)" in (tmp_path / "report.html").read_text()
    assert KEY not in capsys.readouterr().out
    # Of no known shape: what a model wrote is cut by the very key only.
    run.records[3].text = "my password: hunter2-hunter2"
    assert withhold(found, ["hunter2-hunter2"]).runs[0].records[3].text == "my password: (withheld)"
    assert withhold(found).runs[0].records[3].text == "my password: hunter2-hunter2"


def test_a_measurement_is_not_overwritten_by_another(tmp_path: Path) -> None:
    first, second = (report_of([], title=title) for title in ("first", "second"))
    second.provenance = msgspec.structs.replace(second.provenance, created_at="later")
    write_json(first, tmp_path / "report.json")
    write_json(second, tmp_path / "second.json")
    with pytest.raises(ConfigError, match="holds a report already: name another folder"):
        begin("run", RunSettings(), ReportSettings(out=str(tmp_path)))
    again = ReportAgainSettings(ReportSettings(out=str(tmp_path), label="a better title"))
    with pytest.raises(ConfigError, match="holds another report"):
        write_again(again, [str(tmp_path / "second.json")])
    assert write_again(again, [str(tmp_path / "report.json")]) == 1  # it has no run
    assert read_json(tmp_path / "report.json").title == "a better title"
    with pytest.raises(ConfigError, match="is a file: name a folder"):
        begin("run", RunSettings(), ReportSettings(out=str(tmp_path / "report.json")))


def test_a_page_that_cannot_be_written_is_named_and_does_not_cost_the_measurement(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "report.csv").mkdir()
    with pytest.raises(ConfigError, match=r"cannot write the report to .*: Is a directory"):
        Publisher(one_run(), tmp_path, ()).finish()
    assert len(read_json(tmp_path / "report.json").runs) == 1
    assert capsys.readouterr().out.endswith("VALID\n")


def test_settings_are_flat_and_numbers_have_few_digits_and_never_claim_all() -> None:
    flat = flat_settings({"load": {"requests": 10, "window": ""}, "rates": [1, 2], "none": None})
    assert list(flat.items()) == [
        ("load.requests", "10"), ("load.window", ""), ("rates", "[1,2]"), ("none", "null"),
    ]  # fmt: skip
    assert [number(v) for v in (None, 0.0, 0.0123, 1.5, 12.34, 1234.5)] == [
        "–", "0", "0.0123", "1.50", "12.3", "1,234",  # noqa: RUF001
    ]  # fmt: skip
    assert [share(v) for v in (1.0, 0.99999, 0.9996, 0.9, 0.0, 0.0004)] == [
        "100 %", "99.999 %", "99.96 %", "90 %", "0 %", "0.04 %",
    ]  # fmt: skip
    assert [duration(v) for v in (0.0096, 22.0)] == [("9.60", "ms"), ("22.0", "s")]


def test_a_last_request_that_ended_as_it_arrived_is_counted() -> None:
    records = [answered(0, 0.0, [0.1, 0.2]), failed(1, 5.0, Outcome.REFUSED)]
    records[1].end_s = 5.0
    run = Run(label="a", summary=summarise(LoadResult(records, [], 5.0, "")), records=records)
    assert run.summary.num_requests == 2
    assert run.counted == records


WITHOUT_MATPLOTLIB = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "matplotlib":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Refuse())
from baton.__main__ import main
sys.argv = ["baton", "bench", "report", *sys.argv[1:]]
sys.exit(main())
"""


def test_a_report_is_written_without_matplotlib_and_says_how_to_get_drawings(
    tmp_path: Path,
) -> None:
    write_json(one_run(), tmp_path / "old.json")
    command = [sys.executable, "-c", WITHOUT_MATPLOTLIB, "old.json", "--out", "again"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(NO_DRAWINGS) == 1
    names = {path.name for path in (tmp_path / "again").iterdir()}
    assert names == {"report.json", "report.csv", "report.md", "report.html"}
    page = unescape((tmp_path / "again" / "report.html").read_text())
    assert page.count(NO_DRAWINGS) == 1
    assert "<svg" not in page
    assert "Latency, ms" in page


def test_matplotlib_is_imported_in_one_file_which_is_imported_only_when_pages_are_written() -> None:
    users = {
        path.name: {module.partition(".")[0] for module in imports(path)} for path in sources()
    }
    assert [name for name, found in users.items() if "matplotlib" in found] == ["drawings.py"]
    code = "import sys, baton.bench.cli, baton.bench.report.publish; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "baton.bench.report.publish" in done.stdout.split()
    assert "matplotlib" not in done.stdout.split()
