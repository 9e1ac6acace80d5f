"""The command line of `baton bench`: flags, help, and one clear line for each mistake."""

import msgspec
import pytest

from baton.bench import cli
from baton.bench.settings import CompareSettings, RunSettings
from baton.protocol.errors import ConfigError

NAMES = pytest.mark.parametrize("name", cli.COMMANDS)
LOAD = ("--concurrency", "2", "--requests", "1")


def run(*words: str) -> RunSettings:
    return cli.parse(RunSettings, words)[0]


def settings_of(name: str) -> type[msgspec.Struct]:
    return cli.COMMANDS[name].settings


def help_of(name: str) -> str:
    return " ".join(cli.parser(settings_of(name)).format_help().split())


def test_flags_set_their_settings_and_leave_the_others() -> None:
    settings = run("--url", "http://a:1", "--prompt", "uniform:1-9", "--concurrency", "3")
    assert (settings.target.url, settings.workload.prompt) == ("http://a:1", "uniform:1-9")
    assert settings.arrival.concurrency == 3
    assert settings.load == RunSettings().load


def test_words_and_flags_may_be_mixed_and_repeated_ones_keep_their_commas() -> None:
    words = ("a=http://a", "--rounds", "7", "b=http://b#name", "--flags", "a=--x 1,2")
    settings, arms = cli.parse(CompareSettings, words)
    assert arms == ["a=http://a", "b=http://b#name"]
    assert (settings.rounds, settings.flags) == (7, ("a=--x 1,2",))


@NAMES
def test_help_has_every_flag_and_an_example_that_works(name: str) -> None:
    text, fields = help_of(name), cli.flags_of(settings_of(name))
    for field in fields:
        assert f" {field.flag} " in text
        assert field.meta.description
        if field.key.endswith(("_s", "_ms")):
            assert field.unit in ("s", "ms"), f"{field.name} has no unit"
    flags = [field.flag for field in fields]
    assert len(flags) == len(set(flags))
    assert "{," not in text  # no choice without a name
    example = cli.COMMANDS[name].example
    assert example in text
    words = example.split()
    assert words[:3] == ["baton", "bench", name]
    cli.parse(settings_of(name), words[3:])


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["runn"], "did you mean run?"),
        (["run", "--concurency", "3"], "unknown flag --concurency; did you mean --concurrency?"),
        (["run", "--requests", "many"], "--requests cannot be 'many': expected a whole number"),
        (["run", "--preset", "x"], "choose one of chat, tight, long-32k"),
        (["run", "--requests", "5"], "--arrivals poisson:5"),
        (["run", "--arrivals", "poisson:5"], "--requests N"),
        (["run", "--concurrency", "2"], "--requests N"),
        (["run", "--concurrency", "2", "--arrivals", "poisson:1"], "choose one"),
        (["run", "--workload", "trace", "--path", "/not/there.csv"], "/not/there.csv"),
        (["run", *LOAD, "--vocabulary", "9"], "LOW-HIGH"),
        (["run", *LOAD, "--window", "9"], "FROM-TO"),
        (["run", *LOAD, "--window", "9-8"], "ends before it begins"),
        (["run", *LOAD, "--url", "a:1"], "http://host:port"),
        (["sweep", "--duration-s", "5"], "--rates"),
        (["sweep", "--rates", "1", "--duration-s", "5", "--shape", "odd"], "--shape 'odd'"),
        (["search", "--duration-s", "5"], "--preset chat|tight|long-32k"),
        (["search", "--tolerance", "0.001"], "--tolerance cannot be"),
        (["search", "--preset", "chat", "--min-rate", "2"], "must not be below --min-rate 2"),
        (["compare", *LOAD], "NAME=URL"),
        (["compare", "http://a", *LOAD], "write it as NAME=URL"),
        (["compare", "a=http://a", *LOAD], "two arms"),
        (["compare", "a=http://a", "a=http://b", *LOAD], "twice"),
        (["compare", "a=http://a", "b=http://b", "--url", "http://c"], "unknown flag --url; see"),
        (["report"], "report.json"),
        (["report", "/not/there.json"], "/not/there.json"),
    ],
)
def test_a_mistake_is_one_clear_line(words: list[str], hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        cli.main(words)
    assert hint in caught.value.message
    assert "\n" not in caught.value.message
