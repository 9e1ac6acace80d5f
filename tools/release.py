"""Make a release: `python -m tools.release 0.2.0` says what would be done, `--do` does it.

The version is bumped in `protocol/__init__.py` and CHANGELOG.md gets the date. A wheel and, where
their tools are installed, the image and the chart are built into dist/; then comes the commit with
its tag, so a build that fails leaves neither. Nothing is uploaded: the last lines say how.
"""

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
VERSION_FILE = "protocol/__init__.py"
_VERSION = re.compile(r'^VERSION = "([^"]+)"', re.MULTILINE)
_NUMBER = re.compile(r"\d+\.\d+\.\d+(rc\d+)?")
_UNRELEASED = "unreleased"


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.release", description=__doc__
    )
    parser.add_argument("version", help="the version of the release, such as 0.2.0")
    parser.add_argument(
        "--do", action="store_true", help="do it; without this, nothing changes"
    )
    given = parser.parse_args(words)
    problems = problems_of(REPOSITORY, given.version)
    for problem in problems:
        print(f"not ready: {problem}")
    for step in steps_of(given.version):
        print("+", " ".join(step))
    print(f"then: git push origin v{given.version}, and upload the files of dist/")
    if problems or not given.do:
        return 1 if problems else 0
    write_version(REPOSITORY, given.version)
    for step in steps_of(given.version):
        subprocess.run(step, cwd=REPOSITORY, check=True)
    return 0


def problems_of(root: Path, version: str) -> list[str]:
    """Return why this version cannot be released from this checkout now."""
    problems = []
    if not _NUMBER.fullmatch(version):
        problems.append(f"{version} is no version such as 0.2.0")
    changelog = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    if f"## {version} ({_UNRELEASED})" not in changelog:
        problems.append(f"CHANGELOG.md has no section `## {version} ({_UNRELEASED})`")
    if _git(root, "status", "--porcelain"):
        problems.append("the checkout has changes that are not committed")
    if _git(root, "tag", "--list", f"v{version}"):
        problems.append(f"the tag v{version} is there already")
    return problems


def write_version(root: Path, version: str, today: date | None = None) -> None:
    """Write the version into the package, and the date into the changelog."""
    file = root / VERSION_FILE
    file.write_text(
        _VERSION.sub(f'VERSION = "{version}"', file.read_text(encoding="utf-8"))
    )
    changelog = root / "CHANGELOG.md"
    text = changelog.read_text(encoding="utf-8")
    dated = f"## {version} - {today or date.today()}"
    changelog.write_text(text.replace(f"## {version} ({_UNRELEASED})", dated))


def steps_of(version: str) -> list[list[str]]:
    """Return the commands of a release, those alone whose tools are installed."""
    steps = [
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", "dist", "."],
    ]
    builder = next((name for name in ("podman", "docker") if shutil.which(name)), None)
    if builder is not None:
        file = "deploy/containers/Dockerfile"
        steps.append(
            [builder, "build", "--file", file, "--tag", f"baton:{version}", "."]
        )
    chart = REPOSITORY / "deploy" / "chart"
    if chart.is_dir() and shutil.which("helm"):
        versions = ["--version", version, "--app-version", version]
        steps.append(
            ["helm", "package", str(chart), "--destination", "dist", *versions]
        )
    return [
        *steps,
        ["git", "commit", "--all", "--allow-empty", "--message", f"Release {version}"],
        ["git", "tag", "--annotate", f"v{version}", "--message", f"baton {version}"],
    ]


def _git(root: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", *words], cwd=root, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
