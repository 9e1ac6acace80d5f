"""A release is refused where it would be half of one, and writes its version everywhere."""

import re
import subprocess
from datetime import date
from pathlib import Path

import pytest

from baton.protocol import VERSION
from tests.support.sources import REPOSITORY
from tools.release import VERSION_FILE, problems_of, steps_of, write_version


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "protocol").mkdir()
    (tmp_path / VERSION_FILE).write_text(
        '"""Room."""\n\nVERSION = "0.1.0"  # of this release\n'
    )
    (tmp_path / "CHANGELOG.md").write_text(
        "# Changelog\n\n## 0.2.0 (unreleased)\n\n- More.\n"
    )
    git(tmp_path, "init", "--quiet")
    commit(tmp_path)
    return tmp_path


def git(root: Path, *words: str) -> None:
    subprocess.run(["git", *words], cwd=root, check=True, capture_output=True)


def commit(root: Path) -> None:
    git(root, "add", ".")
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    git(root, *who, "commit", "--quiet", "--message", "x")


def test_a_checkout_that_is_ready_has_no_problems(checkout):
    assert problems_of(checkout, "0.2.0") == []
    (only,) = problems_of(checkout, "0.3.0")
    assert "no section `## 0.3.0 (unreleased)`" in only
    assert any("no version" in problem for problem in problems_of(checkout, "next"))
    (checkout / "CHANGELOG.md").write_text("## 0.2.0 (unreleased)\n")
    assert any("not committed" in problem for problem in problems_of(checkout, "0.2.0"))
    commit(checkout)
    git(checkout, "tag", "v0.2.0")
    assert any("there already" in problem for problem in problems_of(checkout, "0.2.0"))


def test_the_version_and_the_date_are_written(checkout):
    write_version(checkout, "0.2.0", date(2026, 12, 24))
    assert (
        'VERSION = "0.2.0"  # of this release' in (checkout / VERSION_FILE).read_text()
    )
    assert "## 0.2.0 - 2026-12-24" in (checkout / "CHANGELOG.md").read_text()


def test_a_build_that_fails_leaves_no_commit_and_no_tag():
    first, *_, second_last, last = steps_of("0.2.0")
    assert "wheel" in first
    assert (second_last[1], last[1]) == ("commit", "tag")


def test_the_files_that_a_release_changes_are_as_it_expects():
    assert f'VERSION = "{VERSION}"' in (REPOSITORY / VERSION_FILE).read_text(
        encoding="utf-8"
    )
    changelog = (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(
        rf"^## {re.escape(VERSION)} (\(unreleased\)|- \d{{4}}-)", changelog, re.M
    )
