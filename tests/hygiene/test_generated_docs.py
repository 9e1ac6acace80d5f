"""Generated pages match the code, and every setting is read somewhere."""

import ast
import re
import subprocess
import sys

import pytest

from baton.protocol.config import ClusterConfig
from baton.runtime.fields import fields_of
from tests.support.sources import REPOSITORY, name_of, sources, tree
from tools.house import OTHERS, SHIPPED, figures

# Where a whole section is handed on under another name.
ALIASES = {"config", "settings"}
# What `serve` and its like write for the processes that they start, and people seldom do.
LAUNCHERS = {
    "engine.shared_cpus", "cache.shared_by", "cache.gpu_shared_by", "router.shares_port",
    "router.name",
}  # fmt: skip


def test_generated_pages_are_fresh() -> None:
    done = subprocess.run(
        [sys.executable, "docs/generate.py", "--check"],
        cwd=REPOSITORY, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


# Nor do these count, by which people who come from vLLM expect to find the same.
LAUNCHERS |= {"router.tls_cert", "router.tls_key"}
LAUNCHERS |= {"router.allowed_origins", "model.generation_config"}
LAUNCHERS |= {"cache.gpu_memory_utilization"}


def test_the_readme_knows_about_how_long_each_room_is() -> None:
    rows = re.findall(
        r"(?m)^\| `([a-z_/]+)` \| ([\d,]+) \|", (REPOSITORY / "README.md").read_text()
    )
    assert {room for room, _ in rows} == {*SHIPPED, *OTHERS}
    for room, told in rows:
        lines = sum(figures(REPOSITORY, room).lengths)
        assert int(told.replace(",", "")) == pytest.approx(lines, rel=0.15, abs=60), room


def test_every_setting_is_read_somewhere() -> None:
    read: set[tuple[str, str]] = set()
    for path in sources():
        if name_of(path) == "protocol/config.py":
            continue
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute | ast.Name):
                holder = node.value.attr if isinstance(node.value, ast.Attribute) else node.value.id
                read.add((holder.lstrip("_"), node.attr))
    unread = [
        field.name
        for field in fields_of(ClusterConfig)
        if not any((holder, field.key) in read for holder in {*ALIASES, field.section} - {""})
    ]
    assert not unread, "settings that no code reads"


def test_every_setting_says_what_it_means() -> None:
    for field in fields_of(ClusterConfig):
        assert field.meta.description
        if field.key.endswith(("_s", "_tokens", "_mib")):
            assert field.unit, f"{field.name} has no unit"


def test_there_are_few_settings() -> None:
    assert len([field for field in fields_of(ClusterConfig) if field.name not in LAUNCHERS]) <= 60
