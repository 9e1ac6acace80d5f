"""Loads of an experiment that cannot be planned: they do not cost what the others measured."""

from functools import partial
from pathlib import Path

import pytest

from baton.bench import cli, searching
from baton.bench.client.probe import Probed
from baton.bench.compare import compare
from baton.bench.experiments import Asked, Bench, Case, Connected, OnStart, judge
from baton.bench.one_load import run
from baton.bench.records import LoadResult
from baton.bench.report.document import Run, read_json
from baton.bench.settings import CompareSettings, RunSettings, SearchSettings, SweepSettings
from baton.bench.sweep import sweep
from baton.protocol.errors import ConfigError
from tests.support.bench_records import answered

# Nobody listens there: whoever asks fails in another way.
ASKED = ("--url", "http://127.0.0.1:9", "--prompt", "4", "--output", "2", "--vocabulary", "300-400")


ARMS = ("a=http://127.0.0.1:9", "b=http://127.0.0.1:10")


def prompts(folder: Path, count: int) -> tuple[str, ...]:
    path = folder / "prompts.jsonl"
    path.write_text('{"prompt": "a", "output_tokens": 2}\n' * count)
    return "--workload", "file", "--path", str(path)


@pytest.mark.parametrize("command", ["sweep", "run", "compare"])
def test_of_several_loads_one_that_cannot_be_planned_is_refused_before_the_first(
    command: str, tmp_path: Path
) -> None:
    words = (*ASKED, *prompts(tmp_path, 22), "--warm-up", "0")
    rates = cli.parse("sweep", SweepSettings, (*words, "--rates", "1,10", "--duration-s", "5"))[0]
    # 20 requests on average: of so many drawn loads one has more than 22.
    again = ("--arrivals", "poisson:4", "--duration-s", "5", "--runs", "20")
    runs = cli.parse("run", RunSettings, (*words, *again))[0]
    same = (*words[2:], *again[:-2], "--rounds", "20")
    rounds, arms = cli.parse("compare", CompareSettings, (*same, *ARMS), cli.ARMS)
    start = {
        "sweep": partial(sweep, rates), "run": partial(run, runs),
        "compare": partial(compare, rounds, arms),
    }  # fmt: skip
    with pytest.raises(ConfigError, match=r"requests are wanted, .* has 22: ask for fewer"):
        start[command]()


class Played(Bench):
    """Every request is answered at once."""

    def connect(self, asked: Asked) -> Connected:
        probed = Probed("m", "", "", True, True, False, False, False)
        return Connected(probed.fit(asked.target), asked.workload, probed)

    def measure(self, case: Case, on_start: OnStart | None = None) -> Run:
        records = [answered(one.index, one.at_s or 0.0, [0.1, 0.2]) for one in case.plan.requests]
        return judge(case, LoadResult(records, [], 1.0, "2026-03-01T12:00:00+00:00"), "")


def test_a_search_that_comes_to_a_rate_without_a_plan_keeps_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(searching, "Bench", Played)
    words = (*ASKED, *prompts(tmp_path, 25), "--shape", "constant", "--duration-s", "5",
             "--start-rate", "2", "--warm-up", "0", "--ttft-ms", "500",
             "--out", str(tmp_path))  # fmt: skip
    assert searching.search(cli.parse("search", SearchSettings, words)[0]) == 1
    report = read_json(tmp_path / "report.json")
    assert [one.rate for one in report.runs] == [2.0, 4.0]
    assert report.search is not None
    assert report.search.rate == 4.0
    (note,) = [
        one for one in report.notes if one.startswith("the search ended at 8/s: 40 requests")
    ]
    assert f"note: {note}" in capsys.readouterr().out
