"""The command line of `baton bench`: flags, help, and one clear line for each mistake."""

import pytest

from baton.bench import cli
from baton.bench.settings import (
    CompareSettings,
    FaultSettings,
    ReportAgainSettings,
    RunSettings,
    SearchSettings,
    SweepSettings,
)
from baton.protocol.errors import ConfigError
from baton.runtime.fields import fields_of

ALL = {
    "run": RunSettings,
    "sweep": SweepSettings,
    "search": SearchSettings,
    "compare": CompareSettings,
    "fault": FaultSettings,
    "report": ReportAgainSettings,
}


def run(*words: str) -> RunSettings:
    return cli.parse("run", RunSettings, words)[0]


def test_flags_carry_no_section() -> None:
    settings = run("--url", "http://a:1", "--prompt", "uniform:1-9", "--concurrency", "3")
    assert settings.target.url == "http://a:1"
    assert settings.workload.prompt == "uniform:1-9"
    assert settings.arrival.concurrency == 3
    assert settings.load.warm_up == RunSettings().load.warm_up


def test_a_switch_needs_no_value() -> None:
    assert run("--verify").check.verify
    assert run("--verify=true").check.verify
    assert not run("--ignore-eos", "false").target.ignore_eos


def test_a_certificate_is_checked_unless_the_flag_that_curl_has_is_given() -> None:
    assert not run("--url", "https://a").target.insecure
    assert run("--url", "https://a", "--insecure").target.insecure
    flags = {"--" + field.key.replace("_", "-") for field in fields_of(RunSettings)}
    assert {"--insecure", "--ca-file"} <= flags  # those that a refused certificate names
    assert "verify" not in " ".join(flags - {"--verify"})


def test_words_and_flags_may_be_mixed() -> None:
    words = ("a=http://a", "--rounds", "7", "b=http://b#name", "--flags", "a=--x 1,2")
    settings, arms = cli.parse("compare", CompareSettings, words, cli.ARMS)
    assert arms == ["a=http://a", "b=http://b#name"]
    assert settings.compare.rounds == 7
    assert settings.compare.flags == ("a=--x 1,2",)


def test_a_flag_may_be_repeated_and_keeps_its_commas() -> None:
    words = ("--fault", "kill:7@1", "--fault", "restart:8@2=run --a 1,2")
    settings, _ = cli.parse("fault", FaultSettings, words)
    assert settings.fault.fault == ("kill:7@1", "restart:8@2=run --a 1,2")


@pytest.mark.parametrize("name", ALL)
def test_no_two_settings_share_a_flag(name: str) -> None:
    keys = [field.key for field in fields_of(ALL[name])]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize("name", ALL)
def test_help_names_every_flag_and_an_example(name: str) -> None:
    words = cli.ARMS if name == "compare" else cli.FILE if name == "report" else None
    text = cli.parser(name, ALL[name], words).format_help()
    for field in cli.flags_of(name, ALL[name]):
        assert "--" + field.key.replace("_", "-") in text
    assert "{," not in text  # no choice without a name
    assert cli.EXAMPLES[name] in " ".join(text.split())


def test_arms_alone_name_the_servers_of_a_comparison() -> None:
    assert "--url" in cli.parser("run", RunSettings).format_help()
    assert "--url" not in cli.parser("compare", CompareSettings, cli.ARMS).format_help()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("sweep", "--shape SHAPE of arrivals: poisson, constant, gamma,cv=N or trace (default"),
        ("search", "--shape SHAPE of arrivals: poisson, constant, gamma,cv=N or trace (default"),
        ("run", "trace as recorded (so by default with --workload trace), trace:5 stretched"),
        ("run", "common start of all prompts, before the tokens of --prompt"),
    ],
)
def test_help_says_how_to_write_it(name: str, text: str) -> None:
    assert text in " ".join(cli.parser(name, ALL[name]).format_help().split())


@pytest.mark.parametrize("name", [name for name in ALL if name != "report"])
def test_an_example_is_parsed(name: str) -> None:
    words = cli.EXAMPLES[name].split()
    assert words[:3] == ["baton", "bench", name]
    cli.parse(name, ALL[name], words[3:], cli.ARMS if name == "compare" else None)


@pytest.mark.parametrize("name", ALL)
def test_every_setting_says_what_it_means(name: str) -> None:
    for field in cli.flags_of(name, ALL[name]):
        assert field.meta.description
        if field.key.endswith(("_s", "_ms")):
            assert field.unit in ("s", "ms"), f"{field.name} has no unit"


