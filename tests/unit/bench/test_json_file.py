"""The file of `--json` is tried before anything is measured, and what it holds is not lost."""

from pathlib import Path

import pytest

from baton.bench.json_file import json_file, save
from baton.protocol.errors import ConfigError
from tools.transfer.settings import TransferSettings


def test_trying_a_file_leaves_the_folder_as_it_was(tmp_path: Path) -> None:
    assert json_file("") is None
    assert json_file(str(tmp_path / "new.json")) == tmp_path / "new.json"
    assert not list(tmp_path.iterdir())
    (tmp_path / "old.json").write_text("{}")
    assert json_file(str(tmp_path / "old.json")) == tmp_path / "old.json"
    assert (tmp_path / "old.json").read_text() == "{}"
    save(tmp_path / "old.json", TransferSettings(reads=7))
    assert '"reads": 7' in (tmp_path / "old.json").read_text()


def test_a_link_to_a_file_that_is_not_there_yet_stays(tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to("new.json")
    json_file(str(tmp_path / "link.json"))
    assert (tmp_path / "link.json").is_symlink()


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    for name in (tmp_path, tmp_path / "missing" / "new.json"):
        with pytest.raises(ConfigError, match=f"--json {name}: "):
            json_file(str(name))
