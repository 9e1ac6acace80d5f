"""Files stay readable, say what they are, and hold nothing that must not be there."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

from tests.support.sources import REPOSITORY, ROOMS, imports, name_of, sources, tree

MAX_LINES = 400
# Longer files, each with the reason why its one concept is not cut.
LONGER: dict[str, str] = {
    "protocol/messages.py": "the whole vocabulary of the channels, in the order of its page",
    "protocol/config.py": "the one tree of settings, of which flags and pages are made",
    "kv_transfer/receive.py": "one state machine with its reads and its lease",
    "router/lifecycle.py": "one state machine, whose transitions are read side by side",
    "router/core.py": "every event of the router passes it",
    "tests/unit/router_core/test_lifecycle.py": "the turns of one state machine",
    "router/reattach.py": "the search for a stream and its adoption",
    "router/registry.py": "the nodes of a router",
}
UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal"}
UNSAFE_METHODS = {"send_pyobj", "recv_pyobj"}
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__"}
VAGUE_NAMES = {"utils", "util", "common", "helpers", "helper", "manager", "misc", "base_impl"}
# Folders that exist on one person's machine only.
MACHINE_PATH = re.compile(r"/(?:home|Users|root|work|mnt|scratch)/[A-Za-z0-9_.-]+")
LINK = re.compile(r"\]\(([^)\s#][^)\s]*)\)")
TEXT_SUFFIXES = {".py", ".md", ".toml", ".txt", ".yaml", ".yml", ".svg", ".cfg", ""}
PYTHON = (*sources(), *sources("tools", "tests"))


def our_text_files() -> list[Path]:
    folders = [*ROOMS, "tools", "tests", "docs", ".ci", "src/baton"]
    # In a linked worktree of git, `.git` is a file that names a folder.
    found = [path for path in REPOSITORY.glob("*") if path.is_file() and path.name != ".git"]
    for folder in folders:
        found += [path for path in (REPOSITORY / folder).rglob("*") if path.is_file()]
    return sorted(
        path for path in found if path.suffix in TEXT_SUFFIXES and "__pycache__" not in path.parts
    )


def test_there_is_something_to_check() -> None:
    assert len(sources()) > 50
    assert len(our_text_files()) > len(sources())


def test_a_long_file_has_a_reason() -> None:
    lengths = {name_of(path): len(path.read_text().splitlines()) for path in PYTHON}
    assert {name for name, length in lengths.items() if length > MAX_LINES} <= set(LONGER)


def test_files_say_what_they_are() -> None:
    silent = [
        name_of(path) for path in PYTHON if path.read_text() and not ast.get_docstring(tree(path))
    ]
    assert not silent


def test_no_file_runs_code_that_it_reads() -> None:
    unsafe = {name_of(path): found for path in PYTHON if (found := unsafe_parts(path))}
    assert not unsafe


def unsafe_parts(path: Path) -> set[str]:
    """Ways from data to code: pickle, pyzmq's shorthands for it, and eval."""
    nodes = list(ast.walk(tree(path)))
    called = {
        node.func.id
        for node in nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    modules = {module.partition(".")[0] for module in imports(path)}
    return modules & UNSAFE_MODULES | called & UNSAFE_CALLS | attributes & UNSAFE_METHODS


def test_names_say_what_is_inside() -> None:
    vague = [name_of(path) for path in PYTHON if set(path.stem.split("_")) & VAGUE_NAMES]
    assert not vague


def test_nothing_names_a_folder_of_one_machine() -> None:
    found = [
        f"{name_of(path)}: {match.group()}"
        for path in our_text_files()
        for match in MACHINE_PATH.finditer(path.read_text(errors="replace"))
    ]
    assert not found, "\n".join(found)


def test_documents_link_to_files_that_exist() -> None:
    broken = [
        f"{name_of(path)}: {target}"
        for path in our_text_files()
        if path.suffix == ".md"
        for target in LINK.findall(path.read_text())
        if "://" not in target and not (path.parent / target.partition("#")[0]).exists()
    ]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    ("wish", "installs"),
    [
        ("", ()),
        ("EXTRAS=nixl", ('--editable ".[nixl]"',)),
        ("TORCH_INDEX=torch.example/cpu", ('--index-url "torch.example/cpu" torch',)),
    ],
)
def test_other_extras_and_another_torch_are_installed_into_an_environment_that_was_ready(
    wish: str, installs: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "bin").mkdir()
    for name in ("bin/python", ".ready-to-serve", ".ready-to-test"):
        (tmp_path / name).touch()
    command = ["make", "-n", "serve", f"VENV={tmp_path}", *([wish] if wish else [])]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert ("pip install" in done.stdout) == bool(wish)
    assert all(text in done.stdout for text in installs)


def test_installing_names_no_package_index() -> None:
    """Which index pip and apt use is for the machine's settings to say."""
    for name in (".ci/run", "Makefile", "constraints.txt", "pyproject.toml"):
        commands = [
            line
            for line in (REPOSITORY / name).read_text().splitlines()
            if not line.lstrip().startswith("#")
        ]
        assert not [line for line in commands if "://" in line], name
