"""What a report holds, that it comes back as it was, and what its pages say and must never say."""

import ast
import csv
import io
import re
from collections.abc import Callable
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
from baton.bench.report.html import html
from baton.bench.report.tables import COLUMNS, csv_text, markdown
from baton.bench.report.wording import duration, number, share
from baton.bench.report.writing import write_all
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
from tests.support.sources import sources, tree

SHORT = Scene(duration_s=8.0, warm_up=2, failed_share=0.05)
EVIL = '</title><script>alert(1)</script> $x_1$ & "q" | `p`\n<img src=x onerror=alert(1)>'
KEY = "sk-proj-0123456789abcdef"
Make = Callable[[], Report]


def report() -> Report:
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


@pytest.mark.parametrize("make", [report, compared, faulty, searched])
def test_a_report_comes_back_from_json_exactly_as_it_was(make: Make, tmp_path: Path) -> None:
    written = make()
    write_json(written, tmp_path / "report.json")
    assert read_json(tmp_path / "report.json") == written


def test_the_json_names_its_schema_first(tmp_path: Path) -> None:
    write_json(report(), tmp_path / "report.json")
    assert (tmp_path / "report.json").read_text().startswith(f'{{"schema":"{SCHEMA}"')


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"schema": "baton.bench/99"}', "has schema 'baton.bench/99'; this baton reads"),
        ('{"rows": []}', "has no schema; this baton reads 'baton.bench/1'"),
        ("not json", "is no report of baton bench"),
        ('{"schema": "baton.bench/1"}', "is a damaged report: Object missing required field"),
        ("[1, 2]", "is no report of baton bench"),
    ],
)
def test_another_file_is_refused_in_one_line(content: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        read_json(path)
    assert said in caught.value.message
    assert "\n" not in caught.value.message


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*none\.json: No such file"):
        read_json(tmp_path / "none.json")


def test_a_row_per_request_warm_up_marked() -> None:
    found = report()
    rows = list(csv.DictReader(io.StringIO(csv_text(found))))
    assert len(rows) == len(found.runs[0].records)
    assert set(COLUMNS) < set(rows[0])
    assert sum(int(row["warm_up"]) for row in rows) == SHORT.warm_up
    assert sum(int(row["counted"]) for row in rows) == found.runs[0].summary.num_requests
    answered = next(row for row in rows if row["outcome"] == "answered" and row["counted"] == "1")
    parts = [float(value) for name, value in answered.items()
             if name in ("client_lag_ms", "queue_ms", "prefill_ms", "exposed_transfer_ms",
                         "decoding_ms")]  # fmt: skip
    assert sum(parts) == pytest.approx(float(answered["e2e_ms"]), abs=0.01)


def test_a_spreadsheet_is_given_no_formula() -> None:
    found = report()
    found.runs[0].records[3] = failed(3, 1.0, Outcome.SERVER_ERROR, '=HYPERLINK("http://evil")')
    assert "'=HYPERLINK" in csv_text(found)
    assert not re.search(r'(^|,)"?=', csv_text(found), re.MULTILINE)


@pytest.mark.parametrize("make", [report, compared, faulty, searched])
def test_both_pages_print_every_definition_and_where_the_figures_come_from(make: Make) -> None:
    found = make()
    for page in (unescaped(words(found)), markdown(found).replace("\\", "")):
        for text in [*DEFINITIONS, "goodput", found.provenance.commit,
                     found.provenance.config_hash, found.title]:  # fmt: skip
            assert text in page


def test_an_invalid_run_cannot_be_overlooked() -> None:
    found = report()
    reasons = ["lag p99 35.1 ms is over 5.0 ms", "a client process used 71 % of a core"]
    found.runs[0].problems = [*map(invalid, reasons), warning("9 requests failed")]
    page, text = words(found), markdown(found)
    banner = page[page.index('<aside class="invalid"') : page.index("</aside>")]
    assert page.index("<aside") < page.index('class="tiles"')
    assert all(reason in banner for reason in reasons)
    assert "9 requests failed" not in banner
    assert "9 requests failed" in page
    assert "<title>INVALID: " in page
    assert '<body class="unusable">' in page
    assert text.index("**INVALID.**") < text.index("Attainment")


def test_a_valid_report_has_no_banner() -> None:
    found = report()
    found.runs[0].problems = [warning("few samples for a p99")]
    assert "<aside" not in words(found)
    assert "INVALID" not in words(found)
    assert "INVALID" not in markdown(found)


def test_one_invalid_rate_does_not_spoil_the_headlines_of_a_sweep() -> None:
    found = searched()
    found.search, found.command = None, "sweep"
    found.runs[1].problems = [invalid("the client was late")]
    assert usable(found)
    assert "4/s" not in str(headlines(found))
    found.runs[0].problems = [invalid("the client was late")]
    assert not usable(found)


def test_headlines_say_what_they_are_held_against() -> None:
    attainment = headlines(report())[0]
    assert attainment.name == "Attainment"
    assert "target 90 %" in attainment.note
    names = [one.name for one in headlines(faulty())]
    assert names[:3] == ["Time to detect", "Time to recover", "Goodput dip"]
    ttft, tpot, goodput = headlines(compared())
    assert (ttft.value, ttft.holds, ttft.verdict) == ("0.64", True, "better")
    assert (tpot.holds, tpot.verdict) == (None, "no difference shown")
    assert (goodput.holds, goodput.verdict) == (False, "worse")
    rate = headlines(searched())[0]
    assert (rate.value, rate.verdict) == ("4.00", "confirmed")


def test_a_few_rounds_have_a_range_and_no_interval() -> None:
    found = compared()
    assert "95 % interval" in headlines(found)[0].note
    for row in found.comparison:
        row.ratios = {
            arm: msgspec.structs.replace(ratio, rounds=5) for arm, ratio in row.ratios.items()
        }
    assert headlines(found)[0].note.startswith("range 0.")


def test_a_rate_that_was_not_confirmed_is_no_result() -> None:
    found = searched()
    assert found.search is not None
    found.search = msgspec.structs.replace(found.search, confirmed=False)
    assert headlines(found)[0].holds is False
    assert "not confirmed" in markdown(found)
    found.search = msgspec.structs.replace(found.search, rate=None, line="even 1/s is too much")
    assert "even 1/s is too much" in words(found)


def test_flags_that_differ_are_shown() -> None:
    page = words(compared())
    assert "The arms did not run alike: block_size." in page
    assert '<td class="flag">NO</td>' in page


def test_a_table_of_another_experiment_is_on_every_page() -> None:
    found = report_of([], command="transfer", title="Transfer")
    found.tables = [Table("shm", ["block", "GiB/s"], [["64 KiB", "9.13"]], "against memcpy")]
    for page in (words(found), markdown(found)):
        assert "9.13" in page
        assert "against memcpy" in page


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


def evil() -> Report:
    found = report_of([scene_run(SHORT, EVIL), scene_run(SHORT, "<b>two</b>")], title=EVIL)
    found.runs[0].records[4] = failed(4, 1.0, Outcome.SERVER_ERROR, EVIL)
    found.runs[0].notes, found.notes = [EVIL], [EVIL]
    found.runs[0].problems = [invalid(EVIL)]
    found.settings = {EVIL: EVIL}
    found.tables = [Table(EVIL, [EVIL, EVIL], [[EVIL, EVIL]], EVIL)]
    return found


@pytest.mark.parametrize("make", [report, evil])
def test_a_page_is_one_file_that_loads_and_runs_nothing(make: Make) -> None:
    elements = Elements(html(make()))
    assert not {"script", "link", "iframe", "img", "object", "image"} & set(elements.names)
    assert not elements.handlers
    assert all(address.startswith("#") for address in elements.addresses)
    assert {address[1:] for address in elements.addresses} <= set(elements.ids)
    assert len(elements.ids) == len(set(elements.ids))


def test_what_a_server_said_is_text_in_markdown_too() -> None:
    text = markdown(evil())
    assert not re.search(r"(?<!\\)<(script|img|b)", text)
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert rows
    assert all(line.endswith(" |") for line in rows)


def test_no_key_reaches_any_file(tmp_path: Path) -> None:
    found = faulty()
    run = found.runs[0]
    run.records[3].detail = f"401: Incorrect API key provided: {KEY}"
    run.notes = [f"Authorization: Bearer {KEY}"]
    run.settings = flat_settings({"target": {"api_key": KEY, "url": f"http://me:{KEY}@host/v1"}})
    found.settings = {"api_key": KEY}
    found.tables = [Table("curl", ["word"], [["-H"], [f"Authorization: Bearer {KEY}"]])]
    assert KEY not in str(withhold(found, [KEY]))
    written = write_all(found, tmp_path / "out")  # even if the caller does not say which it is
    assert {path.suffix for path in written} == {".json", ".csv", ".md", ".html", ".png"}
    assert not [path.name for path in written if KEY.encode() in path.read_bytes()]
    assert "(withheld)" in (tmp_path / "out" / "report.html").read_text()


def test_a_key_without_a_known_shape_is_cut_from_the_models_words_too() -> None:
    found = report()
    found.runs[0].records[3].text = "my password: hunter2-hunter2"
    cleaned = withhold(found, ["hunter2-hunter2"])
    assert cleaned.runs[0].records[3].text == "my password: (withheld)"
    assert withhold(found).runs[0].records[3].text == "my password: hunter2-hunter2"


def test_a_confirmed_search_is_not_spoiled_by_an_invalid_run_on_the_way() -> None:
    found = searched()
    assert found.search is not None
    found.runs[0].problems = [invalid("the client sent late")]
    for confirmed in (True, False):
        found.search = msgspec.structs.replace(found.search, confirmed=confirmed)
        page, text = html(found), markdown(found)
        assert ('<aside class="invalid"' in page) != confirmed
        assert ("> **INVALID" in text) != confirmed
        # What was wrong with it is in its own place all the same.
        assert '<b class="flag">INVALID</b> the client sent late' in page


def test_withholding_nothing_changes_nothing() -> None:
    assert withhold(searched(), ["no-such-key"]) == searched()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write the report to .*file"):
        write_all(report(), tmp_path / "file" / "out")


def test_settings_are_flat_and_in_order() -> None:
    flat = flat_settings({"load": {"requests": 10, "window": ""}, "rates": [1, 2], "none": None})
    assert list(flat.items()) == [
        ("load.requests", "10"), ("load.window", ""), ("rates", "[1,2]"), ("none", "null"),
    ]  # fmt: skip


def test_numbers_have_few_digits_and_never_claim_all() -> None:
    assert [number(v) for v in (None, 0.0, 0.0123, 1.5, 12.34, 1234.5)] == [
        "–", "0", "0.0123", "1.50", "12.3", "1,234",  # noqa: RUF001
    ]  # fmt: skip
    assert [share(v) for v in (1.0, 0.99999, 0.9996, 0.9, 0.0, 0.0004)] == [
        "100 %", "99.999 %", "99.96 %", "90 %", "0 %", "0.04 %",
    ]  # fmt: skip
    assert duration(0.0096) == ("9.60", "ms")
    assert duration(22.0) == ("22.0", "s")


def test_only_drawings_need_matplotlib_and_nobody_loads_it_on_the_way() -> None:
    users = {
        path.name
        for path in sources("bench")
        if any(module.partition(".")[0] == "matplotlib" for module in loaded_at_import(path))
    }
    drawers = {
        path.name
        for path in sources("bench")
        if {"baton.bench.report.plots", "baton.bench.report.figures"} & loaded_at_import(path)
    }
    assert users == {"plots.py"}
    assert drawers == {"figures.py"}


def loaded_at_import(path: Path) -> set[str]:
    """Modules that importing a file imports: neither within functions nor for types alone."""
    found: set[str] = set()
    for node in tree(path).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def words(report: Report) -> str:
    """The page without its drawings, which take longer than all the rest."""
    return html(report, [])


def unescaped(page: str) -> str:
    for entity, character in (("&lt;", "<"), ("&gt;", ">"), ("&quot;", '"'), ("&#x27;", "'")):
        page = page.replace(entity, character)
    return page.replace("&amp;", "&")


def test_a_last_request_that_ended_as_it_arrived_is_counted() -> None:
    records = [answered(0, 0.0, [0.1, 0.2]), failed(1, 5.0, Outcome.REFUSED)]
    records[1].end_s = 5.0
    run = Run(label="a", summary=summarise(LoadResult(records, [], 5.0, "")), records=records)
    assert run.summary.num_requests == 2
    assert run.counted == records
