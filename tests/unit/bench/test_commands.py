"""The commands of `baton bench`: flags, mistakes, what comes before a load, and paired rounds."""

from pathlib import Path

import msgspec
import pytest

from baton.bench import cli
from baton.bench.client.probe import Probed
from baton.bench.compare import arms_of, contrast, flags_of, whole_rounds
from baton.bench.experiment import Experiment, Server
from baton.bench.figures.validity import Case, invalid
from baton.bench.report.document import Report, Run, read_json
from baton.bench.settings import CompareSettings, RunSettings, Target
from baton.protocol.errors import ConfigError
from tests.support.bench_records import answered, load, report_of, run_of, scene_run

LOAD = ("--concurrency", "2", "--requests", "1")
# Nothing listens there: an experiment that asks fails in another way.
URL = ("--url", "http://127.0.0.1:9")
ARMS = ("a=http://127.0.0.1:9", "b=http://127.0.0.1:10")
ASKED = ("--prompt", "4", "--output", "2", "--vocabulary", "300-400")
OPEN = ("--arrivals", "constant:1", "--requests", "5")  # at 0, 1, 2, 3 and 4 s
CLOSED = ("--concurrency", "1", "--requests", "5")


def prompts(folder: Path, count: int) -> tuple[str, ...]:
    path = folder / "prompts.jsonl"
    path.write_text('{"prompt": "a", "output_tokens": 2}\n' * count)
    return "--workload", "file", "--path", str(path)


@pytest.mark.parametrize(
    "words",
    [
        # 20 requests on average: of so many drawn loads one has more than 22.
        ("run", *URL, "--arrivals", "poisson:4", "--duration-s", "5", "--runs", "20"),
        (
            "compare",
            *ARMS,
            "--arrivals",
            "poisson:4",
            "--duration-s",
            "5",
            "--rounds",
            "20",
        ),
    ],
)
def test_of_several_loads_one_that_cannot_be_planned_is_refused_before_the_first(
    words, tmp_path
):
    with pytest.raises(
        ConfigError, match=r"requests are wanted, .* has 22: ask for fewer"
    ):
        cli.main([*words, *ASKED, *prompts(tmp_path, 22), "--warm-up", "0"])


@pytest.fixture
def played(monkeypatch):
    """Every request of an experiment is answered at once."""

    def connect(experiment: Experiment, target: Target) -> Server:
        probed = Probed("m", "", frozenset({"usage", "ignore_eos"}))
        return Server(probed.fit(target), experiment.settings.workload, probed)

    def measure(_: Experiment, case: Case, _target: Target) -> Run:
        records = [
            answered(one.index, one.at_s or 0.0, [0.1, 0.2])
            for one in case.plan.requests
        ]
        return run_of(case, load(records))

    monkeypatch.setattr(Experiment, "connect", connect)
    monkeypatch.setattr(Experiment, "measure", measure)


@pytest.mark.usefixtures("played")
def test_a_search_that_comes_to_a_rate_without_a_plan_keeps_what_it_has(
    tmp_path, capsys
):
    words = (
        "search",
        *URL,
        *ASKED,
        *prompts(tmp_path, 25),
        "--shape",
        "constant",
        "--duration-s",
        "5",
        "--start-rate",
        "2",
        "--warm-up",
        "0",
        "--ttft-ms",
        "500",
        "--out",
        str(tmp_path),
    )
    assert cli.main(words) == 1
    report = read_json(tmp_path / "report.json")
    assert [one.rate for one in report.runs] == [2.0, 4.0]
    assert report.search.rate == 4.0
    (note,) = [
        one
        for one in report.notes
        if one.startswith("the search ended at 8/s: 40 requests")
    ]
    assert note in capsys.readouterr().out


def unfinished(num_wanted: int, capsys: pytest.CaptureFixture[str]) -> Report:
    experiment = Experiment("run", cli.parse(RunSettings, (*ASKED, *CLOSED))[0], [None])
    with experiment:
        run = scene_run("1/s")
        experiment.report.runs.append(run)
    experiment.finish(num_wanted)
    capsys.readouterr()
    return experiment.report


def test_loads_that_were_never_run_make_a_report_unusable(capsys):
    assert unfinished(1, capsys).verdict == "VALID"
    report = unfinished(3, capsys)
    assert report.verdict.startswith("INVALID")
    assert report.invalid[0][1] == "interrupted: 1 of 3 loads were run"


