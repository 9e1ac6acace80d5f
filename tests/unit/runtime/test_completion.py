"""`baton completion`: its script in a bash on a terminal, where a test presses TAB."""

import os
import pty
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.__main__ import main
from baton.command_line import parsers
from baton.completion import SHELLS, script

# What is typed is run by this function in place of baton, which shows the words that it got.
SHOWN = 'baton() { local IFS=,; echo "<$*>"; }\n'
END = "bind 'set bell-style none'; PS1=; echo rea''dy\n"


class Terminal:
    """An interactive bash that has taken the script in."""

    def __init__(self, folder: Path) -> None:
        (folder / "script").write_text(script("bash", parsers()))
        main_end, self._end = pty.openpty()
        self._process = subprocess.Popen(
            ["bash", "--norc", "--noprofile", "-i"],
            stdin=self._end, stdout=self._end, stderr=self._end, cwd=folder,
            start_new_session=True, env={"PATH": os.environ["PATH"], "TERM": "dumb"},
        )  # fmt: skip
        self._main_end = main_end
        self._said = ""
        self.type(f"source ./script; {SHOWN}{END}")
        self.until("ready")

    def type(self, keys: str) -> None:
        os.write(self._main_end, keys.encode())

    def until(self, pattern: str) -> str:
        while (found := re.search(pattern, self._said)) is None:
            self._said += os.read(self._main_end, 4096).decode(errors="replace")
        self._said = self._said[found.end() :]
        return found.group()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._main_end)
        os.close(self._end)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    if shutil.which("bash") is None:
        pytest.skip("needs bash")
    (tmp_path / "my model").mkdir()
    (tmp_path / "cluster.key").touch()
    terminal = Terminal(tmp_path)
    yield terminal
    terminal.close()


def test_tab_completes_commands_flags_choices_and_paths(terminal: Terminal) -> None:
    for typed, words in [
        ("ser\t", "serve"),
        ("bench com\t--conc\t4", "bench,compare,--concurrency,4"),
        ("serve --log-le\tdeb\t", "serve,--log-level,debug"),
        ("serve --log-level=de\t", "serve,--log-level=debug"),
        ("serve --log-json f\t", "serve,--log-json,false"),
        ("decode --engine-ten\t4", "decode,--engine-tensor-parallel,4"),
        ("router --keys clu\t", "router,--keys,cluster.key"),
        ("serve my\t", "serve,my model/"),
        ("serve --port clu\t", "serve,--port,clu"),
        ("up --on sy\t", "up,--on,systemd"),
        ("completion f\t", "completion,fish"),
        ("drain decode-0 --con\t", "drain,decode-0,--con"),
    ]:
        terminal.type(f"baton {typed}\n")
        assert terminal.until("<[^>]*>") == f"<{words}>"


def test_every_command_of_the_help_is_completed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = re.findall(r"(?m)^  ([a-z-]+) ", capsys.readouterr().out)
    assert {name.split()[0] for name in parsers()} == set(shown)


@pytest.mark.parametrize("shell", SHELLS)
def test_each_script_has_the_flags_of_the_help(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", shell]) == 0
    printed = capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    for flag in re.findall(r"--([a-z-]+)", capsys.readouterr().out.partition("[flags]")[2]):
        assert re.search(rf"(--|-l ){flag}\b", printed)
    assert main(["completion", "tcsh"]) == 2
