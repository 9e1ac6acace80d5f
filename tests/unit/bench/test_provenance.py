"""Where figures come from, and what must never be told about it."""

import re
from pathlib import Path

import msgspec
import pytest

import baton
from baton.bench.report.provenance import Provenance, collect, complete, cpu_model_of
from baton.bench.report.redaction import (
    WITHHELD,
    clean,
    clean_text,
    clean_words,
    cut,
    is_secret_name,
)

KEY = "sk-proj-0123456789abcdef"


def test_a_checkout_is_named_by_its_commit_and_else_by_the_version() -> None:
    provenance = collect(["baton", "bench", "run"])
    installed = msgspec.structs.replace(provenance, commit="", dirty=False)
    assert installed.revision == f"version {baton.__version__}"
    if not (Path(__file__).parents[3] / ".git").exists():
        pytest.skip("these sources are in no checkout")
    assert re.fullmatch(r"[0-9a-f]{40}", provenance.commit)
    assert provenance.revision.startswith(provenance.commit[:12])


def test_the_machine_and_its_load_are_told_and_survive_json() -> None:
    before = collect([])
    after = complete(before)
    assert after.machine.cpu_model
    assert 1 <= after.machine.num_cpus <= after.machine.num_cpus_total
    assert after.machine.memory_bytes > 0
    assert after.load_before is not None
    assert after.load_after is not None
    assert after.versions["aiohttp"] != "unknown"
    assert after.created_at.endswith("+00:00")
    assert msgspec.structs.replace(after, load_after=None, gpus_after=[]) == before
    assert msgspec.json.decode(msgspec.json.encode(after), type=Provenance) == after


@pytest.mark.parametrize(
    "words",
    [
        ["--api-key", KEY],
        [f"--api-key={KEY}"],
        ["--set", f"target.api_key={KEY}"],
        ["--header", f"Authorization: Bearer {KEY}"],
        [f"--url=http://someone:{KEY}@127.0.0.1:8000/v1"],
        [f"--url=http://127.0.0.1:8000/v1?token={KEY}"],
        ["--extra-body", f'{{"api_key": "{KEY}"}}'],
    ],
)
def test_a_command_line_is_told_without_its_secrets(words: list[str]) -> None:
    told = collect(["baton", "bench", "run", *words, "--rate", "5"]).command_line
    assert KEY not in " ".join(told)
    assert told[:3] == ["baton", "bench", "run"]
    assert told[-2:] == ["--rate", "5"]


@pytest.mark.parametrize(
    "text",
    [
        '{"token": "HIDDEN"}',
        '{"headers": {"X-Auth-Token":"none, but HIDDEN"}}',
        '{"password": "say \\"HIDDEN\\""}',
        "split=SERVER_TOKEN=HIDDEN serve --port 1",
        "split=serve --api-key 'two HIDDEN' --port 1",
        "restart:4711@20=env TOKEN=HIDDEN serve",
        "http://someone:with@HIDDEN@127.0.0.1:8000/v1",
        "Incorrect API key provided: sk-proj-HIDDEN789abcdef.",
        "authorization: bearer HIDDEN",
        "'Authorization': 'Basic HIDDEN'",
        "https://user:HIDDEN@example.test/v1",
        "https://example.test/v1?api_key=HIDDEN&a=1",
        "hf_HIDDENabcdefghijklmnop",
    ],
)
def test_what_looks_like_a_credential_is_withheld(text: str) -> None:
    assert "HIDDEN" not in clean_text(text)


@pytest.mark.parametrize(
    "text",
    [
        "max_tokens=64 and 512 output tokens",
        "http://127.0.0.1:8000/v1",
        "the token at 17 differs",
        '{"token_ids": [1], "max_tokens": 5, "key": "one"}',
        "normal:512,sd=100",
    ],
)
def test_harmless_text_stays_as_it_is(text: str) -> None:
    assert clean_text(text) == text


def test_a_secret_of_no_known_shape_is_withheld_by_its_value_unless_it_is_a_letter() -> None:
    assert clean_words(["--note", "hunter2-hunter2"], ["hunter2-hunter2"]) == ["--note", WITHHELD]
    assert cut("use EMPTY-KEY here", ["EMPTY-KEY"]) == f"use {WITHHELD} here"
    assert cut("a plain sentence", ["", "a"]) == "a plain sentence"


def test_names_say_what_holds_a_secret_and_settings_are_cleaned_to_any_depth() -> None:
    secret = ["api_key", "--api-key", "Authorization", "hf_token", "token", "X-Api-Key", "password"]
    harmless = ["output_tokens", "token_ids", "max_tokens", "seed", "rate", "key", "tokenizer"]
    assert all(map(is_secret_name, secret))
    assert not any(map(is_secret_name, harmless))
    plain = {"targets": [{"url": "http://a:b@c", "api_key": KEY, "ca_key": ""}], "rate": 2.5}
    assert clean(plain) == {
        "targets": [{"url": "http://c", "api_key": WITHHELD, "ca_key": ""}],
        "rate": 2.5,
    }


def test_a_processor_is_found_under_each_of_its_names() -> None:
    assert cpu_model_of("processor : 0\nmodel name\t: AMD  EPYC\n") == "AMD EPYC"
    assert cpu_model_of("Hardware : BCM2835\n") == "BCM2835"
    assert cpu_model_of("") == ""