def test_words_and_flags_may_be_mixed_and_repeated_ones_keep_their_commas():
    words = ("a=http://a", "--rounds", "7", "b=http://b#name", "--flags", "a=--x 1,2")
    settings, arms = cli.parse(CompareSettings, words)
    assert arms == ["a=http://a", "b=http://b#name"]
    assert (settings.rounds, settings.flags) == (7, ("a=--x 1,2",))


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_the_example_in_the_help_works(name):
    settings = cli.COMMANDS[name].settings
    words = cli.COMMANDS[name].example.split()
    assert words[:3] == ["baton", "bench", name]
    cli.parse(settings, words[3:])


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (
            ["run", "--concurency", "3"],
            "unknown flag --concurency; did you mean --concurrency?",
        ),
        (["run", "--requests", "5"], "--arrivals poisson:5"),
        (["run", "--arrivals", "poisson:5"], "--requests N"),
        (["run", "--concurrency", "2"], "--requests N"),
        (["run", "--concurrency", "2", "--arrivals", "poisson:1"], "choose one"),
        (["run", "--workload", "trace", "--path", "/not/there.csv"], "/not/there.csv"),
        (["run", *LOAD, "--vocabulary", "9"], "LOW-HIGH"),
        (["run", *LOAD, "--url", "a:1"], "http://host:port"),
        (["sweep", "--duration-s", "5"], "--rates"),
        (
            ["sweep", "--rates", "1", "--duration-s", "5", "--shape", "odd"],
            "--shape 'odd'",
        ),
        (["search", "--duration-s", "5"], "--preset chat|tight|long-32k"),
        (
            ["search", "--preset", "chat", "--min-rate", "2"],
            "must not be below --min-rate 2",
        ),
        (["compare", "http://a", *LOAD], "write it as NAME=URL"),
        (["compare", "a=http://a", *LOAD], "two arms"),
        (["compare", "a=http://a", "a=http://b", *LOAD], "twice"),
    ],
)
def test_a_mistake_is_one_clear_line(words, hint):
    with pytest.raises(ConfigError) as caught:
        cli.main(words)
    assert hint in caught.value.message
    assert "\n" not in caught.value.message


def arm_run(arm: str, number: int, *problems: str) -> Run:
    run = scene_run(f"{arm} {number}")
    run.arm = arm
    run.round = number
    run.problems = [invalid(text) for text in problems]
    return run


def rounds(number: int) -> list[Run]:
    return [arm_run(arm, place) for place in range(1, number + 1) for arm in ("a", "b")]


def compared(runs: list[Run]) -> Report:
    report = report_of(runs)
    contrast(report, ["a", "b"])
    return report


def test_only_rounds_in_which_every_arm_is_valid_are_compared():
    runs = [*rounds(1), arm_run("a", 2, "late"), arm_run("b", 2), arm_run("a", 3)]
    assert [sorted(one) for one in whole_rounds(runs, ["a", "b"])] == [["a", "b"]]
    report = compared(runs)
    assert "2 rounds are not compared: an arm has no valid run in them" in report.notes
    assert all(row.ratios["b"].rounds == 1 for row in report.comparison)


def test_ratios_are_to_the_first_arm():
    runs = rounds(7)
    for run in runs[1::2]:
        faster = 2 * run.summary.tokens_per_s
        run.summary = msgspec.structs.replace(run.summary, tokens_per_s=faster)
    rows = {row.name: row for row in compared(runs).comparison}
    assert rows["tokens/s"].ratios["b"].median == pytest.approx(2.0)
    assert rows["tokens/s"].ratios["b"].is_conclusive
    assert rows["TTFT p50"].ratios["b"].median == 1.0
    assert not rows["TTFT p50"].ratios["b"].is_conclusive


def test_an_arm_has_a_name_a_server_and_perhaps_a_model():
    arms = arms_of(
        ["a=http://a:1", "b=http://b:2/v1#org/m"], Target("", "common", timeout_s=7.0)
    )
    assert {
        name: (arm.url, arm.model, arm.timeout_s) for name, arm in arms.items()
    } == {
        "a": ("http://a:1", "common", 7.0),
        "b": ("http://b:2/v1", "org/m", 7.0),
    }


def test_the_report_says_how_each_arm_was_started(tmp_path):
    (tmp_path / "b.yaml").write_text("engine:\n  threads: 2\n")
    given = ("a=vllm serve m --dtype half", f"b={tmp_path}/b.yaml")
    assert flags_of(given, ["a", "b"]) == [
        "a was started with: vllm serve m --dtype half",
        "b was started with: engine: threads: 2",
    ]
    for wrong, said in (
        ("c=--tp 2", "one of a, b"),
        ("a=no-such-file", "neither a file nor a"),
    ):
        with pytest.raises(ConfigError, match=said):
            flags_of((wrong,), ["a", "b"])
