"""Everything that the pages name exists: commands, flags, settings, variables, messages, alerts."""

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton import __version__
from baton.protocol.config import ClusterConfig
from baton.runtime.fields import fields_of
from baton.runtime.settings import VARIABLE_PREFIX, variable_of
from tests.support.sources import REPOSITORY, name_of, sources, tree

DOCS = REPOSITORY / "docs"
# These name commands and settings as they were when something was measured or decided.
HISTORY = ("log.md", "benchmarks.md", "decisions")
PAGES = tuple(
    path
    for path in (REPOSITORY / "README.md", *sorted(DOCS.rglob("*.md")))
    if path.name not in HISTORY and path.parent.name not in HISTORY
)
# A command begins a line of a block or a span of code, perhaps after variables or sudo.
CODE = re.compile(r"```sh\n(.*?)```|`([^`]+)`", re.DOTALL)
COMMAND = re.compile(r"(?m)^(?:[A-Z_]+=\S* |sudo )*baton ([a-z][a-z-]*)((?: [^\n#|&;]*)?)")
FLAG = re.compile(r"(?<!\S)--[a-z][a-z0-9-]*")
SETTING = re.compile(r"`([a-z]+)\.([a-z_]+)(?:=[^`]*)?`")
FILE_SUFFIXES = {"md", "py", "json", "yaml", "txt", "toml", "key", "log", "safetensors"}
VARIABLE = re.compile(rf"\b{VARIABLE_PREFIX}[A-Z_]+\b")
HOLE = "…"


def commands() -> Iterator[tuple[str, str, str]]:
    """Yield page, subcommand and the rest of each command line of baton in the pages."""
    for page in PAGES:
        for block, span in CODE.findall(page.read_text().replace("\\\n", " ")):
            for name, rest in COMMAND.findall(block or span):
                # What is quoted is an argument, even if it is a command in itself.
                yield name_of(page), name, re.sub(r'"[^"]*"', "", rest)


@functools.cache
def help_of(*words: str) -> str:
    command = [sys.executable, "-m", "baton", *words, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"baton {' '.join(words)} --help: {done.stderr}"
    return done.stdout


def test_commands_and_flags_in_the_pages_are_those_of_the_help() -> None:
    known = set(re.findall(r"(?m)^  ([a-z-]+) ", help_of()))
    wrong = []
    for page, name, rest in commands():
        if name not in known:
            wrong.append(f"{page}: baton {name}")
            continue
        words = [name]
        if name == "bench" and (sub := re.match(r" ([a-z]+)", rest)):
            words.append(sub[1])
        flags = set(FLAG.findall(rest)) - {"--help"}
        if flags:
            taken = set(FLAG.findall(help_of(*words).replace(",", " ")))
            wrong += [f"{page}: baton {' '.join(words)} {flag}" for flag in flags - taken]
    assert not wrong, "\n".join(wrong)


# Their flags that stand alone are baton's; other pages name flags of other programs, too.
OWN_FLAGS = ("README.md", "api.md", "install.md", "observability.md", "operations.md", "sizing.md")
LONE_FLAG = re.compile(r"`(--[a-z][a-z0-9-]*)[ `]")


def test_flags_that_stand_alone_in_the_pages_are_those_of_some_command() -> None:
    helps = [help_of(name).replace(",", " ") for name in ("serve", "prefill", "chat", "up")]
    known = {flag for text in helps for flag in FLAG.findall(text)}
    pages = [page for page in PAGES if page.name in OWN_FLAGS]
    assert {page.name for page in pages} == set(OWN_FLAGS)
    named = {(page.name, flag) for page in pages for flag in LONE_FLAG.findall(page.read_text())}
    assert not {(name, flag) for name, flag in named if flag not in known}


def test_settings_and_variables_in_the_pages_exist() -> None:
    fields = fields_of(ClusterConfig)
    names, sections = {field.name for field in fields}, {field.section for field in fields}
    variables = {variable_of(field) for field in fields} | {
        text for text in messages() if VARIABLE.fullmatch(text)
    }
    wrong = []
    for page in PAGES:
        text = page.read_text()
        wrong += [
            f"{name_of(page)}: {section}.{key}"
            for section, key in SETTING.findall(text)
            if section in sections and key not in FILE_SUFFIXES
            if f"{section}.{key}" not in names
        ]
        wrong += [f"{name_of(page)}: {name}" for name in set(VARIABLE.findall(text)) - variables]
    assert not wrong, "\n".join(wrong)


@functools.cache
def messages() -> frozenset[str]:
    """Return all texts of the sources; what a text fills in is a hole."""
    found = set()
    for path in sources():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = (
                    part.value if isinstance(part, ast.Constant) else HOLE for part in node.values
                )
                found.add("".join(str(part) for part in parts))
    return frozenset(found)


@pytest.mark.parametrize("page", ["troubleshooting.md", "models.md"])
def test_quoted_messages_are_in_the_sources(page: str) -> None:
    tables = re.findall(r"(?m)^\| message \|.*\n\|[-|]+\n((?:\|.*\n)+)", (DOCS / page).read_text())
    quoted = [
        row.split(" | ")[0].removeprefix("| ").strip("` ")
        for rows in tables
        for row in rows.splitlines()
    ]
    assert len(quoted) >= 10
    unknown = [text for text in quoted if not any(text in message for message in messages())]
    assert not unknown, "\n".join(unknown)


def test_every_alert_is_explained() -> None:
    rules = (REPOSITORY / "deploy/grafana/alerts.yaml").read_text()
    alerts = set(re.findall(r"alert: (\w+)", rules))
    explained = re.findall(r"(?m)^\| `(\w+)` \|", (DOCS / "operations.md").read_text())
    assert alerts
    assert alerts <= set(explained)


def test_the_index_links_to_every_page() -> None:
    linked = re.findall(r"\]\(([^)#]+)\)", (DOCS / "README.md").read_text())
    targets = {(DOCS / target).resolve() for target in linked}

    def is_linked(page: Path) -> bool:
        return page in targets or page.parent in targets

    missing = [name_of(page) for page in DOCS.rglob("*.md") if not is_linked(page)]
    assert set(missing) <= {"docs/README.md"}, "\n".join(missing)


def test_decisions_are_numbered_from_one_on() -> None:
    numbers = [int(page.name[:4]) for page in sorted((DOCS / "decisions").glob("[0-9]*.md"))]
    assert numbers == list(range(1, len(numbers) + 1))


def test_the_changelog_begins_with_what_is_unreleased_or_with_this_version() -> None:
    headings = re.findall(r"(?m)^## (\S+)", (REPOSITORY / "CHANGELOG.md").read_text())
    releases = [one.strip("[]") for one in headings if one != "Unreleased"]
    assert headings.count("Unreleased") <= 1
    assert "Unreleased" not in headings[1:]
    assert headings[0] == "Unreleased" or releases[0] == __version__
