"""The command line: what each mistake prints, its exit code, and what a shell completes."""

import shutil
import socket
import subprocess
import sys

import pytest

from baton.__main__ import main
from baton.command_line import COMMANDS, SHELLS, parsers
from baton.protocol.config import ClusterConfig

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


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["sevre"], "unknown command 'sevre'"),
        (["serve", "--prot", "1"], "did you mean --port?"),
        (["decode", "--set", "engine.thread=2"], "did you mean engine.threads?"),
        (["keygen"], "required: FILE; see baton keygen --help"),
        (["completion", "cmd"], "bash, zsh"),
    ],
)
def test_a_mistake_is_one_line(words, hint, capsys):
    assert main(words) == 2
    (line,) = said(capsys)
    assert hint in line


@pytest.mark.parametrize("words", [["decode", "--model", "/gone"], ["status", "/gone"]])
def test_a_misspelt_variable_is_one_line_before_anything_else(
    words, capsys, monkeypatch
):
    monkeypatch.setenv("BATON_ENGINE_THREAD", "2")
    assert main(words) == 2
    warning, _ = said(capsys)
    assert warning.startswith(
        "baton: warning: the variable BATON_ENGINE_THREAD is ignored"
    )
    assert warning.endswith("did you mean BATON_ENGINE_THREADS?")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_model_that_is_none_is_one_line(command, tmp_path, capsys):
    assert main([command, "--model", str(tmp_path)]) == 2
    (line,) = said(capsys)
    assert "has no config.json" in line


def test_a_port_that_is_taken_is_named(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", "--port", port]) == 2
    (line,) = said(capsys)
    assert f"port {port} is in use: choose another with --port" in line


def test_a_working_directory_that_was_removed_is_one_line(tmp_path):
    folder = tmp_path / "removed"
    script = (
        f"mkdir {folder} && cd {folder} && rmdir {folder} && exec $0 -m baton serve"
    )
    ended = subprocess.run(
        ["sh", "-c", script, sys.executable],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (
        ended.stderr
        == "baton: the working directory was removed: change to another one\n"
    )
    assert ended.returncode == 2


def test_ctrl_c_is_one_line_also_while_modules_are_loaded():
    done = subprocess.run(
        [sys.executable, "-c", CTRL_C_ON_IMPORT, "baton.bench.cli"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("", "baton: interrupted\n")
    assert done.returncode == 130


def test_tab_completes_commands_flags_choices_and_paths(tmp_path):
    if shutil.which("bash") is None:
        pytest.skip("needs bash")
    (tmp_path / "cluster.key").touch()
    script = subprocess.run(
        [sys.executable, "-m", "baton", "completion", "bash"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for typed, offered in [
        ("baton ser", "serve"),
        ("baton bench com", "compare"),
        ("baton bench compare --conc", "--concurrency"),
        ("baton serve --log-level deb", "debug"),
        ("baton router --keys clu", "cluster.key"),
        ("baton completion f", "fish"),
    ]:
        press = f"{script}\nCOMP_WORDS=({typed}); COMP_CWORD={len(typed.split()) - 1}\n"
        press += '_shtab_baton; printf "%s\\n" "${COMPREPLY[@]}"'
        done = subprocess.run(
            ["bash", "--norc", "-c", press],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert offered in done.stdout.split(), (typed, done.stderr)


@pytest.mark.parametrize("shell", SHELLS)
def test_each_script_has_the_commands_of_the_help(shell, capsys):
    assert main(["completion", shell]) == 0
    printed = capsys.readouterr().out
    assert not [name for name in parsers() if name.split()[-1] not in printed]


@pytest.mark.parametrize(
    ("role", "chosen", "found"),
    [
        ("prefill", "all", "prompts"),
        ("prefill", "none", "none"),
        ("decode", "all", "all"),
    ],
)
def test_a_prefill_node_captures_prompts_alone(role, chosen, found, monkeypatch):
    graphs: list[str] = []

    class Node:
        def __init__(self, config: ClusterConfig, *_: object) -> None:
            graphs.append(config.engine.graphs)

        def run(self) -> int:
            return 0

    monkeypatch.setattr("baton.node.node.EngineNode", Node)
    assert main([role, "--set", f"engine.graphs={chosen}"]) == 0
    assert graphs == [found]
