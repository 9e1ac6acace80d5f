"""The command line: what each mistake prints, and with which exit code."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

import baton
from baton.__main__ import main
from baton.command_line import COMMANDS

CTRL_C_ON_IMPORT = """\
import signal, sys

class Impatient:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            signal.raise_signal(signal.SIGINT)

# The process that started the tests may have told them to ignore it.
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Impatient())
from baton.__main__ import main
sys.exit(main(["bench", "run"]))
"""


def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    printed = capsys.readouterr()
    assert not printed.out
    return printed.err.splitlines()


def test_no_command_is_a_mistake_that_is_answered_with_help(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([]) == 2
    assert "usage: baton COMMAND" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["sevre"], "unknown command 'sevre'"),
        (["serve", "--prot", "1"], "did you mean --port?"),
        (["decode", "--set", "engine.thread=2"], "did you mean engine.threads?"),
        (["demo-model"], "required: FOLDER; see baton demo-model --help"),
        (["demo-model", "--folder"], "required: FOLDER; see baton demo-model --help"),
    ],
)
def test_a_mistake_is_one_line(
    words: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    (line,) = said(capsys)
    assert hint in line


@pytest.mark.parametrize(
    "words", [["decode", "--model", "/gone"], ["completion", "cmd"], ["status", "/gone"]]
)
def test_a_misspelt_variable_is_one_line_before_anything_else(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_ENGINE_THREAD", "2")
    assert main(words) == 2
    warning, _ = said(capsys)
    assert warning.startswith("baton: warning: the variable BATON_ENGINE_THREAD is ignored")
    assert warning.endswith("did you mean BATON_ENGINE_THREADS?")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_model_that_is_none_is_one_line(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--model", str(tmp_path / "gone")]) == 2
    (line,) = said(capsys)
    assert "does not exist" in line
    assert main([command, "--model", str(tmp_path)]) == 2
    (line,) = said(capsys)
    assert "has no config.json" in line


def test_a_port_that_is_taken_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", "--port", port]) == 2
    (line,) = said(capsys)
    assert f"port {port} is in use: choose another with --port" in line


def test_a_demo_model_is_written_where_it_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo-model", str(tmp_path / "demo")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "demo")
    assert (tmp_path / "demo" / "config.json").is_file()


def test_the_package_offers_the_names_it_lists_and_no_others() -> None:
    for name in set(baton.__all__) - {"__version__"}:
        assert getattr(baton, name).__name__ == name
        assert name in dir(baton)
    assert not hasattr(baton, "Engine")


@pytest.mark.parametrize("module", ["msgspec", "baton.runtime.settings", "baton.bench.cli"])
def test_ctrl_c_is_one_line_also_while_modules_are_loaded(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CTRL_C_ON_IMPORT, module],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("", "baton: interrupted\n")
    assert done.returncode == 130
