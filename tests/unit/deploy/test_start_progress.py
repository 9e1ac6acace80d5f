"""What people read while nodes start, and before."""

import re

import pytest

from baton.deploy.startup import PHASES, StartProgress, check_cache_folder
from baton.protocol.errors import ConfigError
from tests.support.sources import REPOSITORY

REPORTED = re.compile(r"progress\(\s*\"([a-z ]+)\"|partial\(progress, \"([a-z ]+)\"\)")


def test_people_are_told_once_what_a_phase_does(capsys):
    progress = StartProgress()
    for doing in ("starting", "kernels 1/14", "kernels 9/14", "kv pool 0/1"):
        progress.show({"decode-0": doing})
    said = capsys.readouterr()
    assert (said.out + said.err).splitlines() == [
        "decode-0: starting",
        "decode-0: compiling kernels, once for this machine",
        "decode-0: allocating the KV cache",
    ]


def test_every_phase_of_a_start_has_words():
    sources = [path.read_text() for path in (REPOSITORY / "model").rglob("*.py")]
    phases = {
        "".join(found) for source in sources for found in REPORTED.findall(source)
    }
    assert phases == PHASES.keys()


def test_a_cache_folder_is_made_and_one_that_cannot_be_written_is_one_line(tmp_path):
    check_cache_folder("")
    check_cache_folder(str(tmp_path / "new" / "folder"))
    assert list((tmp_path / "new" / "folder").iterdir()) == []
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match=r"cache\.folder") as caught:
            check_cache_folder(str(folder))
        assert "\n" not in caught.value.message
