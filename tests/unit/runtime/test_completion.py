"""`baton completion`: what bash offers on TAB, and that the script of every shell has the flags."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from baton.__main__ import main
from baton.command_line import SHELLS, parsers


def test_tab_completes_commands_flags_choices_and_paths(tmp_path: Path) -> None:
    if shutil.which("bash") is None:
        pytest.skip("needs bash")
    (tmp_path / "cluster.key").touch()
    script = subprocess.run(
        [sys.executable, "-m", "baton", "completion", "bash"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
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
            ["bash", "--norc", "-c", press], cwd=tmp_path, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        assert offered in done.stdout.split(), (typed, done.stderr)


@pytest.mark.parametrize("shell", SHELLS)
def test_each_script_has_the_commands_and_flags_of_the_help(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", shell]) == 0
    printed = capsys.readouterr().out
    assert main(["--help"]) == 0
    shown = re.findall(r"(?m)^  ([a-z-]+) ", capsys.readouterr().out)
    assert {name.split()[0] for name in parsers()} == set(shown)
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    flags = re.findall(r"--([a-z-]+)", capsys.readouterr().out.partition("[flags]")[2])
    for name in (*shown, *flags):
        assert re.search(rf"\b{name}\b", printed), name


def test_an_unknown_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "cmd"]) == 2
    assert "bash, zsh" in capsys.readouterr().err
