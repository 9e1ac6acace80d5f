"""The file of `--json` is tried before anything is measured, and no content of it is lost."""

from pathlib import Path

import pytest

from baton.protocol.errors import ConfigError
from tests.support.bench_records import Scene
from tools.json_file import json_file, save


def test_trying_a_file_leaves_the_folder_as_it_was(tmp_path: Path) -> None:
    new, old, link = (tmp_path / name for name in ("new.json", "old.json", "link.json"))
    old.write_text("{}")
    link.symlink_to("not-there-yet.json")
    assert [json_file(str(path)) for path in (new, old, link)] == [new, old, link]
    assert json_file("") is None
    assert sorted(tmp_path.iterdir()) == [link, old]
    assert old.read_text() == "{}"
    assert link.is_symlink()
    save(old, Scene(seed=7))
    assert '"seed": 7' in old.read_text()


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    for name in (tmp_path, tmp_path / "missing" / "new.json"):
        with pytest.raises(ConfigError, match=f"--json {name}: "):
            json_file(str(name))