def test_the_overview_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    said = capsys.readouterr().out
    assert all(f"  {name} " in said for name in cli.DESCRIPTIONS)
    assert cli.main([]) == 2


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["runn"], "did you mean run?"),
        (["xyz"], "run, sweep, search"),
        (["run", "--concurency", "3"], "did you mean --concurrency?"),
        (["run", "--requests", "many"], "--requests cannot be 'many': expected a whole number"),
        (["run", "--requests", "-1"], "--requests cannot be"),
        (["run", "--workload", "poem"], "one of tokens, text, chat"),
        (["run", "--preset", "x"], "it is one of chat, tight, long-32k"),
        (["run", "it's"], 'takes no word like "it\'s"'),
        (["run", " "], "takes no word like ' '"),
        (["run", "--xyzzy"], "unknown flag --xyzzy; see baton bench run --help"),
        (["run", "--frobnicate"], "unknown flag --frobnicate; see baton bench run --help"),
        (["selftest", "--seeed", "1"], "unknown flag --seeed; did you mean --seed?"),
        (["selftest", "--json", "/not/there.json"], "--json /not/there.json: No such file"),
        (["selftest", "--json", "/proc/x"], "--json /proc/x: "),
        (["selftest", "--json", "/tmp"], "--json /tmp: Is a directory"),
        (["selftest", "--json", "/proc/x"], "--json /proc/x: "),
        (["run", "--concurency", "2"], "unknown flag --concurency; did you mean --concurrency?"),
        (["run", "--url"], "see baton bench run --help"),
        (["run", "http://a"], "takes no word like 'http://a'"),
        (["search", "--attainment", "90"], "--attainment cannot be '90'"),
        (["run", "--requests", "5"], "--arrivals poisson:5"),
        (["run", "--arrivals", "poisson:5"], "--requests N"),
        (["run", "--concurrency", "2"], "--requests N"),
        (["run", "--concurrency", "2", "--arrivals", "poisson:1"], "choose one"),
        (["run", "--arrivals", "often:3", "--requests", "1"], "often:3"),
        (["run", "--concurrency", "2", "--requests", "1", "--prompt", "lots"], "lots"),
        (["run", "--concurrency", "2", "--requests", "1", "--vocabulary", "9"], "LOW-HIGH"),
        (["run", "--concurrency", "2", "--requests", "1", "--window", "9"], "FROM-TO"),
        (["run", "--concurrency", "2", "--requests", "1", "--extra-body", "{"], "no JSON object"),
        (["run", "--concurrency", "2", "--requests", "1", "--workload", "trace"], "--path FILE"),
        (["run", "--concurrency", "2", "--requests", "1", "--path", "x"], "--path is for"),
        (["run", "--workload", "trace", "--path", "/not/there.csv"], "/not/there.csv"),
        (["run", "--concurrency", "2", "--requests", "1", "--url", "a:1"], "http://host:port"),
        (["sweep", "--duration-s", "5"], "--rates"),
        (["sweep", "--rates", "1,x", "--duration-s", "5"], "1,x"),
        (["sweep", "--rates", "1", "--duration-s", "5", "--shape", "odd"], "--shape 'odd'"),
        (["run", "--length-scale", "inf"], "--length-scale cannot be 'inf'"),
        (["sweep", "--rates", "1e9", "--duration-s", "5"], "the rate lies between"),
        (["run", "--concurrency", "2", "--requests", "99999999999"], "--requests cannot be"),
        (["run", "--concurrency", "2", "--processes", "100000"], "--processes cannot be"),
        (["search", "--duration-s", "5"], "--preset chat|tight|long-32k"),
        (["compare", "--concurrency", "1", "--requests", "1"], "NAME=URL"),
        (["compare", "a=http://a", "--concurrency", "1", "--requests", "1"], "two arms"),
        (["compare", "a=http://a", "b=http://b", "--url", "http://c"], "unknown flag --url; see"),
        (["compare", "a=http://a", "a=http://b", "--concurrency", "1", "--requests", "1"], "twice"),
        (["fault", "--concurrency", "1", "--requests", "1"], "--fault"),
        (["report"], "report.json"),
        (["report", "/not/there.json"], "/not/there.json"),
    ],
)
def test_a_mistake_is_one_clear_line(words: list[str], hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        cli.main(words)
    assert hint in caught.value.message
    assert "\n" not in caught.value.message
    assert "Traceback" not in caught.value.message
