"""What a terminal shows of a report, when a report may be used, and that none is overwritten."""

from pathlib import Path

import msgspec
import pytest

from baton.bench.console import shown
from baton.bench.figures.search import Ending, Found
from baton.bench.report.document import Run, read_json, write_json
from baton.bench.report.publish import begin, is_usable, write_again
from baton.bench.settings import ReportAgainSettings, ReportSettings, RunSettings
from baton.protocol.errors import ConfigError
from tests.support.bench_records import Scene, invalid, report_of, scene_run


def run_of(label: str, *problems: str, seed: int = 1) -> Run:
    run = scene_run(Scene(duration_s=5.0, seed=seed), label)
    run.problems = [invalid(text) for text in problems]
    return run


def test_the_terminal_shows_latencies_attainment_and_the_verdict() -> None:
    text = shown(report_of([scene_run(Scene(duration_s=20.0), "poisson:6")]))
    lines = text.splitlines()
    assert lines[0].split() == ["poisson:6", "(ms)", "p50", "p90", "p99", "max", "samples"]
    assert any(line.startswith("ttft ") for line in lines)
    assert "attainment " in text
    assert lines[-1] == "VALID"


def test_the_terminal_says_why_figures_must_not_be_used() -> None:
    lines = shown(report_of([run_of("poisson:6", "the client sent late")])).splitlines()
    assert "INVALID: the client sent late" in lines
    assert lines[-1] == "INVALID: these figures are not the server's and must not be used"


def test_a_server_cannot_command_the_terminal() -> None:
    run = run_of("poisson:6", "it said \x1b]0;title\x07 and \x1b[2J")
    assert "\x1b" not in shown(report_of([run]))


@pytest.mark.parametrize(
    ("found", "is_confirmed"),
    [
        (Found(1.0, True, Ending.FOUND, 2.0, "1/s holds", []), True),
        (Found(1.0, False, Ending.PROBES_SPENT, 2.0, "no result", []), False),
    ],
)
def test_a_search_stands_by_what_it_confirmed_and_names_its_invalid_runs(
    found: Found, is_confirmed: bool
) -> None:
    report = report_of([run_of("1/s, up"), run_of("2/s, up", "the client sent late")])
    assert not is_usable(report)
    report.search = found
    assert is_usable(report) is is_confirmed
    lines = shown(report).splitlines()
    assert "note: 2/s, up was INVALID: the client sent late" in lines
    assert lines[-1] == ("CONFIRMED" if is_confirmed else "NOT CONFIRMED")


def test_a_report_without_a_run_is_of_no_use() -> None:
    assert not is_usable(report_of([]))


def test_tables_of_a_narrow_terminal_are_broken_by_columns() -> None:
    report = report_of([run_of(f"run {seed}", seed=seed) for seed in (1, 2)])
    wide, narrow = shown(report).splitlines(), shown(report, 60).splitlines()
    assert max(len(line) for line in wide) > 100
    rows = [line for line in narrow if line.startswith(("run  ", "run 1", "run 2"))]
    assert len(rows) == 3 * 3
    assert all(len(line) <= 60 for line in rows)
    words = " ".join(line[5:] for line in narrow if line.startswith("run 1")).split()
    assert words == next(line[5:] for line in wide if line.startswith("run 1")).split()


def test_pages_of_an_invalid_report_are_no_success(tmp_path: Path) -> None:
    for name, problems in (("good", ()), ("bad", ("late",))):
        write_json(report_of([run_of("a load", *problems)]), tmp_path / name)
    assert write_again(ReportAgainSettings(), [str(tmp_path / "good")]) == 0
    assert write_again(ReportAgainSettings(), [str(tmp_path / "bad")]) == 1


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
